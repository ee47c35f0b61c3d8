"""Paths beside OpenAI's that clients of vLLM call."""

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ullage_common import version
from ullage_router.http.limits import HTTPLimits
from ullage_router.http.openai import tokenize
from ullage_router.tokenizer.model import Model

if TYPE_CHECKING:
    StartService = Any

KEY = "k" * 32


def test_health_version_and_load(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            http = service.http
            for path in ("/health", "/ping", "/health/", "/v1/models/"):
                assert (await http.get(path)).status_code == 200, path
            assert (await http.post("/ping")).status_code == 200
            assert (await http.get("/version")).json() == {"version": version()}
            assert (await http.get("/load")).json() == {"server_load": 0}
            service.engine.script.pause = asyncio.Event()
            running = asyncio.create_task(service.complete())
            await service.until(lambda: service.engine.active == 1)
            assert (await http.get("/load")).json() == {"server_load": 1}
            service.engine.script.pause.set()
            await running
            service.router.service.leave()
            assert (await http.get("/health")).status_code == 503

    asyncio.run(scenario())


def test_trailing_slashes(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            turns = [{"role": "user", "content": "Hi"}]
            bodies: dict[str, dict[str, Any]] = {
                "/v1/completions/": {"prompt": "Hi"},
                "/v1/responses/": {"input": "Hi"},
                "/v1/messages/": {"messages": turns, "max_tokens": 5},
                "/v1/messages/count_tokens/": {"messages": turns},
            }
            for path, body in bodies.items():
                answer = await service.http.post(path, json=body)
                assert answer.status_code == 200, answer.text
            assert (await service.http.get("/v1/models/tiny/")).json()["id"] == "tiny"
            assert (await service.http.get("/")).status_code == 404
            assert (await service.http.get("//")).status_code == 404

    asyncio.run(scenario())


def test_tokenize_counts_what_a_request_has(start_service: "StartService") -> None:
    turns = [{"role": "user", "content": "Hi"}]

    async def scenario() -> None:
        async with start_service() as service:
            http = service.http
            answer = (await http.post("/tokenize", json={"prompt": "a b"})).json()
            assert answer["count"] == len(answer["tokens"]) == 3
            assert answer["max_model_len"] == 2000
            assert answer["token_strs"] is None
            body = {"prompt": "a b", "return_token_strs": True}
            assert (await http.post("/tokenize", json=body)).json()["token_strs"] == ["a", "Ġ", "b"]

            body = {"messages": turns, "reasoning_effort": "high", "user": "me"}
            tokens = await http.post("/tokenize", json=body)
            assert tokens.headers["x-ullage-ignored"] == "user, reasoning_effort"
            chat = await service.chat("Hi", return_token_ids=True)
            assert tokens.json()["tokens"] == chat.json()["prompt_token_ids"]
            body = {"messages": turns, "add_generation_prompt": False}
            closed = (await http.post("/tokenize", json=body)).json()["tokens"]
            text = (await http.post("/detokenize", json={"tokens": closed})).json()
            assert text == {"prompt": "<user>Hi\n"}
            assert not service.engine.requests[1:]

    asyncio.run(scenario())


def test_the_tokenizer_is_described(start_service: "StartService") -> None:
    """lm-eval tokenises by a server whose description has an eos_token."""

    async def scenario() -> None:
        tokens = {"eos_token": "</s>", "image_token": "<image>"}
        async with start_service(special_tokens=tokens) as service:
            for path in ("/tokenizer_info", "/tokenizer_info/"):
                info = (await service.http.get(path)).json()
                assert info == {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "model_max_length": 2000,
                    "add_bos_token": False,
                    "chat_template": service.engine.template,
                    "bos_token": None,
                    "eos_token": "</s>",
                    "pad_token": None,
                    "unk_token": None,
                }

    asyncio.run(scenario())


def test_what_cannot_be_tokenized(start_service: "StartService") -> None:
    wrong: list[tuple[str, Any, str]] = [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"messages": [{"role": "bird", "content": "x"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [999]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1] * 2001}, "tokens"),
    ]

    async def scenario() -> None:
        async with start_service() as service:
            for path, body, field in wrong:
                answer = await service.http.post(path, json=body)
                assert answer.status_code == 400, (body, answer.text)
                assert answer.json()["error"]["param"] == field, body
            answer = await service.http.post("/tokenize", json={"prompt": "a", "model": "other"})
            assert answer.status_code == 404

    asyncio.run(scenario())


def test_long_texts_of_tokens_are_made_apart_and_fit_the_memory(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes name a token of a hundred characters, of which many fit a body."""
    threads: list[threading.Thread] = []
    decode = Model.decode

    def noted(self: Model, ids: Any) -> str:
        threads.append(threading.current_thread())
        return decode(self, ids)

    monkeypatch.setattr(Model, "decode", noted)

    async def scenario() -> None:
        async with start_service() as service:
            for count in (10, 2000):
                answer = await service.http.post("/detokenize", json={"tokens": [1] * count})
                assert answer.status_code == 200, answer.text
            assert [each is threading.main_thread() for each in threads] == [True, False]

            monkeypatch.setattr(tokenize, "CHARACTER_BYTES", HTTPLimits().max_kept_bytes)
            answer = await service.http.post("/detokenize", json={"tokens": [1, 1]})
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] == "ANSWERS_FULL"

    asyncio.run(scenario())


def test_a_key_is_needed(start_service: "StartService", tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "t").write_text(KEY)
    tenants = {"keys_dir": str(tmp_path / "keys"), "tenants": [{"name": "t"}]}

    async def scenario() -> None:
        async with start_service(tenants=tenants) as service:
            for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
                answer = await service.http.post(path, json=body)
                assert answer.status_code == 401
                key = {"authorization": f"Bearer {KEY}"}
                answer = await service.http.post(path, json=body, headers=key)
                assert answer.status_code == 200
            assert (await service.http.get("/tokenizer_info")).status_code == 401
            answer = await service.http.get("/tokenizer_info", headers=key)
            assert answer.status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/tokenize", "/v1/responses", "/v1/messages"])
def test_pages_of_allowed_origins_may_ask(start_service: "StartService", path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/tokenize": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
    }

    async def scenario() -> None:
        cors = {"allowed_origins": ["https://chat.example.com"]}
        async with start_service(cors=cors) as service:
            origin = {"origin": "https://chat.example.com"}
            for each in (path, path + "/"):
                answer = await service.http.post(each, json=bodies[path], headers=origin)
                assert answer.status_code == 200, answer.text
                assert answer.headers["access-control-allow-origin"] == origin["origin"]
                exposed = answer.headers["access-control-expose-headers"].split(", ")
                assert {"x-ullage-ignored", "request-id"} <= set(exposed)
                answer = await service.http.options(each, headers=origin)
                assert answer.status_code == 204
                assert "POST" in answer.headers["access-control-allow-methods"]

    asyncio.run(scenario())
