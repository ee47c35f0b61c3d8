"""Alerts of a running Prometheus."""

import time
from collections.abc import Callable
from typing import Any

WAIT_S = 300.0


def firing(prometheus: Any) -> set[str]:
    """Names of the alerts that fire."""
    found = prometheus.query('ALERTS{alertstate="firing"}')
    return {each["metric"]["alertname"] for each in found}


def make(fault: Callable[[], Any], prometheus: Any, *alerts: str) -> None:
    """Makes a fault, and asserts that these alerts fire after it and did not before."""
    assert not {*alerts} & firing(prometheus)
    fault()
    end = time.monotonic() + WAIT_S
    while missing := {*alerts} - firing(prometheus):
        assert time.monotonic() < end, f"not within {WAIT_S:g} s: {sorted(missing)}"
        time.sleep(0.2)
