"""`ullage-operator` at the command line."""

import subprocess
import sys

import pytest
from ullage_kubeapi.trial import converged
from ullage_testing.otlp import OtlpReceiver

from ullage_operator.main import main


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        main([flag])
    assert ended.value.code == 0
    assert "ullage-operator" in capsys.readouterr().out


def test_without_an_api_server_it_says_what_to_set(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ullage_operator.main"],
        env={"HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "KUBECONFIG" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_reconciliations_are_spans_where_a_collector_is_named(world, start, monkeypatch):
    with OtlpReceiver() as collector:
        monkeypatch.setenv("ULLAGE_TRACING_ENDPOINT", collector.http_endpoint)
        monkeypatch.setenv("ULLAGE_TRACING_PROTOCOL", "http")
        start("--no-leader-election")
        world.create()
        converged(world)
        spans = collector.wait(lambda spans: len(spans) > 0)
    span = spans[0]
    assert (span.service, span.name, span.is_error) == ("ullage-operator", "reconcile", False)
    assert span.attributes == {
        "k8s.namespace.name": world.namespace,
        "ullage.service": "s",
        "ullage.result": "ok",
    }
