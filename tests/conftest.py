"""Settings that must be in the environment before any test module is imported, coroutine tests, and
what every room shares."""

import asyncio
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ullage_testing.certificates import Authority

pytest.register_assert_rewrite("ullage_testing")

# Tests that compute share the cores with the processes they start. Threads that spin while they
# wait for one another burn the very time slices that those processes need: minutes for seconds.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Triton decides when it is imported whether kernels are compiled; without a GPU its interpreter
# runs them.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same commit gets the same verdict, on a fast machine and on a busy one: every run tries the
# same examples, without a clock. `--hypothesis-profile=search` tries new ones.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", _UNTIMED)
settings.register_profile("gate", _UNTIMED, derandomize=True, database=None)
settings.load_profile("gate")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs tests that are coroutine functions, each on an event loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(test(**arguments))
    return True


@pytest.fixture
def make_authority() -> "Callable[[], Authority]":
    from ullage_testing.certificates import Authority

    return Authority


@pytest.fixture(scope="session")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared weights, each model's once a session, or once for all lanes of scripts/test.sh."""
    shared = os.environ.get("ULLAGE_TEST_WEIGHTS")
    return Path(shared) if shared else tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="session")
def promtool() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs promtool; found through ULLAGE_PROMTOOL, beside python, or on PATH."""
    beside = Path(sys.prefix, "bin", "promtool")
    binary = os.environ.get("ULLAGE_PROMTOOL") or (str(beside) if beside.exists() else None)
    binary = binary or shutil.which("promtool")
    if binary is None:
        pytest.skip("no promtool: run tests/charts/get_prometheus.py, or set ULLAGE_PROMTOOL")

    def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binary, *args], input=stdin, capture_output=True, text=True, timeout=60
        )

    return run


@pytest.fixture(scope="session")
def check_exposition(
    promtool: Callable[..., subprocess.CompletedProcess[str]],
) -> Callable[[str], None]:
    """Asserts that promtool has nothing to say against what a process exposes.

    It refuses colons, which vLLM's names have: of these it is only asserted that all are known.
    """

    def check(text: str) -> None:
        from ullage_engine import metric_names

        lines = text.splitlines(keepends=True)
        native = "".join(line for line in lines if "vllm:" not in line)
        done = promtool("check", "metrics", stdin=native)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
        families = {line.split()[2] for line in lines if line.startswith("# TYPE vllm:")}
        aliases = {*metric_names.VLLM_NAMES.values(), "vllm:request_success"}
        known = {*aliases, *(f"{alias}_total" for alias in aliases), "vllm:cache_config_info"}
        assert families <= known

    return check
