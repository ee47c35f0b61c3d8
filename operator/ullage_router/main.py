"""The `ullage-router` command, which serves HTTP and gRPC on one event loop in one process."""

import argparse
import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
from pathlib import Path

import grpc
import msgspec
import uvloop

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common import version
from ullage_common.config.router import GRPCSection, ProbesSection, RouterConfig
from ullage_common.process import addresses, logs
from ullage_common.process.addresses import host_of, joined
from ullage_common.process.config_file import ConfigError, read_file, warn_unknown
from ullage_common.process.memory import return_large_blocks
from ullage_common.process.stacks import dump_loop_on_signal
from ullage_common.wire.request_guard import RequestGuard
from ullage_common.wire.servers import NARROW_WINDOWS, Health, bind, new_probe_server, new_server
from ullage_router.background import failures_logged
from ullage_router.grpc import CallGate, InferenceServicer
from ullage_router.http.app import App
from ullage_router.http.batches.sender import BatchSender
from ullage_router.http.console.console import Console
from ullage_router.http.monitoring import ANSWER_TIMEOUT_S, Pages, make_pages
from ullage_router.http.origins import OriginGuard
from ullage_router.http.server import HTTPServer
from ullage_router.server.service import RouterService

READY_INTERVAL_S = 0.2
DRAIN_MARGIN_S = 2.0
LEAVE_S = 2.0
"""Seconds that clients have during shutdown to switch their connections to another router."""

EPILOG = """examples:
  ullage-router --config router.yaml
  curl localhost:9090/stats

The configuration names the model, the pools and their targets:
  model: smollm2-135m
  pools: [{name: single, targets: ["127.0.0.1:9001"]}]
"""

log = logging.getLogger(__name__)


class CannotListen(Exception):
    """Raised if a port is in use or the process may not bind it. The message names the port."""


class Router:
    """The router process, with its HTTP, gRPC, probe and metrics servers.

    http_port, grpc_port, probe_port, metrics_port
        the ports on which the router actually listens, even if the configured port is 0
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.service = RouterService(config)
        self._console = Console(self.service, config.console) if config.console else None
        routes = self._console.routes() if self._console else {}
        pages = make_pages(self.service.metrics.registry, self.service.load_reporter)
        monitoring = Pages(pages, self._stats, routes)

        self._health = Health()
        gate = CallGate(self.service.tenants, self.service.pipeline)
        guard = RequestGuard(gate.admit, self.service.intake.run)
        self._grpc = new_server(guard, NARROW_WINDOWS)
        self._probes: grpc.aio.Server | None = None

        is_local = config.console is not None and config.console.local
        app = App(
            self.service,
            monitoring if config.http.public_stats else None,
            routes if is_local else {},
        )
        if self._console:
            self._console.serve_requests(app)
        if self.service.batches:
            self.service.batches.send = BatchSender(app).send
        cors = config.cors
        self._http = HTTPServer(OriginGuard(app, config.http.host, cors, is_api=True))
        self._monitoring = HTTPServer(
            OriginGuard(monitoring, config.metrics.host, cors, is_api=False)
        )
        self._readiness: asyncio.Task[None] | None = None

        self.http_port = 0
        self.grpc_port = 0
        self.probe_port = 0
        self.metrics_port = 0

    async def start(self) -> None:
        """Start the HTTP and gRPC servers, and return once they accept requests.

        Raises:
            ConfigError: keys or certificates cannot be read. No port has been bound yet in this
                case.
            CannotListen: a port cannot be used.
        """
        config = self._config
        return_large_blocks()  # of bodies and prompts
        await self.service.read_secrets()
        listener = _listen("http", config.http.host, config.http.port)
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
        self._health.attach(self._grpc, [name])

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
        """Shut down gracefully: let clients move to other routers, and finish running requests.

        Clients with open connections do not know yet that the router is stopping. Their requests
        are still served, but each response closes its connection, so that the client has to connect
        to another router.
        """
        if self._readiness:
            self._readiness.cancel()
        self.service.leave()
        if self._console:
            self._console.close()
        self._health.set_ready(False)
        if self.service.batches:
            await self.service.batches.close()
        await self._http.leave(LEAVE_S)

        self.service.scale_to_zero.queue.close()
        log.info("draining", extra={"inflight": self.service.pipeline.inflight})
        grace_s = _longest_request_s(self._config) + DRAIN_MARGIN_S
        await asyncio.gather(self._http.stop(grace_s), self._grpc.stop(grace_s))
        self.service.scale_to_zero.queue.end()
        self.service.pipeline.drain()
        await self.service.close()
        if self._probes:
            await self._probes.stop(None)
        await self._monitoring.stop(ANSWER_TIMEOUT_S)

    def _stats(self, authorization: str | None) -> bytes:
        """Return the response body for /stats.

        Raises:
            ServiceError: UNAUTHENTICATED, if /stats is protected and the key is unknown.
        """
        self.service.tenants.check_stats(authorization)
        latest = self.service.stats.latest()
        return msgspec.json.encode({**self.service.snapshot(), "latest": latest})

    async def _serve_metrics(self) -> None:
        section = self._config.metrics
        listener = _listen("metrics", section.host, section.port)
        self.metrics_port = listener.getsockname()[1]
        await self._monitoring.start(listener)

    async def _serve_probes(self) -> None:
        """Serve health checks without TLS, because the kubelet's probes do not support TLS."""
        if section := self._config.probes:
            self._probes = new_probe_server()
            self._health.attach_alone(self._probes)
            self.probe_port = _bind("probes", self._probes, section)
            await self._probes.start()

    async def _keep_readiness(self) -> None:
        while True:
            with failures_logged("readiness"):
                self._health.set_ready(self.service.is_ready)
            await asyncio.sleep(READY_INTERVAL_S)


async def serve(config: RouterConfig) -> None:
    """Run the router until SIGINT or SIGTERM, then shut down gracefully."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    dump_loop_on_signal()

    router = Router(config)
    await router.start()
    await stop.wait()
    await router.stop()


def _longest_request_s(config: RouterConfig) -> float:
    """Return the maximum duration of an accepted request, in seconds.

    The duration includes the time that a request may be held while its pool is being woken.
    """
    held_s = config.routing.wake.timeout if any(pool.sleeps for pool in config.pools) else 0.0
    return held_s + config.limits.total_timeout


def _listen(name: str, host: str | None, port: int) -> socket.socket:
    """Return a socket that listens on a host and a port.

    Args:
        name: name of the configuration section, for the error message.
        host: host to listen on, or None for all addresses.
        port: port to listen on.

    Raises:
        CannotListen: the port cannot be used.
    """
    try:
        return addresses.listen(host, port)
    except OSError as error:
        address = joined(host_of(host), port)
        message = f"{name}: {address}: {error.strerror}; choose another port"
        raise CannotListen(message) from error


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
    parser.add_argument("--version", action="version", version=f"%(prog)s {version()}")
    return parser.parse_args(argv)


def raise_open_files() -> None:
    """Raise the limit on open files to the hard limit, because the default is often just 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems refuse "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(argv: list[str] | None = None) -> int:
    """Run the `ullage-router` command.

    Returns:
        The exit status, which is 0 after a clean shutdown, or 2 if the configuration cannot be
        used.
    """
    options = _arguments(argv)
    try:
        config = read_file(options.config, RouterConfig)
        logs.configure(config.log_level)
        return_large_blocks()
        warn_unknown(options.config, config)
        raise_open_files()
        uvloop.run(serve(config))
    except (ConfigError, CannotListen) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
