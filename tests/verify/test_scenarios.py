"""Each scenario passes on a good server, and fails by name on one with the fault it looks for."""

import asyncio
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ullage_testing.fake_openai import Behaviour, serving

from ullage_verify import bystanders, kv_cache
from ullage_verify.client import ChatAnswer, OpenAIClient
from ullage_verify.criteria import Checks, Criterion
from ullage_verify.kinds import KINDS
from ullage_verify.processes import ServerProcesses
from ullage_verify.run import SCENARIOS
from ullage_verify.scenarios import inject, marathon, oom, shift, soak, streams
from ullage_verify.scenarios.settings import ScenarioSettings
from ullage_verify.target import REMEDY, Target, TargetError

Checked = Callable[..., list[Criterion]]
OTHER_STATUS = "prompts of 100, 536 and 100 tokens: no status but 200 and 429"
PREEMPTIONS = "preemptions that lose work"
ROUTER_PREEMPTIONS = "ullage_router_preemptions_total"


def scenario(name: str, **settings: Any) -> Callable[..., Any]:
    async def check(target: Target, server: Any, checks: Checks) -> None:
        options = {"minutes": 0.04, **settings}
        await SCENARIOS[name](target, ScenarioSettings(**options), checks)

    return check


def failed(criteria: list[Criterion]) -> list[str]:
    return [criterion.name for criterion in criteria if criterion.verdict == "failed"]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses that only a real server needs."""
    monkeypatch.setattr(soak, "SAMPLE_S", 0.1)
    monkeypatch.setattr(streams, "SLOW_READ_S", 0.01)
    monkeypatch.setattr(streams, "FREE_WITHIN_S", 0.15)
    monkeypatch.setattr(shift, "MIN_SPEED_SHARE", 0.3)  # a busy machine changes its speed, too
    monkeypatch.setattr(bystanders, "MIN_STREAM_S", 0.3)
    monkeypatch.setattr(inject, "SETTLE_S", 0.0)
    monkeypatch.setattr(inject, "PATIENCE_S", 1.0)
    monkeypatch.setattr(marathon, "EFFECT_S", 0.0)
    monkeypatch.setattr(marathon, "PATIENCE_S", 1.0)
    monkeypatch.setattr(marathon, "PAUSE_S", (0.0, 0.1))
    monkeypatch.setattr(marathon, "RETRY_S", 0.01)


@pytest.mark.parametrize("name", ["streams", "overload", "oom", "large", "shift", "soak"])
def test_a_good_server_passes(checked: Checked, name: str) -> None:
    criteria = checked(scenario(name))
    assert failed(criteria) == []
    assert any(criterion.verdict == "passed" for criterion in criteria)


@pytest.mark.parametrize(
    ("behaviour", "name"),
    [
        ({"drops_streams": True, "max_running": 99}, "every stream ends with a finish reason"),
        ({"lies_about_usage": True}, "every stream's usage has its tokens"),
        ({"has_other_plain_text": True}, "a stream has the text of the plain answer"),
        ({"keeps_vanished": True}, "requests of vanished clients end"),
        ({"ignores_departures": True}, "requests of vanished clients end"),
    ],
)
def test_streams(checked: Checked, behaviour: dict[str, Any], name: str) -> None:
    assert name in failed(checked(probed(scenario("streams"), **behaviour)))


def probed(check: Callable[..., Any], **behaviour: Any) -> Callable[..., Any]:
    """Change the behaviour only after the server has described itself."""

    async def run(target: Target, server: Any, checks: Checks) -> None:
        for name, value in behaviour.items():
            setattr(server.behaviour, name, value)
        await check(target, server, checks)

    return run


@pytest.mark.parametrize(
    ("behaviour", "name"),
    [
        ({"refusal": 500}, "nothing but answers and refusals"),
        ({"retry_after": ""}, "every refusal says when to return"),
        ({"retry_after": "9999"}, "every refusal says when to return"),
        ({"max_running": 0}, "every client is served in the end"),
        ({"max_running": 1}, "most refused clients are accepted when they return"),
        (
            {"ttft_objective_s": 0.0001},
            "p95 of the first token of accepted requests (objective 0.0001 s, its own)",
        ),
    ],
)
def test_overload(
    checked: Checked, behaviour: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, *rest: waits(min(seconds, 0.05), *rest))
    assert name in failed(checked(probed(scenario("overload"), **behaviour)))


@pytest.mark.parametrize(
    ("behaviour", "name"),
    [
        ({"fails_long_prompts_with": 500}, "a prompt that fills the context: the answer"),
        ({"fails_long_prompts_with": 429}, "4 x 497 tokens at once, 71 in each answer"),
        ({"accepts_everything": True}, "a prompt that never fits: the answer"),
        ({"drops_streams": True}, "a prompt that fills the context: streams of others end well"),
        ({"changes_words_after": 30}, "a stream of unique prompts: the same words"),
        (
            {"dies_of_logprobs": True},
            "log-probabilities of a long prompt: a new request afterwards",
        ),
        ({"leaked_bytes": 1}, "free memory returns to its start value"),
    ],
)
def test_oom(
    checked: Checked, behaviour: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_verify.scenarios.oom.BACK_WITHIN_S", 1.0)
    assert name in failed(checked(probed(scenario("oom"), **behaviour)))


FULL_KV = "more than the KV cache holds"


@pytest.fixture
def full_kv_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave all other cases out of `oom`."""
    monkeypatch.setattr(oom, "CASES", [case for case in oom.CASES if case.fills_kv])
    monkeypatch.setattr(kv_cache, "POLL_S", 0.005)


@pytest.mark.parametrize(
    ("behaviour", "verdict", "seen"),
    [
        ({"kv_tokens": 2_000, "max_running": 99}, "passed", "100% of it was in use"),
        ({"kv_tokens": 2_000}, "passed", "of 25 requests were refused"),
        ({"kv_tokens": 1 << 20, "max_running": 99}, "skipped", "at most 5% of it was in use"),
        ({"max_running": 99}, "skipped", "the server does not report the use of its KV cache"),
    ],
)
@pytest.mark.usefixtures("full_kv_alone")
def test_a_case_that_did_not_fill_the_kv_cache_proves_nothing(
    checked: Checked, behaviour: dict[str, Any], verdict: str, seen: str
) -> None:
    criteria = checked(scenario("oom"), **behaviour)
    [about] = [each for each in criteria if each.name == f"{FULL_KV}: the cache was full"]
    assert about.verdict == verdict
    assert seen in about.seen
    assert failed(criteria) == []


@pytest.mark.usefixtures("full_kv_alone")
def test_a_server_that_dies_of_a_full_kv_cache(checked: Checked) -> None:
    criteria = checked(scenario("oom"), kv_tokens=2_500, dies_of_full_kv=True, max_running=99)
    assert f"{FULL_KV}: streams of others end well" in failed(criteria)


VLLM_KV = (
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1',
    "vllm:kv_cache_usage_perc 0.25",
)
SGLANG_KV = ("sglang:max_total_num_tokens 2048", "sglang:token_usage 0.5")


@pytest.mark.parametrize(
    ("lines", "tokens", "share"),
    [(VLLM_KV, 1_600, 0.25), (SGLANG_KV, 2_048, 0.5), ((), None, None)],
)
def test_the_kv_cache_of_other_servers(
    checked: Checked, lines: tuple[str, ...], tokens: int | None, share: float | None
) -> None:
    async def check(target: Target, server: Any, checks: Checks) -> None:
        assert await kv_cache.capacity_tokens(target) == tokens
        assert await kv_cache.used_share(target) == share

    checked(check, more_metrics=lines, serves_stats=False)


def test_oom_sends_long_prompts_to_each_adapter(checked: Checked) -> None:
    criteria = checked(scenario("oom"), adapters=("a", "b"))
    assert "a long prompt to each adapter: the answer" in {each.name for each in criteria}
    assert failed(criteria) == []


def test_oom_compares_no_words_of_a_server_that_does_not_repeat_itself(checked: Checked) -> None:
    criteria = checked(probed(scenario("oom"), is_forgetful=True))
    words = [each for each in criteria if each.name.endswith("the same words")]
    assert {each.verdict for each in words} == {"skipped"}


@pytest.mark.parametrize(
    ("behaviour", "name"),
    [
        ({"large_route": "single"}, "/stats shows the route of large prompts"),
        ({"e2e_objective_s": 0.0001}, "p95 of large requests (objective 0.0001 s, its own)"),
        ({"large_tokens": 5}, "/stats shows the route of small prompts"),
        ({"traces": "some"}, "/stats names the trace of each large prompt"),
        ({"fails_long_prompts_with": 503}, "large prompts are answered"),
    ],
)
def test_large(checked: Checked, behaviour: dict[str, Any], name: str) -> None:
    assert name in failed(checked(probed(scenario("large"), **behaviour)))


def test_large_needs_no_traces(checked: Checked) -> None:
    criteria = checked(scenario("large"), traces="none")
    [traces] = [each for each in criteria if "trace" in each.name]
    assert traces.verdict == "skipped"
    assert "the service exports no traces" in traces.seen
    assert failed(criteria) == []


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"has_large_pool": False}, "the service has no pool for large requests"),
        (
            {"serves_stats": False},
            f"the server does not report the routes of requests (/stats); {REMEDY}",
        ),
    ],
)
def test_large_is_skipped(checked: Checked, behaviour: dict[str, Any], reason: str) -> None:
    (criterion,) = checked(scenario("large"), **behaviour)
    assert (criterion.verdict, criterion.seen) == ("skipped", reason)


def test_large_is_skipped_where_the_context_is_too_small(checked: Checked) -> None:
    (criterion,) = checked(scenario("large", large_tokens=9_000))
    assert criterion.seen == "the context of 600 tokens has no room for more than 9000"


@pytest.mark.parametrize(
    ("behaviour", "name"),
    [
        ({"e2e_objective_s": 0.0001}, "p95 of all answers (objective 0.0001 s, its own)"),
        ({"drops_streams": True}, "every answer of 0.04 minutes ends well"),
        (
            {"grows_bytes": 1 << 20},
            "growth of the server's memory (the process behind /metrics)",
        ),
        (
            {"leaked_bytes": 500},
            "growth of the server's memory (memory that the engines allocate, /stats)",
        ),
        ({"leaked_bytes": 500}, "allocated share of the device's memory"),
    ],
)
def test_soak(checked: Checked, behaviour: dict[str, Any], name: str) -> None:
    assert name in failed(checked(probed(scenario("soak"), **behaviour)))


def test_soak_names_those_whose_memory_it_judges(checked: Checked) -> None:
    criteria = checked(scenario("soak"), serves_stats=False)
    growth = {each.name: each for each in criteria if "growth" in each.name}
    assert {name: each.verdict for name, each in growth.items()} == {
        "growth of the server's memory (the process behind /metrics)": "passed",
        "growth of the server's memory (its engines)": "skipped",
    }
    assert REMEDY in growth["growth of the server's memory (its engines)"].seen


def test_soak_says_that_a_ledger_is_not_the_memory_of_engines(checked: Checked) -> None:
    criteria = checked(scenario("soak"))
    growth = {each.name: each.verdict for each in criteria if "growth" in each.name}
    assert growth == {
        "growth of the server's memory (the process behind /metrics)": "passed",
        "growth of the server's memory (memory that the engines allocate, /stats)": "passed",
        "growth of the server's memory (its engines)": "skipped",
    }


def test_soak_names_those_of_whom_it_has_too_few_samples(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "SAMPLE_S", 1.0)
    criteria = checked(scenario("soak", processes=ServerProcesses(os.getpid())))
    [about] = [each for each in criteria if "growth" in each.name]
    assert about.name == "growth of the server's memory (all its processes, --pid)"
    assert about.verdict == "skipped"
    assert "of at least 12 samples" in about.seen


@pytest.mark.parametrize(("grows", "verdict"), [(0, "passed"), (1 << 20, "failed")])
def test_soak_judges_the_memory_of_engines(checked: Checked, grows: int, verdict: str) -> None:
    """The page of one engine is that of a server whose worker may grow with each request."""

    async def check(target: Target, server: Any, checks: Checks) -> None:
        server.behaviour.worker_grows_bytes = grows
        async with OpenAIClient(server.monitoring_url) as engine:
            judged = dataclasses.replace(target, engines=[engine])
            await scenario("soak")(judged, server, checks)

    criteria = {each.name: each.verdict for each in checked(check, has_worker=True)}
    name = "growth of the server's memory (engines with their workers, 1 x /metrics)"
    assert criteria[name] == verdict


def test_soak_judges_no_sum_without_one_of_the_engines(checked: Checked) -> None:
    async def check(target: Target, server: Any, checks: Checks) -> None:
        async with OpenAIClient(server.url) as one, OpenAIClient("http://127.0.0.1:9") as other:
            judged = dataclasses.replace(target, engines=[one, other])
            await scenario("soak")(judged, server, checks)

    criteria = checked(check, has_worker=True)
    assert not [each for each in criteria if "2 x /metrics" in each.name]
    [engines] = [each for each in criteria if "its engines" in each.name]
    assert engines.verdict == "skipped"


@pytest.mark.parametrize(
    ("behaviour", "name"),
    [
        ({"drops_streams": True}, "prompts of 100, 536 and 100 tokens: no failure"),
        ({"tires_of_long_prompts": True}, "speed with short prompts afterwards"),
        ({"max_running": 0, "retry_after": ""}, "short prompts are served"),
        ({"fails_long_prompts_with": 429}, "answers to prompts of 536 tokens"),
        ({"fails_long_prompts_with": 503}, OTHER_STATUS),
        ({"fails_long_prompts_with": 500}, OTHER_STATUS),
        ({"fails_long_prompts_with": 400}, OTHER_STATUS),
        ({"max_running": 2, "refusal": 503}, OTHER_STATUS),
        ({"preempts_long_prompts": True}, PREEMPTIONS),
        (
            {"preempts_long_prompts": True, "preemption_metric": "ullage_preemptions_total"},
            PREEMPTIONS,
        ),
    ],
)
def test_shift(checked: Checked, behaviour: dict[str, Any], name: str) -> None:
    assert name in failed(checked(probed(scenario("shift", minutes=0.05), **behaviour)))


@pytest.mark.parametrize(
    ("behaviour", "verdict", "seen"),
    [
        ({}, "passed", "0"),
        (
            {
                "preempts_long_prompts": True,
                "swaps": True,
                "preemption_metric": "ullage_preemptions_total",
            },
            "passed",
            "0",
        ),
        ({"preemption_metric": ROUTER_PREEMPTIONS}, "passed", "0"),
        (
            {"preempts_long_prompts": True, "preemption_metric": ROUTER_PREEMPTIONS},
            "skipped",
            "the router counted ",
        ),
        ({"preemption_metric": ""}, "skipped", "the server shows no counter of preemptions"),
        ({"forgets_preemptions": True}, "skipped", "the counter of preemptions fell"),
    ],
)
def test_preemptions_in_a_shift(
    checked: Checked, behaviour: dict[str, Any], verdict: str, seen: str
) -> None:
    criteria = checked(probed(scenario("shift", minutes=0.05), **behaviour))
    (about,) = [each for each in criteria if each.name == PREEMPTIONS]
    assert about.verdict == verdict
    assert about.seen.startswith(seen)


@pytest.mark.parametrize(
    ("engine", "verdict"),
    [
        ({"swaps": True}, "passed"),
        ({}, "failed"),
        ({"preemption_metric": ""}, "skipped"),
    ],
)
def test_the_counters_of_engines_go_before_that_of_the_router(
    checked: Checked, engine: dict[str, Any], verdict: str
) -> None:
    async def check(target: Target, server: Any, checks: Checks) -> None:
        behaviour = {"preemption_metric": "ullage_preemptions_total", **engine}
        async with serving(Behaviour(**behaviour)) as other, OpenAIClient(other.url) as client:

            def preempt(_: str) -> None:
                other.preemptions += 1

            judged = dataclasses.replace(target, engines=[client])
            await scenario("shift", minutes=0.05, progress=preempt)(judged, server, checks)

    router = {"preempts_long_prompts": True, "preemption_metric": ROUTER_PREEMPTIONS}
    (about,) = [each for each in checked(check, **router) if each.name == PREEMPTIONS]
    assert about.verdict == verdict


def test_a_refusal_in_a_shift_is_no_failure(checked: Checked) -> None:
    criteria = checked(probed(scenario("shift", minutes=0.05), max_running=2))
    assert {OTHER_STATUS, PREEMPTIONS}.isdisjoint(failed(criteria))


def faulty(fault: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the check `inject` with one fault, which is done to the fake server."""

    async def check(target: Target, server: Any, checks: Checks) -> None:
        async def happen() -> float:
            await asyncio.sleep(0)
            fault(server)
            return time.monotonic()

        await inject.run(target, ScenarioSettings(faults={"fault": happen}), checks)

    return check


def test_a_fault_after_the_streams_proves_nothing(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(target: Target, server: Any, checks: Checks) -> None:
        async def late() -> float:
            await asyncio.sleep(2.0)
            return time.monotonic()

        await inject.run(target, ScenarioSettings(faults={"late": late}), checks)

    monkeypatch.setattr(bystanders, "MIN_STREAM_S", 0.3)
    criteria = checked(check)
    (about,) = [each for each in criteria if each.name == "late"]
    assert (about.verdict, about.seen) == (
        "skipped",
        "the streams of others had ended before it happened",
    )


def test_a_fault_that_cannot_be_made_here_is_skipped(checked: Checked) -> None:
    async def check(target: Target, server: Any, checks: Checks) -> None:
        async def impossible() -> float:
            raise TargetError("run as root")

        async def harmless() -> float:
            return time.monotonic()

        faults = {"impossible": impossible, "harmless": harmless}
        await inject.run(target, ScenarioSettings(faults=faults, num_faults=5), checks)

    criteria = checked(check)
    assert failed(criteria) == []
    assert [each.seen for each in criteria if each.name == "impossible"] == ["run as root"]


def test_an_empty_text_is_no_equal_text(checked: Checked) -> None:
    criteria = checked(probed(scenario("streams"), is_mute=True))
    assert "a stream has the text of the plain answer" in failed(criteria)


def test_inject_without_harm_passes(checked: Checked) -> None:
    criteria = checked(faulty(lambda server: None))
    assert failed(criteria) == []
    assert len(criteria) == 3 + 1 + 3


def test_the_next_answer_does_not_wait_for_the_streams_of_others(checked: Checked) -> None:
    num_before = 0

    async def check(target: Target, server: Any, checks: Checks) -> None:
        def note(server: Any) -> None:
            nonlocal num_before
            num_before = num_before or len(server.latest)

        await faulty(note)(target, server, checks)
        later = [record["output_tokens"] for record in list(server.latest)[num_before:]]
        assert later[0] == 4 < min(later[1:4])

    assert failed(checked(check)) == []


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (lambda server: setattr(server, "is_hurt", True), "fault: streams of others end well"),
        (lambda server: server.die(), "fault: time to the next answer"),
    ],
)
def test_inject(checked: Checked, fault: Callable[[Any], Any], name: str) -> None:
    assert name in failed(checked(faulty(fault)))


@pytest.mark.parametrize(
    ("health", "verdict", "seen"),
    [
        ("true", "passed", "503"),
        ("always 200", "failed", "200"),
        ("absent", "skipped", "the server has no /health"),
    ],
)
def test_a_dead_server_must_not_call_itself_healthy(
    checked: Checked, health: str, verdict: str, seen: str
) -> None:
    """Nothing replaces a pod whose probe passes, as in kserve#6259."""
    criteria = checked(faulty(lambda server: server.die()), health=health)
    [about] = [each for each in criteria if "/health" in each.name]
    assert (about.verdict, about.seen) == (verdict, seen)


def marathon_of(fault: Callable[[Any], Any], num_faults: int = 3) -> Callable[..., Any]:
    """Return the check of many faults, each of which is done to the fake server."""

    async def check(target: Target, server: Any, checks: Checks) -> None:
        async def happen() -> float:
            await asyncio.sleep(0)
            fault(server)
            return time.monotonic()

        settings = ScenarioSettings(faults={"fault": happen}, num_faults=num_faults)
        await marathon.run(target, settings, checks)

    return check


def test_many_faults_without_harm(checked: Checked) -> None:
    criteria = checked(marathon_of(lambda server: None))
    assert failed(criteria) == []
    assert {each.name for each in criteria} == {
        "the server comes back from every fault",
        "lost answers",
        "answers with other words",
        "p95 of the longest pause",
    }


def test_a_stream_whose_new_request_has_no_text_has_not_recovered() -> None:
    first, second = (marathon.Stream(kind, None) for kind in KINDS[:2])
    run = marathon.Marathon([first, second])
    answer = ChatAnswer(began_at=0.0)
    assert not run.has_recovered(0.0), "nothing was asked"

    first.begin()
    first.on_text(answer)
    assert run.has_recovered(0.0)

    second.begin()
    assert not run.has_recovered(0.0)

    second.on_text(answer)
    fault_at = time.monotonic()
    assert run.has_recovered(0.0)
    assert not run.has_recovered(fault_at)

    second.end(answer)
    second.begin()
    first.on_text(answer)
    assert not run.has_recovered(fault_at), "the second stream was not served since the fault"

    second.on_text(answer)
    assert run.has_recovered(fault_at)


def test_a_cancelled_marathon_checks_the_faults_until_then(checked: Checked) -> None:
    check = marathon_of(lambda server: None, num_faults=1000)
    criteria = checked(cancelled(check, num_requests=60))
    assert failed(criteria) == []
    assert [each.name for each in criteria][:2] == ["lost answers", "answers with other words"]


def test_a_cancelled_soak_checks_the_answers_until_then(checked: Checked) -> None:
    criteria = checked(cancelled(scenario("soak", minutes=60), num_requests=8))
    assert failed(criteria) == []
    assert criteria[0].name == "every answer of 0 minutes ends well"


def cancelled(check: Callable[..., Any], num_requests: int) -> Callable[..., Any]:
    """Return a check that is cancelled when the fake server has this many requests."""

    async def run(target: Target, server: Any, checks: Checks) -> None:
        task = asyncio.ensure_future(check(target, server, checks))
        await server.receives(num_requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    return run


def test_pauses_are_shown_for_each_kind_of_fault(checked: Checked) -> None:
    async def happen() -> float:
        return time.monotonic()

    async def check(target: Target, server: Any, checks: Checks) -> None:
        settings = ScenarioSettings(faults={"first": happen, "second": happen}, num_faults=6)
        await marathon.run(target, settings, checks)

    names = {each.name for each in checked(check)}
    assert names >= {
        f"p95 of the longest pause, {title}" for title in ("first", "second", marathon.DOUBLE)
    }


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (lambda server: setattr(server, "is_hurt", True), "lost answers"),
        (
            lambda server: setattr(server.behaviour, "changes_words_after", 0),
            "answers with other words",
        ),
        (lambda server: server.die(), "the server comes back from every fault"),
    ],
)
def test_many_faults(checked: Checked, fault: Callable[[Any], Any], name: str) -> None:
    assert name in failed(checked(marathon_of(fault, num_faults=20)))


def test_words_of_degraded_answers_are_not_compared(checked: Checked) -> None:
    def degrade(server: Any) -> None:
        server.behaviour.degrades = True

    assert failed(checked(marathon_of(degrade, num_faults=20))) == []


def test_kinds_whose_parameters_are_lowered_without_a_fault_are_skipped(checked: Checked) -> None:
    criteria = checked(probed(marathon_of(lambda server: None), degrades=True))
    skipped = {each.seen for each in criteria if each.name.endswith(": the same words")}
    assert skipped == {"the server lowered top_p=0.9"}


def test_a_fault_that_cannot_be_made_yet_is_made_later(checked: Checked) -> None:
    refusals = iter(range(3))

    def refuse_at_first(server: Any) -> None:
        if next(refusals, None) is not None:
            raise TargetError("no worker is ready")

    assert failed(checked(marathon_of(refuse_at_first))) == []


def test_only_the_words_of_kinds_that_the_server_does_not_repeat_are_skipped(
    checked: Checked,
) -> None:
    criteria = checked(probed(marathon_of(lambda server: None), is_forgetful=True))
    skipped = [each.name for each in criteria if each.verdict == "skipped"]
    assert skipped
    assert all(name.endswith(": the same words") for name in skipped)
    assert {each.name for each in criteria if each.verdict == "passed"} == {
        "the server comes back from every fault",
        "lost answers",
        "p95 of the longest pause",
    }


def test_a_marathon_without_a_stream_to_hit_fails(checked: Checked) -> None:
    criteria = checked(probed(marathon_of(lambda server: None), max_running=0))
    assert failed(criteria) == ["a stream that faults can hit"]


def test_many_faults_hit_every_kind_of_request(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marathon, "COVERAGE_FAULTS", 3)
    criteria = checked(marathon_of(lambda server: None, num_faults=30))
    assert "faults in the middle of each kind of request" in {each.name for each in criteria}


def test_pauses_are_held_to_the_objective(checked: Checked) -> None:
    async def check(target: Target, server: Any, checks: Checks) -> None:
        async def happen() -> float:
            return time.monotonic()

        settings = ScenarioSettings(faults={"fault": happen}, num_faults=3, gap_s=1e-6)
        await marathon.run(target, settings, checks)

    assert failed(checked(check)) == ["p95 of the longest pause"]


@pytest.mark.parametrize(
    ("leaves", "verdict", "seen"),
    [(False, "passed", "1 with 4096 bytes"), (True, "failed", "3 with 12288 bytes")],
)
def test_files_that_faults_leave_in_shared_memory(
    checked: Checked, monkeypatch: pytest.MonkeyPatch, leaves: bool, verdict: str, seen: str
) -> None:
    """As in vllm#54002: each crash leaves a file in /dev/shm, until nothing fits there any more."""
    monkeypatch.setattr(inject, "SHARED_FILES_WITHIN_S", 0.2)
    monkeypatch.setattr(inject, "NUM_IN_A_ROW", 1)
    prefix = f"ullage-test-{os.getpid()}-"
    opened: list[tuple[int, Path]] = []

    def crash() -> None:
        """Start again: this process plays the server."""
        while opened:
            descriptor, path = opened.pop()
            os.close(descriptor)
            if not leaves:
                path.unlink()
        descriptor, name = tempfile.mkstemp(prefix=prefix, dir="/dev/shm")
        os.write(descriptor, b"1" * 4_000)
        opened.append((descriptor, Path(name)))

    async def check(target: Target, server: Any, checks: Checks) -> None:
        async def fault() -> float:
            crash()
            return time.monotonic()

        settings = ScenarioSettings(faults={"fault": fault}, processes=ServerProcesses(os.getpid()))
        await inject.run(target, settings, checks)

    try:
        crash()
        criteria = checked(check)
    finally:
        os.close(opened[0][0])
        for path in Path("/dev/shm").glob(f"{prefix}*"):
            path.unlink()
    [about] = [each for each in criteria if each.name == inject.SHARED_FILES]
    assert (about.verdict, about.seen) == (verdict, seen)


def test_a_server_whose_first_process_has_ended_has_no_files(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inject, "NUM_IN_A_ROW", 1)

    async def check(target: Target, server: Any, checks: Checks) -> None:
        process = await asyncio.create_subprocess_exec("sleep", "600")

        async def fault() -> float:
            process.kill()
            await process.wait()
            server.die()
            return time.monotonic()

        settings = ScenarioSettings(faults={"fault": fault}, processes=ServerProcesses(process.pid))
        await inject.run(target, settings, checks)

    last = checked(check)[-1]
    assert (last.name, last.verdict) == (inject.SHARED_FILES, "skipped")
    assert "this process has ended" in last.seen


def test_faults_that_are_missing_are_skipped_by_name(checked: Checked) -> None:
    criteria = checked(scenario("inject", missing_faults={"SIGKILL": "needs --pid"}))
    first = criteria[0]
    assert (first.name, first.verdict, first.seen) == ("SIGKILL", "skipped", "needs --pid")


def test_inject_is_skipped_without_permission(checked: Checked) -> None:
    (criterion,) = checked(scenario("inject"))
    assert (criterion.verdict, criterion.name) == ("skipped", "faults")
