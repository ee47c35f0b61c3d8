"""What the operator was denied in all these tests: nothing. The name puts this file last."""

from ullage_cluster.kubectl import Kubectl, names
from ullage_cluster.release import Release

OPERATORS = 2
"""As tests/e2e/cluster/values.yaml asks for."""


def test_no_operator_missed_a_right(kubectl: Kubectl, release: Release) -> None:
    """Lists, watches and writes that are denied are logged so, and the rest goes on."""
    operators = names(kubectl.listed("pods", release.selector))
    logs = {name: kubectl("logs", name, "--tail=-1") for name in operators}
    assert len(logs) >= OPERATORS, logs.keys()
    assert all(logs.values()), logs.keys()
    assert any("leads, by the lease" in log for log in logs.values()), "one of them acts"
    lines = [line for log in logs.values() for line in log.splitlines()]
    denied = [line for line in lines if "missing permission" in line or "forbidden" in line.lower()]
    assert not denied, denied
