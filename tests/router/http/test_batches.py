"""OpenAI's Batch API, as its official client meets it."""

import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import openai
import pytest

from ullage_common.wire.errors import ServiceError
from ullage_common.wire.limits import MAX_PRIORITY
from ullage_router.batches import runner

if TYPE_CHECKING:
    Service = Any
    StartService = Any

CHAT = "/v1/chat/completions"
BUSY = ServiceError(
    grpc.StatusCode.RESOURCE_EXHAUSTED, "MEMORY_FULL", "does not fit now", retry_after_s=1
)


@pytest.fixture(autouse=True)
def _without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "wait_s", lambda tries, retry_after_s: 0.02)
    monkeypatch.setattr(runner, "DISK_WAIT_S", 0.02)


def with_files(path: Path, **limits: Any) -> dict[str, Any]:
    return {"files": {"dir": str(path / "files"), **limits}}


def chat_line(custom_id: str, text: str = "Hi", **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


async def create(
    service: "Service", lines: list[Any], endpoint: Any = CHAT, **more: Any
) -> openai.types.Batch:
    data = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    file = await service.openai.files.create(file=("in.jsonl", data.encode()), purpose="batch")
    batch: openai.types.Batch = await service.openai.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )
    return batch


async def ended(service: "Service", name: str) -> openai.types.Batch:
    runner_ = service.router.service.batches
    await service.until(lambda: runner_.find("", name).has_ended)
    batch: openai.types.Batch = await service.openai.batches.retrieve(name)
    return batch


async def lines_of(service: "Service", name: str | None) -> list[dict[str, Any]]:
    if name is None:
        return []
    text = (await service.openai.files.content(name)).text
    return [json.loads(line) for line in text.splitlines()]


def test_a_batch_answers_each_line_once(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            lines = [chat_line(f"line {i}", f"Number {i}") for i in range(30)]
            wrong = chat_line("wrong", temperature=-1)
            batch = await create(service, [*lines, "", wrong], metadata={"a": "b"})
            assert batch.status == "validating"
            assert batch.expires_at == batch.created_at + 86400
            done = await ended(service, batch.id)
            assert done.status == "completed"
            counts = done.request_counts
            assert counts
            assert (counts.total, counts.completed, counts.failed) == (31, 30, 1)
            assert done.metadata == {"a": "b"}
            times = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at)
            assert list(times) == sorted(times)

            answers = await lines_of(service, done.output_file_id)
            assert sorted(each["custom_id"] for each in answers) == sorted(
                each["custom_id"] for each in lines
            )
            for each in answers:
                assert each["error"] is None
                assert each["response"]["status_code"] == 200
                message = each["response"]["body"]["choices"][0]["message"]
                assert message["content"] == "Hello big world"
            [failed] = await lines_of(service, done.error_file_id)
            assert failed["custom_id"] == "wrong"
            assert failed["response"]["status_code"] == 400
            assert failed["response"]["body"]["error"]["param"] == "temperature"

            assert {each.priority for each in service.engine.requests} == {-MAX_PRIORITY}
            file = await service.openai.files.retrieve(done.output_file_id)
            assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
            state = await service.stats()
            assert (state["batches"]["active"], state["batches"]["requests_left"]) == (0, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/responses"])
def test_other_endpoints(start_service: "StartService", tmp_path: Path, endpoint: str) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            name = "prompt" if endpoint == "/v1/completions" else "input"
            line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {name: "Hi"}}
            done = await ended(service, (await create(service, [line], endpoint)).id)
            [answer] = await lines_of(service, done.output_file_id)
            assert "Hello big world" in json.dumps(answer["response"]["body"])
            assert done.error_file_id is None

    asyncio.run(scenario())


def test_embeddings(start_service: "StartService", tmp_path: Path) -> None:
    from ullage.inference.v1 import inference_pb2

    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            service.engine.task = inference_pb2.TASK_EMBED
            url = "/v1/embeddings"
            lines = [
                {"custom_id": f"{i}", "method": "POST", "url": url, "body": {"input": ["a", "b"]}}
                for i in range(3)
            ]
            done = await ended(service, (await create(service, lines, url)).id)
            assert done.request_counts
            assert done.request_counts.completed + done.request_counts.failed == 3

    asyncio.run(scenario())


def test_wrong_lines_fail_the_batch(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            done = await ended(
                service, (await create(service, [chat_line("a"), chat_line("a"), "{"])).id
            )
            assert done.status == "failed"
            assert done.errors
            assert done.errors.data
            told = [(error.code, error.line, error.param) for error in done.errors.data]
            assert told == [
                ("duplicate_custom_id", 2, "custom_id"),
                ("invalid_json_line", 3, None),
            ]
            assert done.failed_at
            assert (done.output_file_id, done.error_file_id) == (None, None)
            assert service.engine.requests == []
            await service.openai.files.delete(done.input_file_id)

    asyncio.run(scenario())


def test_a_wrong_request_is_refused_by_name(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            file = await service.openai.files.create(file=("a", b"{}"), purpose="user_data")
            body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
            for change, status, words in (
                ({}, 400, "whose purpose is user_data; possible: files with purpose batch"),
                ({"input_file_id": "file-x"}, 404, "file-x"),
                ({"endpoint": "/v1/images"}, 400, "endpoint is /v1/images"),
                ({"completion_window": "1h"}, 400, "completion_window is 1h; possible: 24h"),
                ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
                (
                    {"output_expires_after": {"anchor": "created_at", "seconds": 3000000}},
                    400,
                    "output_expires_after.seconds is 3000000; possible: up to 2592000",
                ),
            ):
                answer = await service.http.post("/v1/batches", json=body | change)
                assert answer.status_code == status, answer.text
                assert words in answer.json()["error"]["message"]
            for method, path in (("GET", "batch_1"), ("POST", "batch_1/cancel")):
                answer = await service.http.request(method, f"/v1/batches/{path}")
                assert answer.status_code == 404
                assert "batch_1" in answer.json()["error"]["message"]

    asyncio.run(scenario())


def test_batches_that_are_off_name_their_field(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for method, path in (
                ("POST", "/v1/batches"),
                ("GET", "/v1/batches"),
                ("GET", "/v1/batches/batch_1"),
                ("POST", "/v1/batches/batch_1/cancel"),
            ):
                answer = await service.http.request(method, path, json={})
                assert answer.status_code == 404
                assert "spec.router.files" in answer.json()["error"]["message"]

    asyncio.run(scenario())


def test_refusals_make_the_batch_wait(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_service(
            **with_files(tmp_path), routing={"queue": {"max_requests": 0}}
        ) as service:
            service.engine.script.refuse = BUSY
            batch = await create(service, [chat_line(str(i)) for i in range(3)])
            runner_ = service.router.service.batches
            await service.until(lambda: runner_.num_sent > 8)
            assert runner_.find("", batch.id).failed == 0
            service.engine.script.refuse = None
            done = await ended(service, batch.id)
            assert done.request_counts
            assert (done.request_counts.completed, done.request_counts.failed) == (3, 0)

    asyncio.run(scenario())


def test_a_service_that_fails_is_tried_three_times(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            service.engine.script.refuse = ServiceError(
                grpc.StatusCode.INTERNAL, "REQUEST_FAILED", "broken"
            )
            done = await ended(service, (await create(service, [chat_line("a")])).id)
            assert done.status == "completed"
            [failed] = await lines_of(service, done.error_file_id)
            assert failed["response"]["status_code"] == 500
            assert service.router.service.batches.num_sent == 3

    asyncio.run(scenario())


def test_metrics_count_batches_and_their_requests(
    start_service: "StartService", tmp_path: Path
) -> None:
    def of_state(name: str, label: str, **values: float) -> dict[str, float]:
        return {f'ullage_router_{name}{{{label}="{key}"}}': n for key, n in values.items()}

    async def scenario() -> None:
        limits = {"batches": {"max_concurrency": 2}}
        async with start_service(**with_files(tmp_path, **limits)) as service:
            service.engine.script.hold = asyncio.Event()
            batch = await create(service, [*map(chat_line, "abc"), chat_line("d", temperature=-1)])
            await service.until(lambda: len(service.engine.requests) == 2)
            batches = await service.metrics("ullage_router_batches")
            assert sum(batches.values()) == 1.0
            assert batches['ullage_router_batches{status="in_progress"}'] == 1.0
            requests = of_state("batch_requests", "state", waiting=2.0, running=2.0)
            assert await service.metrics("ullage_router_batch_requests") == requests

            service.engine.script.hold.set()
            await ended(service, batch.id)
            batches = await service.metrics("ullage_router_batches")
            assert sum(batches.values()) == 1.0
            assert batches['ullage_router_batches{status="completed"}'] == 1.0
            requests = of_state("batch_requests", "state", waiting=0.0, running=0.0)
            assert await service.metrics("ullage_router_batch_requests") == requests
            assert await service.metrics("ullage_router_batch_requests_ended_total") == of_state(
                "batch_requests_ended_total", "state", completed=3.0, failed=1.0
            )
            sent = await service.metrics("ullage_router_batch_requests_sent_total")
            assert list(sent.values()) == [4.0]

    asyncio.run(scenario())


def test_cancelling_keeps_what_was_answered(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = {"batches": {"max_concurrency": 1}}
        async with start_service(**with_files(tmp_path, **limits)) as service:
            runner_ = service.router.service.batches
            batch = await create(service, [chat_line(str(i)) for i in range(50)])
            await service.until(lambda: runner_.find("", batch.id).completed >= 2)
            service.engine.script.hold = asyncio.Event()
            with pytest.raises(openai.ConflictError, match=batch.id):
                await service.openai.files.delete(batch.input_file_id)
            cancelling = await service.openai.batches.cancel(batch.id)
            assert cancelling.status in ("cancelling", "cancelled")
            done = await ended(service, batch.id)
            assert done.status == "cancelled"
            assert done.cancelled_at
            counts = done.request_counts
            assert counts
            assert 2 <= counts.completed < 50
            assert len(await lines_of(service, done.output_file_id)) == counts.completed
            with pytest.raises(openai.ConflictError, match="is cancelled"):
                await service.openai.batches.cancel(batch.id)
            await service.openai.files.delete(batch.input_file_id)

    asyncio.run(scenario())


def test_late_requests_are_errors(
    start_service: "StartService", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WINDOW_S", 1)

    async def scenario() -> None:
        limits = {"batches": {"max_concurrency": 1}}
        async with start_service(**with_files(tmp_path, **limits)) as service:
            service.engine.script.hold = asyncio.Event()
            batch = await create(service, [chat_line("a"), chat_line("b"), chat_line("c")])
            done = await ended(service, batch.id)
            assert done.status == "expired"
            assert done.expired_at
            late = await lines_of(service, done.error_file_id)
            assert [each["custom_id"] for each in late] == ["a", "b", "c"]
            assert {each["error"]["code"] for each in late} == {"batch_expired"}
            assert done.request_counts
            assert (done.request_counts.completed, done.request_counts.failed) == (0, 3)

    asyncio.run(scenario())


def test_a_restart_answers_no_line_twice(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        sections = with_files(tmp_path, batches={"max_concurrency": 2})
        async with start_service(**sections) as service:
            runner_ = service.router.service.batches
            batch = await create(service, [chat_line(str(i)) for i in range(40)])
            waiting = await create(service, [chat_line("later")])
            await service.until(lambda: runner_.find("", batch.id).completed >= 5)
            service.engine.script.hold = asyncio.Event()
            await service.until(lambda: service.engine.active == 2)
        stored = (tmp_path / "files" / "files").glob("*.data")
        [output] = [path for path in stored if b"batch_req_" in path.read_bytes()]
        # A power cut in the middle of a line
        with output.open("ab") as file:
            file.write(b'{"id":"batch_req_1_39","custom')

        async with start_service(**sections) as service:
            done = await ended(service, batch.id)
            assert done.status == "completed"
            answers = await lines_of(service, done.output_file_id)
            assert sorted(int(each["custom_id"]) for each in answers) == list(range(40))
            assert done.request_counts
            assert done.request_counts.completed == 40
            assert len(service.engine.requests) <= 36
            assert (await ended(service, waiting.id)).status == "completed"
            listed = [each.id async for each in service.openai.batches.list(limit=1)]
            assert listed == [waiting.id, batch.id]

    asyncio.run(scenario())


def test_a_batch_waits_for_an_engine_that_is_still_connecting(
    start_service: "StartService", tmp_path: Path
) -> None:
    """The engine has described its model, and the stream for requests opens later."""

    async def scenario() -> None:
        opened = asyncio.Event()

        def prepare(engine: Any) -> None:
            engine.multiplex_hold = opened

        async with start_service(wait=False, prepare=prepare, **with_files(tmp_path)) as service:
            await service.until(lambda: service.engine.num_opening == 1)
            runner_ = service.router.service.batches
            batch = await create(service, [chat_line(str(i)) for i in range(4)])
            await service.until(
                lambda: runner_.num_sent >= 8 or runner_.find("", batch.id).has_ended
            )
            opened.set()
            done = await ended(service, batch.id)
            assert await lines_of(service, done.error_file_id) == []
            answers = await lines_of(service, done.output_file_id)
            assert sorted(each["custom_id"] for each in answers) == list("0123")

    asyncio.run(scenario())


def test_a_full_store_holds_the_batch_until_there_is_room(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path, max_bytes=6000)) as service:
            taking = await service.openai.files.create(file=("x", b"x" * 4000), purpose="user_data")
            runner_ = service.router.service.batches
            batch = await create(service, [chat_line(str(i)) for i in range(5)])
            await service.until(lambda: runner_.find("", batch.id).completed >= 1)
            await asyncio.sleep(0.1)
            assert not runner_.find("", batch.id).has_ended
            await service.openai.files.delete(taking.id)
            done = await ended(service, batch.id)
            answers = await lines_of(service, done.output_file_id)
            assert sorted(each["custom_id"] for each in answers) == list("01234")
            assert len(service.engine.requests) == 5

    asyncio.run(scenario())


def test_batches_of_others_do_not_exist(start_service: "StartService", tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for tenant in ("alice", "bob"):
        (keys / tenant).write_text(f"{tenant}-key-0123456789")

    async def scenario() -> None:
        tenants = {
            "keys_dir": str(keys),
            "tenants": [{"name": "alice", "priority": 5, "models": ["tiny"]}],
        }
        async with start_service(
            **with_files(tmp_path, batches={"max_active": 2}), tenants=tenants
        ) as service:
            alice = service.openai.with_options(api_key="alice-key-0123456789")
            bob = service.openai.with_options(api_key="bob-key-0123456789")
            service.engine.script.hold = asyncio.Event()
            lines = json.dumps(chat_line("a")).encode()
            file = await alice.files.create(file=("in.jsonl", lines), purpose="batch")
            window: Any = {"endpoint": CHAT, "completion_window": "24h"}
            batch = await alice.batches.create(input_file_id=file.id, **window)
            for call in (bob.batches.retrieve, bob.batches.cancel):
                with pytest.raises(openai.NotFoundError, match=batch.id):
                    await call(batch.id)
            with pytest.raises(openai.NotFoundError):
                await bob.batches.create(input_file_id=file.id, **window)
            assert (await bob.batches.list()).data == []
            with pytest.raises(openai.RateLimitError, match="maxActive"):
                await alice.batches.create(input_file_id=file.id, **window)

            await service.until(lambda: service.engine.active == 1)
            service.engine.script.hold.set()
            runner_ = service.router.service.batches
            await service.until(lambda: runner_.find("alice", batch.id).has_ended)
            done = await alice.batches.retrieve(batch.id)
            assert done.status == "completed", done.errors
            assert done.output_file_id
            assert "Hello big world" in (await alice.files.content(done.output_file_id)).text
            usage = (await service.stats())["tenants"]["usage"]
            assert next(each for each in usage if each["name"] == "alice")["requests"] == 1
            assert service.engine.requests[0].priority == -MAX_PRIORITY

    asyncio.run(scenario())


def test_no_client_can_pose_as_a_batch(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            answer = await service.http.post(
                CHAT, json=chat_line("a")["body"], headers={"ullage.batch_tenant": "alice"}
            )
            assert answer.status_code == 200
            assert service.engine.requests[0].priority == 0
            assert not re.search("batch", json.dumps(dict(answer.headers)))

    asyncio.run(scenario())


def test_a_client_that_leaves_leaves_no_stuck_batch(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            runner_ = service.router.service.batches
            store = service.router.service.files
            data = json.dumps(chat_line("a")).encode()
            file = await service.openai.files.create(file=("in.jsonl", data), purpose="batch")
            stored = store.find("", file.id)
            creating = asyncio.create_task(runner_.create("", CHAT, stored, None, 3600))
            await service.until(lambda: bool(runner_.page("", 1, "")[0]))
            creating.cancel()
            [batch], _ = runner_.page("", 1, "")
            assert (await ended(service, batch.id)).status == "completed"

    asyncio.run(scenario())


def test_a_file_is_kept_until_its_last_batch_has_ended(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            service.engine.script.hold = asyncio.Event()
            first = await create(service, [chat_line("a")])
            second = await service.openai.batches.create(
                input_file_id=first.input_file_id, endpoint=CHAT, completion_window="24h"
            )
            await service.openai.batches.cancel(first.id)
            assert (await ended(service, first.id)).status == "cancelled"
            with pytest.raises(openai.ConflictError, match=second.id):
                await service.openai.files.delete(first.input_file_id)
            service.engine.script.hold.set()
            assert (await ended(service, second.id)).status == "completed"
            await service.openai.files.delete(first.input_file_id)

    asyncio.run(scenario())
