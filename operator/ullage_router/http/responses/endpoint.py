"""Serves /v1/responses, and the stored responses below it."""

import functools
from collections.abc import Callable, Mapping
from http import HTTPStatus

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError
from ullage_router.errors import unknown_response
from ullage_router.http.files.queries import object_id
from ullage_router.http.messages import Body, Reply, Request
from ullage_router.http.openai.endpoint import (
    CountAnswer,
    Dialect,
    Parsed,
    sampling_defaults,
)
from ullage_router.http.responses.answer import LINES, SSE, Framing, ResponsesAnswer
from ullage_router.http.responses.errors import ERRORS, MESSAGE_ERRORS
from ullage_router.http.responses.input_items import read_page
from ullage_router.http.responses.requests import SAMPLING, Asked, read_request
from ullage_router.http.responses.store import (
    ConnectionResponses,
    ResponseStore,
    StoredResponse,
)
from ullage_router.prompts.tools.forced_calls import FURTHER
from ullage_router.server.service import RouterService
from ullage_router.tenants.session import TenantSession
from ullage_router.tokenizer.model import Model

COUNTED: Mapping[str, object] = {"object": "response.input_tokens"}
"""Fields of the response that counts tokens, in addition to their number."""
INPUT_ITEMS = "/input_items"
"""End of the path of a response's input items."""
_JSON_TYPE = (b"content-type", b"application/json")


def dialect(service: RouterService, store: ResponseStore) -> Dialect:
    """Return the dialect of the endpoint.

    Args:
        service: Provides the configuration and the model.
        store: Keeps the responses.
    """
    return Dialect(
        functools.partial(_parse, service, store),
        ERRORS,
        takes_files=True,
        more_bytes=functools.partial(_stored_bytes, store) if store.is_enabled else None,
    )


def counting_dialect(service: RouterService, store: ResponseStore) -> Dialect:
    """Return the dialect of the endpoint that counts the tokens of a request.

    Args:
        service: Provides the configuration.
        store: Has the responses that requests continue.
    """
    return Dialect(
        functools.partial(_parse_count, service, store),
        ERRORS,
        takes_files=True,
        more_bytes=functools.partial(_stored_bytes, store) if store.is_enabled else None,
    )


def message_dialect(service: RouterService, responses: ConnectionResponses) -> Dialect:
    """Return the dialect of the messages on a WebSocket.

    Args:
        service: Provides the configuration and the model.
        responses: The responses that messages may continue.
    """
    return Dialect(
        functools.partial(_parse_message, service, responses),
        MESSAGE_ERRORS,
        keepalive=b"",  # the connection has pings
        takes_files=True,
        more_bytes=functools.partial(_stored_bytes, responses),
    )


class _Continuing(msgspec.Struct):
    """The field of a body that names the response to continue."""

    previous_response_id: str | None = None


_CONTINUING = msgspec.json.Decoder(_Continuing)


def _stored_bytes(
    store: ResponseStore | ConnectionResponses, body: Body, tenant: TenantSession
) -> int:
    """Return the size in bytes of the response that a request continues.

    It is 0 for invalid bodies, which `_parse` refuses.
    """
    try:
        name = _CONTINUING.decode(body.peek()).previous_response_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
    before = store.find(tenant.name, name) if name else None
    return before.continued_bytes if before else 0


def _parse(
    service: RouterService, store: ResponseStore, body: Body, tenant: TenantSession
) -> Parsed:
    asked = _read(service, store, body, tenant)
    return _parsed(service, asked, SSE, functools.partial(store.add, tenant.name))


def _parse_message(
    service: RouterService, responses: ConnectionResponses, body: Body, tenant: TenantSession
) -> Parsed:
    asked = _read(service, responses, body, tenant)
    add = responses.stored.add if asked.is_stored else responses.add
    parsed = _parsed(service, asked, LINES, functools.partial(add, tenant.name))
    return parsed._replace(is_streamed=True)


def _parsed(
    service: RouterService,
    asked: Asked,
    framing: Framing,
    add: Callable[[str, StoredResponse], None],
) -> Parsed:
    model = service.engines.model
    defaults = SAMPLING | (sampling_defaults(model) if model else {})
    sampling = {
        name: defaults[name] if asked.repeated[name] is None else asked.repeated[name]
        for name in SAMPLING
    }
    asked.repeated["parallel_tool_calls"] = _is_parallel(asked, model)
    keep = functools.partial(_keep, add, asked) if asked.conversation else None
    return Parsed(
        [asked.request],
        asked.is_streamed,
        functools.partial(
            ResponsesAnswer,
            framing,
            asked.repeated | sampling,
            asked.namespaces,
            asked.custom_tools,
            keep,
        ),
        prompt_cache_key=asked.prompt_cache_key,
        ignored=asked.ignored,
        kept_bytes=asked.kept_bytes,
        keeps_logprobs=True,
    )


def _parse_count(
    service: RouterService, store: ResponseStore, body: Body, tenant: TenantSession
) -> Parsed:
    asked = _read(service, store, body, tenant)
    return Parsed(
        [asked.request],
        is_streamed=False,
        answer=lambda _: CountAnswer(ERRORS, COUNTED),
        ignored=asked.ignored,
        counts_only=True,
    )


def _read(
    service: RouterService,
    store: ResponseStore | ConnectionResponses,
    body: Body,
    tenant: TenantSession,
) -> Asked:
    drops_turns = "shrinkContext" in service.config.routing.ladder
    return read_request(
        body.take(), tenant.name, store, drops_turns=drops_turns, documents=body.documents
    )


def _is_parallel(asked: Asked, model: Model | None) -> bool:
    """Return whether the answer may have several calls.

    If the model must call a function, this depends on its format of calls.
    """
    if not asked.request.messages.HasField("tools"):
        return bool(asked.repeated["parallel_tool_calls"])
    tools = asked.request.messages.tools
    if tools.mode == inference_pb2.TOOL_MODE_NAMED:
        return False
    if tools.mode == inference_pb2.TOOL_MODE_REQUIRED:
        return tools.several_forced_calls and model is not None and model.tool_format in FURTHER
    return not tools.single_call


def _keep(
    add: Callable[[str, StoredResponse], None],
    asked: Asked,
    name: str,
    body: bytes,
    turn: inference_pb2.Message,
) -> None:
    """Keep a response, with the conversation that ends with the answer's turn."""
    answered = inference_pb2.Messages(messages=[turn]).SerializeToString()
    # Serialized messages that follow one another are the serialized list of all their turns.
    conversation = asked.conversation + answered
    root = asked.previous.root if asked.previous else name
    add(name, StoredResponse(body, conversation, asked.input_items, root))


class StoredResponses:
    """Serves the stored responses of a tenant.

    Args:
        service: Provides the tenants.
        store: Keeps the responses.
        prefix: Beginning of the path, before a response's id.
    """

    def __init__(self, service: RouterService, store: ResponseStore, prefix: str) -> None:
        self._service = service
        self._store = store
        self._prefix = prefix

    async def read(self, request: Request, reply: Reply) -> None:
        """Answer with a stored response."""
        tenant = self._tenant(request)
        stored = self._find(tenant, object_id(request, self._prefix))
        await reply.whole(HTTPStatus.OK, [_JSON_TYPE], stored.body)

    async def input_items(self, request: Request, reply: Reply) -> None:
        """Answer with a page of the items that a stored response answers."""
        tenant = self._tenant(request)
        items = self._find(tenant, object_id(request, self._prefix, INPUT_ITEMS)).input_items
        request.charge(len(items), tenant)
        page = functools.partial(read_page, items, request.query)
        body = await self._service.intake.run(len(items), tenant, page)
        await reply.whole(HTTPStatus.OK, [_JSON_TYPE], body)

    async def delete(self, request: Request, reply: Reply) -> None:
        """Delete a stored response. Responses that continue it stay."""
        tenant = self._tenant(request)
        name = object_id(request, self._prefix)
        if not self._store.remove(tenant, name):
            raise self._unknown(name)
        deleted = {"id": name, "object": "response", "deleted": True}
        await reply.whole(HTTPStatus.OK, [_JSON_TYPE], msgspec.json.encode(deleted))

    def _find(self, tenant: str, name: str) -> StoredResponse:
        stored = self._store.find(tenant, name)
        if stored is None:
            raise self._unknown(name)
        return stored

    def _tenant(self, request: Request) -> str:
        return self._service.tenants.open_session(request.headers.get("authorization")).name

    def _unknown(self, name: str) -> ServiceError:
        why = "which is not stored here (any more)"
        if not self._store.is_enabled:
            why = "and this service stores no responses; set spec.routing.responses.enabled of it"
        return unknown_response(name, why)
