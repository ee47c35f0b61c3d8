"""Answers of a random model at temperature 2 match their grammars, whatever these are."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ullage.inference.v1 import inference_pb2 as pb
from ullage_engine.protocol.grammar import compile_error
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.protocol.step_plan import NOTHING_ALLOWED, Chunk, StepPlan
from ullage_engine.runner.sampler import sample
from ullage_engine.server.grammar import after_reasoning, grammar_text
from ullage_engine.tokenizer.detokenizer import TokenBytes
from ullage_engine.tokenizer.tokenizer import ModelTokenizer
from ullage_engine.worker.grammar import GrammarError, Grammars, no_vocabulary, vocabulary

PROMPT = [7, 8, 9]
WORDS = ['{"', '":', '",', "tr", "true", "false", "null", "},", "12", "ab", "[]", '"}', "é"]
Value = dict[str, Any]


def make_tokenizer() -> ModelTokenizer:
    """Every byte, a few longer tokens that straddle JSON's structure, and an end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    longer = [spell.pre_tokenize_str(word)[0][0] for word in WORDS]
    tokens = ["<end>", *letters, *dict.fromkeys(longer)]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer, made.decoder = spell, decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    text = made.to_str()
    return ModelTokenizer(made, text.encode(), "", (0,), {"eos_token": "<end>"})


TOKENIZER = make_tokenizer()
BYTES = TokenBytes(TOKENIZER.tokenizer)
VOCAB = TOKENIZER.tokenizer.get_vocab_size() + 5
"""Models have more logits than their tokenizer has tokens."""
END = 0
A = TOKENIZER.tokenizer.token_to_id("a")


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    shared: list[LLTokenizer] = []

    def load() -> LLTokenizer:
        shared.append(vocabulary(TOKENIZER, VOCAB))
        return shared[0]

    yield Grammars(load)
    assert len(shared) <= 1


def form(**kind: Any) -> str:
    return grammar_text(pb.Grammar(**kind))[1]


class Answer:
    """One sequence of a model whose logits are noise."""

    def __init__(self, grammars: Grammars, grammar: str, seed: int, **fields: Any) -> None:
        sampling = {"temperature": 2.0, "seed": seed, **fields.pop("sampling", {})}
        self.params = SamplingParams(**sampling)
        self.tokens = [*PROMPT, *fields.pop("output", [])]
        self.banned = fields.pop("banned", [])
        self._grammars = grammars
        request = EngineRequest(
            request_id=f"r{seed}",
            token_ids=self.tokens,
            num_prompt_tokens=len(PROMPT),
            max_tokens=500,
            sampling=self.params,
            stop_token_ids=[END],
        )
        self.request_id = request.request_id
        grammars.open(request, grammars.compile(grammar).result())

    def chunk(self) -> Chunk:
        return Chunk(
            request_id=self.request_id,
            token_ids=self.tokens[-1:],
            start=len(self.tokens) - 1,
            block_ids=[],
            sampling=self.params,
            history=list(self.tokens),
            num_prompt_tokens=len(PROMPT),
            banned=self.banned,
        )

    def run(self, most: int = 500) -> bool:
        """Whether it came to its end within so many tokens."""
        while len(self.tokens) < len(PROMPT) + most:
            plan, failed = self._grammars.constrain(StepPlan([self.chunk()]))
            assert not failed, failed
            torch.manual_seed(len(self.tokens))
            token = sample(torch.randn(1, VOCAB), plan.chunks)[0].token_id
            self.tokens.append(token)
            if token == END:
                break
        self._grammars.close(self.request_id)
        return self.tokens[-1] == END

    @property
    def text(self) -> str:
        return b"".join(map(BYTES.text_bytes, self.tokens[len(PROMPT) :])).decode(
            "utf-8", "replace"
        )


NAMES = st.sampled_from(["a", "b", "long name", "é", 'q"', "d"])
SCALARS: st.SearchStrategy[Value] = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "x y"}, {"const": [1, "é"]}]),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-300, 300),
        st.integers(0, 400),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-c]{2,4}$"},
            {"type": "string", "format": "date"},
            {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": 7},
        ]
    ),
    st.lists(
        st.one_of(st.integers(-9, 9), st.booleans(), st.text(max_size=3)), min_size=1, max_size=4
    ).map(lambda values: {"enum": values}),
)


def nested(inner: st.SearchStrategy[Value]) -> st.SearchStrategy[Value]:
    objects = st.builds(
        lambda parts, num_required: {
            "type": "object",
            "properties": parts,
            "required": list(parts)[:num_required],
            "additionalProperties": False,
        },
        st.dictionaries(NAMES, inner, max_size=4),
        st.integers(0, 4),
    )
    arrays = st.builds(
        lambda item, low, more: {
            "type": "array",
            "items": item,
            "minItems": low,
            "maxItems": low + more,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    return objects | arrays | st.lists(inner, min_size=1, max_size=3).map(lambda a: {"anyOf": a})


SCHEMAS = st.recursive(SCALARS, nested, max_leaves=6)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 30))
def test_what_ends_is_valid(grammars: Grammars, schema: Value, seed: int) -> None:
    answer = Answer(grammars, form(json_schema=json.dumps(schema)), seed)
    if answer.run():
        Draft202012Validator(schema).validate(json.loads(answer.text))
    else:  # numbers may have any number of digits
        assert len(answer.text) > 100


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 30), cut=st.integers(0, 40))
def test_an_answer_resumed_anywhere_is_the_same(
    grammars: Grammars, schema: Value, seed: int, cut: int
) -> None:
    text = form(json_schema=json.dumps(schema))
    whole = Answer(grammars, text, seed)
    whole.run(80)
    output = [token for token in whole.tokens[len(PROMPT) :] if token != END]
    rest = Answer(grammars, text, seed, output=output[:cut])
    rest.run(80)
    assert rest.tokens == whole.tokens


def test_other_grammars_are_matched_to_their_end(grammars: Grammars) -> None:
    for seed in range(20):
        number = Answer(grammars, form(regex="[0-9]{3}-[a-z]{2}|é+!"), seed)
        if number.run():
            assert number.text[3:4] == "-" or set(number.text) == {"é", "!"}
        texts = ["a b", "c|d", "Ü/[", "a"]
        choice = Answer(grammars, form(choice=pb.Choice(texts=texts)), seed)
        assert choice.run()
        assert choice.text in texts
        lark = Answer(grammars, form(lark='start: "<" /[a-c]{1,3}/ ">"'), seed)
        assert lark.run()
        assert lark.text[0] + lark.text[-1] == "<>"
        anything = Answer(grammars, form(json_object=pb.JsonObject()), seed)
        if anything.run(60):
            assert isinstance(json.loads(anything.text), dict)


GRAMMARS: dict[str, tuple[Any, str, str]] = {
    "json_schema": (
        '{"type": "object", "properties": {}, "additionalProperties": false}',
        "{}",
        "{1}",
    ),
    "regex": ("ab+", "abb", "ba"),
    "lark": ('start: "x" b\nb: "y"', "xy", "yx"),
    "choice": (pb.Choice(texts=["yes", "no"]), "no", "now"),
}


def thinker() -> Tokenizer:
    """A tokenizer that has marks of reasoning as special and as other added tokens."""
    made = Tokenizer.from_str(TOKENIZER.tokenizer.to_str())
    made.add_special_tokens(["[THINK]", "[/THINK]"])
    made.add_tokens(["<think>", "</think>"])
    return made


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize(
    ("begin", "end", "is_token"),
    [
        ("<think>", "</think>", True),
        ("[THINK]", "[/THINK]", True),
        ("Thought:", 'Response": "', False),
    ],
)
def test_a_grammar_holds_after_the_reasoning(
    kind: str, begin: str, end: str, is_token: bool
) -> None:
    made = thinker()
    words = LLTokenizer(made.to_str(), eos_token=END)
    given_text, right, wrong = GRAMMARS[kind]
    marks = pb.Reasoning(begin=begin, end=end)
    if is_token:
        marks.begin_token_id = made.token_to_id(begin)
        marks.end_token_id = made.token_to_id(end)
    opened = pb.Reasoning()
    opened.CopyFrom(marks)
    opened.begin = ""

    def allows(reasoning: pb.Reasoning, text: str) -> bool:
        matcher = LLMatcher(words, after_reasoning(form(**{kind: given_text}), reasoning))
        ids = made.encode(text).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert allows(marks, right)
    assert allows(marks, f"{begin}Hm.\n{right}{end}\n\n{right}")
    assert allows(opened, f"Hm.\n{wrong}{end}{right}")
    assert not allows(marks, f"{begin}Hm.{end}{wrong}")
    assert not allows(marks, f"{begin}Hm.{end}")
    assert not allows(marks, wrong)
    assert not allows(opened, right)


def test_the_end_is_all_that_follows_the_end(grammars: Grammars) -> None:
    answer = Answer(grammars, form(regex="ab"), 1, banned=[END])
    assert answer.run()
    assert answer.text == "ab"


def test_an_end_that_is_banned_waits_while_anything_else_may_follow(grammars: Grammars) -> None:
    bias = {"logit_bias": {END: 100.0}}
    eager = Answer(grammars, form(regex="a{1,9}"), 1, sampling=bias)
    late = Answer(grammars, form(regex="a{1,9}"), 2, sampling=bias, banned=[END])
    assert eager.run()
    assert late.run()
    assert (eager.text, late.text) == ("a", "a" * 9)


@pytest.mark.parametrize("banned", [[], [END]])
def test_a_bad_word_is_banned_even_if_nothing_else_may_follow(
    grammars: Grammars, banned: list[int]
) -> None:
    bad = TOKENIZER.tokenizer.token_to_id("b")
    answer = Answer(grammars, form(regex="ab"), 3, output=[A], banned=[bad, *banned])
    plan, failed = grammars.constrain(StepPlan([answer.chunk()]))
    assert not failed
    assert sample(torch.zeros(1, VOCAB), plan.chunks)[0].token_id == NOTHING_ALLOWED
    grammars.close(answer.request_id)

    optional = Answer(grammars, form(regex="ab?"), 4, output=[A], banned=[bad, *banned])
    assert optional.run()
    assert optional.text == "a"


def test_a_chunk_that_samples_nothing_and_one_without_a_grammar_stay_as_they_are(
    grammars: Grammars,
) -> None:
    answer = Answer(grammars, form(regex="a"), 1)
    plan = StepPlan([answer.chunk()])
    grammars.close(answer.request_id)
    assert grammars.constrain(plan) == (plan, {})
    assert grammars.constrain(plan)[0] is plan


def test_output_that_the_grammar_does_not_allow_fails_its_request_only(grammars: Grammars) -> None:
    wrong = Answer(grammars, form(regex="a"), 1, output=[20, 21])
    right = Answer(grammars, form(regex="a"), 2)
    plan, failed = grammars.constrain(StepPlan([wrong.chunk(), right.chunk()]))
    assert list(failed) == [wrong.request_id]
    assert [chunk.request_id for chunk in plan.chunks] == [right.request_id]
    assert right.run()
    grammars.close(wrong.request_id)


def test_many_grammars_leave_few_behind(grammars: Grammars) -> None:
    futures = [grammars.compile(form(regex=f"a{{{n}}}")) for n in range(1, 60)]
    assert all(not future.result().is_error() for future in futures)
    assert grammars.compile(form(regex="a{59}")) is futures[-1]
    grammars.compile(form(regex="b")).result()
    assert grammars.compile(form(regex="a{1}")) is not futures[0]


def test_engines_without_a_tokenizer_refuse_grammars() -> None:
    with pytest.raises(GrammarError, match="no tokenizer"):
        Grammars(no_vocabulary).compile(form(regex="a")).result()


LOOP = {"anyOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/n"}]}
HOSTILE: list[Value] = [
    {"type": "string", "maxLength": 10**9},
    {"type": "string", "pattern": "(a{1000}){1000}"},
    {"type": "string", "pattern": "^.*a.{12}.*b.{12}$"},
    {"type": "array", "items": {}, "minItems": 10**6},
    {"type": "integer", "multipleOf": 1013},
    {"enum": [f"v{i}" * 3 for i in range(3000)]},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}},
    {
        "allOf": [
            {"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in "xy"]} for i in range(6)
        ]
    },
    {"$defs": {"n": LOOP}, "$ref": "#/$defs/n"},
    {"$ref": "#"},
]


@pytest.mark.parametrize("schema", HOSTILE, ids=lambda schema: json.dumps(schema)[:40])
def test_hostile_schemas_end_in_tokens_or_an_error(grammars: Grammars, schema: Value) -> None:
    text = form(json_schema=json.dumps(schema))
    if compile_error(text):
        with pytest.raises(GrammarError):
            grammars.compile(text).result()
        return
    answer = Answer(grammars, text, 5)
    for _ in range(20):
        plan, failed = grammars.constrain(StepPlan([answer.chunk()]))
        if failed or answer.tokens[-1] == END:
            break
        answer.tokens.append(sample(torch.randn(1, VOCAB), plan.chunks)[0].token_id)
    grammars.close(answer.request_id)
