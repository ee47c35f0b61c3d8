"""Serving with vLLM: what is admitted fits, nothing is lost, and vLLM never preempts."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from ullage_testing.fake_vllm import FakeVllm, next_token

from ullage_common.request_cost import CacheGroup, MemoryProfile, request_blocks, sample_blocks
from ullage_engine.memory.out_of_memory import OutOfMemoryFault
from ullage_engine.protocol.messages import Rejected
from ullage_engine.protocol.requests import (
    BeamParams,
    Embedding,
    EngineRequest,
    SamplingParams,
    TokenOutput,
)
from ullage_engine.vllm_worker.engine import VllmEngine
from ullage_engine.vllm_worker.reservations import Reservations
from ullage_engine.vllm_worker.sequence import EngineLimits

BLOCK = 16
BYTES = 32
CHUNK = 64
ADAPTERS = ("a", "b", "c")


class Clock:
    """Time that stands still unless it is moved."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def make_engine(
    num_blocks: int = 64,
    *,
    windows: tuple[int, ...] = (0,),
    max_model_len: int = 10_000,
    session_blocks: int = 0,
    shares_prompts: bool = True,
    keeps_prompts: bool = True,
    lookahead_tokens: int = 0,
    adapter_slots: int | None = None,
    core_class: type[FakeVllm] = FakeVllm,
) -> tuple[VllmEngine, FakeVllm, Clock]:
    clock = Clock()
    core = core_class(
        num_blocks, BLOCK, windows=windows, chunk_tokens=CHUNK, adapter_slots=adapter_slots
    )
    profile = MemoryProfile(
        BLOCK,
        tuple(CacheGroup(BYTES, window_tokens=window) for window in windows),
        prefill_chunk_tokens=CHUNK,
        kv_pool_bytes=num_blocks * BLOCK * BYTES,
        session_kv_bytes=session_blocks * BLOCK * BYTES,
        copies_shared_block=False,
        decode_tokens=1,
    )
    reservations = Reservations(
        core, session_blocks=session_blocks, session_idle_s=60.0, clock=clock
    )
    limits = EngineLimits(
        max_model_len=max_model_len,
        max_sequences=8,
        lookahead_tokens=lookahead_tokens,
        shares_prompts=shares_prompts,
        keeps_prompts=keeps_prompts,
        adapter_slots=adapter_slots or 0,
    )
    engine = VllmEngine(core, profile, limits, reservations, clock)
    for name in ADAPTERS if adapter_slots else ():
        assert engine.adapters.add(name, f"/adapters/{name}", is_checked=True) == ""
    return engine, core, clock


def make_request(
    name: str, prompt: list[int] | int = 20, max_tokens: int = 10, **changes: object
) -> EngineRequest:
    token_ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    request = EngineRequest(
        request_id=name,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0),
    )
    return structs.replace(request, **changes)


def expected_text(request: EngineRequest) -> list[int]:
    tokens = list(request.token_ids[: request.num_prompt_tokens])
    while len(tokens) - request.num_prompt_tokens < request.max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens[request.num_prompt_tokens :]


class Client:
    """Collects what an engine answers."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.texts: dict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, str] = {}
        self.cached: dict[str, int] = {}

    def submit(self, *requests: EngineRequest, resumed: bool = False) -> Rejected | None:
        answer = self.engine.submit_group(list(requests), resumed=resumed)
        if isinstance(answer, Rejected):
            return answer
        self._take(answer)
        return None

    def step(self) -> None:
        self._take(self.engine.step())
        self.engine.reservations.check_integrity()

    def run(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("requests do not end")

    def run_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(1000):
            if is_done():
                return
            self.step()
        raise AssertionError("it does not come to that")

    def _take(self, outputs: Sequence[TokenOutput | Embedding]) -> None:
        for each in outputs:
            assert isinstance(each, TokenOutput)
            assert each.request_id not in self.finished, "output after the end"
            self.texts[each.request_id] += each.token_ids
            self.cached[each.request_id] = each.num_cached_tokens
            if each.finish:
                self.finished[each.request_id] = each.finish


def test_a_request_is_answered_and_gives_back_its_blocks() -> None:
    engine, core, _ = make_engine()
    client = Client(engine)
    request = make_request("a", 40, 30)
    assert client.submit(request) is None
    client.run()
    assert client.texts["a"] == expected_text(request)
    assert client.finished == {"a": "length"}
    assert core.num_free == core.num_blocks


def test_steps_are_tallied_and_a_request_waits_once() -> None:
    engine, _, _ = make_engine()
    client = Client(engine)
    prompt = 3 * CHUNK
    client.submit(make_request("a", prompt, 10, accepted_at=time.monotonic()))
    client.submit(make_request("b", 10, 5))
    client.run()
    figures = engine.stats().figures
    assert sum(figures.step_seconds.counts) == engine.num_steps
    # The last token of an answer is never fed back.
    assert figures.step_tokens.total == prompt + 10 + 9 + 4
    assert sum(figures.queue_seconds.counts) == 1
    assert figures.num_grown > 0
    assert figures.num_shrunk > 0


class CountingVllm(FakeVllm):
    """Counts how often it is asked what a request holds."""

    num_asked = 0

    def num_held(self, request_id: str) -> float:
        self.num_asked += 1
        return super().num_held(request_id)


def test_a_step_asks_once_for_each_request_however_many_grow() -> None:
    engine, _, _ = make_engine(num_blocks=4096, core_class=CountingVllm)
    core = engine._core
    assert isinstance(core, CountingVllm)
    for _ in range(300):
        engine._output_lengths.observe(1)  # so that all are charged for one block after the other
    client = Client(engine)
    num_requests = 8
    for number in range(num_requests):
        client.submit(make_request(str(number), [number] * 8, 100))
    client.run_until(lambda: len(client.texts) == num_requests)

    asked = []
    for _ in range(2 * BLOCK):
        core.num_asked = 0
        engine.step()
        asked.append(core.num_asked)
    # All walk over the edge of a block in the same step, twice, and each reserves one more.
    num_walks = num_requests
    num_changes = 2 * num_requests  # what it holds of the old reservation, and of the new one
    assert max(asked) <= num_walks + num_changes + num_requests
    assert sorted(asked)[BLOCK] == 0


def test_the_error_of_a_step_is_told_before_the_engine_ends() -> None:
    told: list[Exception] = []
    engine, _, _ = make_engine()
    engine.on_failed_step = told.append
    client = Client(engine)
    client.submit(make_request("a", 40, 30))
    engine.inject_out_of_memory(2)
    with pytest.raises(OutOfMemoryFault):
        client.run()
    assert engine.num_steps == 2
    assert [type(each) for each in told] == [OutOfMemoryFault]


def test_a_stop_token_ends_it_and_is_part_of_it() -> None:
    text = expected_text(make_request("a", 40, 30))
    engine, _, _ = make_engine()
    client = Client(engine)
    request = make_request("a", 40, 30, stop_token_ids=[text[4]])
    client.submit(request)
    client.run()
    assert client.texts["a"] == text[: text.index(text[4]) + 1]
    assert client.finished == {"a": "stop"}


@given(
    prompt=st.integers(1, 300),
    max_tokens=st.integers(1, 200),
    samples=st.integers(1, 4),
    windows=st.sampled_from([(0,), (0, 48), (0, 48, 48), (48,)]),
)
def test_the_price_is_what_is_held(
    prompt: int, max_tokens: int, samples: int, windows: tuple[int, ...]
) -> None:
    """Held are the blocks of all tokens but the last, which is never fed back."""
    engine, core, _ = make_engine(1000, windows=windows)
    client = Client(engine)
    client.submit(*[make_request(str(index), prompt, max_tokens) for index in range(samples)])
    most = 0
    while engine.has_work:
        client.step()
        most = max(most, core.num_blocks - core.num_free)
    profile = engine._profile
    stored = prompt + max_tokens - 1
    if windows == (0,):
        held = {core.most_held[str(index)] for index in range(samples)}
        assert held == {request_blocks(profile, prompt, stored)}
    assert most <= request_blocks(profile, prompt, prompt + max_tokens, samples)
    if prompt <= CHUNK and samples == 1:
        assert core.most_held["0"] == request_blocks(profile, prompt, stored)


@pytest.mark.parametrize("windows", [(0,), (0, 48), (48,), (0, 48, 128)])
def test_what_just_fits_is_answered_and_what_just_does_not_is_refused_for_good(
    windows: tuple[int, ...],
) -> None:
    outcomes = set()
    for num_blocks in range(4, 30):
        for prompt in range(BLOCK, 10 * BLOCK, BLOCK // 2):
            client = Client(make_engine(num_blocks, windows=windows)[0])
            refusal = client.submit(make_request("a", prompt, 20))
            client.run()
            assert refusal.never if refusal else client.finished == {"a": "length"}
            outcomes.add(refusal is None)
    assert outcomes == {True, False}


@pytest.mark.parametrize("windows", [(0, 48), (48,), (0, 48, 128)])
def test_the_steps_in_which_windows_need_most_need_the_price(windows: tuple[int, ...]) -> None:
    engine, core, _ = make_engine(1000, windows=windows)
    client = Client(engine)
    prompt = 4 * CHUNK + 1
    # It leaves one token of the first step, so the last step begins a block and is full.
    client.submit(make_request("first", [7] * (CHUNK - 1), 1))
    client.submit(make_request("split", prompt, 10))
    client.run()
    assert core.most_held["split"] == request_blocks(engine._profile, prompt, prompt + 9)


@pytest.mark.parametrize("windows", [(0, 48), (48,), (0, 48, 128)])
def test_when_the_prompt_is_computed_only_what_decodes_need_is_reserved(
    windows: tuple[int, ...],
) -> None:
    engine, core, _ = make_engine(windows=windows)
    client = Client(engine)
    prompt = 4 * CHUNK + 8
    output = 40
    client.submit(make_request("a", prompt, output))
    profile = engine._profile
    reservations = engine.reservations
    whole = request_blocks(profile, prompt, prompt + output)
    of_decodes = sample_blocks(profile, prompt + output, 0)
    assert of_decodes < whole
    while "a" not in client.texts:
        assert reservations.reserved("a") == whole
        client.step()
    client.step()
    assert reservations.reserved("a") == of_decodes
    most = 0
    while engine.has_work:
        most = max(most, core.num_in_tables("a"))
        client.step()
    assert most == of_decodes


def test_what_a_computed_prompt_needed_is_there_for_the_next_request() -> None:
    engine, _, _ = make_engine(num_blocks=26, windows=(0, 48))
    client = Client(engine)
    assert client.submit(make_request("a", 4 * CHUNK, 5)) is None
    assert client.submit(make_request("b", [7] * 20, 5)) is not None
    client.run_until(lambda: len(client.texts["a"]) == 2)
    assert client.submit(make_request("b", [7] * 20, 5)) is None
    client.run()
    assert set(client.finished) == {"a", "b"}


def test_what_does_not_fit_is_refused_with_the_time_of_the_next_release() -> None:
    engine, _, _ = make_engine(num_blocks=8)
    client = Client(engine)
    assert client.submit(make_request("a", 60, 20)) is None
    refusal = client.submit(make_request("b", [7] * 60, 20))
    assert refusal is not None
    assert not refusal.never
    assert (refusal.needed_bytes, refusal.available_bytes) == (
        5 * BLOCK * BYTES,
        3 * BLOCK * BYTES,
    )
    assert refusal.retry_after_s > 0
    client.run()
    assert client.submit(make_request("b", [7] * 60, 20)) is None


def test_what_is_cached_and_held_by_others_costs_nothing() -> None:
    engine, _, _ = make_engine(num_blocks=8)
    client = Client(engine)
    client.submit(make_request("a", 80, 10))
    client.step()
    client.step()
    # Four whole blocks of the prompt are shared, so two are needed and two there.
    assert client.submit(make_request("b", 80, 10)) is None
    client.run()
    assert client.cached["b"] == 64
    assert client.texts["a"] == client.texts["b"] == expected_text(make_request("b", 80, 10))


@pytest.mark.parametrize(
    ("request_changes", "words"),
    [
        ({"prompt": 2000, "max_tokens": 5}, "more than the whole pool"),
        ({"prompt": 500, "max_tokens": 5}, "leave no room"),
        ({"prompt": [], "max_tokens": 5}, "is empty"),
    ],
    ids=["pool", "length", "empty"],
)
def test_what_never_fits_is_refused_for_good(
    request_changes: dict[str, object], words: str
) -> None:
    longest = 400 if words == "leave no room" else 10_000
    engine, _, _ = make_engine(max_model_len=longest)
    refusal = Client(engine).submit(make_request("a", **request_changes))  # type: ignore[arg-type]
    assert refusal is not None
    assert refusal.never
    assert words in refusal.message


def test_an_id_in_use_is_refused() -> None:
    engine, _, _ = make_engine()
    client = Client(engine)
    client.submit(make_request("a"))
    refusal = client.submit(make_request("a"))
    assert refusal is not None
    assert "already" in refusal.message


def test_samples_share_their_prompt_and_are_admitted_together() -> None:
    engine, core, _ = make_engine(num_blocks=16)
    client = Client(engine)
    samples = [make_request(str(index), 100, 10) for index in range(4)]
    # Six whole blocks and one of each; as four requests they would need 28.
    assert client.submit(*samples) is None
    refusal = client.submit(*[make_request(f"x{i}", [5] * 100, 10) for i in range(4)])
    assert refusal is not None
    assert refusal.needed_bytes == 10 * BLOCK * BYTES
    client.run()
    assert {tuple(client.texts[str(index)]) for index in range(4)} == {
        tuple(expected_text(samples[0]))
    }
    assert core.num_free == core.num_blocks


def test_without_a_prefix_cache_samples_share_nothing() -> None:
    engine, _, _ = make_engine(num_blocks=40, shares_prompts=False)
    assert Client(engine).submit(*[make_request(str(i), 100, 10) for i in range(4)]) is None
    assert engine.stats().headroom_bytes == (40 - 4 * 7) * BLOCK * BYTES


def test_where_prompts_are_not_kept_only_samples_of_one_share_them() -> None:
    engine, core, _ = make_engine(keeps_prompts=False, session_blocks=8)
    client = Client(engine)
    client.submit(*[make_request(str(index), 100, 10, session_id="s") for index in range(2)])
    client.run()
    assert (client.cached["0"], client.cached["1"]) == (0, 96)
    client.submit(make_request("2", 100, 10, session_id="s"))
    client.run()
    assert client.cached["2"] == 0
    assert core.num_free == core.num_blocks


def test_samples_that_do_not_fit_together_take_turns() -> None:
    engine, core, _ = make_engine(num_blocks=12)
    client = Client(engine)
    samples = [make_request(str(index), 40, 60) for index in range(4)]
    assert client.submit(*samples) is None
    assert client.submit(make_request("x", 40, 60)) is not None
    client.run()
    assert all(client.texts[each.request_id] == expected_text(each) for each in samples)
    assert core.num_free == core.num_blocks


def test_the_first_sample_may_be_cancelled_before_the_others_start() -> None:
    engine, core, _ = make_engine()
    client = Client(engine)
    samples = [make_request(str(index), 200, 10) for index in range(3)]
    client.submit(*samples)
    client.step()
    engine.cancel("0")
    client.run()
    assert client.texts["1"] == client.texts["2"] == expected_text(samples[1])
    assert core.num_free == core.num_blocks


def test_resumed_requests_wait_for_memory_and_go_on_where_they_were() -> None:
    engine, _, _ = make_engine(num_blocks=8)
    client = Client(engine)
    whole = [make_request(str(index), [index] * 50, 40) for index in range(3)]
    for request in whole:
        sent = expected_text(request)[:7]
        resumed = structs.replace(request, token_ids=request.token_ids + sent)
        client.texts[request.request_id] += sent
        assert client.submit(resumed, resumed=True) is None
    assert client.submit(make_request("new", [9] * 50, 40)) is not None
    client.run()
    assert all(client.texts[each.request_id] == expected_text(each) for each in whole)


def test_one_that_is_complete_is_answered_at_once() -> None:
    engine, _, _ = make_engine()
    client = Client(engine)
    request = make_request("a", 20, 5)
    complete = structs.replace(request, token_ids=request.token_ids + expected_text(request))
    client.submit(complete, resumed=True)
    assert client.finished == {"a": "length"}
    assert not engine.has_work


def test_the_least_important_gives_way_when_others_outgrow_what_they_reserved() -> None:
    engine, core, _ = make_engine(num_blocks=20)
    for _ in range(200):
        engine._output_lengths.observe(2)
    client = Client(engine)
    requests = [
        make_request("low", [1] * 30, 150, priority=-1),
        make_request("high", [2] * 30, 150, priority=1),
        make_request("usual", [3] * 30, 20),
    ]
    for request in requests:
        assert client.submit(request) is None
    client.run()
    assert all(client.texts[each.request_id] == expected_text(each) for each in requests)
    assert engine.stats().num_preemptions > 0
    assert core.num_free == core.num_blocks


def test_a_session_keeps_its_blocks_until_somebody_needs_them_or_it_is_idle() -> None:
    engine, core, clock = make_engine(num_blocks=10, session_blocks=6)
    client = Client(engine)
    first = make_request("1", 40, 9, session_id="s")
    client.submit(first)
    client.run()
    assert engine.stats().num_sessions == 1
    assert engine.stats().session_bytes == 3 * BLOCK * BYTES == engine.stats().kv_reclaimable_bytes
    assert core.num_free == 7
    turn = [*first.token_ids, *client.texts["1"], 3, 4, 5]
    client.submit(make_request("2", turn, 9, session_id="s"))
    client.run()
    assert client.cached["2"] == 48
    # Nine blocks are needed, and six free: the session gives way.
    assert client.submit(make_request("3", [5] * 120, 10)) is None
    assert engine.stats().num_sessions == 0
    client.run()
    client.submit(structs.replace(first, request_id="4"))
    client.run()
    clock.now += 61.0
    engine.reservations.end_idle_sessions()
    assert engine.stats().num_sessions == 0
    assert core.num_free == core.num_blocks


def test_sessions_that_share_a_prompt_give_way_as_well() -> None:
    engine, core, _ = make_engine(num_blocks=30, session_blocks=12)
    client = Client(engine)
    system = [7] * 160
    for index in (1, 2):
        client.submit(make_request(str(index), [*system, *[index] * 10], 3, session_id=f"s{index}"))
        client.run()
    assert engine.stats().num_sessions == 2
    assert engine.stats().headroom_bytes == 30 * BLOCK * BYTES
    # 24 blocks, while 18 to 20 are free.
    assert client.submit(make_request("large", [5] * 320, 60)) is None
    client.run()
    assert client.finished["large"] == "length"
    assert core.num_free == core.num_blocks


def test_a_turn_that_just_misses_its_blocks_is_refused() -> None:
    engine, _, _ = make_engine(num_blocks=10, windows=(0, 48), session_blocks=10)
    client = Client(engine)
    first = make_request("1", 20, 9, session_id="s")
    client.submit(first)
    client.run()
    turn = [*first.token_ids, *client.texts["1"], *[3] * 20]
    for length in range(20, 60):
        refusal = client.submit(make_request(f"turn {length}", turn, length, session_id="s"))
        if refusal is not None:
            assert refusal.needed_bytes > refusal.available_bytes
        client.run()


def test_those_that_wait_come_before_new_ones_and_the_most_important_first() -> None:
    engine, _, _ = make_engine(num_blocks=8)
    client = Client(engine)
    client.submit(make_request("running", [9] * 50, 40))
    for name, priority in (("low", -1), ("high", 1), ("usual", 0)):
        request = make_request(name, [priority + 5] * 60, 40, priority=priority)
        client.submit(request, resumed=True)
    # It would fit: two blocks are free, and those that wait need more.
    assert client.submit(make_request("new", [1] * 10, 5)) is not None
    client.run()
    assert list(client.finished) == ["running", "high", "usual", "low"]


def test_the_least_important_is_the_one_that_gives_way() -> None:
    engine, _, _ = make_engine(num_blocks=12)
    for _ in range(200):
        engine._output_lengths.observe(2)
    client = Client(engine)
    for index, priority in enumerate((1, -1, 0)):
        client.submit(make_request(str(index), [index] * 30, 90, priority=priority))
    preempted: set[str] = set()
    while engine.has_work:
        client.step()
        preempted |= {each.request_id for each in engine._queue.deferred}
        if not preempted:
            continue
        break
    assert preempted == {"1"}
    client.run()
    assert len(client.finished) == 3


def test_a_queue_is_bounded_in_batches() -> None:
    engine, core, _ = make_engine(num_blocks=1000)
    client = Client(engine)
    core.max_running = 0
    for index in range(32):
        assert client.submit(make_request(str(index), 10, 2)) is None
    refusal = client.submit(make_request("more", 10, 2))
    assert refusal is not None
    assert "waiting queue" in refusal.message


def test_output_ended_by_a_stop_string_says_how_long_outputs_are() -> None:
    engine, _, _ = make_engine()
    client = Client(engine)
    before = engine.stats().expected_output_tokens
    for index in range(200):
        client.submit(make_request(str(index), 10, 50))
        for _ in range(3):
            client.step()
        engine.cancel(str(index), is_answered=True)
    assert engine.stats().expected_output_tokens < 5 < before


@pytest.mark.parametrize("lookahead_tokens", [4, 16])
def test_what_vllm_looks_ahead_is_reserved_and_ends_a_sequence_sooner(
    lookahead_tokens: int,
) -> None:
    engine, core, _ = make_engine(num_blocks=8, lookahead_tokens=lookahead_tokens)
    client = Client(engine)
    client.submit(make_request("a", 14, 2))
    assert engine.stats().kv_committed_bytes == 2 * BLOCK * BYTES
    client.run()
    client.submit(make_request("long", 40, 500))
    client.run()
    assert client.finished["long"] == "length"
    assert len(client.texts["long"]) == 8 * BLOCK - 40 - lookahead_tokens
    whole = client.submit(make_request("whole", 8 * BLOCK - 1, 5))
    assert whole is not None
    assert whole.never
    assert core.num_free == core.num_blocks


def test_a_step_in_which_nothing_is_computed_is_no_progress() -> None:
    engine, core, _ = make_engine()
    client = Client(engine)
    client.submit(make_request("a", 100, 5))
    client.step()
    client.step()
    assert engine.num_steps == 2
    core.max_running = 0
    client.submit(make_request("b", [3] * 100, 5))
    client.run_until(lambda: "a" in client.finished)
    steps = engine.num_steps
    client.step()
    client.step()
    assert engine.num_steps == steps
    core.max_running = 8
    client.run()


def test_a_request_that_vllm_gives_up_fails_with_the_reason() -> None:
    engine, core, _ = make_engine()
    client = Client(engine)
    core.broken = {"a": ("the grammar cannot be followed", "grammar")}
    client.submit(make_request("a", 20, 30))
    client.submit(make_request("b", 20, 30))
    client.run()
    [failed] = engine.take_failed()
    assert (failed.request_id, failed.field) == ("a", "grammar")
    assert "cannot be followed" in failed.message
    assert client.finished == {"b": "length"}
    assert core.num_free == core.num_blocks


def test_a_cancelled_request_leaves_nothing() -> None:
    engine, core, _ = make_engine()
    client = Client(engine)
    client.submit(make_request("a", 40, 30))
    client.step()
    engine.cancel("a")
    engine.cancel("a")
    assert not engine.has_work
    assert core.num_free == core.num_blocks


def test_what_vllm_refuses_fails_alone_and_names_its_field() -> None:
    engine, core, _ = make_engine()
    client = Client(engine)
    hot = make_request("a", sampling=SamplingParams(temperature=3.0))
    assert client.submit(hot, structs.replace(hot, request_id="b")) is None
    assert client.submit(make_request("c")) is None
    client.run()
    failed = engine.take_failed()
    assert {(each.request_id, each.field) for each in failed} == {
        ("a", "temperature"),
        ("b", "temperature"),
    }
    assert client.finished == {"c": "length"}
    assert core.num_free == core.num_blocks


def test_beams_are_refused_by_name() -> None:
    engine, _, _ = make_engine()
    Client(engine).submit(make_request("a", beam=BeamParams(width=2)))
    [failed] = engine.take_failed()
    assert failed.field == "samples.beam"
    assert not engine.has_work


def test_a_prompt_as_long_as_the_model_allows_is_embedded() -> None:
    engine, core, _ = make_engine(max_model_len=100)
    request = make_request("a", 100, 0, embed=True)
    assert engine.submit_group([request]) == []
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    [embedding] = outputs
    assert isinstance(embedding, Embedding)
    assert len(embedding.vector) == 4
    refusal = engine.submit_group([make_request("b", 101, 0, embed=True)])
    assert isinstance(refusal, Rejected)
    assert refusal.never
    assert core.num_free == core.num_blocks


def test_a_session_is_kept_by_adapter() -> None:
    engine, _, _ = make_engine(session_blocks=8)
    client = Client(engine)
    client.submit(make_request("1", 40, 9, session_id="s"))
    client.submit(make_request("2", 40, 9, session_id="s", adapter="x"))
    client.run()
    assert engine.stats().num_sessions == 2


def test_an_adapter_is_loaded_when_it_is_asked_for_and_the_longest_unused_gives_way() -> None:
    engine, core, _ = make_engine(adapter_slots=2)
    client = Client(engine)
    for name, adapter in enumerate("abac"):
        client.submit(make_request(str(name), adapter=adapter))
        client.run()
    assert core.loaded == ["a", "c"]
    stats = engine.stats()
    assert (stats.num_adapter_loads, stats.num_adapter_unloads) == (3, 1)
    assert len(client.finished) == 4


def test_one_that_finds_all_slots_in_use_waits_and_others_go_on() -> None:
    engine, core, _ = make_engine(adapter_slots=1)
    client = Client(engine)
    client.submit(make_request("1", max_tokens=30, adapter="a"))
    group = [make_request(f"waits {index}", adapter="b") for index in range(2)]
    assert client.submit(*group) is None
    assert client.submit(make_request("base", max_tokens=5)) is None
    assert engine.stats().kv_committed_bytes == (4 + 2) * BLOCK * BYTES
    client.run_until(lambda: "base" in client.finished)
    assert core.loaded == ["a"]
    assert "waits 0" not in client.texts
    # Not even the adapter that is loaded overtakes the one that waits for its slot.
    client.submit(make_request("2", adapter="a"))
    client.submit(make_request("urgent", max_tokens=3, adapter="a", priority=1))
    client.run()
    assert list(client.finished) == ["base", "urgent", "1", "waits 0", "waits 1", "2"]
    assert all(client.texts[each.request_id] == expected_text(each) for each in group)
    assert core.num_free == core.num_blocks


@pytest.mark.parametrize("samples", [1, 3])
def test_however_many_come_for_those_that_are_loaded_nobody_waits_for_ever(samples: int) -> None:
    engine, _, _ = make_engine(num_blocks=200, adapter_slots=2)
    client = Client(engine)
    number = 0

    def come() -> None:
        nonlocal number
        for adapter in "ab":
            number += 1
            group = [make_request(f"{number} {i}", adapter=adapter) for i in range(samples)]
            client.submit(*group)

    come()
    client.step()
    assert client.submit(make_request("waits", adapter="c")) is None

    def is_served() -> bool:
        come()
        return "waits" in client.finished

    client.run_until(is_served)
    client.run()


def test_what_finds_neither_memory_nor_a_slot_is_refused() -> None:
    engine, core, _ = make_engine(num_blocks=8, adapter_slots=1)
    client = Client(engine)
    client.submit(make_request("a", 60, 20, adapter="a"))
    refusal = client.submit(make_request("b", [7] * 60, 20, adapter="b"))
    assert refusal is not None
    assert not refusal.never
    client.run()
    assert core.loaded == ["a"]
    assert core.num_free == core.num_blocks


def test_who_waits_for_memory_keeps_its_adapter() -> None:
    engine, core, _ = make_engine(num_blocks=8, adapter_slots=2)
    client = Client(engine)
    for adapter in "ab":
        client.submit(make_request(adapter, adapter=adapter))
        client.run()
    client.submit(make_request("base", [9] * 50, 30))
    client.submit(make_request("large", [5] * 60, 20, adapter="a"), resumed=True)
    # It would take the slot of the longest unused one, which is the one that the first waits for.
    client.submit(make_request("later", 1, 1, adapter="c"), resumed=True)
    client.run()
    assert len(client.finished) == 5
    assert core.loaded == ["a", "c"]
    assert engine.stats().num_adapter_loads == 3


def test_who_waits_for_a_slot_keeps_no_memory_from_others_and_has_it_in_turn() -> None:
    engine, core, _ = make_engine(num_blocks=64, adapter_slots=1)
    client = Client(engine)
    number = 0
    client.submit(make_request("runs", [1] * 20, 200, adapter="a"))
    waiting = [make_request(f"waits {i}", [2 + i] * 250, 100, adapter="b") for i in range(2)]
    assert [client.submit(each) for each in waiting] == [None, None]
    assert client.submit(make_request("as well", [4] * 500, adapter="b")) is not None

    assert client.submit(make_request("base", [9] * 200)) is None
    client.run_until(lambda: "base" in client.finished)
    assert "runs" not in client.finished

    def is_served() -> bool:
        nonlocal number
        number += 1
        client.submit(make_request(f"base {number}", [9] * 200))
        return all(each.request_id in client.finished for each in waiting)

    client.run_until(is_served)
    client.run()
    assert core.num_free == core.num_blocks


def test_samples_go_on_if_only_the_first_load_of_their_adapter_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, core, _ = make_engine(adapter_slots=1)
    core.unreadable = {"b"}
    load = core.load_adapter

    def load_at_the_second_try(name: str) -> None:
        try:
            load(name)
        finally:
            core.unreadable.clear()

    monkeypatch.setattr(core, "load_adapter", load_at_the_second_try)
    client = Client(engine)
    client.submit(*[make_request(str(index), adapter="b") for index in range(3)])
    client.run()
    assert [each.request_id for each in engine.take_failed()] == ["0"]
    assert client.finished == {"1": "length", "2": "length"}
    assert core.num_free == core.num_blocks


def test_an_adapter_that_cannot_be_read_fails_its_requests_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, core, _ = make_engine(adapter_slots=1)
    core.unreadable = {"b"}
    client = Client(engine)
    client.submit(make_request("1", adapter="a"))
    client.submit(*[make_request(f"fails {index}", adapter="b") for index in range(2)])
    client.submit(make_request("2", adapter="a"))
    client.run()
    failed = engine.take_failed()
    # The field is of the request, so that the engine's health is not what suffers.
    assert {(each.request_id, each.field) for each in failed} == {
        ("fails 0", "model"),
        ("fails 1", "model"),
    }
    assert all("adapter b cannot be loaded" in each.message for each in failed)
    assert not any("/adapters/b" in each.message for each in failed)
    assert "there is no /adapters/b" in caplog.text
    assert client.finished == {"1": "length", "2": "length"}
    assert core.num_free == core.num_blocks


def test_an_injected_fault_breaks_the_engine_in_its_step() -> None:
    engine, _, _ = make_engine()
    client = Client(engine)
    client.submit(make_request("a", 20, 30))
    engine.inject_out_of_memory(2)
    client.step()
    client.step()
    with pytest.raises(OutOfMemoryFault):
        engine.step()


def test_a_smaller_share_of_the_batch_starts_fewer() -> None:
    engine, core, _ = make_engine()
    engine.set_batch_share(0.25)
    assert core.max_running == 2
    engine.set_batch_share(0.0)
    assert core.max_running == 1


def test_what_others_took_of_the_device_is_withheld_from_new_requests_only() -> None:
    engine, _, _ = make_engine(num_blocks=8)
    client = Client(engine)
    assert client.submit(make_request("a", 40, 8)) is None
    engine.withhold(4 * BLOCK * BYTES)
    assert engine.stats().headroom_bytes == BLOCK * BYTES
    assert client.submit(make_request("b", [1] * 40, 8)) is not None
    client.run()
    assert client.finished == {"a": "length"}


def test_statistics_add_up() -> None:
    engine, _, _ = make_engine()
    client = Client(engine)
    client.submit(make_request("a", 100, 20))
    stats = engine.stats()
    assert stats.num_waiting == 1
    assert stats.prefill_backlog_tokens == 100
    assert stats.kv_committed_bytes == 8 * BLOCK * BYTES
    client.step()
    client.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.prefill_backlog_tokens) == (1, 0, 0)
    assert stats.kv_held_bytes == 7 * BLOCK * BYTES
    assert stats.kv_committed_bytes == BLOCK * BYTES
    assert stats.kv_used_bytes == 100 * BYTES
    [release] = engine.releases()
    assert release.num_bytes == 8 * BLOCK * BYTES
    assert release.after_s > 0
    client.run()
    assert engine.stats() == replace_counts(engine)


def test_every_waiting_prompt_delays_a_release() -> None:
    engine, _, _ = make_engine()
    client = Client(engine)
    client.submit(make_request("a", 20, 20))
    client.step()
    client.step()
    [alone] = engine.releases()
    client.submit(make_request("b", [1] * 100, 20))
    soonest = engine.releases()[0]
    assert soonest.num_bytes == alone.num_bytes
    assert soonest.after_s > alone.after_s


def replace_counts(engine: VllmEngine) -> object:
    return structs.replace(
        engine.stats(),
        kv_committed_bytes=0,
        num_running=0,
        num_waiting=0,
        kv_used_bytes=0,
        kv_free_bytes=engine._profile.kv_pool_bytes,
    )


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.integers(0, 3),  # which prompt
            st.integers(1, 150),  # its length
            st.integers(1, 80),  # output
            st.integers(1, 3),  # samples
            st.integers(-1, 1),  # priority
            st.booleans(),  # session
            st.booleans(),  # resumed
            st.sampled_from(["", *ADAPTERS]),
            st.sampled_from(["", "", "", "refused", "given up"]),  # fault of the first
        ),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.booleans()),
        st.tuples(st.just("step"), st.integers(1, 30)),
        st.tuples(st.just("idle")),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(
    actions=ACTIONS,
    num_blocks=st.integers(4, 40),
    expected_output=st.integers(1, 80),
    windows=st.sampled_from([(0,), (0, 48), (48,)]),
    adapter_slots=st.integers(1, 3),
)
def test_in_any_traffic_nothing_is_lost_and_vllm_never_preempts(
    actions: list[tuple[object, ...]],
    num_blocks: int,
    expected_output: int,
    windows: tuple[int, ...],
    adapter_slots: int,
) -> None:
    engine, core, clock = make_engine(
        num_blocks, windows=windows, session_blocks=8, adapter_slots=adapter_slots
    )
    for _ in range(300):
        engine._output_lengths.observe(expected_output)
    client = Client(engine)
    open_requests = dict[str, EngineRequest]()
    failing = set[str]()
    number = 0
    for action in actions:
        match action:
            case (
                "submit",
                which,
                length,
                output,
                samples,
                priority,
                has_session,
                resumed,
                adapter,
                fault,
            ):
                requests = []
                if fault:
                    failing.add(str(number))
                if fault == "given up":
                    core.broken[str(number)] = ("it breaks vLLM", "")
                for _ in range(samples):  # type: ignore[call-overload]
                    requests.append(
                        make_request(
                            str(number),
                            [0] * (length // 2) + [which] * (length - length // 2),  # type: ignore[operator]
                            output,  # type: ignore[arg-type]
                            priority=priority,
                            session_id=f"s{length % 3}" if has_session else "",  # type: ignore[operator]
                            adapter=adapter,
                        )
                    )
                    number += 1
                if fault == "refused":
                    hot = SamplingParams(temperature=3.0)
                    requests[0] = structs.replace(requests[0], sampling=hot)
                refusal = client.submit(*requests)
                if refusal is not None and resumed and not refusal.never:
                    refusal = client.submit(*requests, resumed=True)
                if refusal is None:
                    open_requests |= {each.request_id: each for each in requests}
            case ("cancel", which, is_answered):
                engine.cancel(str(which), is_answered=bool(is_answered))
                if str(which) not in client.finished:
                    open_requests.pop(str(which), None)
            case ("step", count):
                for _ in range(count if engine.has_work else 0):  # type: ignore[call-overload]
                    client.step()
            case _:
                clock.now += 100.0
                engine.reservations.end_idle_sessions()
        engine.reservations.check_integrity()
    client.run()
    failed = [each.request_id for each in engine.take_failed()]
    assert len(failed) == len(set(failed))
    assert set(failed) <= failing
    assert failing & open_requests.keys() <= set(failed)
    for request_id in failed:
        assert request_id not in client.texts
        open_requests.pop(request_id, None)
    for request_id, request in open_requests.items():
        longest = engine._costs.longest(request, 1) - request.num_prompt_tokens
        text = expected_text(request)[:longest]
        assert client.texts[request_id][: len(text)] == text[: len(client.texts[request_id])]
        assert client.finished[request_id] in ("length", "stop")
        if not request.session_id:
            assert client.texts[request_id] == text
    engine.reservations.end_all_sessions()
    assert core.num_free == core.num_blocks
    assert engine.take_failed() == []
