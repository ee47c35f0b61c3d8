"""Measure the CPU time of one routing decision, and print the median in microseconds.

usage: python -m benchmarks.router.decide PORT...

Requests are admitted in this process, with the router's own components. The engines listen on the
given ports of this machine, and send reports all the time. A decision is one admission: it begins
with the tokens of a unique prompt, and reserves memory on an engine, which is then released.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence

import uvloop

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import PoolSection, RouterConfig
from ullage_router.admission.admission import AdmissionRequest
from ullage_router.call import Call, deadline_of
from ullage_router.prompts.prompts import Prompt
from ullage_router.server.service import RouterService
from ullage_router.telemetry.record import RequestRecord
from ullage_router.tenants.account import shared_account
from ullage_router.tenants.session import TenantSession

READY_S = 60.0
BATCHES = 100
BATCH = 50
PROMPT_TOKENS = 200
MAX_TOKENS = 16
REQUEST_TIMEOUT_S = 30.0


async def decision_us(ports: Sequence[int]) -> float:
    targets = tuple(f"127.0.0.1:{port}" for port in ports)
    pool = PoolSection(name="single", targets=targets)
    service = RouterService(RouterConfig(model="fake", pools=(pool,)))
    await service.start()
    try:
        await until_ready(service, len(ports))
        return await median_us(service)
    finally:
        await service.close()


async def until_ready(service: RouterService, num_engines: int) -> None:
    async with asyncio.timeout(READY_S):
        while num_ready(service) < num_engines:  # noqa: ASYNC110 - there is no such event
            await asyncio.sleep(0.05)


def num_ready(service: RouterService) -> int:
    return sum(engine.state == "ready" for engine in service.engines.all())


async def median_us(service: RouterService) -> float:
    model = service.engines.served_model("")
    took = []
    for _ in range(BATCHES):
        await asyncio.sleep(0.002)  # let reports come in between
        calls = [new_call(Prompt(model, prompt_tokens())) for _ in range(BATCH)]
        started = time.thread_time()
        for call in calls:
            reservation = await service.admission.admit(AdmissionRequest(call))
            reservation.engine.release(reservation.credit)
        took.append((time.thread_time() - started) / BATCH)
    return 1e6 * statistics.median(took)


def prompt_tokens() -> list[int]:
    return [random.randrange(1000) for _ in range(PROMPT_TOKENS)]


def new_call(prompt: Prompt) -> Call:
    stop = inference_pb2.StopConditions(max_tokens=MAX_TOKENS)
    request = inference_pb2.GenerateRequest(stop=stop)
    record = RequestRecord("decision")
    deadline = deadline_of(request, record, REQUEST_TIMEOUT_S, REQUEST_TIMEOUT_S)
    return Call(request, record, TenantSession(shared_account()), deadline, prompt=prompt)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ports", type=int, nargs="+")
    print(round(uvloop.run(decision_us(parser.parse_args().ports)), 1))
