"""`spec.cascade`: what the API refuses, and what routers read of the rest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ullage_cli.local.plan import plan_local
from ullage_common.config.router import FallbackSection, RouterConfig
from ullage_operator.api.errors import InvalidManifest, LocalFailure
from ullage_operator.api.parsing import parse
from ullage_operator.planning.plan import ServicePlan

MakePlan = Callable[..., ServicePlan]
Manifest = Callable[..., dict[str, Any]]
SMALL = {"service": "small"}
FAR = {"address": "far-router.other.svc:9000"}
OWN = {"own": True}


def router_config(plan: ServicePlan) -> RouterConfig:
    (item,) = (
        item
        for item in plan.apply
        if item["kind"] == "ConfigMap" and item["metadata"]["name"] == "demo-router"
    )
    return msgspec.convert(yaml.safe_load(item["data"]["router.yaml"]), RouterConfig)


def test_there_is_none_by_default(make_plan: MakePlan) -> None:
    assert router_config(make_plan()).cascade is None


def test_routers_read_their_cascade(make_plan: MakePlan) -> None:
    config = router_config(
        make_plan(
            cascade={
                "steps": [SMALL, FAR],
                "confidence": {"thresholdPercent": 75},
                "heuristics": {"promptCharacters": 100, "maths": False},
                "parallel": True,
                "fallback": {"queuedRequests": 3},
            }
        )
    ).cascade
    assert config is not None
    assert config.name == "models/demo"
    assert [(step.name, step.target) for step in config.steps] == [
        ("small", "small-router:9000"),
        ("far-router.other.svc:9000", "far-router.other.svc:9000"),
        ("demo", ""),
    ]
    assert (config.confidence.tokens, config.confidence.threshold) == (16, 0.75)
    assert (config.heuristics.prompt_characters, config.heuristics.maths) == (100, False)
    assert config.parallel
    assert config.fallback == FallbackSection(queued_requests=3)


def test_pods_mount_what_steps_need(make_plan: MakePlan) -> None:
    near = SMALL | {"tls": {"secretName": "mine"}}
    far = FAR | {"tls": {"secretName": "mine", "serverName": "x.y"}, "keySecretName": "far-key"}
    plan = make_plan(cascade={"steps": [near, far]})
    config = router_config(plan).cascade
    assert config is not None
    near_step, far_step, own = config.steps
    assert near_step.tls
    assert far_step.tls
    assert near_step.tls.server_name == "small-router.models.svc"
    assert (far_step.tls.server_name, near_step.key_dir) == ("x.y", None)
    assert (own.tls, own.key_dir) == (None, None)
    (router,) = (item for item in plan.apply if item["kind"] == "Deployment")
    pod = router["spec"]["template"]["spec"]
    names = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    mounts = pod["containers"][0]["volumeMounts"]
    paths = {m["mountPath"]: names[m["name"]] for m in mounts if m["name"] in names}
    assert paths == {
        near_step.tls.dir: "mine",
        far_step.tls.dir: "mine",
        far_step.key_dir: "far-key",
    }


def test_an_address_names_the_certificate(make_plan: MakePlan) -> None:
    config = router_config(make_plan(cascade={"steps": [FAR | {"tls": {"secretName": "a"}}]}))
    assert config.cascade
    assert config.cascade.steps[0].tls
    assert config.cascade.steps[0].tls.server_name == "far-router.other.svc"


def test_defaults_of_the_api_and_of_the_router_agree(make_plan: MakePlan) -> None:
    """What a router assumes when a field is missing is what the API fills in."""
    written = router_config(make_plan(cascade={"steps": [SMALL], "fallback": {}})).cascade
    assert written is not None
    bare = {"name": written.name, "steps": written.steps, "fallback": {}}
    assert written == msgspec.convert(msgspec.to_builtins(bare), type(written))


def test_the_own_engines_may_stand_anywhere(make_plan: MakePlan) -> None:
    config = router_config(make_plan(cascade={"steps": [OWN, SMALL]})).cascade
    assert config is not None
    assert config.own == 0


@pytest.mark.parametrize(
    ("cascade", "words"),
    [
        ({}, "steps"),
        ({"steps": []}, "steps"),
        ({"steps": [OWN]}, "must name another service"),
        ({"steps": [OWN, OWN, SMALL]}, "own engines once"),
        ({"steps": [SMALL, SMALL]}, "each service once"),
        ({"steps": [FAR, FAR]}, "each address once"),
        ({"steps": [SMALL, FAR, {"service": "b"}, {"service": "c"}]}, "steps"),
        ({"steps": [SMALL | FAR]}, "exactly one of"),
        ({"steps": [{}, SMALL]}, "exactly one of"),
        ({"steps": [{"service": "demo"}]}, "name this service itself"),
        ({"steps": [{"service": "Small"}]}, "service"),
        ({"steps": [{"address": "small"}]}, "address"),
        ({"steps": [{"address": "fd00::7:9000"}]}, "address"),
        ({"steps": [{"address": "small:99999"}]}, "'small:99999' is not host:port"),
        ({"steps": [{"address": "[fd00]:9000"}]}, r"or \[fd00::7\]:9000"),
        ({"steps": [SMALL, OWN | {"keySecretName": "a"}]}, "for other services"),
        ({"steps": [SMALL, OWN | {"tls": {"secretName": "a"}}]}, "for other services"),
        ({"steps": [SMALL | {"tls": {}}]}, "secretName"),
        ({"steps": [OWN, SMALL], "fallback": {}}, "name another step before it"),
        ({"steps": [SMALL], "fallback": {"pressureLevel": 0, "queuedRequests": 0}}, "a sign of"),
        ({"steps": [SMALL], "fallback": {"maxPriority": 101}}, "maxPriority"),
        ({"steps": [SMALL], "confidence": {"thresholdPercent": 150}}, "threshold"),
        ({"steps": [SMALL], "confidence": {"tokens": 0}}, "tokens"),
        ({"steps": [SMALL], "confidence": {"token": 4}}, "did you mean tokens"),
        ({"steps": [SMALL], "heuristics": {"turns": -1}}, "turns"),
    ],
)
def test_wrong_cascades_are_refused(
    make_plan: MakePlan, cascade: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidManifest, match=words):
        make_plan(cascade=cascade)


def test_local_mode_finds_services_by_address_only(manifest: Manifest, tmp_path: Path) -> None:
    def local(step: dict[str, Any]) -> list[str]:
        service = parse(manifest(cascade={"steps": [step]}))
        made = plan_local(service, tmp_path, http_port=0, grpc_port=0, log_level="info")
        texts = [file.text for file in made.files if file.path.name == "router.yaml"]
        return [step["target"] for step in yaml.safe_load(texts[0])["cascade"]["steps"]]

    with pytest.raises(LocalFailure, match="write address: 127"):
        local(SMALL)
    assert local({"address": "127.0.0.1:9123"}) == ["127.0.0.1:9123", ""]
