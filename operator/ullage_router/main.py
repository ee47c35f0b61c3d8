"""`ullage-router`: one process, one event loop, HTTP and gRPC side by side."""

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
import sys
import time
from pathlib import Path

import grpc
import msgspec
import uvloop

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common import version
from ullage_common.config.router import GRPCSection, ProbesSection, RouterConfig
from ullage_common.process import logs
from ullage_common.process.addresses import host_of, joined
from ullage_common.process.config_file import ConfigError, read_file, warn_unknown
from ullage_common.process.memory import return_large_blocks
from ullage_common.process.stacks import dump_loop_on_signal
from ullage_common.wire.request_guard import RequestGuard
from ullage_common.wire.servers import NARROW_WINDOWS, Health, bind, new_probe_server, new_server
from ullage_router.grpc import CallGate, InferenceServicer
from ullage_router.http.app import App
from ullage_router.http.console.console import Console
from ullage_router.http.messages import Limits
from ullage_router.http.monitoring import ANSWER_TIMEOUT_S, Pages, Siblings, own_pages
from ullage_router.http.origins import OriginGuard
from ullage_router.http.server import HTTPServer
from ullage_router.server.processes import (
    CannotListen,
    ProcessSlot,
    Supervisor,
    config_of,
    listen,
    longest_request_s,
    watch_parent,
)
from ullage_router.server.service import RouterService

READY_INTERVAL_S = 0.2
DRAIN_MARGIN_S = 2.0
MAX_HELD_BYTES = 256 << 20
"""Bytes of bodies that arrive, in all processes of a router together."""
LEAST_BODIES = 4
"""Number of the largest bodies that one process has room for, however many processes there are."""
LEAVE_S = 2.0
"""Time for clients to take their connections elsewhere."""

EPILOG = """examples:
  ullage-router --config router.yaml
  curl localhost:9090/stats

The configuration names the model, the pools and their targets:
  model: smollm2-135m
  pools: [{name: single, targets: ["127.0.0.1:9001"]}]
"""

log = logging.getLogger(__name__)


class Router:
    """A running router.

    http_port, grpc_port, probe_port, metrics_port
        where it listens, also when the configuration says 0

    Args:
        config: of the whole router.
        place: among the processes that share its ports; None when it is the only one.
    """

    def __init__(self, config: RouterConfig, place: ProcessSlot | None = None) -> None:
        self._config = config if place is None else config_of(config, place)
        self._place = place
        self.service = RouterService(self._config, place)
        pages = own_pages(self.service.metrics.registry, self.service.load_reporter)
        self._console = Console(self.service, config.console, place) if config.console else None
        routes = self._console.routes() if self._console else {}
        self._siblings: Siblings | None = None
        if place:
            own_routes = self._console.own_routes() if self._console else {}
            folder = Path(place.folder)
            count = config.processes
            self._siblings = Siblings(
                pages, self._stats, folder, place.index, count, routes, own_routes
            )
        monitoring = self._siblings.pages if self._siblings else Pages(pages, self._stats, routes)
        self._health = Health()
        gate = CallGate(self.service.tenants, self.service.pipeline)
        guard = RequestGuard(gate.admit, self.service.intake.run)
        self._grpc = new_server(place is not None, guard, NARROW_WINDOWS)
        self._probes: grpc.aio.Server | None = None
        share = MAX_HELD_BYTES // config.processes
        least = LEAST_BODIES * Limits().max_body_bytes
        limits = Limits(max_held_bytes=max(share, least))
        is_local = config.console is not None and config.console.local
        app = App(
            self.service,
            monitoring if config.http.public_stats else None,
            routes if is_local else {},
        )
        if self._console:
            self._console.serve_requests(app)
        http = config.http
        metrics = config.metrics
        cors = config.cors
        self._http = HTTPServer(OriginGuard(app, http.host, cors, is_api=True), limits)
        self._readiness: asyncio.Task[None] | None = None
        guarded = OriginGuard(monitoring, metrics.host, cors, is_api=False)
        self._monitoring = None if self._siblings else HTTPServer(guarded)
        self.http_port = 0
        self.grpc_port = 0
        self.probe_port = 0
        self.metrics_port = 0

    async def start(self) -> None:
        """Start to serve both protocols; return when they are served.

        Raises:
            ConfigError: keys or certificates cannot be read; no port was taken.
            CannotListen: a port cannot be used.
        """
        config = self._config
        return_large_blocks()  # bodies, and what is made of them
        await self.service.read_secrets()
        is_shared = self._place is not None
        listener = listen(config.http.host, config.http.port, is_shared)
        self.http_port = listener.getsockname()[1]
        servicer = InferenceServicer(
            self.service.pipeline,
            self.service.engines,
            self.service.tenants,
            self.service.issuer,
            config.limits,
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, self._grpc)
        name = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
        await self._health.attach(self._grpc, [name])
        tls = self.service.tls.server
        credentials = tls.server_credentials() if tls else None
        self.grpc_port = _bind("grpc", self._grpc, config.grpc, credentials)
        await self._serve_probes()
        await self._serve_metrics()
        await self.service.start()
        await self._grpc.start()
        await self._http.start(listener, tls.server_context() if tls else None)
        self._readiness = asyncio.create_task(self._keep_readiness(), name="readiness")
        ports = {"http_port": self.http_port, "grpc_port": self.grpc_port}
        log.info("listening", extra={**ports, "metrics_port": self.metrics_port})

    async def stop(self) -> None:
        """Send clients elsewhere, lets requests end and closes everything.

        Clients with open connections do not know yet: their requests are still served, and the
        answers tell them to connect anew, to another router.
        """
        if self._readiness:
            self._readiness.cancel()
        self.service.leave()
        if self._console:
            self._console.close()
        await self._health.set_ready(False)
        await self._http.leave(LEAVE_S)
        self.service.scale_to_zero.queue.close()
        log.info("draining", extra={"inflight": self.service.pipeline.inflight})
        grace_s = longest_request_s(self._config) + DRAIN_MARGIN_S
        until = time.monotonic() + grace_s
        await asyncio.gather(self._http.stop(grace_s), self._grpc.stop(grace_s))
        if self.service.idempotency:
            await self.service.idempotency.drain(max(0.0, until - time.monotonic()))
        self.service.scale_to_zero.queue.end()
        self.service.pipeline.drain()
        await self.service.close()
        if self._probes:
            await self._probes.stop(None)
        if self._siblings:
            await self._siblings.stop()
        if self._monitoring:
            await self._monitoring.stop(ANSWER_TIMEOUT_S)

    def _stats(self, authorization: str | None) -> bytes:
        """The state of this process, and which of the router's processes it is."""
        self.service.tenants.check_stats(authorization)
        latest = self.service.stats.latest()
        return msgspec.json.encode({**self.service.snapshot(), "latest": latest})

    async def _serve_metrics(self) -> None:
        section = self._config.metrics
        is_shared = self._siblings is not None
        listener = listen(section.host, section.port, is_shared, name="metrics")
        self.metrics_port = listener.getsockname()[1]
        if self._siblings:
            guarded = OriginGuard(
                self._siblings.pages, section.host, self._config.cors, is_api=False
            )
            await self._siblings.start(listener, HTTPServer(guarded))
        if self._monitoring:
            await self._monitoring.start(listener)

    async def _serve_probes(self) -> None:
        """Serve health without TLS, which the kubelet's probes do not speak."""
        if section := self._config.probes:
            self._probes = new_probe_server(is_shared=self._place is not None)
            self._health.attach_alone(self._probes)
            self.probe_port = _bind("probes", self._probes, section)
            await self._probes.start()

    async def _keep_readiness(self) -> None:
        while True:
            await self._health.set_ready(self.service.is_ready)
            await asyncio.sleep(READY_INTERVAL_S)


async def serve(config: RouterConfig, place: ProcessSlot | None = None) -> None:
    """Serve until SIGINT or SIGTERM, or the end of its parent, then drains."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    dump_loop_on_signal()
    if place:
        watch_parent(stop)
    router = Router(config, place)
    await router.start()
    await stop.wait()
    await router.stop()


def _bind(
    name: str,
    server: grpc.aio.Server,
    at: GRPCSection | ProbesSection,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    address = joined(host_of(at.host), at.port)
    try:
        return bind(server, address, credentials)
    except RuntimeError as error:
        raise CannotListen(f"{name}: {address}: cannot listen; choose another port") from error


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ullage-router",
        description="Routes requests for a language model to the engine whose memory they fit.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="router.yaml")
    parser.add_argument("--place", help=argparse.SUPPRESS)  # set by the parent of several
    parser.add_argument("--version", action="version", version=f"%(prog)s {version()}")
    return parser.parse_args(argv)


def raise_open_files() -> None:
    """Allows as many connections as the system does; shells and containers often allow 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # where "unlimited" is more than may be asked
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(argv: list[str] | None = None) -> int:
    """Run the router; return the exit status: 0 after a clean stop, 2 when the configuration cannot
    be used."""
    options = _arguments(argv)
    try:
        config = read_file(options.config, RouterConfig)
        place = msgspec.json.decode(options.place, type=ProcessSlot) if options.place else None
        logs.configure(config.log_level, fields={"process": place.index} if place else {})
        return_large_blocks()
        if place is None:
            warn_unknown(options.config, config)
        if place is None and config.processes > 1:
            return uvloop.run(Supervisor(options.config, config).run())
        raise_open_files()
        uvloop.run(serve(config, place))
    except (ConfigError, CannotListen) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
