"""The Prometheus endpoint every process serves."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, start_http_server


def serve_metrics(registry: CollectorRegistry, port: int, host: str) -> Callable[[], None]:
    """Serves `registry` at http://host:port/metrics from a thread; returns what stops it."""
    server, thread = start_http_server(port, addr=host, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
