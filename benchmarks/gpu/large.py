"""Scenario 2: a second engine on the same GPU is the pool for large requests with long prompts."""

import asyncio

from benchmarks.gpu.device_memory import MOST_SHARE, Sampler
from benchmarks.gpu.figures import Fact, Job, Report, at_most, count, none_of
from benchmarks.gpu.service import (
    PATIENT,
    Stream,
    ask,
    engine_up,
    kv_bytes,
    metrics,
    prompt_of,
    router_up,
)
from ullage_common.wire.channels import open_channel

OUTPUT_TOKENS = 32


def run(job: Job, report: Report) -> None:
    asyncio.run(_run(job, report))


async def _run(job: Job, report: Report) -> None:
    threshold = 8_000 if not job.tiny else 800
    lengths = {"single": threshold // 8, "large": threshold + threshold // 8}
    memory = {"max_kv": kv_bytes(job, 4 * threshold)}
    routing = PATIENT | {"routing": {"large_request_tokens": threshold}}

    # One after another, because each measures its own memory at its start.
    async with (
        engine_up(job, "single", {"memory": memory}) as single,
        engine_up(job, "large", {"memory": memory, "server": {"pool": "large"}}) as large,
        router_up(job, {"single": [single], "large": [large]}, routing) as router,
        open_channel(router.target) as channel,
    ):
        with Sampler(job, "large") as sampler:
            answers: dict[str, Stream] = {}
            for number, (pool, length) in enumerate(lengths.items()):
                prompt = prompt_of(job, number, length)
                answers[pool] = await ask(channel, prompt, OUTPUT_TOKENS)

        for pool, answer in answers.items():
            report(Fact(f"{lengths[pool]} tokens", answer.error or f"served by {answer.route}"))
            report(count(f"{lengths[pool]} tokens served by {pool}", answer.route == pool, 1))
        report(none_of("failed requests", sum(bool(answer.error) for answer in answers.values())))
        report(at_most("most used by both", sampler.share(), "of the device", MOST_SHARE))
        for pool, engine in (("single", single), ("large", large)):
            ooms = (await asyncio.to_thread(metrics, engine))["ullage_oom_events_total"]
            report(none_of(f"{pool}: steps that ran out of memory", ooms))
