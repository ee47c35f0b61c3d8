"""The HTTP application: every path, and what is said about paths and methods that are none."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

import grpc
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ullage_router.errors import http_status, unknown_model
from ullage_router.http.errors import envelope, error_headers
from ullage_router.http.generate import CHAT, COMPLETION, GenerateEndpoint, request_id
from ullage_router.http.messages import Headers, Reply, Request
from ullage_router.service import RouterService
from ullage_router.siblings import Siblings
from ullage_router.stats import Record
from ullage_rpc.errors import ServiceError

Endpoint = Callable[[Request, Reply], Awaitable[None]]
Page = Callable[[Request], object]

JSON_TYPE = (b"content-type", b"application/json")
MODELS = "/v1/models"

log = logging.getLogger(__name__)


class App:
    """Answers every request that the server reads, and those that it cannot read."""

    def __init__(self, service: RouterService, siblings: Siblings | None = None) -> None:
        self._service = service
        self._routes = _routes(service, siblings)

    async def serve(self, request: Request, reply: Reply) -> None:
        try:
            await self._endpoint(request)(request, reply)
        except ServiceError as error:
            _tell(request, reply, error)
        except Exception:
            if reply.has_begun:
                raise
            log.exception("request failed", extra={"path": request.path})
            _tell(request, reply, _internal())

    def check(self, request: Request) -> None:
        if request.path.startswith("/v1/"):
            self._service.tenants.visit(request.headers.get("authorization"))

    def refuse(self, request: Request, reply: Reply, error: ServiceError) -> None:
        record = Record(request_id(request.headers))
        self._service.pipeline.refused(record, error)
        _tell(request, reply, error, [(b"connection", b"close")])

    def _endpoint(self, request: Request) -> Endpoint:
        path = MODELS + "/" if request.path.startswith(MODELS + "/") else request.path
        methods = self._routes.get(path)
        if methods is None:
            what = f"there is no {request.path}; see {MODELS} and /stats"
            raise ServiceError(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", what)
        if endpoint := methods.get(request.method):
            return endpoint
        return _Options(request.path, methods)


class _Options:
    """What is said about the methods of a path, asked for or not."""

    def __init__(self, path: str, methods: Mapping[str, Endpoint]) -> None:
        self._path = path
        self._allowed = ", ".join(methods)

    async def __call__(self, request: Request, reply: Reply) -> None:
        allow = (b"allow", self._allowed.encode())
        if request.method == "OPTIONS":
            reply.whole(HTTPStatus.NO_CONTENT, [allow], b"")
            return
        error = ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "METHOD_NOT_ALLOWED",
            f"{self._path} takes {self._allowed}",
        )
        _tell(request, reply, error, [allow])


class _Pages:
    """The small answers."""

    def __init__(self, service: RouterService, siblings: Siblings | None) -> None:
        self._service = service
        self._siblings = siblings

    def models(self, request: Request) -> object:
        self._service.tenants.visit(request.headers.get("authorization"))
        return {"object": "list", "data": [self._describe()]}

    def model(self, request: Request) -> object:
        self._service.tenants.visit(request.headers.get("authorization"))
        name, served = request.path.removeprefix(MODELS + "/"), self._service.config.model
        if name != served:
            raise unknown_model(name, served)
        return self._describe()

    def stats(self, request: Request) -> object:
        self._service.tenants.check_stats(request.headers.get("authorization"))
        place = self._siblings.describe() if self._siblings else {}
        return {**self._service.snapshot(), **place}

    def healthz(self, request: Request) -> object:
        return {"status": "alive"}

    async def metrics(self, request: Request, reply: Reply) -> None:
        if self._siblings:
            body = await self._siblings.metrics()
        else:
            body = generate_latest(self._service.metrics.registry)
        reply.whole(HTTPStatus.OK, [(b"content-type", CONTENT_TYPE_LATEST.encode())], body)

    async def readyz(self, request: Request, reply: Reply) -> None:
        if self._service.is_ready:
            _json(reply, HTTPStatus.OK, {"status": "ready"})
            return
        word = "draining" if self._service.is_leaving else "no engine was ready yet"
        _json(reply, HTTPStatus.SERVICE_UNAVAILABLE, {"status": word})

    def _describe(self) -> dict[str, object]:
        model = self._service.engines.model
        return {
            "id": self._service.config.model,
            "object": "model",
            "created": model.description.created if model else 0,
            "owned_by": "ullage",
            "root": self._service.config.model,
            "max_model_len": model.description.max_model_len if model else None,
        }


def _routes(service: RouterService, siblings: Siblings | None) -> dict[str, dict[str, Endpoint]]:
    """By path, then by method; a path that ends with a slash stands for all below it."""
    pages = _Pages(service, siblings)
    chat = GenerateEndpoint(service, CHAT)
    completion = GenerateEndpoint(service, COMPLETION)
    return {
        "/v1/chat/completions": {"POST": chat},
        "/v1/completions": {"POST": completion},
        MODELS: _get(_page(pages.models)),
        MODELS + "/": _get(_page(pages.model)),
        "/stats": _get(_page(pages.stats)),
        "/metrics": _get(pages.metrics),
        "/healthz": _get(_page(pages.healthz)),
        "/readyz": _get(pages.readyz),
    }


def _get(endpoint: Endpoint) -> dict[str, Endpoint]:
    return {"GET": endpoint, "HEAD": endpoint}


def _page(make: Page) -> Endpoint:
    """An endpoint that answers with JSON."""

    async def endpoint(request: Request, reply: Reply) -> None:
        _json(reply, HTTPStatus.OK, make(request))

    return endpoint


def _json(reply: Reply, status: int, body: object) -> None:
    reply.whole(status, [JSON_TYPE], msgspec.json.encode(body))


def _tell(request: Request, reply: Reply, error: ServiceError, more: Headers | None = None) -> None:
    headers = [
        JSON_TYPE,
        (b"x-request-id", request_id(request.headers).encode()),
        *error_headers(error),
        *(more or ()),
    ]
    reply.whole(http_status(error), headers, envelope(error))


def _internal() -> ServiceError:
    return ServiceError(grpc.StatusCode.INTERNAL, "INTERNAL", "the router failed; its log says why")
