"""Environment of a worker process; glibc and OpenMP read it before any Python runs."""

from collections.abc import Mapping
from types import MappingProxyType

WORKER_ENV: Mapping[str, str] = MappingProxyType(
    {
        # One arena: freed temporaries of any thread are reused by all, so the heap has one
        # high-water mark, reached in warm-up, and not one a thread.
        "MALLOC_ARENA_MAX": "1",
        # Large temporaries come from the heap and go back to it. With mmap each would fault its
        # pages in anew, and glibc would move its threshold while serving: resident memory jumps.
        "MALLOC_MMAP_MAX_": "0",
        # Never give the heap's top back to the kernel: what warm-up took is in the ledger already.
        "MALLOC_TRIM_THRESHOLD_": str(1 << 62),
        # Threads spin this often for one another, then sleep. The default is 300,000: when anything
        # else runs on their cores they burn whole time slices waiting for a thread that is not
        # running. 120 small products with two threads on two cores took 18 ms either way when the
        # cores were free; with two busy neighbours 26 ms against 80 ms, at worst 32 ms against 2 s.
        "GOMP_SPINCOUNT": "1000",
        # Descriptors and code of one shape of matrix product take about 0.6 MB, and are kept in two
        # caches of 1,024: oneDNN's and torch's own above it. One is enough, and not that large:
        # shapes that fell out cost about a millisecond when they come again.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "96",
        "LRU_CACHE_CAPACITY": "1",
    }
)
"""Set for every worker, on top of the parent's environment."""


TRANSFER_ENV: Mapping[str, str] = MappingProxyType(
    {
        # A failed transfer ends its process, and so the group, rather than waiting for ever.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # For GPUs that speak over PCIe: more channels and larger pieces.
        "NCCL_MIN_NCHANNELS": "4",
        "NCCL_BUFFSIZE": "8388608",
        # All ranks of an engine are on one host, and nobody else may speak to them.
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
)
"""For transfers between ranks; `parallelism.nccl` may say otherwise."""


def worker_env(
    threads: int, num_ranks: int = 1, nccl: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """`WORKER_ENV` for a worker with `threads` compute threads; ranks inherit it from rank 0."""
    own = {**WORKER_ENV, "OMP_NUM_THREADS": str(threads)}
    return own if num_ranks == 1 else {**own, **TRANSFER_ENV, **nccl}
