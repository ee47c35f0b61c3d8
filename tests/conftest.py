"""Settings that must be in the environment before any test module is imported, coroutine tests, and
what every room shares."""

import asyncio
import inspect
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ullage_testing.certificates import Authority

pytest.register_assert_rewrite("ullage_testing")

TESTS = Path(__file__).parent
NIGHTLY = (
    # the programmes that measure, and every query of the dashboards
    "benchmarks/test_compare.py",
    "benchmarks/test_gpu.py",
    "benchmarks/test_survive.py",
    "observability",
    # a second and third test of a promise, with real kills and every kind of model
    "e2e/test_canary_answers.py",
    "e2e/test_deterministic.py",
    "e2e/test_fingerprints.py",
    "e2e/test_greedy_oracle.py",
    "e2e/test_hybrid.py",
    "e2e/test_kv_tiers.py",
    "e2e/test_shared_memory.py",
    # a model of its own for a few prompts
    "cli/batch/test_real_model.py",
    "offline/test_llm.py",
    # groups of ranks, kernels in Triton's interpreter, families of models
    "engine/kernels/triton",
    "engine/runner/test_deterministic.py",
    "engine/runner/test_deterministic_families.py",
    "engine/runner/test_step_graphs.py",
    "engine/worker/process",
    "engine/worker/ranks",
    "engine/worker/test_beam_oracle.py",
    "engine/worker/test_speculation.py",
    "engine/worker/test_start_proof.py",
    # buckets that are slow, busy or away
    "engine/model_loader/test_s3.py",
    "kv/test_all_tiers.py",
    "kv/test_remote_faults.py",
    # fuzzers and hostile clients
    "engine/server/test_fuzz_frames.py",
    "router/grpc/test_fuzz_frames.py",
    "router/http/test_body_memory.py",
    "router/http/test_early_refusal.py",
    "router/http/test_fuzz_api.py",
    "router/http/test_fuzz_bytes.py",
    "router/prompts/test_long_texts.py",
    "router/prompts/test_text_bounds.py",
    # a browser
    "router/http/test_console_page.py",
    # faults of engines and API servers that take seconds each to pass
    "operator/controller/test_bases_live.py",
    "operator/controller/test_exposure_live.py",
    "operator/controller/test_handlers.py",
    "operator/controller/test_lifecycle.py",
    "operator/controller/test_model_caches_live.py",
    "operator/rollout/test_full_node.py",
    "router/admission/test_scaling_live.py",
    "router/engines/test_ejection.py",
    "router/engines/test_roster.py",
    "router/engines/test_silence.py",
    "router/pipeline/test_faults.py",
    "router/rollout/test_rollout_live.py",
    "charts/test_values.py",
)
"""Tests that `make check` leaves to `make nightly`: long ones whose promise another test guards."""
FIRST = "e2e/test_verify.py"
"""The scenarios that must always pass, which begin first in their lane: the gate runs nightly tests
only as long as its time allows."""
UNTIL = float(os.environ.get("ULLAGE_TEST_UNTIL", "inf"))
"""Unix time from which no test begins; tests that are left out are counted and named."""
ROOMS = os.environ.get("ULLAGE_TEST_ROOMS", "").split()
"""Folders of `tests/` to which a run is restricted (scripts/changed_rooms.py); empty: all."""
LEFT_OUT = pytest.StashKey[Counter[str]]()

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


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()
    missing = [each for each in (*NIGHTLY, FIRST) if not (TESTS / each).exists()]
    if missing:
        raise pytest.UsageError(f"tests/conftest.py names files that are gone: {missing}")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the folders of rooms that did not change; files beside them always run."""
    if not ROOMS or not collection_path.is_relative_to(TESTS):
        return None
    inside = collection_path.relative_to(TESTS).parts
    is_folder_of_a_room = bool(inside) and (TESTS / inside[0]).is_dir()
    return True if is_folder_of_a_room and inside[0] not in ROOMS else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    nightly = [TESTS / each for each in NIGHTLY]
    for item in items:
        if any(item.path.is_relative_to(each) for each in nightly):
            item.add_marker(pytest.mark.nightly)
    items.sort(key=lambda item: item.path != TESTS / FIRST)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() >= UNTIL:
        item.config.stash[LEFT_OUT][item.location[0]] += 1
        pytest.skip("left out: the time is up")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left_out = config.stash[LEFT_OUT]
    for path, count in sorted(left_out.items()):
        terminalreporter.write_line(f"left out, as the time was up: {count} tests of {path}")


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
