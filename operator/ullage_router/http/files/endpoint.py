"""Serves /v1/files and the paths below it."""

from http import HTTPStatus
from typing import cast
from urllib.parse import quote

import msgspec

from ullage_router.errors import files_off
from ullage_router.files.catalog import Order
from ullage_router.files.store import FileStore
from ullage_router.http.files.answers import DeletedFile, FileList, described
from ullage_router.http.files.form import FORM_BYTES, PURPOSES, receive_file
from ullage_router.http.files.multipart import FormParser, boundary_of
from ullage_router.http.files.queries import object_id, read_limit, read_word
from ullage_router.http.messages import Reply, Request
from ullage_router.server.service import RouterService

MAX_PAGE = 10_000
"""Maximum number of files in a list, and the default, as in OpenAI's API."""
CONTENT = "/content"
"""End of the path of a file's bytes."""
_JSON_TYPE = (b"content-type", b"application/json")


class FilesEndpoint:
    """Serves the files of a tenant.

    Args:
        service: Provides the tenants and the store.
        prefix: Beginning of the path, before a file's id.
    """

    def __init__(self, service: RouterService, prefix: str) -> None:
        self._service = service
        self._prefix = prefix

    async def create(self, request: Request, reply: Reply) -> None:
        """Store the file of a form."""
        tenant, store = self._open(request)
        parser = FormParser(boundary_of(request.headers.get("content-type", "")))
        pieces = request.pieces(tenant, store.section.max_file_bytes + FORM_BYTES)
        file = await receive_file(store, tenant, parser, pieces)
        await _send(reply, described(file))

    async def list(self, request: Request, reply: Reply) -> None:
        """Answer with a page of the files."""
        tenant, store = self._open(request)
        query = request.query
        files, has_more = store.page(
            tenant,
            read_limit(query, MAX_PAGE, MAX_PAGE),
            purpose=read_word(query, "purpose", PURPOSES, ""),
            after=query.get("after", ""),
            order=cast(Order, read_word(query, "order", ("asc", "desc"), "desc")),
        )
        page = FileList(
            data=[described(file) for file in files],
            first_id=files[0].id if files else None,
            last_id=files[-1].id if files else None,
            has_more=has_more,
        )
        await _send(reply, page)

    async def read(self, request: Request, reply: Reply) -> None:
        """Answer with the description of a file."""
        tenant, store = self._open(request)
        await _send(reply, described(store.find(tenant, object_id(request, self._prefix))))

    async def content(self, request: Request, reply: Reply) -> None:
        """Answer with the bytes of a file."""
        tenant, store = self._open(request)
        file = store.find(tenant, object_id(request, self._prefix, CONTENT))
        name = quote(file.filename)
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", b"%d" % file.num_bytes),
            (b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode()),
        ]
        if request.method == "HEAD":
            reply.start(HTTPStatus.OK, headers)
            await reply.end()
            return
        chunks = store.chunks(file)
        first = await anext(chunks, b"")
        reply.start(HTTPStatus.OK, headers)
        await reply.piece(first)
        async for chunk in chunks:
            await reply.piece(chunk)
        await reply.end()

    async def delete(self, request: Request, reply: Reply) -> None:
        """Delete a file."""
        tenant, store = self._open(request)
        name = object_id(request, self._prefix)
        await store.delete(tenant, name)
        await _send(reply, DeletedFile(id=name))

    def _open(self, request: Request) -> tuple[str, FileStore]:
        """Return the request's tenant and the store.

        Raises:
            ServiceError: The key is unknown, the service stores no files, or the store cannot be
                used yet.
        """
        tenant = self._service.tenants.open_session(request.headers.get("authorization"))
        store = self._service.files
        if store is None:
            raise files_off()
        store.require_open()
        return tenant.name, store


async def _send(reply: Reply, body: msgspec.Struct) -> None:
    await reply.whole(HTTPStatus.OK, [_JSON_TYPE], msgspec.json.encode(body))
