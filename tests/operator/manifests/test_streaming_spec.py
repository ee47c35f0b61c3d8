"""Streams: from the API to what routers read."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import yaml

from ullage_common.config.router import (
    ConsoleSection,
    CORSSection,
    RouterConfig,
    StreamingSection,
)
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.planning.plan import ServicePlan

MakePlan = Callable[..., ServicePlan]


def router_config(plan: ServicePlan) -> RouterConfig:
    (item,) = (
        item
        for item in plan.apply
        if item["kind"] == "ConfigMap" and item["metadata"]["name"] == "demo-router"
    )
    return msgspec.convert(yaml.safe_load(item["data"]["router.yaml"]), RouterConfig)


def test_defaults_of_the_api_and_of_the_router_agree(make_plan: MakePlan) -> None:
    config = router_config(make_plan())
    assert config.streaming == StreamingSection()
    assert not config.http.public_stats
    assert config.console is None
    assert config.cors is None


def test_routers_read_them(make_plan: MakePlan) -> None:
    streaming = {
        "bufferTokens": 80,
        "coalesceTokens": 2,
        "coalesceWindow": "15ms",
        "tokensPerSecond": "30.5",
        "keepalive": "0s",
    }
    config = router_config(make_plan(streaming=streaming, router={"publicStats": True}))
    assert config.streaming == StreamingSection(
        buffer_tokens=80,
        coalesce_tokens=2,
        coalesce_window=0.015,
        tokens_per_second=30.5,
        keepalive=0.0,
    )
    assert config.http.public_stats


def test_routers_know_the_pages_that_may_use_them(make_plan: MakePlan) -> None:
    origins = ["https://chat.example.com", "http://localhost:3000"]
    config = router_config(make_plan(router={"cors": {"allowedOrigins": origins}}))
    assert config.cors == CORSSection(allowed_origins=tuple(origins))


def test_a_cluster_gets_the_console_that_only_watches(make_plan: MakePlan) -> None:
    config = router_config(make_plan(observability={"console": {"enabled": True}}))
    assert config.console == ConsoleSection(local=False)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"streaming": {"coalesceWindow": "2s"}}, "coalesceWindow must be at most 1s"),
        ({"streaming": {"coalesceTokens": 0}}, "spec.streaming.coalesceTokens"),
    ],
)
def test_mistakes_are_named(make_plan: MakePlan, spec: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidManifest) as caught:
        make_plan(**spec)
    assert words in str(caught.value)
