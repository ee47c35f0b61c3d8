"""`spec.observability.tracing` reaches routers and engines, here and on a cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ullage_cli.local.plan import plan_local
from ullage_common.process.tracing import TracingSection
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.manifests.config_files import engine_config, router_config
from ullage_operator.rollout.release import shared_hash

Make = Callable[..., dict[str, Any]]
ENDPOINT = "http://collector.monitoring:4318"


def test_routers_and_engines_get_where_spans_go(manifest: Make, tmp_path: Path) -> None:
    tracing = {"endpoint": ENDPOINT, "protocol": "http", "samplePercent": 25}
    service = parse(manifest(observability={"tracing": tracing}))
    wanted = TracingSection(endpoint=ENDPOINT, protocol="http", sample_percent=25)
    [pool] = service.spec.pools.values()
    assert router_config(service).tracing == wanted
    assert engine_config(service, "single", pool, Settings()).tracing == wanted
    here = plan_local(service, tmp_path, http_port=0, grpc_port=0, log_level="info")
    configs = [yaml.safe_load(file.text) for file in here.files if "tracing" in file.text]
    assert [config["tracing"]["endpoint"] for config in configs] == [ENDPOINT, ENDPOINT]


def test_it_is_off_unless_asked_for_and_engines_are_replaced_for_it(manifest: Make) -> None:
    off = parse(manifest())
    on = parse(manifest(observability={"tracing": {"endpoint": ENDPOINT}}))
    assert router_config(off).tracing is None
    assert router_config(on).tracing == TracingSection(endpoint=ENDPOINT)
    assert shared_hash(off) != shared_hash(on)


def test_wrong_values_are_named(manifest: Make) -> None:
    wrong: list[tuple[dict[str, object], str]] = [
        ({"endpoint": "collector:4317"}, "endpoint is a URL such as http://collector:4318"),
        ({}, "endpoint"),
        ({"endpoint": ENDPOINT, "samplePercent": 200}, "samplePercent"),
        ({"endpoint": ENDPOINT, "protocol": "udp"}, "protocol"),
    ]
    for tracing, words in wrong:
        with pytest.raises(InvalidManifest, match=words):
            parse(manifest(observability={"tracing": tracing}))
