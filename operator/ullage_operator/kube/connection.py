"""The address and credentials of the API server, as `kubernetes.config` reads them.

Inside a pod, the credentials are those of the service account, whose token file is reloaded every
minute. Elsewhere, the credentials come from the kubeconfig, including its exec plugins and OIDC
logins. Credentials that the API server rejects are reloaded, and so are certificates if a TLS
handshake fails, for example after a new authority has issued the API server's certificate.
"""

import asyncio
import functools
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import kopf
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from ullage_operator.api.errors import ClusterUnavailable
from ullage_operator.api.naming import FIELD_MANAGER

_KUBECONFIG = "~/.kube/config"
_REFUSED_S = 5.0
"""Delay in seconds before a rejected login is reported to kopf, which would retry immediately.

The same holds for a certificate of the API server that no file of the configuration verifies.
"""
_UNREADABLE = (config.ConfigException, yaml.YAMLError, OSError, KeyError, TypeError, ValueError)


async def load_configuration() -> Configuration:
    """Return the configuration of the service account inside a pod, or of the kubeconfig elsewhere.

    Raises:
        ClusterUnavailable: there is no configuration, or it cannot be read.
    """
    configuration = Configuration(connection_pool_maxsize=0)  # no limit
    try:
        config.load_incluster_config(configuration)
    except config.ConfigException:
        await _load_kubeconfig(configuration)
    return configuration


async def _load_kubeconfig(configuration: Configuration) -> None:
    paths = os.environ.get("KUBECONFIG") or _KUBECONFIG
    if not _has_file(paths):
        raise ClusterUnavailable(
            "no Kubernetes API found: run inside a pod with a service account, or set KUBECONFIG"
        )
    try:
        await config.load_kube_config(paths, client_configuration=configuration)
    except _UNREADABLE as error:
        raise ClusterUnavailable(f"the kubeconfig {paths} cannot be used: {error}") from error


def _has_file(paths: str) -> bool:
    return any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep) if path)


class ApiConnection:
    """A client for one API server that logs in on first use. Callers must `close` it.

    Args:
        load: reads the address and the credentials.
    """

    def __init__(self, load: Callable[[], Awaitable[Configuration]] = load_configuration) -> None:
        self._load = load
        self._api: ApiClient | None = None
        self.tls: tuple[object, ...] = ()
        """TLS settings of the current client, with the certificates that it has loaded.

        Sessions that were opened with other settings must be opened again.
        """
        self._is_closed = False
        self._renewing = asyncio.Lock()

    async def api(self) -> ApiClient:
        """Return the API client with the current credentials, logging in on first use."""
        if self._is_closed:
            raise ClusterUnavailable("the connection to the API server is closed")
        if self._api is None:
            await self.renew(None)
        assert self._api is not None
        return self._api

    async def renew(self, refused: Configuration | None) -> None:
        """Reload the credentials. If several requests are rejected at once, reload only once."""
        async with self._renewing:
            current = self._api and self._api.configuration
            if current is not refused:
                return

            configuration = await self._load()
            tls = _tls(configuration)
            if self._api is not None and tls == self.tls:
                self._api.configuration = configuration  # open requests go on
                return

            previous = self._api
            api = ApiClient(configuration)  # it reads the CA's file, which may fail
            api.user_agent = FIELD_MANAGER
            self._api = api
            self.tls = tls
            if previous is not None:
                await previous.close()

    async def headers(self) -> dict[str, str]:
        """Return the Authorization header (empty with client certificates)."""
        headers: dict[str, str] = {}
        api = await self.api()
        await api.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
        return headers

    async def kopf_session(self, *middlewares: aiohttp.ClientMiddlewareType) -> kopf.AiohttpSession:
        """Return a session for kopf that sends this client's credentials."""
        api = await self.api()
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=api.rest_client.ssl_context, limit=0),
            headers={"User-Agent": FIELD_MANAGER},
            proxy=api.configuration.proxy,
            trust_env=True,
            middlewares=(functools.partial(self._log_in, self.tls), *middlewares),
        )
        return kopf.AiohttpSession(server=api.configuration.host, aiohttp_session=session)

    async def _log_in(
        self,
        tls: tuple[object, ...],
        request: aiohttp.ClientRequest,
        send: aiohttp.ClientHandlerType,
    ) -> aiohttp.ClientResponse:
        """Send a request of a session, and reload credentials that are refused.

        Args:
            tls: the TLS settings with which the session was opened.
            request: the request.
            send: sends the request.
        """
        used = (await self.api()).configuration
        request.server_hostname = used.tls_server_name
        request.headers.update(await self.headers())
        try:
            response = await send(request)
        except aiohttp.ClientSSLError:
            if tls == self.tls:
                await self.renew(used)
            if tls == self.tls:
                await asyncio.sleep(_REFUSED_S)
            raise

        if response.status != 401:
            return response
        await response.release()
        await self.renew(used)
        request.headers.update(await self.headers())
        response = await send(request)
        if response.status == 401:
            await asyncio.sleep(_REFUSED_S)
        return response

    async def close(self) -> None:
        self._is_closed = True
        if self._api is not None:
            await self._api.close()


def _tls(configuration: Configuration) -> tuple[object, ...]:
    """Return the address, TLS and proxy settings, which cannot change while a session is open.

    A certificate may also be replaced within its file.
    """
    names = ("host", "verify_ssl", "tls_server_name", "proxy")
    files = ("ssl_ca_cert", "cert_file", "key_file")
    paths = [getattr(configuration, name) for name in files]
    settings = [getattr(configuration, name) for name in names]
    return (*settings, *paths, *(_digest(path) for path in paths if path))


def _digest(path: str) -> bytes:
    """Return the hash of a file (empty if it cannot be read)."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError:
        return b""


FAILURES = (TimeoutError, aiohttp.ClientError, OSError)
"""Exceptions raised by a request that gets no response."""
