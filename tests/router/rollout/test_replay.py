"""Prompts are replayed on a stable engine and a canary, over real connections."""

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer
from ullage_testing.fake_engine import TOKENIZER, FakeEngine, Script
from ullage_testing.otlp import OtlpReceiver

from ullage.inference.v1 import inference_pb2
from ullage_common.canary_answers import MIN_PROMPTS, Unjudged
from ullage_common.process.logs import JsonFormatter
from ullage_common.wire.errors import ServiceError
from ullage_router.policy.facts import Side
from ullage_router.rollout import replay
from ullage_router.rollout.replay import MAX_ANSWER_TOKENS, MAX_PROMPTS, Replayer

LETTERS = range(60, 68)
"""Tokens that the models of these tests give a probability."""
PROMPTS = [f"prompt {n}" for n in range(MIN_PROMPTS)]


class Bigrams(FakeEngine):
    """An engine whose next token depends on the last one, and on its weights."""

    damage = 0
    """Distance by which the weights are off."""
    has_logprobs = True
    """Whether answers have log-probabilities if they are asked for."""

    def logits(self, last: int) -> dict[int, float]:
        return {each: 3.0 * ((7 * each + 3 * (last + self.damage)) % 8) for each in LETTERS}

    async def _tell(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if self.script.hold:
            await self.script.hold.wait()
        ids = list(request.token_ids.ids)
        for _ in range(request.stop.max_tokens):
            if self.script.fail_after is not None:
                await context.abort(grpc.StatusCode.INTERNAL, "no such kernel")
            logits = self.logits(ids[-1])
            mass = math.log(sum(map(math.exp, logits.values())))
            bias = request.sampling.logit_bias
            ids.append(max(logits, key=lambda each: logits[each] + bias.get(each, 0.0)))
            ranked = sorted(logits, key=lambda each: -logits[each])
            top = [
                inference_pb2.Alternative(token_id=each, logprob=logits[each] - mass)
                for each in ranked[: request.output.top_logprobs]
            ]
            entry = inference_pb2.TokenLogprob(
                token_id=ids[-1], logprob=logits[ids[-1]] - mass, top=top
            )
            delta = inference_pb2.Delta(text=chr(ids[-1]), num_tokens=1)
            if request.output.HasField("top_logprobs") and self.has_logprobs:
                delta.logprobs.append(entry)
            if request.output.delta_token_ids:
                delta.token_ids.append(ids[-1])
            yield inference_pb2.GenerateResponse(delta=delta)
        reason = inference_pb2.FINISH_REASON_LENGTH
        yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished(reason=reason))


class Trial:
    """A router with a stable engine and a canary, both with weights."""

    def __init__(self, service: Any, stable: Bigrams, canary: Bigrams, folder: Path) -> None:
        self.service = service
        self.stable = stable
        self.canary = canary
        self.prompts = folder / "prompts.jsonl"
        self._file = folder / "rollout.yaml"

    @property
    def replayer(self) -> Replayer:
        found: Replayer = self.service.router.service.rollout.replayer
        return found

    def write_prompts(self, prompts: list[str] = PROMPTS) -> None:
        self.prompts.write_text("\n".join(json.dumps({"prompt": each}) for each in prompts))

    def begin(self, *, sampled: bool = False, weight: int = 1, step: int = 0) -> None:
        section = {
            "revision": "new",
            "weight": weight,
            "step": step,
            "pools": [{"name": "single", "targets": [self.canary.address]}],
            "answers": {} if sampled else {"prompts_file": str(self.prompts)},
        }
        self._file.write_text(json.dumps({"revision": "old", "canary": section}))

    def begin_without(self, weight: int = 1) -> None:
        """A trial that compares no answers."""
        pools = [{"name": "single", "targets": [self.canary.address]}]
        section = {"revision": "new", "weight": weight, "pools": pools}
        self._file.write_text(json.dumps({"revision": "old", "canary": section}))

    async def until_ready(self) -> None:
        """Wait until the router may send requests to both sides."""
        engines = self.service.router.service.engines
        await self.service.until(lambda: all(map(engines.is_ready_on, Side)))

    async def until_compared(self, prompts: int = MIN_PROMPTS) -> None:
        await self.service.until(lambda: self.replayer.counts.prompts >= prompts)

    async def until_unjudged(self, reason: Unjudged) -> None:
        await self.service.until(lambda: self.replayer.unjudged is reason)

    async def until_ended(self) -> None:
        """Wait until the replayer asks for no more answers in this trial."""
        await self.service.until(lambda: self.replayer._task and self.replayer._task.done())

    async def metrics(self) -> str:
        return str((await self.service.monitoring.get("/metrics")).text)


def replays(engine: FakeEngine) -> list[inference_pb2.GenerateRequest]:
    """The requests that no user sent."""
    return [each for each in engine.requests if each.priority < 0]


PATIENT = {"placement": {"breaker": {"failures": 1000}}}
"""Routing in which engines that fail are not ejected."""
Started = Callable[..., contextlib.AbstractAsyncContextManager[Trial]]


@pytest.fixture
def started(start_service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    monkeypatch.setattr(replay, "POLL_S", 0.02)
    monkeypatch.setattr(replay, "PAUSE_S", 0.05)

    @contextlib.asynccontextmanager
    async def start(damage: int = 0, **sections: Any) -> AsyncIterator[Trial]:
        folder = tmp_path / "mounted"
        folder.mkdir()
        (folder / "rollout.yaml").write_text('{"revision": "old"}')
        engines = [Bigrams(name, "single", 1000, 2000) for name in ("stable-0", "canary-0")]
        engines[1].damage = damage
        async with contextlib.AsyncExitStack() as stack:
            for engine in engines:
                await engine.start()
                stack.push_async_callback(engine.stop)
            service = await stack.enter_async_context(
                start_service(
                    pools={"single": [engines[0].address]},
                    rollout_file=str(folder / "rollout.yaml"),
                    wait=False,
                    **sections,
                )
            )
            yield Trial(service, engines[0], engines[1], folder)

    return start


def test_equal_weights_agree_in_every_token(started: Started) -> None:
    async def scenario() -> None:
        async with started() as trial:
            trial.write_prompts()
            trial.begin()
            await trial.until_compared()
            counts = trial.replayer.counts
            tokens = MIN_PROMPTS * MAX_ANSWER_TOKENS
            assert (counts.agreed, counts.tokens) == (tokens, tokens)
            assert counts.canary_nll == pytest.approx(counts.stable_nll)
            assert counts.stable_nll > 0
            check_requests(trial)

            page = await trial.metrics()
            assert f'ullage_router_answers{{trial="new/0",what="agreed"}} {tokens}.0' in page
            told = (await trial.service.stats())["rollout"]
            assert told["answers"]["tokens"] == tokens
            assert told["stable"]["succeeded"] == told["canary"]["succeeded"] == 0

    asyncio.run(scenario())


def check_requests(trial: Trial) -> None:
    """Replays give way to users, share no cache with them, and are of no tenant or session."""
    assert len(trial.stable.requests) == MIN_PROMPTS
    assert len(trial.canary.requests) == MIN_PROMPTS * MAX_ANSWER_TOKENS
    requests = trial.stable.requests + trial.canary.requests
    assert {each.priority for each in requests} == {-100}
    assert {each.sampling.temperature for each in requests} == {0.0}
    assert {each.session_id for each in requests} == {""}
    [salt] = {each.cache_salt for each in requests}
    assert len(salt) == 32
    assert {each.stop.max_tokens for each in trial.canary.requests} == {1}
    starts = [len(each.token_ids.ids) for each in trial.canary.requests[:MAX_ANSWER_TOKENS]]
    assert starts == [*range(starts[0], starts[0] + MAX_ANSWER_TOKENS)]


def test_damaged_weights_disagree_and_are_surprised(started: Started) -> None:
    async def scenario() -> None:
        async with started(damage=3) as trial:
            trial.write_prompts()
            trial.begin()
            await trial.until_compared()
            counts = trial.replayer.counts
            assert counts.agreed == 0
            assert counts.canary_nll > 10 * counts.stable_nll

    asyncio.run(scenario())


def test_prompts_are_taken_from_requests_until_there_are_enough(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def scenario() -> None:
        async with started() as trial:
            trial.begin(sampled=True)
            await trial.until_ready()
            await trial.until_unjudged(Unjudged.FEW_PROMPTS)
            assert not trial.canary.requests
            for number in range(MAX_PROMPTS + 4):
                for _ in range(2):  # the same prompt twice says no more
                    answer = await trial.service.chat(f"secret {number}", max_tokens=1)
                    assert answer.status_code == 200
            await trial.until_compared(MAX_PROMPTS)
            await trial.service.until(lambda: trial.replayer.unjudged is None)
            assert trial.replayer.counts.prompts == MAX_PROMPTS
            assert not trial.replayer._sampled, "what was replayed is forgotten"
            assert trial.replayer.counts.agreed == trial.replayer.counts.tokens
            prompts = {
                bytes(each.token_ids.ids) for each in trial.stable.requests if each.priority < 0
            }
            assert len(prompts) == MAX_PROMPTS

    asyncio.run(scenario())
    assert "secret" not in caplog.text


SECRET = "quetzal"
TOKEN_IDS = ",".join(map(str, Tokenizer.from_buffer(TOKENIZER).encode(SECRET).ids))
"""The secret as the model's tokens."""


@pytest.mark.parametrize("is_quoted", [False, True], ids=["compared", "quoted by an engine"])
def test_a_sampled_prompt_is_in_no_log_metric_or_trace(
    is_quoted: bool, started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def scenario(receiver: OtlpReceiver) -> None:
        async with started(tracing={"endpoint": receiver.grpc_endpoint}) as trial:
            trial.begin(sampled=True)
            await trial.until_ready()
            if is_quoted:
                message = f"no room for {SECRET}"
                error = ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", message)
                trial.canary.script.refuse = error
            for number in range(MIN_PROMPTS):
                answer = await trial.service.chat(f"{SECRET} {number}", max_tokens=1)
                assert answer.status_code == 200
                shown.append(json.dumps(await trial.service.stats()))  # most are still kept
            if is_quoted:
                await trial.until_unjudged(Unjudged.FAILING)
            else:
                await trial.until_compared()
            page = await trial.metrics()
            shown.append(page)
            shown.append(json.dumps(await trial.service.stats()))
        spans = receiver.wait(lambda spans: len({each.trace_id for each in spans}) >= MIN_PROMPTS)
        assert "ullage_router_answers" in page
        shown.extend(map(repr, spans))

    shown: list[str] = []
    with OtlpReceiver() as receiver:
        asyncio.run(scenario(receiver))
    # Formatted as in the log, with the fields that `caplog.text` lacks.
    formatter = JsonFormatter()
    logged = [formatter.format(record) for record in caplog.records if record.name != "httpx"]
    assert any("replay" in line or "canary" in line for line in logged), logged
    for text in [*shown, *logged]:
        assert SECRET not in text
        assert TOKEN_IDS not in text.replace(" ", "")


def test_nothing_is_kept_or_replayed_unless_asked_for(started: Started) -> None:
    async def scenario() -> None:
        async with started() as trial:
            trial.begin_without(weight=100)
            engines = trial.service.router.service.engines
            await trial.service.until(lambda: engines.is_ready_on(Side.CANARY))
            for number in range(4):
                assert (await trial.service.chat(f"{number}", max_tokens=1)).status_code == 200
            assert not trial.replayer._sampled
            assert trial.replayer._task is None
            assert {each.priority for each in trial.canary.requests} == {0}
            assert "ullage_router_answers" not in await trial.metrics()

    asyncio.run(scenario())


def test_a_new_step_starts_over_and_its_end_drops_prompts(started: Started) -> None:
    async def scenario() -> None:
        async with started() as trial:
            trial.write_prompts()
            trial.begin()
            await trial.until_compared()
            trial.begin(step=1)
            await trial.service.until(lambda: trial.replayer.trial == "new/1")
            await trial.until_compared()

            trial.stable.script.hold = asyncio.Event()
            trial.begin(step=2, sampled=True)
            await trial.service.until(lambda: trial.replayer.trial == "new/2")
            assert trial.replayer.counts.prompts == 0
            asked = [asyncio.create_task(trial.service.chat(text)) for text in ("one", "two")]
            await trial.service.until(lambda: bool(trial.replayer._sampled))
            trial.begin(weight=0)
            await trial.service.until(lambda: trial.replayer.trial == "")
            assert not trial.replayer._sampled
            trial.stable.script.hold.set()
            await asyncio.gather(*asked)

    asyncio.run(scenario())


def test_another_tokenizer_or_template_is_not_compared(started: Started) -> None:
    async def scenario() -> None:
        async with started() as trial:
            trial.canary.template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
            trial.write_prompts()
            trial.begin()
            await trial.until_unjudged(Unjudged.OTHER_TOKENIZER)
            page = await trial.metrics()
            assert 'answers_unjudged{reason="OtherTokenizer",trial="new/0"} 1.0' in page
            assert not trial.canary.requests

    asyncio.run(scenario())


def test_comparing_waits_for_engines_and_for_free_memory(started: Started) -> None:
    async def scenario() -> None:
        async with started() as trial:
            trial.stable.push(ready=False)
            trial.canary.push(ready=False)
            trial.write_prompts()
            trial.begin()
            await trial.until_unjudged(Unjudged.NO_STABLE_ENGINE)
            trial.stable.push(ready=True, headroom_bytes=20 * 16_000)
            await trial.until_unjudged(Unjudged.NO_CANARY_ENGINE)
            trial.canary.push(ready=True, headroom_bytes=5 * 16_000)
            await trial.until_unjudged(Unjudged.ENGINES_BUSY)
            assert not trial.canary.requests, "a tenth of the free memory is less than a block"
            trial.canary.push(headroom_bytes=100 * 16_000)
            await trial.until_compared()

    asyncio.run(scenario())


def test_a_file_that_cannot_be_used_is_told_and_read_again(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with started() as trial:
            trial.begin()
            await trial.until_unjudged(Unjudged.UNUSABLE_PROMPTS)
            trial.prompts.write_text('{"prompt": "private"}\n{"messages": "private"}\n')
            told = ": line 2: "
            await trial.service.until(lambda: any(told in reason for reason in reasons(caplog)))
            trial.write_prompts(PROMPTS[:3])
            few = f"3 prompts; give at least {MIN_PROMPTS}"
            await trial.service.until(lambda: any(few in reason for reason in reasons(caplog)))
            trial.write_prompts()
            await trial.until_compared()

    asyncio.run(scenario())
    assert not any("private" in reason for reason in reasons(caplog))


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(getattr(each, "reason", "")) for each in caplog.records]


def test_an_engine_that_comes_back_is_asked_again(started: Started) -> None:
    async def scenario() -> None:
        async with started() as trial:
            trial.write_prompts()
            trial.canary.script.hold = asyncio.Event()
            trial.begin()
            await trial.service.until(lambda: trial.canary.active == 1)
            trial.canary.script = Script()
            await trial.canary.restart()
            await trial.until_compared()
            counts = trial.replayer.counts
            assert counts.agreed == counts.tokens == MIN_PROMPTS * MAX_ANSWER_TOKENS

    asyncio.run(scenario())


def test_a_canary_that_fails_agrees_in_nothing(started: Started) -> None:
    async def scenario() -> None:
        async with started(routing=PATIENT) as trial:
            trial.canary.script.fail_after = 0
            trial.write_prompts()
            trial.begin()
            await trial.until_compared()
            counts = trial.replayer.counts
            assert (counts.agreed, counts.tokens) == (0, MIN_PROMPTS * MAX_ANSWER_TOKENS)
            assert len(trial.canary.requests) == MIN_PROMPTS * replay.MAX_TRIES

    asyncio.run(scenario())


def test_prompts_that_engines_refuse_are_left_out(started: Started) -> None:
    async def scenario() -> None:
        async with started() as trial:
            code = grpc.StatusCode.INVALID_ARGUMENT
            trial.canary.script.refuse = ServiceError(code, "INVALID_FIELD", "no")
            trial.write_prompts()
            trial.begin()
            await trial.until_unjudged(Unjudged.FAILING)
            assert trial.replayer.counts.prompts == 0

    asyncio.run(scenario())


def test_refused_samples_are_counted_and_their_number_is_limited(started: Started) -> None:
    async def scenario() -> None:
        async with started() as trial:
            trial.canary.has_logprobs = False
            trial.begin(sampled=True)
            await trial.until_ready()
            await trial.until_unjudged(Unjudged.FEW_PROMPTS)
            assert (await trial.service.chat("first", max_tokens=1)).status_code == 200
            await trial.until_unjudged(Unjudged.FAILING)
            for number in range(MAX_PROMPTS + 3):
                assert (await trial.service.chat(f"{number}", max_tokens=1)).status_code == 200
            await trial.until_ended()
            assert trial.replayer.unjudged is Unjudged.FAILING
            assert len(replays(trial.canary)) == trial.replayer.counts.refused == MAX_PROMPTS
            assert (trial.replayer.counts.prompts, len(trial.replayer._sampled)) == (0, 0)
            assert len(trial.replayer._seen) == MAX_PROMPTS
            page = await trial.metrics()
            assert f'answers{{trial="new/0",what="refused"}} {MAX_PROMPTS}.0' in page
            assert 'answers_unjudged{reason="Failing",trial="new/0"} 1.0' in page

    asyncio.run(scenario())


def test_prompts_that_no_stable_engine_can_answer_are_given_up(started: Started) -> None:
    async def scenario() -> None:
        async with started(routing=PATIENT) as trial:
            trial.stable.script.fail_after = 0
            trial.write_prompts()
            trial.begin()
            await trial.until_ended()
            assert trial.replayer.unjudged is Unjudged.FAILING
            assert trial.replayer.counts.refused == MIN_PROMPTS
            assert len(trial.stable.requests) == MIN_PROMPTS * replay.MAX_TRIES
            assert not trial.canary.requests

    asyncio.run(scenario())


def test_engines_that_are_away_each_time_are_asked_a_limited_number_of_times(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "MAX_TRIES", 1)

    async def scenario() -> None:
        async with started(routing=PATIENT) as trial:
            code = grpc.StatusCode.UNAVAILABLE
            trial.canary.script.refuse = ServiceError(code, "DRAINING", "later")
            trial.write_prompts([f"prompt {n}" for n in range(10 * MAX_PROMPTS)])
            trial.begin()
            await trial.until_ended()
            assert trial.replayer.unjudged is Unjudged.FAILING
            assert trial.replayer.counts.refused == MAX_PROMPTS
            rounds = MAX_PROMPTS * replay.MAX_ROUNDS
            assert len(trial.stable.requests) == len(trial.canary.requests) == rounds

    asyncio.run(scenario())


def test_engines_that_are_full_are_asked_until_they_have_room(started: Started) -> None:
    async def scenario() -> None:
        async with started(routing=PATIENT) as trial:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            trial.canary.script.refuse = ServiceError(code, "NO_MEMORY", "full")
            trial.write_prompts()
            trial.begin()
            rounds = MIN_PROMPTS * replay.MAX_ROUNDS
            await trial.service.until(lambda: len(trial.stable.requests) > rounds)
            await trial.until_unjudged(Unjudged.ENGINES_BUSY)
            trial.canary.script.refuse = None
            await trial.until_ended()
            counts = trial.replayer.counts
            assert (counts.prompts, counts.refused) == (MIN_PROMPTS, 0)
            assert trial.replayer.unjudged is None

    asyncio.run(scenario())


LARGE = "x" * 1700
"""A prompt above a tenth of the memory of idle engines, but within their `max_model_len`."""


def test_prompts_of_a_file_that_are_too_large_make_way_for_others(started: Started) -> None:
    async def scenario() -> None:
        async with started() as trial:
            trial.write_prompts([*(f"{LARGE}{n}" for n in range(2 * MAX_PROMPTS)), *PROMPTS])
            trial.begin()
            await trial.until_ended()
            counts = trial.replayer.counts
            assert (counts.prompts, counts.refused) == (MIN_PROMPTS, 0)
            assert trial.replayer.unjudged is None

            trial.write_prompts([f"{LARGE}{n}" for n in range(MIN_PROMPTS)])
            trial.begin(step=1)
            await trial.service.until(lambda: trial.replayer.trial == "new/1")
            await trial.until_ended()
            assert trial.replayer.unjudged is Unjudged.FAILING
            assert len(trial.stable.requests) == MIN_PROMPTS

    asyncio.run(scenario())


def test_requests_that_are_too_large_for_one_side_are_not_sampled(started: Started) -> None:
    async def scenario() -> None:
        async with started() as trial:
            blocks = 50
            trial.canary.push(kv_pool_bytes=blocks * 16_000, headroom_bytes=blocks * 16_000)
            trial.begin(sampled=True)
            await trial.until_ready()
            large = "x" * (blocks * 16 // 10)
            for number in range(MAX_PROMPTS):
                answer = await trial.service.chat(f"{large}{number}", max_tokens=1)
                assert answer.status_code == 200
            assert not trial.replayer._seen
            for number in range(MIN_PROMPTS):
                assert (await trial.service.chat(f"{number}", max_tokens=1)).status_code == 200
            await trial.until_compared()
            lengths = [len(each.token_ids.ids) for each in replays(trial.stable)]
            assert len(lengths) == MIN_PROMPTS
            assert max(lengths) < len(large)

    asyncio.run(scenario())


def test_engines_that_require_tickets_get_them_and_no_tenant_is_charged(
    started: Started, tmp_path: Path
) -> None:
    for folder in ("tickets", "tenants"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tickets" / "a").write_bytes(b"k" * 32)
    sections = {
        "tickets": {"keys_dir": str(tmp_path / "tickets"), "required": True},
        "tenants": {"keys_dir": str(tmp_path / "tenants"), "anonymous": "allow"},
    }

    async def scenario() -> None:
        async with started(**sections) as trial:
            trial.write_prompts()
            trial.begin()
            await trial.until_compared()
            engines = (trial.stable, trial.canary)
            tickets = [each["x-ullage-ticket"] for e in engines for each in e.metadata]
            assert len(set(tickets)) == len(tickets) == MIN_PROMPTS * (1 + MAX_ANSWER_TOKENS)
            page = await trial.metrics()
            charged = [line for line in page.splitlines() if "tenant_tokens_total{" in line]
            assert [line for line in charged if not line.endswith(" 0.0")] == []
            assert (await trial.service.complete("Hi", max_tokens=1)).status_code == 200
            assert "tenant_tokens_total{" in await trial.metrics(), "what users ask for is charged"

    asyncio.run(scenario())
