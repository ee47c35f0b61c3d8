"""spec.tenants: from the manifest to the router's configuration, its pod and a local run."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from ullage_cli.local.plan import LocalPlan, plan_local
from ullage_cli.main import main
from ullage_common.config.router import RouterConfig, TenantRules
from ullage_operator.api.errors import InvalidManifest, LocalFailure
from ullage_operator.api.parsing import parse
from ullage_operator.planning.plan import ServicePlan
from ullage_router.tenants.keys import KeyRing, load_keys

MakePlan = Callable[..., ServicePlan]
Make = Callable[..., dict[str, Any]]
TENANTS = {
    "secretName": "my-keys",
    "defaults": {"requestsPerMinute": 60, "maxTokens": 100, "models": ["smollm2"]},
    "named": [
        {"name": "alice", "requestsPerMinute": 600, "priority": 5, "tokensPerSecond": 20},
        {"name": "bob", "enabled": False, "weight": "2.5"},
    ],
}


def find(plan: ServicePlan, kind: str, name: str = "demo-router") -> dict[str, Any]:
    [found] = [o for o in plan.apply if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def router_config(plan: ServicePlan) -> RouterConfig:
    text = find(plan, "ConfigMap")["data"]["router.yaml"]
    return msgspec.convert(yaml.safe_load(text), RouterConfig)


def test_the_router_reads_every_tenant_complete(make_plan: MakePlan) -> None:
    section = router_config(make_plan(tenants=TENANTS)).tenants
    assert section is not None
    assert (section.anonymous, section.protect_stats, section.share) == ("deny", False, 0.5)
    defaults = TenantRules(requests_per_minute=60, max_tokens=100, models=("smollm2",))
    assert section.defaults == defaults
    alice, bob = section.tenants
    assert (alice.name, alice.requests_per_minute, alice.max_tokens) == ("alice", 600, 100)
    assert (alice.priority, alice.tokens_per_second, alice.weight) == (5, 20, 1)
    assert (bob.enabled, bob.requests_per_minute, bob.weight) == (False, 60, 2.5)


def test_without_tenants_there_is_no_section_and_no_volume(make_plan: MakePlan) -> None:
    plan = make_plan()
    assert router_config(plan).tenants is None
    pod = find(plan, "Deployment")["spec"]["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["config", "tmp"]


def test_each_router_may_have_the_whole_limit(make_plan: MakePlan) -> None:
    made = make_plan(tenants={**TENANTS, "acrossRouters": "Each"}, router={"replicas": 3})
    section = router_config(made).tenants
    assert section is not None
    assert section.share == 1.0


def test_the_pod_mounts_the_whole_secret(make_plan: MakePlan) -> None:
    """A folder and no subPath: only then does the kubelet follow changes."""
    plan = make_plan(tenants=TENANTS)
    for item in plan.apply:
        kubernetes_validate.validate(item, "1.35", strict=True)
    pod = find(plan, "Deployment")["spec"]["template"]["spec"]
    [volume] = [v for v in pod["volumes"] if "secret" in v]
    assert volume["secret"] == {"secretName": "my-keys", "defaultMode": 0o440}
    [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == volume["name"]]
    assert mount == {"name": "keys", "mountPath": "/etc/ullage-keys", "readOnly": True}
    section = router_config(plan).tenants
    assert section is not None
    assert section.keys_dir == mount["mountPath"]


@pytest.mark.parametrize(
    ("tenants", "line"),
    [
        ({}, "spec.tenants.secretName: required field is missing"),
        ({"named": [{"name": "a"}, {"name": "a"}]}, "two tenants have one name"),
        ({"named": [{"name": "other"}]}, "choose another name"),
        ({"named": [{"name": "Alice"}]}, "must match"),
        ({"named": [{"name": "anonymous"}]}, "set anonymous to Allow"),
        (
            {"named": [{"name": "a", "priority": 5, "maxPriority": 4}]},
            "must not exceed maxPriority",
        ),
        ({"named": [{"name": "a", "weight": 0}]}, "from 0.01 to 100"),
        ({"anonymous": "maybe"}, "must be one of Allow, Deny"),
    ],
)
def test_mistakes_say_what_to_do(manifest: Make, tenants: dict[str, Any], line: str) -> None:
    given = tenants if not tenants else {"secretName": "s", **tenants}
    with pytest.raises(InvalidManifest, match=re.escape(line)):
        parse(manifest(tenants=given))


def local(manifest: dict[str, Any], run_dir: Path, secrets: Path | None) -> LocalPlan:
    return plan_local(
        parse(manifest), run_dir, http_port=0, grpc_port=0, log_level="info", secrets=secrets
    )


def test_a_local_run_reads_a_folder(manifest: Make, tmp_path: Path) -> None:
    (tmp_path / "my-keys").mkdir()
    plan = local(manifest(tenants=TENANTS), tmp_path, tmp_path)
    [text] = [file.text for file in plan.files if file.path.name == "router.yaml"]
    section = msgspec.convert(yaml.safe_load(text), RouterConfig).tenants
    assert section is not None
    assert (section.keys_dir, section.share) == (str(tmp_path / "my-keys"), 1.0)


def test_a_local_run_without_the_folder_says_which(manifest: Make, tmp_path: Path) -> None:
    with pytest.raises(LocalFailure, match="Secret my-keys; pass --secrets DIR"):
        local(manifest(tenants=TENANTS), tmp_path, None)
    with pytest.raises(LocalFailure, match="has no folder my-keys"):
        local(manifest(tenants=TENANTS), tmp_path, tmp_path)


def test_a_key_that_the_command_makes_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []
    for _ in range(2):
        assert main(["key", "new", "alice", "--into", str(tmp_path / "my-keys")]) == 0
        lines = dict(line.split() for line in capsys.readouterr().out.splitlines()[:2])
        assert lines["key"] not in (tmp_path / "my-keys" / "alice").read_text()
        made.append(lines["key"])
    ring = KeyRing(load_keys(tmp_path / "my-keys", {}).digests)
    assert [ring.owner(key) for key in made] == ["alice", "alice"]


def test_a_key_for_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "Alice"]) == 2
    assert "lower-case letters" in capsys.readouterr().err
