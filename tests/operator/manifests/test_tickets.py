"""`spec.tickets`: one Secret for routers and engines, and who may reach an engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ullage_cli.local.plan import plan_local
from ullage_common.config.engine import EngineConfig
from ullage_common.config.router import RouterConfig
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.api.parsing import parse
from ullage_operator.planning.plan import ServicePlan

MakePlan = Callable[..., ServicePlan]
SECRET = {"secretName": "demo-tickets"}


def find(plan: ServicePlan, kind: str, name: str) -> dict[str, Any]:
    (item,) = (i for i in plan.apply if i["kind"] == kind and i["metadata"]["name"] == name)
    return item


def read(plan: ServicePlan) -> tuple[RouterConfig, EngineConfig]:
    router = find(plan, "ConfigMap", "demo-router")["data"]["router.yaml"]
    engine = find(plan, "ConfigMap", "demo-single")["data"]["engine.yaml"]
    return (
        msgspec.convert(yaml.safe_load(router), RouterConfig),
        msgspec.convert(yaml.safe_load(engine), EngineConfig),
    )


def test_off_by_default(make_plan: MakePlan) -> None:
    assert [config.tickets for config in read(make_plan())] == [None, None]


@pytest.mark.parametrize("required", [False, True])
def test_both_sides_read_the_same_secret(make_plan: MakePlan, required: bool) -> None:
    plan = make_plan(tickets=SECRET | {"ttl": "1500ms", "required": required})
    router, engine = (config.tickets for config in read(plan))
    assert router is not None
    assert engine is not None
    assert (router.ttl, router.required, engine.required) == (1.5, required, required)
    for kind, name, folder in (
        ("Deployment", "demo-router", router.keys_dir),
        ("StatefulSet", "demo-single", engine.keys_dir),
    ):
        pod = find(plan, kind, name)["spec"]["template"]["spec"]
        (volume,) = (v for v in pod["volumes"] if v["name"] == "tickets")
        assert volume["secret"]["secretName"] == "demo-tickets"
        mounts = {m["mountPath"]: m for m in pod["containers"][0]["volumeMounts"]}
        assert mounts[folder]["name"] == "tickets"
        assert mounts[folder]["readOnly"]
    asking = find(plan, "NetworkPolicy", "demo-engine")["spec"]["ingress"][0]["from"]
    assert ({"podSelector": {}} in asking) == required, "only where nobody gets in without one"


@pytest.mark.parametrize(
    ("tickets", "words"),
    [
        ({}, "secretName"),
        (SECRET | {"ttl": "61s"}, "ttl must be from 100ms to 60s"),
        (SECRET | {"ttl": "0s"}, "ttl must be"),
        ({"secretName": "Not A Name"}, "secretName"),
        (SECRET | {"require": True}, "did you mean required"),
    ],
)
def test_wrong_tickets_are_refused(
    make_plan: MakePlan, tickets: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidManifest, match=words):
        make_plan(tickets=tickets)


def test_local_mode_takes_the_same_way(
    manifest: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets"
    (secrets / "demo-tickets").mkdir(parents=True)
    made = plan_local(
        parse(manifest(tickets=SECRET)),
        tmp_path / "run",
        http_port=0,
        grpc_port=0,
        log_level="info",
        secrets=secrets,
    )
    folders = [yaml.safe_load(file.text)["tickets"]["keys_dir"] for file in made.files]
    assert folders == [str(secrets / "demo-tickets")] * 2
