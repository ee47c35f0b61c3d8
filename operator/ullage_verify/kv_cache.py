"""The size of a server's KV cache in tokens, and the share of the cache that is in use."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass

from ullage_verify.client import Document
from ullage_verify.target import Target

POLL_S = 0.2
"""Seconds between two samples of the use of the KV cache."""
USE_METRICS = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
"""Metrics with the used share of the KV cache, 0 to 1. The second is that of older vLLM."""
CONFIG_METRIC = "vllm:cache_config_info"
"""Metric of vLLM whose labels have the number and the size of the blocks of the KV cache."""
TOKENS_METRIC = "sglang:max_total_num_tokens"


@dataclass
class PeakUse:
    """The largest share of the KV cache that was in use, of the fullest engine."""

    share: float | None = None
    """Share from 0 to 1, or None if the server reports no use."""

    def add(self, share: float | None) -> None:
        if share is not None:
            self.share = max(self.share or 0.0, share)


async def capacity_tokens(target: Target) -> int | None:
    """Return how many tokens the KV caches of all engines hold, or None if that is unknown.

    Ullage reports the size of the caches in bytes. The bytes of a token follow from the prediction
    for the longest of the latest requests.
    """
    stats = await target.stats()
    if pool_bytes := sum(engine.get("kv_pool_bytes", 0) for engine in stats.get("engines", ())):
        token_bytes = _token_bytes(stats.get("latest", ()))
        return int(pool_bytes / token_bytes) if token_bytes else None

    for labels in await target.metric_labels(CONFIG_METRIC):
        with contextlib.suppress(KeyError, ValueError):
            return int(labels["num_gpu_blocks"]) * int(labels["block_size"])
    tokens = await target.metric(TOKENS_METRIC)
    return int(tokens) if tokens else None


@contextlib.asynccontextmanager
async def watched_use(target: Target) -> AsyncIterator[PeakUse]:
    """Sample the use of the KV cache until the end of the block."""
    peak = PeakUse()

    async def watch() -> None:
        while True:
            peak.add(await used_share(target))
            await asyncio.sleep(POLL_S)

    task = asyncio.create_task(watch())
    try:
        yield peak
    finally:
        task.cancel()


async def used_share(target: Target) -> float | None:
    """Return the used share of the KV cache of the fullest engine, or None if that is unknown."""
    shares = [
        1 - engine["headroom_bytes"] / engine["kv_pool_bytes"]
        for engine in (await target.stats()).get("engines", ())
        if engine.get("kv_pool_bytes") and "headroom_bytes" in engine
    ]
    return max(shares) if shares else await target.metric(*USE_METRICS)


def _token_bytes(requests: Iterable[Mapping[str, object]]) -> float | None:
    """Return the KV bytes of a token, from the longest of some requests in Ullage's /stats."""
    sizes: list[tuple[int, float]] = []
    for request in requests:
        tokens = _number(request, "prompt_tokens") + _number(request, "output_tokens")
        predicted = _number(request, "predicted_bytes")
        if tokens and predicted:
            sizes.append((tokens, predicted / tokens))
    return max(sizes)[1] if sizes else None


def _number(request: Document, key: str) -> int:
    value = request.get(key)
    return value if isinstance(value, int) else 0
