"""Log-probabilities of a prompt's tokens, in the forms of OpenAI's `echo` and of vLLM."""

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from ullage_testing.fake_engine import Script

if TYPE_CHECKING:
    StartService = Any

PROMPT = [10, 20, 30, 40, 50, 60]
OWN = [None, *(-(position + token / 256) for position, token in enumerate(PROMPT) if position)]
TOP = {"<0>": -0.25, "<1>": -0.5}


def echoed(logprobs: dict[str, Any]) -> list[float | None]:
    """The log-probabilities of the prompt, once its other fields are checked."""
    assert logprobs["tokens"][: len(PROMPT)] == [f"<{token}>" for token in PROMPT]
    assert logprobs["text_offset"][: len(PROMPT)] == [0, 4, 8, 12, 16, 20]
    found = logprobs["token_logprobs"][: len(PROMPT)]
    assert found[0] is None
    assert logprobs["top_logprobs"][0] is None
    for token, own, top in zip(PROMPT[1:], found[1:], logprobs["top_logprobs"][1:], strict=False):
        assert top == {f"<{token}>": own, **TOP}
    return list(found)


def test_the_prompt_alone(start_service: "StartService") -> None:
    """As harnesses score a text: the token that the engine generates behind it is not returned."""

    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.complete(PROMPT, echo=True, logprobs=2, max_tokens=0)
            body = answer.json()
            [choice] = body["choices"]
            assert choice["text"] == service.router.service.engines.model.decode(PROMPT)
            assert echoed(choice["logprobs"]) == OWN
            assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
            assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
            assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == len(PROMPT)
            assert service.engine.requests[0].stop.max_tokens == 1
            assert service.engine.requests[0].output.prompt_logprobs == 2

            bare = (await service.complete(PROMPT, echo=True, max_tokens=0)).json()
            assert bare["choices"][0]["text"] == choice["text"]
            assert bare["choices"][0]["logprobs"] is None
            assert not service.engine.requests[1].output.HasField("prompt_logprobs")

    asyncio.run(scenario())


def test_the_prompt_and_its_answer(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            body = (await service.complete(PROMPT, echo=True, logprobs=2)).json()
            logprobs = body["choices"][0]["logprobs"]
            assert echoed(logprobs) == OWN
            assert logprobs["tokens"][len(PROMPT) :] == ["Hello", " big", " world"]
            assert logprobs["token_logprobs"][len(PROMPT) :] == [-0.5] * 3
            assert logprobs["text_offset"][len(PROMPT) :] == [24, 29, 33]

    asyncio.run(scenario())


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_many_choices(start_service: "StartService", prompts: int, n: int, max_tokens: int) -> None:
    """Each has the log-probabilities of its own prompt, as a whole and in a stream."""

    async def scenario() -> None:
        async with start_service() as service:
            asked = {"echo": True, "logprobs": 2, "n": n, "max_tokens": max_tokens}
            lists = [PROMPT] * prompts
            body = (await service.complete(lists, **asked)).json()
            assert [choice["index"] for choice in body["choices"]] == list(range(prompts * n))
            for choice in body["choices"]:
                assert echoed(choice["logprobs"]) == OWN
                assert len(choice["logprobs"]["tokens"]) == len(PROMPT) + max_tokens
            assert body["usage"]["completion_tokens"] == prompts * n * max_tokens

            stream = await service.openai.completions.create(
                model="tiny",
                prompt=lists,
                stream=True,
                stream_options={"include_usage": True},
                **asked,
            )
            whole = {index: {"text": "", "logprobs": {}} for index in range(prompts * n)}
            reasons = dict.fromkeys(whole, "")
            async for chunk in stream:
                for choice in chunk.choices:
                    own = whole[choice.index]
                    own["text"] += choice.text
                    reasons[choice.index] = choice.finish_reason or reasons[choice.index]
                    if choice.logprobs:
                        for name, values in choice.logprobs.model_dump().items():
                            own["logprobs"].setdefault(name, []).extend(values)
                last = chunk
            for choice in body["choices"]:
                assert whole[choice["index"]]["text"] == choice["text"]
                assert whole[choice["index"]]["logprobs"] == choice["logprobs"]
                assert reasons[choice["index"]] == choice["finish_reason"]
            assert last.usage.completion_tokens == prompts * n * max_tokens

    asyncio.run(scenario())


def test_the_form_of_vllm(start_service: "StartService") -> None:
    def check(positions: list[Any], count: int) -> None:
        assert len(positions) == count
        assert positions[0] is None
        for position, ranked in enumerate(positions[1:], start=1):
            own = [each for each in ranked.values() if each["rank"] == position]
            assert own
            assert ranked["0"] == {"logprob": -0.25, "rank": 1, "decoded_token": "<0>"}
            assert len(ranked) == 2

    async def scenario() -> None:
        async with start_service() as service:
            body = (await service.complete(PROMPT, prompt_logprobs=1, n=2)).json()
            for choice in body["choices"]:
                check(choice["prompt_logprobs"], len(PROMPT))
                assert choice["logprobs"] is None
                own = choice["prompt_logprobs"][2]["30"]
                assert own == {"logprob": OWN[2], "rank": 2, "decoded_token": "<30>"}

            chat = (await service.chat("Hi", prompt_logprobs=1)).json()
            check(chat["prompt_logprobs"], chat["usage"]["prompt_tokens"])
            assert "prompt_logprobs" not in chat["choices"][0]

            # 0 asks for the prompt's own tokens, and each form has as many as it asks for.
            both = {"prompt_logprobs": 0, "echo": True, "logprobs": 2, "max_tokens": 0}
            body = (await service.complete(PROMPT, **both)).json()
            [choice] = body["choices"]
            assert echoed(choice["logprobs"]) == OWN
            assert [*map(len, choice["prompt_logprobs"][1:])] == [1] * (len(PROMPT) - 1)

    asyncio.run(scenario())


def test_what_cannot_be_served_is_refused_by_name(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for field, body in (
                ("max_tokens", {"max_tokens": 0}),
                ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
                ("prompt_logprobs", {"prompt_logprobs": -1}),
                ("prompt_logprobs", {"prompt_logprobs": 21}),
                ("prompt_logprobs", {"prompt_logprobs": 1, "use_beam_search": True, "n": 2}),
                ("prompt_logprobs", {"echo": True, "logprobs": 1, "use_beam_search": True, "n": 2}),
            ):
                answer = await service.complete(PROMPT, **body)
                assert answer.status_code == 400, body
                assert answer.json()["error"]["param"] == field, answer.text
            answer = await service.chat("Hi", max_tokens=0)
            assert answer.json()["error"]["param"] == "max_tokens"
            many = ["x" * 60_000] * 20
            answer = await service.complete(many, echo=True, logprobs=20, max_tokens=0)
            assert answer.json()["error"]["param"] == "prompt"
            assert not service.engine.requests

    asyncio.run(scenario())


@pytest.mark.parametrize("at_once", [2, 3, 4, 8])
def test_an_engine_that_is_lost_costs_no_token_of_the_prompt(
    start_service: "StartService", at_once: int
) -> None:
    """Another one begins again, and its messages may have other sizes."""

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            script = Script(fail_after_scored=4)

            def mend() -> None:
                script.fail_after_scored = None
                script.scored_at_once = at_once

            script.on_failure = mend
            for engine in service.engines:
                engine.script = script
            body = (await service.complete(PROMPT, echo=True, logprobs=2)).json()
            logprobs = body["choices"][0]["logprobs"]
            assert echoed(logprobs) == OWN
            assert len(logprobs["tokens"]) == len(PROMPT) + 3
            assert all(engine.requests for engine in service.engines)

    asyncio.run(scenario())
