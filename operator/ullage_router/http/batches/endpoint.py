"""Serves /v1/batches and the paths below it."""

from functools import partial
from http import HTTPStatus
from typing import Annotated, Literal

import msgspec

from ullage_common.wire.validation import invalid_value
from ullage_router.batches.batch import WINDOW, Batch
from ullage_router.batches.lines import ENDPOINTS
from ullage_router.batches.runner import BatchRunner
from ullage_router.errors import files_off
from ullage_router.files.documents import wrong_purpose
from ullage_router.files.store import FileStore
from ullage_router.http.batches.answers import BatchList, described
from ullage_router.http.files.form import MIN_TTL_S
from ullage_router.http.files.queries import object_id, read_limit
from ullage_router.http.messages import Body, Reply, Request
from ullage_router.http.openai.decoding import body_decoder, parse_fields
from ullage_router.http.openai.errors import ignored_header
from ullage_router.http.responses.requests import check_metadata
from ullage_router.http.responses.schemas import Metadata
from ullage_router.server.service import RouterService

MAX_PAGE = 100
"""Maximum number of batches in a list, as in OpenAI's API."""
DEFAULT_PAGE = 20
CANCEL = "/cancel"
"""End of the path that cancels a batch."""
_JSON_TYPE = (b"content-type", b"application/json")


class ExpiresAfter(msgspec.Struct, frozen=True):
    """How long the output files of a batch are kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=MIN_TTL_S)]


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a POST request to /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None

    def refused(self) -> None:
        """Return None, since no field is unsupported."""


_BODY = body_decoder(BatchRequest)


class BatchesEndpoint:
    """Serves the batches of a tenant.

    Args:
        service: Provides the tenants, the store and the runner.
        prefix: Beginning of the path, before a batch's id.
    """

    def __init__(self, service: RouterService, prefix: str) -> None:
        self._service = service
        self._prefix = prefix

    async def create(self, request: Request, reply: Reply) -> None:
        """Create a batch."""
        tenant, store, runner = self._open(request)
        body = await request.read_json(tenant)
        read = partial(_read, body)
        asked, ignored = await self._service.intake.run(body.num_bytes, tenant, read)
        request.release()
        chosen = asked.output_expires_after
        ttl = int(store.section.ttl)
        if chosen and chosen.seconds > ttl:
            raise invalid_value("output_expires_after.seconds", chosen.seconds, f"up to {ttl}")
        file = store.find(tenant, asked.input_file_id)
        if file.purpose != "batch":
            raise wrong_purpose("input_file_id", file, "batch")

        batch = await runner.create(
            tenant, asked.endpoint, file, asked.metadata, chosen.seconds if chosen else ttl
        )
        more = [(b"x-ullage-ignored", ignored_header(ignored).encode())] if ignored else []
        body_out = msgspec.json.encode(described(batch, WINDOW))
        await reply.whole(HTTPStatus.OK, [_JSON_TYPE, *more], body_out)

    async def list(self, request: Request, reply: Reply) -> None:
        """Answer with a page of the batches."""
        tenant, _, runner = self._open(request)
        query = request.query
        limit = read_limit(query, MAX_PAGE, DEFAULT_PAGE)
        batches, has_more = runner.page(tenant, limit, query.get("after", ""))
        page = BatchList(
            data=[described(batch, WINDOW) for batch in batches],
            first_id=batches[0].id if batches else None,
            last_id=batches[-1].id if batches else None,
            has_more=has_more,
        )
        await reply.whole(HTTPStatus.OK, [_JSON_TYPE], msgspec.json.encode(page))

    async def read(self, request: Request, reply: Reply) -> None:
        """Answer with the description of a batch."""
        tenant, _, runner = self._open(request)
        await _send(reply, runner.find(tenant, object_id(request, self._prefix)))

    async def cancel(self, request: Request, reply: Reply) -> None:
        """Cancel a batch."""
        tenant, _, runner = self._open(request)
        name = object_id(request, self._prefix, CANCEL)
        await _send(reply, await runner.cancel(tenant, name))

    def _open(self, request: Request) -> tuple[str, FileStore, BatchRunner]:
        """Return the request's tenant, the store and the runner.

        Raises:
            ServiceError: The key is unknown, the service stores no files, or the store cannot be
                used yet.
        """
        service = self._service
        tenant = service.tenants.open_session(request.headers.get("authorization"))
        if service.files is None or service.batches is None:
            raise files_off()
        service.files.require_open()
        return tenant.name, service.files, service.batches


def _read(body: Body) -> tuple[BatchRequest, tuple[str, ...]]:
    """Decode and check the body of a request.

    Raises:
        ServiceError: A field is invalid.
    """
    asked, ignored = parse_fields(_BODY, body.take())
    if asked.endpoint not in ENDPOINTS:
        raise invalid_value("endpoint", asked.endpoint, ", ".join(ENDPOINTS))
    if asked.completion_window != WINDOW:
        raise invalid_value("completion_window", asked.completion_window, WINDOW)
    check_metadata(asked.metadata)
    return asked, ignored


async def _send(reply: Reply, batch: Batch) -> None:
    body = msgspec.json.encode(described(batch, WINDOW))
    await reply.whole(HTTPStatus.OK, [_JSON_TYPE], body)
