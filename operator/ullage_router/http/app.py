"""The HTTP application: every path, and what is said about paths and methods that are none."""

from http import HTTPStatus

import grpc
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ullage_router.errors import http_status, unknown_model
from ullage_router.http.errors import envelope, error_headers
from ullage_router.http.generate import CHAT, COMPLETION, GenerateEndpoint, request_id
from ullage_router.service import RouterService
from ullage_rpc.errors import ServiceError


def build_app(service: RouterService) -> Starlette:
    """The application that serves `service`."""
    pages = _Pages(service)
    timeout_s, model = service.config.limits.request_timeout, service.config.model
    chat = GenerateEndpoint(service.pipeline, service.tenants, model, timeout_s, CHAT)
    completion = GenerateEndpoint(service.pipeline, service.tenants, model, timeout_s, COMPLETION)
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/stats", pages.stats),
        Route("/metrics", pages.metrics),
        Route("/healthz", pages.healthz),
        Route("/readyz", pages.readyz),
    ]
    handlers = {HTTPException: _http_error, ServiceError: _service_error}
    return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]


class _Pages:
    """The small answers."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def models(self, request: Request) -> Response:
        self._service.tenants.visit(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": [self._describe()]})

    async def model(self, request: Request) -> Response:
        self._service.tenants.visit(request.headers.get("authorization"))
        name, served = request.path_params["name"], self._service.config.model
        if name != served:
            raise unknown_model(name, served)
        return JSONResponse(self._describe())

    async def stats(self, request: Request) -> Response:
        self._service.tenants.check_stats(request.headers.get("authorization"))
        return JSONResponse(self._service.snapshot())

    async def metrics(self, request: Request) -> Response:
        body = generate_latest(self._service.metrics.registry)
        return Response(body, media_type=CONTENT_TYPE_LATEST)

    async def healthz(self, request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def readyz(self, request: Request) -> Response:
        if self._service.is_ready:
            return JSONResponse({"status": "ready"})
        word = "draining" if self._service.pipeline.is_draining else "no engine is ready"
        return JSONResponse({"status": word}, HTTPStatus.SERVICE_UNAVAILABLE)

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


async def _service_error(request: Request, error: ServiceError) -> Response:
    response = Response(envelope(error), http_status(error), media_type="application/json")
    _finish(response, request, error)
    return response


async def _http_error(request: Request, error: HTTPException) -> Response:
    """404 for a path and 405 for a method."""
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "")
        reason, what = "METHOD_NOT_ALLOWED", f"{request.url.path} takes {allowed}"
    else:
        reason, what = "NOT_FOUND", f"there is no {request.url.path}; see /v1/models and /stats"
    told = ServiceError(grpc.StatusCode.NOT_FOUND, reason, what)
    response = Response(envelope(told), error.status_code, media_type="application/json")
    response.headers.update(error.headers or {})
    _finish(response, request, told)
    return response


def _finish(response: Response, request: Request, error: ServiceError) -> None:
    response.headers["x-request-id"] = request_id(request.headers)
    for name, value in error_headers(error):
        response.headers[name.decode()] = value.decode()
