"""The operator's settings and what they do to pods."""

from datetime import UTC, datetime

import pytest

from ullage_common.process.tracing import TracingSection
from ullage_operator.api.naming import operator_selector
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.main import arguments_parser
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import plan


def test_what_the_environment_leaves_out_stays_as_it_is():
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({"ULLAGE_ENGINE_IMAGE": "", "ULLAGE_IMAGE_PULL_SECRETS": ""}) == (
        Settings()
    )


class Environment(dict[str, str]):
    """Variables that note which names are read."""

    def __init__(self, **variables: str) -> None:
        super().__init__(variables)
        self.read: set[str] = set()

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)


def test_the_help_names_every_variable_that_is_read():
    environment = Environment(ULLAGE_TRACING_ENDPOINT="http://collector:4318")
    Settings.from_env(environment)
    assert {"ULLAGE_MESH", "ULLAGE_TRACING_PROTOCOL"} <= environment.read
    text = arguments_parser().format_help()
    assert not [name for name in environment.read if f"  {name} " not in text]


def test_every_setting_can_be_given():
    given = Settings.from_env(
        {
            "ULLAGE_ENGINE_IMAGE": "e",
            "ULLAGE_CUDA_ENGINE_IMAGE": "c",
            "ULLAGE_VLLM_ENGINE_IMAGE": "v",
            "ULLAGE_ROUTER_IMAGE": "r",
            "ULLAGE_IMAGE_PULL_POLICY": "Always",
            "ULLAGE_IMAGE_PULL_SECRETS": "one,two",
            "ULLAGE_LOG_LEVEL": "debug",
            "ULLAGE_OPERATOR_NAMESPACE": "n",
            "ULLAGE_DNS_LAG": "2.5",
            "ULLAGE_METRICS_NAMESPACE": "m",
            "ULLAGE_RUNBOOKS": "https://wiki.example.com/runbooks",
            "ULLAGE_MESH": "linkerd",
            "ULLAGE_TRACING_ENDPOINT": "http://collector:4318",
            "ULLAGE_TRACING_PROTOCOL": "http",
        }
    )
    assert given == Settings(
        engine_image="e",
        cuda_engine_image="c",
        vllm_engine_image="v",
        router_image="r",
        image_pull_policy="Always",
        image_pull_secrets=("one", "two"),
        log_level="debug",
        dns_lag_s=2.5,
        namespace="n",
        metrics_namespace="m",
        runbooks="https://wiki.example.com/runbooks",
        mesh="linkerd",
        tracing=TracingSection(endpoint="http://collector:4318", protocol="http"),
    )


def test_only_operators_of_the_own_namespace_are_let_in(manifest):
    def peers(settings):
        made = plan(parse(manifest()), Observed(now=datetime.now(UTC)), settings).apply
        rules = [r for o in made if o["kind"] == "NetworkPolicy" for r in o["spec"]["ingress"]]
        found = [peer for rule in rules for peer in rule.get("from", ())]
        return [
            p for p in found if operator_selector() == p.get("podSelector", {}).get("matchLabels")
        ]

    own = {"matchLabels": {"kubernetes.io/metadata.name": "ullage-system"}}
    inside = peers(Settings(namespace="ullage-system"))
    assert [peer["namespaceSelector"] for peer in inside] == [own, own]
    assert [peer["namespaceSelector"] for peer in peers(Settings())] == [{}, {}]


@pytest.mark.parametrize(
    "given",
    [
        {"ULLAGE_TRACING_ENDPOINT": "collector:4317"},
        {"ULLAGE_TRACING_ENDPOINT": "http://collector", "ULLAGE_TRACING_PROTOCOL": "udp"},
    ],
)
def test_a_wrong_collector_is_named(given):
    with pytest.raises(SystemExit, match=r"ULLAGE_TRACING_ENDPOINT.*(not a URL|Invalid enum)"):
        Settings.from_env(given)


@pytest.mark.parametrize("given", ["soon", "-1", "nan", "30s"])
def test_a_wrong_lag_is_named(given):
    with pytest.raises(SystemExit, match=r"ULLAGE_DNS_LAG=.* is not a number of seconds"):
        Settings.from_env({"ULLAGE_DNS_LAG": given})


def test_pods_are_fetched_with_the_services_secrets_and_the_operators(manifest):
    service = parse(manifest(imagePullSecrets=[{"name": "own"}, {"name": "both"}]))
    settings = Settings(image_pull_secrets=("both", "operators"))
    made = plan(service, Observed(now=datetime.now(UTC)), settings).apply
    pods = [obj["spec"]["template"]["spec"] for obj in made if "template" in obj.get("spec", {})]
    assert len(pods) == 2
    for pod in pods:
        assert pod["imagePullSecrets"] == [{"name": n} for n in ("own", "both", "operators")]
