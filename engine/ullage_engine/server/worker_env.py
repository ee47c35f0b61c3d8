"""The environments of worker processes: threads, allocators and transfers between ranks.

glibc and OpenMP read the environment before any Python runs.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ullage_common.config.engine import EngineConfig
from ullage_common.process.cores import is_pinned, usable_cores

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
        # Descriptors and code of one shape of matrix product take about 0.6 MB, and are kept in two
        # caches of 1,024: oneDNN's and torch's own above it. One is enough, and not that large:
        # shapes that fell out cost about a millisecond when they come again.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "96",
        "LRU_CACHE_CAPACITY": "1",
        # Huge pages for torch's large allocations, where the system grants them: KV is read in
        # blocks of a page or less from all over the pool. Steps on CPUs took 8 to 15 % less.
        "THP_MEM_ALLOC_ENABLE": "1",
    }
)
"""Environment of every worker, on top of the parent's."""


SLEEPING_ENV: Mapping[str, str] = MappingProxyType(
    {
        # Threads spin this often for one another, then sleep. The default is 300,000: when another
        # engine computes on their cores they burn whole time slices waiting for a thread that is
        # not running. 120 small products with two threads on two cores took 26 ms against 80 ms
        # with two busy neighbours, at worst 32 ms against 2 s. On cores of its own an engine's
        # steps are 1.3 to 1.7 times slower for it.
        "GOMP_SPINCOUNT": "1000",
    }
)
"""Environment of workers that share their cores with other engines' or ranks'."""

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
"""Environment of transfers between ranks; `parallelism.nccl` may say otherwise."""
_INTERFACES = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}


def worker_env(
    threads: int,
    num_ranks: int = 1,
    nccl: Mapping[str, str] = MappingProxyType({}),
    *,
    owns_cores: bool = False,
) -> dict[str, str]:
    """Return `WORKER_ENV` for `threads` compute threads; ranks inherit it from rank 0.

    `owns_cores`: no other engine computes on the cores that this one may use. Several ranks share
    them with one another.
    """
    own = {**WORKER_ENV, "OMP_NUM_THREADS": str(threads)}
    if num_ranks > 1:
        return {**own, **SLEEPING_ENV, **TRANSFER_ENV, **nccl}
    return own if owns_cores else {**own, **SLEEPING_ENV}


def vllm_env(
    threads: int,
    num_ranks: int = 1,
    nccl: Mapping[str, str] = MappingProxyType({}),
    *,
    owns_cores: bool = False,
) -> dict[str, str]:
    """Return the environment of a worker with vLLM, which sets its allocator itself."""
    own = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # The log has a line for each thing that happened, and no bars.
        "TQDM_DISABLE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if num_ranks > 1:
        own |= {**TRANSFER_ENV, **nccl}
    return own if owns_cores else {**own, **SLEEPING_ENV}


def launch_env(config: EngineConfig, environment: Callable[..., dict[str, str]]) -> dict[str, str]:
    """Return the environment of a configuration on this node, by `worker_env` or `vllm_env`."""
    threads = config.server.threads or max(1, usable_cores() // config.num_local_ranks)
    owns_cores = config.server.owns_cores
    nccl = config.parallelism.nccl
    own = environment(
        threads,
        config.gpus,
        nccl,
        owns_cores=is_pinned() if owns_cores is None else owns_cores,
    )
    if config.group.nodes > 1:  # which do not talk on the loopback interface
        for name in _INTERFACES - nccl.keys():
            own.pop(name, None)
    return own
