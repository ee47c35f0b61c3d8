"""The router's configuration: one YAML or JSON file, read once, never changed.

The operator writes this file (`ullage_operator.manifests`); sizes are bytes and times are seconds.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ullage_rpc.config import Strict, read_file

LARGE_POOL = "large"

Rung = Literal["shrinkContext", "shrinkOutput", "queue", "route", "reject"]
DEFAULT_LADDER: tuple[Rung, ...] = ("shrinkContext", "shrinkOutput", "queue", "route", "reject")

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]


class HTTPSection(Strict, frozen=True, kw_only=True):
    host: str = "0.0.0.0"
    port: Port = 8000
    """0 takes a free port, which the log names."""


class GRPCSection(Strict, frozen=True, kw_only=True):
    host: str = "0.0.0.0"
    port: Port = 9000


class MetricsSection(Strict, frozen=True, kw_only=True):
    host: str = "0.0.0.0"
    port: Port = 9090


class PoolSection(Strict, frozen=True, kw_only=True):
    name: Text
    """The pool named `large` takes the large requests."""
    targets: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """`name:port`, where every A record is an engine, or `ip:port`."""

    def __post_init__(self) -> None:
        for target in self.targets:
            host, colon, port = target.rpartition(":")
            if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
                raise ValueError(f"target {target!r} is not host:port, such as engines:9000")


class QueueSection(Strict, frozen=True, kw_only=True):
    max_requests: Count = 256
    timeout: Seconds = 10.0
    """Longest wait of one request."""


class RoutingSection(Strict, frozen=True, kw_only=True):
    large_request_tokens: Positive = 8000
    """Prompts longer than this take the large pool."""
    large_request_kv: Positive = 6000 << 20
    """Requests predicted above this many KV bytes take the large pool."""
    ladder: tuple[Rung, ...] = DEFAULT_LADDER
    """What is tried, in this order, when a request does not fit; its end is always a refusal."""
    queue: QueueSection = QueueSection()

    def __post_init__(self) -> None:
        if len(set(self.ladder)) != len(self.ladder):
            raise ValueError(f"ladder {list(self.ladder)} names a rung twice; name each once")


class LimitsSection(Strict, frozen=True, kw_only=True):
    max_output_tokens: Positive = 4096
    request_timeout: Seconds = 30.0
    """From the request's arrival to its last token."""


class MemorySection(Strict, frozen=True, kw_only=True):
    """The engines' budget; they apply it, the router shows it in /stats."""

    threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.85
    safety_reserve: Count = 2 << 30


class RouterConfig(Strict, frozen=True, kw_only=True):
    model: Text
    """Served name; requests for another are answered 404."""
    pools: Annotated[tuple[PoolSection, ...], msgspec.Meta(min_length=1)]
    """In order of preference."""
    http: HTTPSection = HTTPSection()
    grpc: GRPCSection = GRPCSection()
    metrics: MetricsSection = MetricsSection()
    routing: RoutingSection = RoutingSection()
    limits: LimitsSection = LimitsSection()
    memory: MemorySection = MemorySection()
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools {names} share a name; give each its own")


def read_config(path: Path) -> RouterConfig:
    """Reads and checks a configuration file.

    Raises:
        ConfigError: see `ullage_rpc.config.read_file`.
    """
    return read_file(path, RouterConfig)
