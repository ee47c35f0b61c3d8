"""Environment variables for workers: threads, allocators and communication between ranks.

glibc and OpenMP read these variables before any Python code runs.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ullage_common.config.engine import EngineConfig
from ullage_common.process.cores import is_pinned, usable_cores

WORKER_ENV: Mapping[str, str] = MappingProxyType(
    {
        # One malloc arena: all threads reuse freed temporaries of each other. So the heap has one
        # high-water mark, reached in warm-up, instead of one for each thread.
        "MALLOC_ARENA_MAX": "1",
        # Keep large temporaries on the heap. With mmap each of them would fault in its pages again.
        # glibc would also move its threshold while serving, and resident memory would jump.
        "MALLOC_MMAP_MAX_": "0",
        # Never return the heap's top to the kernel: the ledger already counts warm-up's memory.
        "MALLOC_TRIM_THRESHOLD_": str(1 << 62),
        # The descriptors and code of one matrix product's shape take about 0.6 MB. By default two
        # caches keep 1,024 shapes each: oneDNN's, and torch's own above it. One smaller cache is
        # enough, since a shape that was evicted costs about a millisecond when it comes again.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "96",
        "LRU_CACHE_CAPACITY": "1",
        # OpenBLAS starts its threads when numpy is imported. No worker multiplies with numpy, and
        # the process from which workers are forked must have a single thread.
        "OPENBLAS_NUM_THREADS": "1",
        # Huge pages for torch's large allocations, if the system grants them: attention reads KV
        # in blocks of a page or less from all over the pool. Steps on CPUs became 8 to 15 % faster.
        "THP_MEM_ALLOC_ENABLE": "1",
    }
)
"""Environment variables set for every worker, in addition to those of the parent process."""


SLEEPING_ENV: Mapping[str, str] = MappingProxyType(
    {
        # Threads spin this often before they sleep. With the default of 300,000, and another
        # engine on the same cores, they burn whole time slices waiting for a thread that is not
        # running. Beside two busy neighbours, 120 small products with two threads on two cores
        # took 26 ms instead of 80 ms, and 32 ms instead of 2 s in the worst case. If an engine has
        # its cores to itself, its steps are 1.3 to 1.7 times slower with this setting.
        "GOMP_SPINCOUNT": "1000",
    }
)
"""Environment variables that make waiting threads sleep early, for workers that share cores."""

TRANSFER_ENV: Mapping[str, str] = MappingProxyType(
    {
        # A failed transfer ends its process, and so the group. It would wait for ever otherwise.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # More channels and larger pieces, for GPUs that are connected by PCIe.
        "NCCL_MIN_NCHANNELS": "4",
        "NCCL_BUFFSIZE": "8388608",
        # All ranks of an engine are on one host, and no other host may connect to them.
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
)
"""Environment variables for communication between ranks. `parallelism.nccl` overrides them."""
_INTERFACES = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}


def worker_env(
    threads: int,
    num_ranks: int = 1,
    nccl: Mapping[str, str] = MappingProxyType({}),
    *,
    owns_cores: bool = False,
) -> dict[str, str]:
    """Return a native worker's environment. All ranks inherit it from rank 0.

    Args:
        threads: number of compute threads per rank.
        num_ranks: number of ranks in the engine.
        nccl: NCCL settings that override the defaults.
        owns_cores: whether no other engine runs on this engine's cores. Ignored if there are
            several ranks, because these always share cores with each other.
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
    """Return a vLLM worker's environment. vLLM configures its own allocator."""
    own = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # The log has one line an event, so progress bars are off.
        "TQDM_DISABLE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if num_ranks > 1:
        own |= {**TRANSFER_ENV, **nccl}
    return own if owns_cores else {**own, **SLEEPING_ENV}


def launch_env(config: EngineConfig, environment: Callable[..., dict[str, str]]) -> dict[str, str]:
    """Return the environment variables for the workers that this configuration starts on this node.

    `environment` builds them from the settings: `worker_env` or `vllm_env`.
    """
    threads = config.server.threads or max(1, usable_cores() // config.num_local_ranks)
    owns_cores = config.server.owns_cores
    nccl = config.parallelism.nccl
    own = environment(
        threads,
        config.gpus,
        nccl,
        owns_cores=is_pinned() if owns_cores is None else owns_cores,
    )
    if config.group.nodes > 1:  # nodes cannot connect over the loopback interface
        for name in _INTERFACES - nccl.keys():
            own.pop(name, None)
    return own
