"""The API server over HTTP: one aiohttp application in a thread of its own.

It keeps no secrets, and checks tokens only where a test says which (`tokens`); it listens on
loopback only. Tests may make it fail
(`inject`), forget its history (`compact`), and read what was asked of it (`requests`).
"""

import asyncio
import contextlib
import copy
import json
import re
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from ullage_kubeapi import patches, resources, watching
from ullage_kubeapi.collector import Collector
from ullage_kubeapi.faults import Fault, Faults
from ullage_kubeapi.listtypes import ListTypes
from ullage_kubeapi.objects import Object, Objects
from ullage_kubeapi.routes import Target, target
from ullage_kubeapi.selectors import matcher
from ullage_kubeapi.status import ApiError, bad_request, expired, no_such_path
from ullage_kubeapi.tables import dig, table
from ullage_kubeapi.writes import Request, Writer, Written, list_types

VERSION = {"major": "1", "minor": "35", "gitVersion": "v1.35.0", "platform": "linux/amd64"}
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class ApiServer:
    """A running server: `with running() as api`."""

    def __init__(
        self, bookmark_interval: float, collects: bool = True, tls: Path | None = None
    ) -> None:
        self.objects = Objects()
        self.tokens: set[str] = set()
        """Who else logs in is refused; where it is empty, nobody is."""
        self.authorizations: list[str | None] = []
        """The header of each request."""
        self._tls = tls
        self.requests: list[tuple[str, str, int]] = []
        self.url = ""
        self._writer = Writer(self.objects)
        self._collector = Collector(self.objects, self._writer)
        self._bookmark_interval = bookmark_interval
        self._collects = collects
        self._faults = Faults()
        for namespace in ("default", "kube-system"):
            where = Request(self.objects.resources["", "v1", "namespaces"], "", namespace, "test")
            self._writer.create(where, {"metadata": {"name": namespace}})

    def inject(self, method: str, path: str, status: int, times: int = 1, **how: Any) -> Fault:
        """Makes the next `times` requests fail whose path matches the regular expression.

        Keywords are those of `Fault`: retry_after and delay_s, in seconds.
        """
        return self._faults.add(Fault(method, re.compile(path), status, times, **how))

    def deny(self, verb: str, plural: str) -> None:
        """Refuses a verb on a resource to everybody, as RBAC does; `grant` takes it back."""
        self._faults.deny(verb, plural)

    def grant(self, verb: str, plural: str) -> None:
        self._faults.grant(verb, plural)

    def fail_watches(self, code: int) -> None:
        """Ends all open watches with an error event."""
        error = ApiError(code, "Injected", "injected by the test")
        self._loop.call_soon_threadsafe(self.objects.close, error)

    def compact(self) -> None:
        """Forgets all events so far: a watch or a page from before is answered with 410."""
        self.objects.compact()

    def restore(self, revision: int) -> None:
        """Goes back to a revision, as a restore of etcd does, and ends all watches."""
        self._loop.call_soon_threadsafe(self.objects.restore, revision)
        self.drop_watches()

    def replace_certificate(self, folder: Path) -> None:
        """Serves another tls.crt and tls.key from now on, and closes all connections."""

        def replace() -> None:
            assert self._context is not None
            self._context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
            assert self._runner.server is not None
            for connection in self._runner.server.connections:
                connection.force_close()
                if connection.transport is not None:
                    connection.transport.close()

        self._loop.call_soon_threadsafe(replace)

    def drop_watches(self) -> None:
        """Ends all open watches, as a restart of the server or a proxy between would."""
        self._loop.call_soon_threadsafe(self.objects.close)

    def writes(self) -> list[tuple[str, str, int]]:
        """The requests so far that could change something, renewals of leases aside."""
        asked = [r for r in list(self.requests) if r[0] not in ("GET", "HEAD")]
        return [r for r in asked if "/leases" not in r[1] and r[1] != REVIEWS]

    def kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig file for this server."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": "test"}}],
            "contexts": [
                {
                    "name": "test",
                    "context": {"cluster": "test", "user": "test", "namespace": "default"},
                }
            ],
        }
        path = folder / "kubeconfig.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    async def serve(self, started: Callable[[], None], stop: asyncio.Event) -> None:
        app = web.Application(client_max_size=8 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        self._context = self._ssl()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._context)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http{'s' if self._tls else ''}://{host}:{port}"
        self._loop = asyncio.get_running_loop()
        collecting = asyncio.create_task(self._collector.run() if self._collects else stop.wait())
        started()
        await stop.wait()
        self.objects.close()
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        await runner.cleanup()

    def _ssl(self) -> ssl.SSLContext | None:
        if self._tls is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._tls / "tls.crt", self._tls / "tls.key")
        return context

    def _authenticate(self, request: web.Request) -> None:
        header = request.headers.get("Authorization")
        self.authorizations.append(header)
        if self.tokens and (header or "").partition(" ")[2] not in self.tokens:
            raise ApiError(401, "Unauthorized", "Unauthorized")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            response = await self._dispatch(request)
        except ApiError as error:
            headers = {"Retry-After": str(error.retry)} if error.retry else {}
            response = web.json_response(error.body(), status=error.code, headers=headers)
        except (json.JSONDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
            body = bad_request(f"the body is not valid: {error}")
            response = web.json_response(body.body(), status=400)
        self.requests.append((request.method, request.path_qs, response.status))
        return response

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        self._authenticate(request)
        await self._fail(request)
        if request.path == REVIEWS:
            return await self._review(request)
        document = self._discovery(request.path.rstrip("/"))
        if document is not None:
            return web.json_response(document)
        where = target(request.path, self.objects)
        self._faults.check(request.method, "watch" in request.query, where)
        return await self._resource(request, where)

    async def _review(self, request: web.Request) -> web.StreamResponse:
        review = await self._body(request)
        asked = review["spec"]["resourceAttributes"]
        review["status"] = {"allowed": self._faults.allows(asked["verb"], asked["resource"])}
        return web.json_response(review, status=201)

    async def _fail(self, request: web.Request) -> None:
        fault = self._faults.striking(request.method, request.path_qs)
        if fault is None:
            return
        await asyncio.sleep(fault.delay_s)
        if fault.status == 0 and request.transport is not None:
            request.transport.abort()
        if fault.status != 200:
            status = fault.status or 500
            raise ApiError(status, "Injected", "injected by the test", retry=fault.retry_after)

    def _discovery(self, path: str) -> dict[str, Any] | None:
        listed_resources = list(self.objects.resources.values())
        if path == "/version":
            return VERSION
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return resources.group_list(listed_resources)
        if path == "/openapi/v3":
            return resources.openapi_index(listed_resources)
        if path.startswith("/openapi/v3/"):
            return resources.openapi_document(path.removeprefix("/openapi/v3/"), listed_resources)
        match = re.fullmatch(r"/api/(v1)|/apis/([^/]+/[^/]+)", path)
        if match is None:
            return None
        group_version = match[1] or match[2]
        matching = [
            resource for resource in listed_resources if resource.api_version == group_version
        ]
        if not matching:
            raise no_such_path()
        return resources.resource_list(group_version, matching)

    async def _resource(self, request: web.Request, where: Target) -> web.StreamResponse:
        verbs: dict[str, Callable[[web.Request, Target], Awaitable[web.StreamResponse]]] = {
            "GET": self._get if where.name else self._list,
            "POST": self._post,
            "PUT": self._put,
            "PATCH": self._patch,
            "DELETE": self._delete,
        }
        if request.method not in verbs:
            raise ApiError(405, "MethodNotAllowed", f"{request.method} is not allowed here")
        return await verbs[request.method](request, where)

    def _request(self, http: web.Request, where: Target) -> Request:
        agent = http.headers.get("User-Agent", "unknown").split("/")[0]
        return Request(
            resource=where.resource,
            namespace=where.namespace,
            name=where.name,
            manager=http.query.get("fieldManager") or agent,
            subresource=where.subresource,
            field_validation=http.query.get("fieldValidation") or "Warn",
            dry_run=http.query.get("dryRun") == "All",
            force=http.query.get("force") == "true",
        )

    async def _get(self, http: web.Request, where: Target) -> web.StreamResponse:
        live = self._writer.live(self._request(http, where))
        if where.subresource == "scale":
            return web.json_response(_scale(live, where))
        return self._reply(http, where, live)

    def _reply(
        self, http: web.Request, where: Target, obj: Object, status: int = 200
    ) -> web.Response:
        if "as=Table" in http.headers.get("Accept", "") and http.method == "GET":
            body = table(where.resource, [obj], obj["metadata"]["resourceVersion"])
        else:
            body = watching.served(obj, where.resource)
        return web.json_response(body, status=status)

    async def _list(self, http: web.Request, where: Target) -> web.StreamResponse:
        query = http.query
        selector = matcher(query.get("labelSelector", ""), query.get("fieldSelector", ""))
        if query.get("watch") in ("true", "1"):
            return await self._watch(http, where, selector)
        objects = [o for o in self.objects.listed(where.resource, where.namespace) if selector(o)]
        page, meta = self._page(query, objects)
        if "as=Table" in http.headers.get("Accept", ""):
            return web.json_response(table(where.resource, page, meta["resourceVersion"]))
        if "as=PartialObjectMetadataList" in http.headers.get("Accept", ""):
            metas = [{"metadata": obj["metadata"]} for obj in page] or None  # as Kubernetes has it
            kind = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1"}
            return web.json_response(kind | {"metadata": meta, "items": metas})
        body = {
            "kind": f"{where.resource.kind}List",
            "apiVersion": where.resource.api_version,
            "metadata": meta,
            "items": [watching.served(obj, where.resource) for obj in page],
        }
        return web.json_response(body)

    def _page(
        self, query: Mapping[str, str], objects: list[Object]
    ) -> tuple[list[Object], dict[str, Any]]:
        """One page; the continue token is "revision:offset" and dies with compaction."""
        revision = self.objects.revision
        offset = 0
        if token := query.get("continue"):
            revision, offset = (int(part) for part in token.split(":"))
            if revision < self.objects.oldest:
                raise expired(revision, self.objects.oldest)
        limit = int(query.get("limit") or 0) or len(objects)
        page = objects[offset : offset + limit]
        remaining = len(objects) - offset - limit
        meta: dict[str, Any] = {"resourceVersion": str(revision)}
        if remaining > 0:
            meta |= {"continue": f"{revision}:{offset + limit}", "remainingItemCount": remaining}
        return page, meta

    async def _watch(
        self, http: web.Request, where: Target, selector: Callable[[Mapping[str, Any]], bool]
    ) -> web.StreamResponse:
        query = http.query
        watch = watching.Watch(
            resource=where.resource,
            namespace=where.namespace,
            selector=selector,
            since=query.get("resourceVersion", ""),
            bookmarks=query.get("allowWatchBookmarks") in ("true", "1"),
            initial_events=query.get("sendInitialEvents") in ("true", "1"),
            timeout=float(query.get("timeoutSeconds") or 1800),
            bookmark_interval=self._bookmark_interval,
        )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(http)
        lines = watching.stream(self.objects, watch)
        with contextlib.suppress(ConnectionError):
            async with contextlib.aclosing(lines):
                async for line in lines:
                    await response.write(line)
        return response

    async def _body(self, http: web.Request) -> Any:
        text = (await http.read()).decode()
        # JSON is YAML, too, and a hundred times faster read as what it is.
        is_yaml = "yaml" in http.content_type and not text.startswith("{")
        body = yaml.safe_load(text) if is_yaml else json.loads(text or "{}")
        if not isinstance(body, dict | list):
            raise bad_request("the body is not an object")
        return body

    def _written(self, http: web.Request, where: Target, written: Written) -> web.Response:
        response = self._reply(http, where, written.obj, 201 if written.created else 200)
        for warning in written.warnings:
            response.headers.add("Warning", f"299 - {json.dumps(warning)}")
        return response

    async def _post(self, http: web.Request, where: Target) -> web.StreamResponse:
        body = await self._body(http)
        return self._written(http, where, self._writer.create(self._request(http, where), body))

    async def _put(self, http: web.Request, where: Target) -> web.StreamResponse:
        request = self._request(http, where)
        body = await self._body(http)
        if where.subresource == "scale":
            return self._rescale(http, where, body)
        if where.resource.is_custom and not body.get("metadata", {}).get("resourceVersion"):
            raise bad_request("metadata.resourceVersion: must be specified for an update")
        return self._written(http, where, self._writer.update(request, body))

    async def _patch(self, http: web.Request, where: Target) -> web.StreamResponse:
        request = self._request(http, where)
        body = await self._body(http)
        if "apply-patch" in http.content_type:
            if not http.query.get("fieldManager"):
                raise bad_request("fieldManager is required for apply patch")
            return self._written(http, where, self._writer.apply(request, body))
        live = self._writer.live(request)
        if where.subresource == "scale":
            changed = _patched(http.content_type, _scale(live, where), body, ListTypes(None))
            return self._rescale(http, where, changed)
        types = list_types(where.resource)
        if where.resource.is_custom and "strategic" in http.content_type:
            raise ApiError(415, "UnsupportedMediaType", "custom resources take no strategic patch")
        changed = _patched(http.content_type, copy.deepcopy(live), body, types)
        return self._written(http, where, self._writer.update(request, changed))

    def _rescale(self, http: web.Request, where: Target, scale: Object) -> web.Response:
        request = replace(self._request(http, where), subresource="")
        changed = copy.deepcopy(self._writer.live(request))
        *parents, last = where.resource.scale_paths["specReplicasPath"].strip(".").split(".")
        node = changed
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = scale["spec"]["replicas"]
        written = self._writer.update(request, changed)
        return web.json_response(_scale(written.obj, where))

    async def _delete(self, http: web.Request, where: Target) -> web.StreamResponse:
        options = await self._body(http) if http.can_read_body else {}
        for name in ("propagationPolicy", "gracePeriodSeconds"):
            if name in http.query:
                options[name] = http.query[name]
        request = self._request(http, where)
        if where.name:
            doomed = self._writer.delete(request, options)
            return self._reply(http, where, doomed)
        selector = matcher(http.query.get("labelSelector", ""), http.query.get("fieldSelector", ""))
        for obj in self.objects.listed(where.resource, where.namespace):
            if selector(obj):
                each = replace(
                    request,
                    name=obj["metadata"]["name"],
                    namespace=obj["metadata"].get("namespace", ""),
                )
                self._writer.delete(each, options)
        return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})


def _patched(content_type: str, live: Object, body: Any, types: ListTypes) -> Object:
    if content_type == "application/json-patch+json":
        return patches.json_patch(live, body)
    if content_type == "application/merge-patch+json":
        return patches.merge_patch(live, body)
    if content_type == "application/strategic-merge-patch+json":
        return patches.strategic_merge_patch(live, body, types)
    raise ApiError(415, "UnsupportedMediaType", f"the patch type {content_type} is not known")


def _scale(live: Object, where: Target) -> dict[str, Any]:
    paths = where.resource.scale_paths
    meta = live["metadata"]
    status: dict[str, Any] = {"replicas": dig(live, paths["statusReplicasPath"]) or 0}
    if "labelSelectorPath" in paths:
        status["selector"] = dig(live, paths["labelSelectorPath"]) or ""
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {
            k: meta[k] for k in ("name", "namespace", "uid", "resourceVersion") if k in meta
        },
        "spec": {"replicas": dig(live, paths["specReplicasPath"]) or 0},
        "status": status,
    }


@contextlib.contextmanager
def running(
    bookmark_interval: float = 5.0, collects: bool = True, tls: Path | None = None
) -> Iterator[ApiServer]:
    """A server in a thread, stopped when the block ends.

    Args:
        bookmark_interval: seconds.
        collects: whether there is a garbage collector, which looks at all objects after every
            change: too slow for many thousands of them.
        tls: a folder with tls.crt and tls.key, to serve HTTPS.
    """
    server = ApiServer(bookmark_interval, collects, tls)
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()
    thread = threading.Thread(
        target=loop.run_until_complete, args=(server.serve(started.set, stop),), daemon=True
    )
    thread.start()
    if not started.wait(10):
        raise RuntimeError("the test API server did not start within 10 s")
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
