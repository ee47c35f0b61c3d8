"""OpenAI's Files API, as its official client and a plain one meet it."""

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from ullage_router.errors import NO_RETRY

if TYPE_CHECKING:
    Service = Any
    StartService = Any

TEXT = "# Notes\n\nCafé, naïve, 東京.\n"


def with_files(path: Path, **limits: Any) -> dict[str, Any]:
    return {"files": {"dir": str(path / "files"), **limits}}


def form(data: bytes, filename: str = "notes.md", purpose: str = "user_data") -> dict[str, Any]:
    return {"files": {"file": (filename, data)}, "data": {"purpose": purpose}}


def test_the_official_client_keeps_files(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            client = service.openai.files
            sent = TEXT.encode() * 20_000
            file = await client.create(file=("notes.md", sent), purpose="user_data")
            assert (file.bytes, file.filename, file.purpose) == (len(sent), "notes.md", "user_data")
            assert file.id.startswith("file-")
            assert file.expires_at == file.created_at + 30 * 86400
            other = await client.create(
                file=("lines.jsonl", b"{}\n"),
                purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 3600},
            )
            assert other.expires_at == other.created_at + 3600

            assert (await client.retrieve(file.id)) == file
            assert (await client.content(file.id)).content == sent
            assert [each.id async for each in client.list()] == [other.id, file.id]
            assert [each.id async for each in client.list(limit=1, order="asc")] == [
                file.id,
                other.id,
            ]
            assert [each.id async for each in client.list(purpose="batch")] == [other.id]

            assert (await client.delete(file.id)).deleted
            for call in (client.retrieve, client.content, client.delete):
                with pytest.raises(openai.NotFoundError, match=file.id):
                    await call(file.id)

    asyncio.run(scenario())


def test_metrics_count_files_and_their_bytes(start_service: "StartService", tmp_path: Path) -> None:
    counted = ("ullage_router_files", "ullage_router_file_bytes", "ullage_router_uploads")
    limits = ("ullage_router_files_limit", "ullage_router_file_bytes_limit")

    async def scenario() -> None:
        async with start_service(**with_files(tmp_path, max_files=7, max_bytes=9000)) as service:
            assert await service.metrics("ullage_router_file_store_open") == {
                "ullage_router_file_store_open": 1.0
            }
            assert await service.metrics(*limits) == dict(zip(limits, (7.0, 9000.0), strict=True))
            assert set((await service.metrics(*counted)).values()) == {0.0}

            file = await service.openai.files.create(file=("a.md", b"12345"), purpose="user_data")
            assert await service.metrics(*counted) == {
                "ullage_router_files": 1.0,
                "ullage_router_file_bytes": 5.0,
                "ullage_router_uploads": 0.0,
            }
            await service.openai.files.delete(file.id)
            assert set((await service.metrics(*counted)).values()) == {0.0}

        async with start_service() as service:
            assert not await service.metrics(*counted, *limits, "ullage_router_batches")

    asyncio.run(scenario())


def test_files_that_are_off_name_their_field(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answers = [
                await service.http.post("/v1/files", **form(b"x")),
                await service.http.get("/v1/files"),
                await service.http.get("/v1/files/file-1"),
                await service.http.get("/v1/files/file-1/content"),
                await service.http.delete("/v1/files/file-1"),
            ]
            for answer in answers:
                assert answer.status_code == 404
                assert "spec.router.files" in answer.json()["error"]["message"]
            assert "files" not in await service.stats()

    asyncio.run(scenario())


def test_files_of_others_do_not_exist(start_service: "StartService", tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for tenant in ("alice", "bob"):
        (keys / tenant).write_text(f"{tenant}-key-0123456789")

    async def scenario() -> None:
        tenants = {"keys_dir": str(keys)}
        async with start_service(**with_files(tmp_path), tenants=tenants) as service:
            alice, bob = (
                {"authorization": f"Bearer {name}-key-0123456789"} for name in ("alice", "bob")
            )
            answer = await service.http.post("/v1/files", headers=alice, **form(b"secret"))
            path = f"/v1/files/{answer.json()['id']}"
            assert (await service.http.get("/v1/files", headers=bob)).json()["data"] == []
            for method, end in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                refused = await service.http.request(method, path + end, headers=bob)
                assert refused.status_code == 404
                assert (await service.http.request(method, path + end)).status_code == 401
            assert (await service.http.get(f"{path}/content", headers=alice)).text == "secret"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (
            form(b"x", purpose="assistants"),
            400,
            "purpose is assistants; possible: batch, user_data",
        ),
        ({"files": {"file": ("a.txt", b"x")}}, 400, "purpose is missing"),
        (
            {"files": {"other": ("a.txt", b"x")}, "data": {"purpose": "batch"}},
            400,
            "file is missing",
        ),
        (
            {"files": {"file": (None, b"x")}, "data": {"purpose": "batch"}},
            400,
            "without a filename",
        ),
        (form(b"%PDF-1.4", "report.pdf"), 400, "file 'report.pdf' is a PDF; send UTF-8 text"),
        (form(b"\xff\xfe", "word.docx"), 400, "file 'word.docx' is not UTF-8 text"),
        (form(b"x" * 2001), 413, "more than 2000 bytes, the most of a file"),
        (form(b"x" * 200_000), 413, "send at most"),
        ({"json": {"purpose": "batch"}}, 415, "send multipart/form-data"),
        (
            {**form(b"x"), "data": {"purpose": "batch", "expires_after[seconds]": "5"}},
            400,
            "created_at",
        ),
        (
            {
                **form(b"x"),
                "data": {
                    "purpose": "batch",
                    "expires_after[anchor]": "created_at",
                    "expires_after[seconds]": "5",
                },
            },
            400,
            "expires_after[seconds] is 5; possible: 3600 to 2592000",
        ),
    ],
)
def test_a_wrong_upload_is_refused_by_name(
    start_service: "StartService", tmp_path: Path, sent: Any, status: int, words: str
) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path, max_file_bytes=2000)) as service:
            answer = await service.http.post("/v1/files", **sent)
            assert answer.status_code == status, answer.text
            assert words in answer.json()["error"]["message"]
            assert (await service.http.get("/v1/files")).json()["data"] == []
            assert list((tmp_path / "files" / "uploads").iterdir()) == []
            state = (await service.stats())["files"]
            assert (state["files"], state["bytes"], state["uploads"]) == (0, 0, 0)

    asyncio.run(scenario())


def test_a_body_without_a_length_is_bounded_while_it_arrives(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path, max_file_bytes=300_000)) as service:

            async def chunked() -> Any:
                yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
                for _ in range(200):
                    yield b"y" * 10_000

            kind = {"content-type": "multipart/form-data; boundary=x"}
            answer = await service.http.post("/v1/files", content=chunked(), headers=kind)
            assert answer.status_code == 413
            assert "more than 300000 bytes" in answer.json()["error"]["message"]
            assert (await service.stats())["files"]["bytes"] == 0

    asyncio.run(scenario())


def test_a_full_store_is_a_507_that_clients_do_not_repeat(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path, max_bytes=10)) as service:
            client = service.openai.with_options(max_retries=2)
            await client.files.create(file=("a", b"0123456789"), purpose="user_data")
            tries: list[httpx.Request] = []

            async def count(request: httpx.Request) -> None:
                tries.append(request)

            service.http.event_hooks["request"].append(count)
            with pytest.raises(openai.InternalServerError, match=r"files\.maxBytes") as error:
                await client.files.create(file=("b", b"x"), purpose="user_data")
            assert error.value.status_code == 507
            assert error.value.code in NO_RETRY
            assert len(tries) == 1

    asyncio.run(scenario())


def test_a_client_that_leaves_leaves_no_file(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            store = service.router.service.files
            reader, writer = await asyncio.open_connection("127.0.0.1", service.router.http_port)
            writer.write(
                b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9000000\r\n"
                b"content-type: multipart/form-data; boundary=x\r\n\r\n"
                b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
                + b"y"
                * 1_000_000
            )
            await writer.drain()
            await service.until(lambda: store.catalog.num_bytes > 500_000)
            assert store.uploads
            writer.close()
            await service.until(lambda: not store.uploads)
            assert (store.catalog.num_bytes, store.catalog.num_files) == (0, 0)
            assert list((tmp_path / "files" / "uploads").iterdir()) == []
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            assert await reader.read() == b""

    asyncio.run(scenario())


def test_uploads_beyond_the_most_wait_for_a_retry(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            store = service.router.service.files
            uploads = [await store.begin_upload("") for _ in range(16)]
            answer = await service.http.post("/v1/files", **form(b"x"))
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            for upload in uploads:
                await upload.abort()
            assert (await service.http.post("/v1/files", **form(b"x"))).status_code == 200

    asyncio.run(scenario())


def test_lists_and_heads(start_service: "StartService", tmp_path: Path) -> None:
    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            name = (await service.http.post("/v1/files", **form(b"", "empty ü.txt"))).json()["id"]
            path = f"/v1/files/{name}/content"
            for method in ("GET", "HEAD"):
                answer = await service.http.request(method, path)
                assert (answer.status_code, answer.content) == (200, b"")
                assert "empty%20%C3%BC.txt" in answer.headers["content-disposition"]
            for query, word in (
                ("limit=0", "limit is 0; possible: 1 to 10000"),
                ("limit=x", "limit is x"),
                ("order=up", "order is up; possible: asc, desc"),
                ("purpose=vision", "purpose is vision"),
            ):
                answer = await service.http.get(f"/v1/files?{query}")
                assert answer.status_code == 400
                assert word in answer.json()["error"]["message"]
            assert (await service.http.put("/v1/files")).status_code == 405

    asyncio.run(scenario())


def test_a_foreign_page_cannot_upload(start_service: "StartService", tmp_path: Path) -> None:
    """Browsers let any page send a form without a preflight."""

    async def scenario() -> None:
        async with start_service(**with_files(tmp_path)) as service:
            page = {"origin": "https://evil.example"}
            answer = await service.http.post("/v1/files", headers=page, **form(b"x"))
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "ORIGIN_NOT_ALLOWED"

    asyncio.run(scenario())
