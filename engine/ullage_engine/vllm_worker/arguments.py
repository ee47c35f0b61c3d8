"""Builds the arguments of `vllm.EngineArgs` from the configuration and the checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage_common.config.engine import VLLM_LORA_RANKS, EngineConfig, refusal_by_vllm
from ullage_engine.protocol.errors import WorkerStartError
from ullage_engine.vllm_worker.ranks import EXTENSION

_CPU_CHUNK_TOKENS = 512
"""Maximum prompt tokens per step on CPUs, where larger chunks would exceed the step deadline."""


def check(config: EngineConfig) -> None:
    """Reject settings that vLLM does not support, or that Ullage does not support with vLLM.

    Raises:
        WorkerStartError: a setting is unsupported. The message is one line that names the field and
            the value to set.
    """
    ranks = config.parallelism
    if problem := refusal_by_vllm(config.model, config.memory):
        raise WorkerStartError(problem)
    if ranks.tensor * ranks.pipeline != config.gpus:
        raise WorkerStartError(
            f"parallelism: tensor {ranks.tensor} times pipeline {ranks.pipeline} is not gpus "
            f"{config.gpus}; change one"
        )


@dataclass(frozen=True, slots=True)
class Node:
    """One node of an engine that spans several nodes."""

    rank: int
    """Index of the node. The leader has index 0."""
    leader: str
    """Address of the leader."""


def engine_args(
    config: EngineConfig,
    folder: Path,
    dtype: str,
    device_share: float | None,
    node: Node | None = None,
    adapter_slots: int = 0,
) -> dict[str, Any]:
    """Return vLLM's arguments for a validated configuration.

    Args:
        config: the engine's configuration.
        folder: folder of the checkpoint.
        dtype: dtype of the weights and activations.
        device_share: fraction of a GPU's memory that vLLM may use, from 0 to 1. None on CPUs.
        node: this node, if the engine spans several nodes.
        adapter_slots: maximum number of adapters that can be loaded at a time.
    """
    model = config.model
    batching = config.batching
    ranks = config.parallelism
    chunk_tokens = batching.prefill_chunk_tokens
    is_cpu = device_share is None
    if chunk_tokens is None and is_cpu:
        chunk_tokens = _CPU_CHUNK_TOKENS
    arguments: dict[str, Any] = {
        "model": str(folder),
        "served_model_name": model.name,
        "dtype": dtype,
        "quantization": "fp8" if model.quantization == "fp8" else None,
        "kv_cache_dtype": model.kv_dtype,
        "max_model_len": model.max_model_len,
        "tensor_parallel_size": ranks.tensor,
        "pipeline_parallel_size": ranks.pipeline,
        "max_num_seqs": batching.max_sequences,
        # Samples share their prompt through vLLM's prefix cache. None means vLLM's default: on,
        # except for encoders, which would not start with prefix caching.
        "enable_prefix_caching": None,
        "scheduling_policy": "priority",
        "seed": 0,
        # The server fills in the sampling defaults of a request, for both engines.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "structured_outputs_config": {"backend": "guidance"},
        "worker_extension_cls": EXTENSION,
        **_format_args(folder),
        **_chunk_args(chunk_tokens, batching.max_sequences),
        **_adapter_args(config, adapter_slots, is_cpu),
        **(_node_args(config, node) if node else {}),
    }
    if is_cpu:
        # Compilation takes a minute at every start and hardly speeds up steps on CPUs.
        arguments["enforce_eager"] = True
        # Any size would do. The ledger replaces it, and vLLM does not compare it with the memory of
        # the machine.
        arguments["kv_cache_memory_bytes"] = 1
    else:
        arguments["gpu_memory_utilization"] = device_share
    return {**arguments, **config.vllm.args}


def _format_args(folder: Path) -> dict[str, Any]:
    """Return the arguments that make vLLM load the same files as the native engine.

    By default, vLLM prefers files in Mistral's own format to files in the transformers format.
    """
    names = {path.name for path in folder.glob("*.safetensors")}
    own = {name for name in names if name.startswith("consolidated")}
    return {"load_format": "safetensors"} if own and own != names else {}


def _node_args(config: EngineConfig, node: Node) -> dict[str, Any]:
    return {
        "nnodes": config.group.nodes,
        "node_rank": node.rank,
        "master_addr": node.leader,
        "master_port": config.group.vllm_port,
        "distributed_executor_backend": "mp",
    }


def _chunk_args(chunk_tokens: int | None, max_sequences: int) -> dict[str, Any]:
    """Return vLLM's arguments for chunked prefill, or an empty dict to keep its defaults."""
    if chunk_tokens is None:
        return {}
    if chunk_tokens == 0:
        return {"enable_chunked_prefill": False}
    return {"max_num_batched_tokens": chunk_tokens + max_sequences}


def lora_rank(config: EngineConfig) -> int:
    """Return the smallest LoRA rank supported by vLLM that is at least `memory.max_lora_rank`."""
    return next(rank for rank in VLLM_LORA_RANKS if rank >= config.memory.max_lora_rank)


def spare_slots(is_cpu: bool) -> int:
    """Return how many adapter slots must stay empty: one on CPUs, none on GPUs.

    If a CPU batch mixes adapters and the base model, vLLM uses the last slot to compute the base
    model's sequences, so that slot must be empty.
    """
    return 1 if is_cpu else 0


def _adapter_args(config: EngineConfig, adapter_slots: int, is_cpu: bool) -> dict[str, Any]:
    if not config.max_loras:
        return {}
    num_slots = adapter_slots + spare_slots(is_cpu)
    return {
        "enable_lora": True,
        "max_lora_rank": lora_rank(config),
        "max_loras": num_slots,
        # Size of vLLM's own cache of adapters in host memory: only the adapters in slots.
        "max_cpu_loras": num_slots,
    }


def core_binding(cores: Sequence[int], num_ranks: int) -> str:
    """Return a value for VLLM_CPU_OMP_THREADS_BIND that gives each rank its own CPU cores.

    The value is "nobind" if there are fewer cores than ranks.
    """
    share = len(cores) // num_ranks
    if share == 0:
        return "nobind"
    parts = [cores[rank * share : (rank + 1) * share] for rank in range(num_ranks)]
    return "|".join(",".join(map(str, part)) for part in parts)
