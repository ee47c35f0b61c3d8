"""A worker process with vLLM and SmolLM2, spoken to as the server does."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ullage_testing.small_models import (
    SOURCE,
    continue_greedily,
    load_smollm2_reference,
    smollm2_path,
)
from ullage_testing.worker_link import WorkerProcess, launcher

from ullage.inference.v1 import inference_pb2 as pb
from ullage_engine.protocol.errors import WeightsError, WorkerStartError
from ullage_engine.protocol.messages import Cancel, Ready
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.server.grammar import grammar_text
from ullage_engine.server.worker_env import vllm_env
from ullage_engine.tokenizer.tokenizer import ModelTokenizer, load_tokenizer

from .conftest import vllm_config

Launch = Callable[..., WorkerProcess]
BLOCK = 32
TOKEN_BYTES = 2 * 30 * 3 * 64 * 4
"""KV of one token: keys and values of 30 layers, 3 heads of 64 numbers, 4 bytes each."""
NUM_BLOCKS = 48
# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
QUESTION = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
END_OF_TURN = 2
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, weights_dir: Path) -> Iterator[Launch]:
    """Launches workers; sections given by keyword replace fields of `vllm_config`."""
    with launcher() as launch_command:

        def launch_one(source: str = SOURCE, **sections: Any) -> WorkerProcess:
            folder = tmp_path_factory.mktemp("w")
            memory = {
                "max_kv": (NUM_BLOCKS + 1) * BLOCK * TOKEN_BYTES,
                **sections.pop("memory", {}),
            }
            config = vllm_config(
                source,
                memory=memory,
                batching={"max_sequences": 4},
                server={"weights_dir": str(weights_dir), "run_dir": str(folder)},
                **sections,
            )
            (folder / "engine.yaml").write_text(yaml.safe_dump(config))
            command = [sys.executable, "-m", "ullage_engine.vllm_worker"]
            return launch_command(command, folder, vllm_env(2))

        yield launch_one


@pytest.fixture(scope="module")
def ready_worker(launch: Launch) -> Iterator[tuple[WorkerProcess, Ready]]:
    worker = launch()
    ready = worker.wait_ready()
    yield worker, ready
    assert worker.stop() == 0


@pytest.fixture
def worker(ready_worker: tuple[WorkerProcess, Ready]) -> WorkerProcess:
    """One worker for all tests, which leave it idle."""
    return ready_worker[0]


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return load_tokenizer(smollm2_path())


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' model of the same file."""
    return load_smollm2_reference()


def make_request(name: str, token_ids: list[int] | None = None, **fields: Any) -> EngineRequest:
    prompt = QUESTION if token_ids is None else token_ids
    return EngineRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=fields.pop("num_prompt_tokens", len(prompt)),
        sampling=fields.pop("sampling", SamplingParams(temperature=0.0)),
        **{"max_tokens": 8, **fields},
    )


def grammar(**kind: Any) -> str:
    return grammar_text(pb.Grammar(**kind))[1]


def is_idle(worker: WorkerProcess) -> bool:
    """Whether nothing is held or reserved but what sessions keep."""
    state = worker.fresh_state()
    kept = state.kv_free_bytes + state.kv_reclaimable_bytes
    return (kept, state.kv_committed_bytes) == (state.kv_pool_bytes, 0)


def test_it_says_how_far_it_is_and_what_it_serves(
    ready_worker: tuple[WorkerProcess, Ready],
) -> None:
    worker, ready = ready_worker
    stages = list(dict.fromkeys(each.stage for each in worker.loading))
    assert stages == ["imports", "weights", "warm_up", "kv_pool"]
    assert all(each.done_bytes <= each.total_bytes for each in worker.loading)
    # The weights are 513 MiB in float32.
    assert max(each.total_bytes for each in worker.loading) > 500 << 20
    assert (ready.max_model_len, ready.vocab_size, ready.dtype) == (1024, 49152, "float32")
    profile = ready.profile
    [group] = profile.groups
    assert group.grows
    assert group.bytes_per_token == TOKEN_BYTES
    assert profile.block_tokens == BLOCK
    assert profile.kv_pool_bytes == NUM_BLOCKS * BLOCK * TOKEN_BYTES
    [place] = ready.ranks
    assert (place.num_layers, place.num_heads, place.num_kv_heads) == (30, 9, 3)
    reserved = {each.name: each.reserved_bytes for each in ready.state.ledger}
    assert list(reserved) == ["context", "model", "staging", "safety_reserve", "kv_pool"]
    assert reserved["kv_pool"] == profile.kv_pool_bytes + BLOCK * TOKEN_BYTES
    assert sum(reserved.values()) <= ready.state.total_bytes == 4 << 30
    assert ready.state.rss_bytes <= ready.state.total_bytes


def test_it_answers_a_question_with_the_tokens_of_transformers(
    worker: WorkerProcess, reference: Any
) -> None:
    answer = worker.submit(make_request("q", max_tokens=40, stop_token_ids=[END_OF_TURN]))
    unstopped = worker.submit(make_request("u", max_tokens=40))
    worker.finish_all()
    expected = continue_greedily(reference, QUESTION, 40)
    assert unstopped.token_ids == expected
    assert unstopped.finish == "length"
    assert answer.token_ids == expected[: expected.index(END_OF_TURN) + 1]
    assert answer.finish == "stop"


def test_logprobs_are_those_of_the_model(worker: WorkerProcess, reference: Any) -> None:
    sampling = SamplingParams(temperature=1.3, seed=11, top_logprobs=3)
    answer = worker.submit(make_request("logprobs", max_tokens=12, sampling=sampling))
    bare = worker.submit(
        make_request("bare", max_tokens=4, sampling=SamplingParams(seed=1, top_logprobs=0))
    )
    worker.finish_all()
    with torch.inference_mode():
        logits = reference(torch.tensor([QUESTION + answer.token_ids])).logits[0]
    expected = logits.log_softmax(-1)[len(QUESTION) - 1 : -1]
    assert len(answer.logprobs) == 12
    for row, token, entry in zip(expected, answer.token_ids, answer.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        top = row.topk(3)
        assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-3)
        assert entry.top_ids == top.indices.tolist()
    assert [each.top_ids for each in bare.logprobs] == [[]] * 4


def test_no_stop_token_comes_before_min_tokens(worker: WorkerProcess) -> None:
    bias = SamplingParams(temperature=0.0, logit_bias={END_OF_TURN: 100.0})
    common = {"stop_token_ids": [END_OF_TURN], "max_tokens": 20, "sampling": bias}
    plain = worker.submit(make_request("plain", **common))
    late = worker.submit(make_request("late", min_tokens=6, **common))
    worker.finish_all()
    assert (len(plain.token_ids), len(late.token_ids)) == (1, 7)
    assert plain.finish == late.finish == "stop"


def test_samples_share_their_prompt_and_differ(worker: WorkerProcess) -> None:
    prompt = [100 + number for number in range(200)]
    samples = worker.submit_group(
        [
            make_request(f"n{seed}", prompt, max_tokens=16, sampling=SamplingParams(seed=seed))
            for seed in range(3)
        ]
    )
    worker.finish_all()
    assert [each.num_cached_tokens for each in samples] == [0, 192, 192]
    assert len({tuple(each.token_ids) for each in samples}) == 3


def test_a_seed_repeats_a_text_also_from_its_middle(worker: WorkerProcess) -> None:
    common = {
        "max_tokens": 40,
        "min_tokens": 30,
        "stop_token_ids": [END_OF_TURN],
        "sampling": SamplingParams(
            seed=5, top_p=0.95, presence_penalty=1.0, repetition_penalty=1.1
        ),
    }
    whole = worker.submit(make_request("whole", **common))
    worker.finish_all()
    again = worker.submit(make_request("again", **common))
    worker.finish_all()
    sent = QUESTION + whole.token_ids[:17]
    rest = worker.submit(
        make_request("rest", sent, num_prompt_tokens=len(QUESTION), **common), resumed=True
    )
    worker.finish_all()
    assert again.token_ids == whole.token_ids
    assert rest.token_ids == whole.token_ids[17:]


GRAMMARS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json": (
        {"json_schema": json.dumps(SCHEMA)},
        lambda text: isinstance(json.loads(text)["age"], int),
    ),
    "regex": (
        {"regex": "[0-9]{3}-[a-z]{2}"},
        lambda text: text[:3].isdecimal() and text[3] == "-" and text[4:].islower(),
    ),
    "lark": (
        {"lark": 'start: "a" DIGITS\nDIGITS: /[0-9]{4}/'},
        lambda text: text[0] == "a" and text[1:].isdecimal() and len(text) == 5,
    ),
    "choice": (
        {"choice": pb.Choice(texts=["red", "green"])},
        lambda text: text in ("red", "green"),
    ),
}


def test_answers_match_their_grammars_and_go_on_in_them(
    worker: WorkerProcess, tokenizer: ModelTokenizer
) -> None:
    ends = list(tokenizer.eos_token_ids)
    common = {name: {"grammar": grammar(**kind)} for name, (kind, _) in GRAMMARS.items()} | {
        "free": {}
    }
    for number, fields in enumerate(common.values()):
        sampling = SamplingParams(temperature=1.5, seed=number)
        fields |= {"sampling": sampling, "max_tokens": 80, "stop_token_ids": ends}
    wholes = {name: worker.submit(make_request(name, **common[name])) for name in common}
    worker.finish_all()
    texts = {name: tokenizer.decode(each.token_ids) for name, each in wholes.items()}
    rests = {}
    for name, (_, matches) in GRAMMARS.items():
        assert wholes[name].finish == "stop", texts[name]
        assert matches(texts[name]), texts[name]
        sent = QUESTION + wholes[name].token_ids[:1]
        rests[name] = worker.submit(
            make_request(f"{name}+", sent, num_prompt_tokens=len(QUESTION), **common[name]),
            resumed=True,
        )
    bad = worker.submit(make_request("bad", grammar="not a grammar"))
    worker.finish_all()
    for name, rest in rests.items():
        assert rest.token_ids == wholes[name].token_ids[1:]
    assert "grammar" in bad.failed
    assert bad.failed_field == "grammar"


def test_of_those_that_wait_the_most_important_is_next(worker: WorkerProcess) -> None:
    running = [worker.submit(make_request(f"r{n}", [n + 5] * 9, max_tokens=60)) for n in range(4)]
    worker.wait_for(lambda: all(each.token_ids for each in running))
    worker.order.clear()
    names = {"low": -1, "middle": 0, "high": 1}
    for name, priority in names.items():
        worker.submit(make_request(name, [77, 78, priority + 9], priority=priority))
    worker.finish_all()
    first = [worker.order.index(name) for name in ("high", "middle", "low")]
    assert first == sorted(first)


def test_a_cancelled_request_frees_its_memory(worker: WorkerProcess) -> None:
    answer = worker.submit(make_request("gone", max_tokens=900))
    worker.wait_for(lambda: len(answer.token_ids) > 3)
    worker.send(Cancel(request_id="gone"))
    assert is_idle(worker)
    answer.finish = "cancelled"
    assert len(answer.token_ids) < 900


def test_what_does_not_fit_is_rejected_with_figures(worker: WorkerProcess) -> None:
    prompts = [[n + 20] * 500 for n in range(3)]
    held = worker.submit(make_request("held", prompts[0], max_tokens=100))
    beside = worker.submit(make_request("beside", prompts[1], max_tokens=100))
    third = worker.submit(make_request("third", prompts[2], max_tokens=100))
    never = worker.submit(make_request("never", [5] * 1024))
    worker.finish_all()
    block_bytes = BLOCK * TOKEN_BYTES
    assert held.finish == beside.finish == "length"
    assert third.rejected is not None
    assert not third.rejected.never
    assert third.rejected.needed_bytes == 19 * block_bytes
    assert third.rejected.available_bytes == (NUM_BLOCKS - 2 * 19) * block_bytes
    assert 0 < third.rejected.retry_after_s <= 30
    assert never.rejected is not None
    assert never.rejected.never
    assert "1024" in never.rejected.message
    assert is_idle(worker)
    fits = worker.submit(make_request("later", prompts[2], max_tokens=100))
    worker.finish_all()
    assert fits.finish == "length"


def test_a_sessions_next_turn_finds_its_prompt(worker: WorkerProcess) -> None:
    prompt = [300 + number for number in range(150)]
    first = worker.submit(make_request("t1", prompt, session_id="s", cache_salt="one"))
    worker.finish_all()
    kept = worker.fresh_state()
    assert (kept.num_sessions, kept.session_bytes) == (1, 4 * BLOCK * TOKEN_BYTES)
    turn = prompt + first.token_ids + [9, 9, 9]
    second = worker.submit(make_request("t2", turn, session_id="s", cache_salt="one"))
    other = worker.submit(make_request("t3", turn, session_id="s", cache_salt="two"))
    worker.finish_all()
    assert (second.num_cached_tokens, other.num_cached_tokens) == (128, 0)
    assert is_idle(worker)


def test_what_vllm_refuses_fails_alone_with_its_field(worker: WorkerProcess) -> None:
    wrong = {
        "prompt": make_request("v", [5, 60_000]),
        "model": make_request("a", adapter="unknown"),
        "logprobs": make_request("l", sampling=SamplingParams(top_logprobs=21)),
        "top_p": make_request("p", sampling=SamplingParams(top_p=1.5)),
        "temperature": make_request("t", sampling=SamplingParams(temperature=-1.0)),
    }
    answers = {field: worker.submit(request) for field, request in wrong.items()}
    good = worker.submit(make_request("good"))
    worker.finish_all()
    assert good.finish == "length"
    for field, answer in answers.items():
        assert answer.failed_field == field, answer.failed
        assert answer.failed
        assert "\n" not in answer.failed
    assert is_idle(worker)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "argument": ({"vllm": {"args": {"block_sizes": 32}}}, "block_sizes"),
    "quantization": (
        {"model": {"quantization": "int8"}},
        "model.quantization: only the native engine has int8",
    ),
    "deterministic": ({"model": {"deterministic": True}}, "model.deterministic"),
    "host": ({"memory": {"host_kv": 1 << 20}}, "memory.host_kv"),
    "ranks": ({"gpus": 2}, "parallelism: tensor 1 times pipeline 1 is not gpus 2"),
    "source": ({"model": {"source": "file:///nowhere"}}, "/nowhere"),
    "length": ({"model": {"max_model_len": 99_999}}, "99999"),
}


@pytest.mark.parametrize(("sections", "words"), WRONG.values(), ids=WRONG)
def test_a_start_that_cannot_succeed_says_why_in_one_line(
    start_here: Any, sections: dict[str, Any], words: str
) -> None:
    with pytest.raises((WorkerStartError, WeightsError)) as caught:
        start_here(SOURCE, **sections)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_worker_without_enough_memory_sends_its_reason_and_ends(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = (worker := launch(memory={"device_bytes": 900 << 20})).wait_failed()
    assert failed.error.startswith("memory.deviceBytes: ")
    assert "\n" not in failed.error
    assert not failed.may_retry
    assert worker.process.wait(60) == 2
    assert "Traceback" not in capfd.readouterr().err
