"""Grammars in the step loop: nothing that happens to a request changes what it says."""

import errno
import json
from collections.abc import Callable

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.protocol.messages import KvOffer, KvSlot, KvWritten, Rejected
from ullage_engine.protocol.requests import (
    EngineRequest,
    PromptLogprobs,
    SamplingParams,
    TokenOutput,
)
from ullage_engine.protocol.step_plan import Moves, SampledToken, StepPlan
from ullage_engine.runner.sampler import sample
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import KvPolicy, Scheduler, SchedulerLimits
from ullage_engine.tokenizer.detokenizer import TokenBytes
from ullage_engine.tokenizer.tokenizer import ModelTokenizer
from ullage_engine.worker.engine import EngineCore
from ullage_engine.worker.grammar import GrammarError, Grammars, vocabulary

END = 256
VOCAB = 260
JSON = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 12, "maxLength": 30},
            "on": {"type": "boolean"},
        },
        "required": ["name", "on"],
        "additionalProperties": False,
    },
    overrides={"whitespace_flexible": False},
)
REGEX = LLMatcher.grammar_from_regex("[a-z]{20,60}")


def byte_tokenizer() -> ModelTokenizer:
    """A token a byte, and an end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return ModelTokenizer(made, made.to_str().encode(), "", (END,), {"eos_token": "<end>"})


TOKENIZER = byte_tokenizer()
BYTES = TokenBytes(TOKENIZER.tokenizer)


class NoiseRunner:
    """Its logits are noise of (seed, position); runs out of memory where `fails` says so."""

    def __init__(self, fails: Callable[[StepPlan], bool]) -> None:
        self._fails = fails
        self.copies: list[str] = []
        """Copies of KV that were begun, and waits for them, in order."""

    def move(self, moves: Moves) -> None:
        self.copies.append("move")

    def sync(self) -> None:
        self.copies.append("sync")

    def take_prompt_logprobs(self) -> list[PromptLogprobs]:
        return []

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        if self._fails(plan):
            raise torch.OutOfMemoryError("no memory")
        chunks = [chunk for chunk in plan.chunks if chunk.sampling is not None]
        rows = [torch.empty(0, VOCAB)]
        for chunk in chunks:
            assert chunk.sampling is not None
            torch.manual_seed(chunk.sampling.seed * 10_007 + chunk.end)
            rows.append(torch.randn(1, VOCAB))
        return sample(torch.cat(rows), chunks)


def make_engine(
    blocks: int = 256,
    host_slots: int = 0,
    fails: Callable[[StepPlan], bool] = lambda plan: False,
    kv_space: bytes = b"",
) -> EngineCore:
    profile = MemoryProfile(
        block_tokens=16,
        groups=(CacheGroup(bytes_per_token=10),),
        state_bytes_per_sequence=0,
        activation_bytes_per_token=1,
        sampler_bytes_per_sequence=1,
        prefill_chunk_tokens=32,
        kv_pool_bytes=blocks * 160,
    )
    throughput = ThroughputEstimator()
    policy = KvPolicy(host_slots=host_slots, kv_space=kv_space)
    limits = SchedulerLimits(512, 8, 32, True, 8192)
    scheduler = Scheduler(profile, limits, throughput, OutputLengthEstimator(512, start=4), policy)
    grammars = Grammars(lambda: vocabulary(TOKENIZER, VOCAB))
    return EngineCore(scheduler, NoiseRunner(fails), throughput, grammars)


def make_request(name: str, grammar: str, seed: int, output: tuple[int, ...] = ()) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=[65] * 40 + list(output),
        num_prompt_tokens=40,
        max_tokens=120,
        sampling=SamplingParams(temperature=2.0, seed=seed),
        stop_token_ids=[END],
        grammar=grammar,
    )


GROUPS = [
    [make_request(f"json{seed}", JSON, seed) for seed in (1, 2, 3)],
    [make_request("regex", REGEX, 4)],
    [make_request("free", "", 5)],
]


def run(engine: EngineCore, groups: list[list[EngineRequest]]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}

    def take(outputs: list[TokenOutput]) -> None:
        for output in outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)

    for group in groups:
        answer = engine.submit_group(group)
        assert not isinstance(answer, Rejected)
        take(answer)
    for _ in range(3000):
        if not engine.has_work:
            return tokens
        take(engine.step())
        engine.scheduler.check_integrity()
    raise AssertionError("it never ends")


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[int]]:
    """Each request by itself."""
    found: dict[str, list[int]] = {}
    for group in GROUPS:
        for request in group:
            found |= run(make_engine(), [[request]])
    return found


def test_answers_alone_match_their_grammars(undisturbed: dict[str, list[int]]) -> None:
    for name, tokens in undisturbed.items():
        text = b"".join(map(BYTES.text_bytes, tokens)).decode("utf-8", "replace")
        if name.startswith("json"):
            assert set(json.loads(text)) == {"name", "on"}
        elif name == "regex":
            assert text.isascii()
            assert text.islower()
            assert 20 <= len(text) <= 60
    assert len({tuple(tokens) for tokens in undisturbed.values()}) == 5


@pytest.mark.parametrize("host_slots", [0, 64], ids=["recomputed", "swapped"])
def test_preemption_changes_nothing(undisturbed: dict[str, list[int]], host_slots: int) -> None:
    engine = make_engine(blocks=14, host_slots=host_slots)
    assert run(engine, GROUPS) == undisturbed
    assert engine.scheduler.stats().num_preemptions > 0
    assert bool(engine.scheduler.stats().num_swaps) == bool(host_slots)
    assert engine.take_failed() == []


def test_steps_computed_again_change_nothing(undisturbed: dict[str, list[int]]) -> None:
    def fails(plan: StepPlan) -> bool:
        return len(plan.chunks) > 2 or plan.num_tokens > 30

    engine = make_engine(fails=fails)
    assert run(engine, GROUPS) == undisturbed
    assert engine.num_oom_events > 0


def test_a_resumed_request_goes_on(undisturbed: dict[str, list[int]]) -> None:
    sent = undisturbed["json2"][:9]
    rest = run(make_engine(), [[make_request("json2", JSON, 2, tuple(sent))]])
    assert sent + rest["json2"] == undisturbed["json2"]


def test_a_request_whose_grammar_fails_leaves_the_others(
    undisturbed: dict[str, list[int]],
) -> None:
    engine = make_engine()
    wrong = make_request("wrong", REGEX, 9, output=(1, 2))
    broken = make_request("broken", "no grammar", 9)
    found = run(engine, [*GROUPS, [wrong], [broken]])
    assert found == undisturbed
    failed = engine.take_failed()
    assert {each.request_id for each in failed} == {"wrong", "broken"}
    assert all(each.field == "grammar" and each.message for each in failed)


def test_copies_beside_a_request_whose_grammar_fails_are_reported_when_they_are_done() -> None:
    """A copy that is reported too early makes others read a slot that is not filled yet."""
    engine = make_engine(kv_space=bytes(32))
    runner = engine._runner
    assert isinstance(runner, NoiseRunner)
    assert engine.tiers is not None
    run(engine, [[make_request("free", "", 5)]])
    [offer] = engine.tiers.take_messages()
    assert isinstance(offer, KvOffer)

    slots = [KvSlot(each.key, place, 1) for place, each in enumerate(offer.blocks)]
    engine.tiers.on_granted(slots)
    assert engine.submit_group([make_request("wrong", REGEX, 9, output=(1, 2))]) == []
    assert engine.step() == []
    assert [each.request_id for each in engine.take_failed()] == ["wrong"]
    assert engine.tiers.take_messages() == [KvWritten(stored=slots)]
    assert runner.copies == ["move", "sync"]
    assert not engine.has_work


def test_a_vocabulary_that_cannot_be_loaded_fails_the_request_and_no_other() -> None:
    def load() -> LLTokenizer:
        raise OSError("cannot read tokenizer.json")

    engine = make_engine()
    engine.grammars = Grammars(load)
    tokens = run(engine, [[make_request("matched", REGEX, 1)], [make_request("free", "", 5)]])
    assert tokens.keys() == {"free"}
    (failed,) = engine.take_failed()
    assert failed.request_id == "matched"
    assert "cannot read tokenizer.json" in failed.message
    assert not failed.field, "the engine is at fault, not the request"


def test_a_vocabulary_for_which_there_is_no_memory_ends_the_worker_and_fails_no_request() -> None:
    """As the host's shortage, which the next worker gets over, wherever the loader met it."""

    def load() -> LLTokenizer:
        try:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        except OSError as error:
            raise GrammarError("model.gguf: Cannot allocate memory") from error

    engine = make_engine()
    engine.grammars = Grammars(load)
    with pytest.raises(MemoryError):
        run(engine, [[make_request("free", "", 5)], [make_request("matched", REGEX, 1)]])
    assert engine.take_failed() == []


def test_a_cancelled_request_is_forgotten() -> None:
    engine = make_engine()
    assert engine.submit_group([make_request("a", REGEX, 1)]) == []
    for _ in range(5):
        engine.step()
    engine.cancel("a")
    plan = StepPlan([])
    assert not engine.has_work
    assert engine.grammars.constrain(plan)[0] is plan
