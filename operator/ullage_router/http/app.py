"""The HTTP application, which routes requests and rejects unknown paths and methods."""

import asyncio
import functools
import logging
from collections.abc import Callable
from http import HTTPStatus

import msgspec

from ullage_common import version
from ullage_common.wire.errors import ServiceError
from ullage_router.errors import (
    http_status,
    internal,
    method_not_allowed,
    no_compaction,
    unknown_model,
    unknown_path,
)
from ullage_router.http import openapi
from ullage_router.http.anthropic import endpoint as anthropic
from ullage_router.http.batches.endpoint import CANCEL, BatchesEndpoint
from ullage_router.http.error_bodies import error_body
from ullage_router.http.files.endpoint import CONTENT, FilesEndpoint
from ullage_router.http.messages import Endpoint, Headers, Reply, Request, Routes, without_slash
from ullage_router.http.monitoring import Pages
from ullage_router.http.openai.embeddings import (
    EmbeddingsEndpoint,
    parse_embeddings,
    vector_room,
)
from ullage_router.http.openai.endpoint import (
    CHAT,
    COMPLETION,
    GenerateEndpoint,
    request_id,
    sampling_defaults,
)
from ullage_router.http.openai.errors import error_headers
from ullage_router.http.openai.scores import parse_rerank, parse_score
from ullage_router.http.openai.tokenize import (
    DetokenizeEndpoint,
    TokenizeEndpoint,
    TokenizerInfoEndpoint,
)
from ullage_router.http.responses import endpoint as responses
from ullage_router.http.responses.socket import ResponsesSocket
from ullage_router.http.responses.store import ResponseStore
from ullage_router.server.service import RouterService
from ullage_router.telemetry.record import RequestRecord
from ullage_router.tenants.session import TenantSession

Page = Callable[[Request], object]

JSON_TYPE = (b"content-type", b"application/json")
MODELS = "/v1/models"
RESPONSES = "/v1/responses"
INPUT_TOKENS = RESPONSES + "/input_tokens"
COMPACT = RESPONSES + "/compact"
FILES = "/v1/files"
BATCHES = "/v1/batches"
_SUBTREES = (MODELS + "/", RESPONSES + "/", FILES + "/", BATCHES + "/")
_ACTIONS = {
    FILES + "/": CONTENT,
    BATCHES + "/": CANCEL,
    RESPONSES + "/": responses.INPUT_ITEMS,
}
"""Ends of paths below an object of a subtree, by the subtree."""

log = logging.getLogger(__name__)


class App:
    """Answers every request, including requests that the server could not parse.

    The path, the method and the API key are checked before the body is read.

    Args:
        service: Serves requests.
        monitoring: Serves /stats and /metrics, or None if they are served on another port.
        more: Routes of the console, or None if the console is off or served on another port.
    """

    def __init__(
        self, service: RouterService, monitoring: Pages | None = None, more: Routes | None = None
    ) -> None:
        self._service = service
        described = {openapi.PATH: _get(self._describe)}
        self._routes: Routes = {**(more or {}), **_routes(service, monitoring), **described}
        self._description = b""
        """The OpenAPI document. Empty until it is first requested."""

    async def __call__(self, request: Request, reply: Reply) -> None:
        try:
            if error := request.refusal:
                record = RequestRecord(request_id(request.headers))
                self._service.pipeline.refuse(record, error)
                raise error
            await self._endpoint(request)(request, reply)
        except ServiceError as error:
            if reply.has_begun:
                raise
            # The traceback holds the request, which may hold the error: a reference cycle.
            await _fail(request, reply, error.with_traceback(None))
        except Exception:
            if reply.has_begun:
                raise
            log.exception("request failed", extra={"path": request.path})
            await _fail(request, reply, internal())

    @property
    def routes(self) -> list[tuple[str, str]]:
        """The served (path, method) pairs, with the paths in OpenAPI's notation."""
        return [
            (f"{path}{{name}}" if path.endswith("/") else path, method)
            for path, methods in self._routes.items()
            for method in methods
        ]

    async def _describe(self, request: Request, reply: Reply) -> None:
        if not self._description:  # takes 30 ms, which is too long for the event loop
            self._description = await asyncio.to_thread(openapi.document, self.routes)
        await reply.whole(HTTPStatus.OK, [JSON_TYPE], self._description)

    def _endpoint(self, request: Request) -> Endpoint:
        path = without_slash(request.path)
        methods = self._routes.get(path) or self._routes.get(_route(path))
        if methods is None:
            raise unknown_path(request.path, see=MODELS)
        if endpoint := methods.get(request.method):
            return endpoint
        if (request.method, path) == ("POST", COMPACT):
            raise no_compaction()
        return functools.partial(_answer_options, ", ".join(methods))


def _route(path: str) -> str:
    """Return the path's key in the routes.

    This is the path itself, or the beginning that its subtree shares, or a path below any object of
    the subtree, such as `/v1/files/{name}/content`.
    """
    for subtree in _SUBTREES:
        if path.startswith(subtree):
            action = _ACTIONS.get(subtree)
            return f"{subtree}{{name}}{action}" if action and path.endswith(action) else subtree
    return path


async def _answer_options(allowed: str, request: Request, reply: Reply) -> None:
    """Answer an OPTIONS request, or refuse a method that the path does not allow."""
    allow = (b"allow", allowed.encode())
    if request.method == "OPTIONS":
        await reply.whole(HTTPStatus.NO_CONTENT, [allow], b"")
    else:
        await _fail(request, reply, method_not_allowed(request.path, allowed), [allow])


class _SmallPages:
    """Serves small JSON documents: the list of models and the health probes."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def models(self, request: Request) -> object:
        """Return the models that the request's tenant may use."""
        tenant = self._service.tenants.open_session(request.headers.get("authorization"))
        names = filter(tenant.may_use, self._names())
        return {"object": "list", "data": [self._describe(name, tenant) for name in names]}

    def model(self, request: Request) -> object:
        """Return one model.

        Raises:
            ServiceError: The tenant may not use the model, or it does not exist.
        """
        tenant = self._service.tenants.open_session(request.headers.get("authorization"))
        name = without_slash(request.path).removeprefix(MODELS + "/")
        served, *adapters = self._names()
        if not (tenant.may_use(name) and name in (served, *adapters)):
            raise unknown_model(name, served, adapters, tenant.rules.models)
        return self._describe(name, tenant)

    def healthz(self, request: Request) -> object:
        """Report that the process is alive."""
        return {"status": "alive"}

    def version(self, request: Request) -> object:
        """Return the version of the router."""
        return {"version": version()}

    def load(self, request: Request) -> object:
        """Return the number of requests that this process serves now."""
        return {"server_load": self._service.pipeline.inflight}

    async def readyz(self, request: Request, reply: Reply) -> None:
        """Answer 200 if the router is ready for requests, and 503 otherwise."""
        if self._service.is_ready:
            await _json(reply, HTTPStatus.OK, {"status": "ready"})
            return
        word = "draining" if self._service.is_leaving else "no engine was ready yet"
        await _json(reply, HTTPStatus.SERVICE_UNAVAILABLE, {"status": word})

    def _names(self) -> list[str]:
        """Return the names of the served model and its adapters."""
        return [self._service.config.model, *sorted(self._service.engines.adapters)]

    def _describe(self, name: str, tenant: TenantSession) -> dict[str, object]:
        """Describe the served model or one of its adapters.

        An adapter's description names the served model as its parent. If the tenant may not use the
        served model, the adapter is instead described as a model of its own.
        """
        model = self._service.engines.model
        served = self._service.config.model
        if not tenant.may_use(served):
            served = name
        return {
            "id": name,
            "object": "model",
            "created": model.description.created if model else 0,
            "owned_by": "ullage",
            "root": served,
            "parent": None if name == served else served,
            "max_model_len": model.description.max_model_len if model else None,
            "sampling_defaults": sampling_defaults(model) if model else None,
        }


def _routes(service: RouterService, monitoring: Pages | None) -> dict[str, dict[str, Endpoint]]:
    """Return the endpoints by path and method. A path with a trailing slash matches its subtree."""
    pages = _SmallPages(service)
    chat = GenerateEndpoint(service, CHAT)
    completion = GenerateEndpoint(service, COMPLETION)
    store = ResponseStore(service.config.routing.responses)
    stored = responses.StoredResponses(service, store, RESPONSES + "/")
    files = FilesEndpoint(service, FILES + "/")
    batches = BatchesEndpoint(service, BATCHES + "/")
    room = vector_room()
    score = EmbeddingsEndpoint(service, room, parse_score)
    rerank = EmbeddingsEndpoint(service, room, parse_rerank)
    return {
        "/v1/chat/completions": {"POST": chat},
        "/v1/completions": {"POST": completion},
        "/v1/messages": {"POST": GenerateEndpoint(service, anthropic.MESSAGES)},
        "/v1/messages/count_tokens": {"POST": GenerateEndpoint(service, anthropic.COUNT_TOKENS)},
        "/v1/embeddings": {"POST": EmbeddingsEndpoint(service, room, parse_embeddings)},
        "/score": {"POST": score},
        "/v1/score": {"POST": score},
        "/rerank": {"POST": rerank},
        "/v1/rerank": {"POST": rerank},
        "/v2/rerank": {"POST": rerank},
        RESPONSES: {
            "POST": GenerateEndpoint(service, responses.dialect(service, store)),
            "GET": ResponsesSocket(service, store),
        },
        INPUT_TOKENS: {
            "POST": GenerateEndpoint(service, responses.counting_dialect(service, store))
        },
        RESPONSES + "/": _get(stored.read) | {"DELETE": stored.delete},
        f"{RESPONSES}/{{name}}{responses.INPUT_ITEMS}": _get(stored.input_items),
        FILES: _get(files.list) | {"POST": files.create},
        FILES + "/": _get(files.read) | {"DELETE": files.delete},
        f"{FILES}/{{name}}{CONTENT}": _get(files.content),
        BATCHES: _get(batches.list) | {"POST": batches.create},
        BATCHES + "/": _get(batches.read),
        f"{BATCHES}/{{name}}{CANCEL}": {"POST": batches.cancel},
        MODELS: _get(_page(pages.models)),
        MODELS + "/": _get(_page(pages.model)),
        "/healthz": _get(_page(pages.healthz)),
        "/readyz": _get(pages.readyz),
        "/health": _get(pages.readyz),
        "/ping": {**_get(pages.readyz), "POST": pages.readyz},
        "/version": _get(_page(pages.version)),
        "/load": _get(_page(pages.load)),
        "/tokenize": {"POST": TokenizeEndpoint(service)},
        "/detokenize": {"POST": DetokenizeEndpoint(service)},
        "/tokenizer_info": _get(TokenizerInfoEndpoint(service)),
        **({path: _get(monitoring) for path in ("/stats", "/metrics")} if monitoring else {}),
    }


def _get(endpoint: Endpoint) -> dict[str, Endpoint]:
    return {"GET": endpoint, "HEAD": endpoint}


def _page(make: Page) -> Endpoint:
    """Return an endpoint that calls `make` for each request and replies with its result as JSON."""

    async def endpoint(request: Request, reply: Reply) -> None:
        await _json(reply, HTTPStatus.OK, make(request))

    return endpoint


async def _json(reply: Reply, status: int, body: object) -> None:
    await reply.whole(status, [JSON_TYPE], msgspec.json.encode(body))


async def _fail(
    request: Request, reply: Reply, error: ServiceError, more: Headers | None = None
) -> None:
    headers = [
        JSON_TYPE,
        (b"x-request-id", request_id(request.headers).encode()),
        *error_headers(error),
        *(more or ()),
    ]
    await reply.whole(http_status(error), headers, error_body(request.path, error))
