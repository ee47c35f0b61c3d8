"""Decides which web pages may use a router, using CORS and the Host and Origin headers.

A router on a loopback address serves only its own machine, but a browser on that machine may run
pages from foreign sites. Such a page can reach the router in two ways:

 * The page sends requests to 127.0.0.1. The `Origin` header reveals them.
 * After the page was loaded, its host name is changed to resolve to 127.0.0.1 (DNS rebinding). The
   browser then treats the router as the page's own server. Only the `Host` header reveals this.

Foreign pages can reach a router in a pod in the same ways, through a forwarder such as
`kubectl port-forward` that connects over the pod's loopback interface.

Other connections arrive over a network that controls who may connect, often through a proxy with
other host names. Their Host is therefore not checked, and their Origin only for uploaded forms and
for WebSockets, which a foreign page may send without asking the router first.
"""

import functools
import ipaddress
import socket
from http import HTTPStatus
from urllib.parse import urlsplit

from ullage_common.config.router import ANY_ORIGIN, CORSSection
from ullage_common.wire.errors import ServiceError
from ullage_router.errors import forbidden, http_status
from ullage_router.http.error_bodies import error_body
from ullage_router.http.messages import Endpoint, Headers, Reply, Request, without_slash
from ullage_router.http.openai.errors import error_headers

API = "/v1/"
"""Prefix of the paths with CORS headers, whose responses any holder of an API key may read."""
_API_PAGES = frozenset(
    {"/tokenize", "/detokenize", "/tokenizer_info", "/score", "/rerank", "/v2/rerank"}
)
"""Paths of the API outside of its prefix, as vLLM has them."""
_FOR_MACHINES = frozenset({"/metrics", "/measures", "/measures/wait"})
"""Pages that Prometheus and the operator read, possibly through the proxies of a service mesh."""
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
"""Suffixes of host names that cannot be registered, such as host.docker.internal."""
MAX_HOST = 253 + len(".:65535")
"""Maximum length of a Host header: the longest DNS name with its trailing dot and a port."""
KEPT_NAMES = 256
"""Number of hosts whose check results are cached. Nearly all requests name the same host."""
_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED = (
    b"retry-after, x-request-id, request-id, x-should-retry, x-ratelimit-limit-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
    b"x-ratelimit-reset-requests, x-ratelimit-reset-tokens, x-ullage-action, x-ullage-route, "
    b"x-ullage-degraded, x-ullage-trail, x-ullage-model, x-ullage-engine, x-ullage-cascade, "
    b"x-ullage-cached, x-ullage-predicted-kv-bytes, x-ullage-discarded-tokens, x-ullage-revision, "
    b"x-ullage-ignored, x-ullage-resumed-on, x-ullage-resumed-inexact"
)
_PREFLIGHT_S = b"600"


class OriginGuard:
    """Refuses requests from foreign web pages, and adds the CORS headers to responses.

    Args:
        serve: Serves all other requests.
        host: The address on which the server listens, or None for all addresses.
        cors: Origins that may use the API. None allows only pages of the router itself.
        is_api: Whether this is the API's port, as opposed to the metrics port. On connections from
            a forwarder, the API's port checks only requests with an Origin, which browsers send.
            The metrics port checks all requests except those for the pages that Prometheus and the
            operator read.
    """

    def __init__(
        self, serve: Endpoint, host: str | None, cors: CORSSection | None, *, is_api: bool
    ) -> None:
        self._serve = serve
        self._is_local = host is not None and is_loopback(host)
        self._origins = frozenset(cors.allowed_origins) if cors else frozenset[str]()
        self._hosts = frozenset(
            name for origin in self._origins if (name := urlsplit(origin).hostname)
        )
        self._is_api = is_api

    async def __call__(self, request: Request, reply: Reply) -> None:
        origin = request.headers.get("origin")
        if request.refusal is None:
            try:
                self._check(request, origin)
            except ServiceError as error:
                headers = [(b"content-type", b"application/json"), *error_headers(error)]
                await reply.whole(http_status(error), headers, error_body(request.path, error))
                return

            if self._origins and self._is_api and _is_api_path(request.path):
                reply.headers = self._cors_headers(origin)
                if origin and request.method == "OPTIONS" and self._allows(origin):
                    await reply.whole(HTTPStatus.NO_CONTENT, _preflight_headers(request), b"")
                    return

        await self._serve(request, reply)

    def _check(self, request: Request, origin: str | None) -> None:
        """Refuse the request if a foreign page may have sent it.

        Raises:
            ServiceError: A foreign page may have sent the request.
        """
        if not self._is_local:
            if not is_loopback(request.local_address):
                if _needs_no_preflight(request):
                    self._check_origin(origin, request.headers.get("host", ""))
                return
            is_for_machines = not origin if self._is_api else request.path in _FOR_MACHINES
            if is_for_machines:
                return

        host = request.headers.get("host", "")
        self._check_host(request, host)
        self._check_origin(origin, host)

    def _check_host(self, request: Request, host: str) -> None:
        # Over TLS the browser has checked the certificate, and a rebound name has none here.
        if not (request.is_encrypted or _is_local_host(host) or _name(host) in self._hosts):
            raise forbidden(
                "HOST_NOT_ALLOWED",
                f"host is {host[:100]!r}, which is no name of this machine; use 127.0.0.1 or "
                "localhost, or allow an origin of that name in spec.router.cors.allowedOrigins",
            )

    def _check_origin(self, origin: str | None, host: str) -> None:
        if origin and not (self._allows(origin) or _is_same(origin, host)):
            raise forbidden(
                "ORIGIN_NOT_ALLOWED",
                f"origin is {origin[:100]!r}, whose pages may not use this router; allow it in "
                "spec.router.cors.allowedOrigins",
            )

    def _allows(self, origin: str) -> bool:
        return origin in self._origins or ANY_ORIGIN in self._origins

    def _cors_headers(self, origin: str | None) -> Headers:
        """Return the CORS headers of a response.

        The header `vary` makes caches store one response per origin.
        """
        vary = (b"vary", b"origin")
        if not (origin and self._allows(origin)):
            return [vary]
        allowed = ANY_ORIGIN if ANY_ORIGIN in self._origins else origin
        return [
            vary,
            (b"access-control-allow-origin", allowed.encode()),
            (b"access-control-expose-headers", _EXPOSED),
        ]


def _needs_no_preflight(request: Request) -> bool:
    """Return whether browsers let a foreign page send this request without a CORS preflight.

    These are forms and WebSockets. All other bodies are JSON, for which browsers ask first.
    """
    if request.switch is not None:
        return True
    return request.headers.get("content-type", "").lower().startswith("multipart/")


def _is_api_path(path: str) -> bool:
    return path.startswith(API) or without_slash(path) in _API_PAGES


def _preflight_headers(request: Request) -> Headers:
    wanted = request.headers.get("access-control-request-headers", "")
    return [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", _names_of(wanted).encode()),
        (b"access-control-max-age", _PREFLIGHT_S),
    ]


def _names_of(wanted: str) -> str:
    """Return a comma-separated list of header names with the invalid names removed."""
    names = (name.strip().lower() for name in wanted.split(","))
    return ", ".join(n for n in names if n and n.replace("-", "").replace("_", "").isalnum())


@functools.lru_cache(maxsize=KEPT_NAMES)
def is_loopback(host: str) -> bool:
    """Return whether a server on this address can be reached only from the same machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _name(host: str) -> str:
    """Return the host name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _is_local_host(host: str) -> bool:
    """Return whether a Host header is safe from DNS rebinding.

    An IP address is safe, and so is a name that cannot be registered.
    """
    return len(host) <= MAX_HOST and _is_local(host)


@functools.lru_cache(maxsize=KEPT_NAMES)
def _is_local(host: str) -> bool:
    name = _name(host)
    if not name or name == socket.gethostname().lower():
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(_LOCAL_SUFFIXES)
    return True


def _is_same(origin: str, host: str) -> bool:
    """Return whether one of the router's own pages sent the request.

    The schemes are not compared, since they may differ behind a proxy.
    """
    return origin.partition("://")[2].lower() == host.lower()
