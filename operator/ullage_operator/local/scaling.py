"""Scales the pools of a local run, by the same measures and decisions as in a cluster."""

import asyncio
from collections.abc import Callable, Mapping

from ullage_operator.autoscale import Policy
from ullage_operator.local.ports import LOOPBACK
from ullage_operator.local.runtime import LocalRuntime
from ullage_operator.scaler import Followed, Scaler

OnChange = Callable[[str, str], None]
"""Called with a pool and what becomes of it."""


async def keep_scaled(
    runtime: LocalRuntime,
    policies: Mapping[str, Policy],
    sizes: Mapping[str, int],
    metrics_port: int,
    on_change: OnChange,
) -> None:
    """Starts and stops engines as their router's measures ask for, until it is cancelled.

    Args:
        sizes: of the pools at first.
        metrics_port: the router's.
    """
    news = asyncio.Event()
    scaler: Scaler[str] = Scaler(lambda _: news.set())
    followed = Followed(policies, (f"http://{LOOPBACK}:{metrics_port}",))
    present = dict(sizes)
    try:
        while True:
            news.clear()
            for pool, decision in scaler.follow("", followed, sizes).pools.items():
                if decision.replicas != present[pool]:
                    count = decision.replicas
                    on_change(pool, f"{count} engines ({decision.reason}: {decision.message})")
                    present[pool] = count
                    await runtime.scale(pool, count)
            await news.wait()
    finally:
        await scaler.close()
