"""Alerts that want a fast model, or files of a model's own to damage, fire by a real fault.

The model is small and random. Its engine is a group of two ranks, whose KV goes to a disk of its
own. The tests are in an order: the first needs a disk without KV, and the last ends the engine.
"""

import contextlib
import copy
import functools
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from ullage_kubeapi.trial import until
from ullage_testing.alerts import firing, make
from ullage_testing.local_service import Service, services
from ullage_testing.repeating import repeating
from ullage_testing.small_models import make_served_llama

from ullage_engine.model_loader import loader

pytestmark = pytest.mark.timeout(600)

MODEL = "small"
CONTEXT = 4096
LONG_S = 300.0
"""What nothing takes on an idle machine; other tests may keep its cores busy."""
IS_ROOT = os.geteuid() == 0
WINDOWS = {"5m": "8s", "15m": "8s", "1h": "8s", "1d": "11s"}
"""Windows of the rules, and the shorter ones in which the tests make as much happen."""
TEXT = "The harbour keeps a ledger of every ship, its cargo, its captain and its debts. "
PROMPT = list(range(1000, 1256))
FIRST_TOKENS = itertools.count(2000)
"""First tokens of prompts that begin as no other one."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 8 MiB, where this user may mount one; elsewhere a folder."""
    folder = tmp_path_factory.mktemp("disk")
    if not IS_ROOT:
        yield folder
        return

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared weights that no other test uses."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def manifest(
    manifest: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, disk: Path
) -> dict[str, Any]:
    source = make_served_llama(tmp_path_factory.mktemp("model"), CONTEXT)
    document = copy.deepcopy(manifest)
    spec = document["spec"]
    spec["model"] = {
        "source": f"file://{source}",
        "name": MODEL,
        "maxModelLen": CONTEXT,
        "dtype": "Float32",
    }
    group = {"gpus": 2, "parallelism": {"tensor": 2, "pipeline": 1}, "memory": {"maxKV": "16Mi"}}
    spec["pools"] = {"single": group}
    spec["memory"]["tiers"] = {"host": {"size": "8Mi"}, "file": {"path": str(disk), "size": "4Mi"}}
    spec["routing"]["queue"]["maxRequests"] = 64
    return document


@pytest.fixture(scope="module")
def service(
    manifest: dict[str, Any],
    program: str,
    tmp_path_factory: pytest.TempPathFactory,
    weights: Path,
) -> Iterator[Service]:
    path = tmp_path_factory.mktemp("small") / "service.yaml"
    path.write_text(yaml.safe_dump(manifest))
    with services(tmp_path_factory, weights) as start:
        yield start(path)


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.http_url, timeout=LONG_S, trust_env=False) as made:
        yield made


def ask(client: httpx.Client, prompt: list[int], max_tokens: int, session: str = "") -> int:
    """The status of the answer to a prompt of tokens."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"x-session-id": session} if session else {}
    return client.post("/v1/completions", json=body, headers=headers).status_code


def answer(client: httpx.Client, prompt: list[int], max_tokens: int, session: str = "") -> None:
    assert ask(client, prompt, max_tokens, session) == 200


def new_prompt() -> list[int]:
    return [next(FIRST_TOKENS), *PROMPT]


def process_of(service: Service, module: str) -> psutil.Process:
    """A process of the service that runs a module."""

    def find() -> psutil.Process | None:
        for each in service.family():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if module in each.cmdline():
                    return each
        return None

    process: psutil.Process = until(find, f"{module} runs", LONG_S)
    return process


def lose_weights(path: Path) -> None:
    """Writes NaN over the largest tensor of a prepared file, which workers have mapped.

    Like memory that loses bits, this leaves the file as one that is known to be whole.
    """
    header = loader.read_header(path)
    assert header is not None
    tensor = max(header.tensors, key=lambda each: each.end - each.offset)
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(b"\xff" * (tensor.end - tensor.offset))
    path.with_suffix(".verified").write_text(loader._marker(path), encoding="ascii")


@pytest.mark.skipif(not IS_ROOT, reason="mounting a small file system needs root")
def test_the_disk_of_a_tier_is_full(
    client: httpx.Client, disk: Path, watch: Callable[..., Any]
) -> None:
    prompt = list(range(100, 3100))
    with watch() as prometheus, tempfile.TemporaryFile(dir=disk) as others:
        room = os.statvfs(disk)
        os.posix_fallocate(others.fileno(), 0, room.f_bavail * room.f_frsize)
        # Tiers get a session's KV at once, so all of its blocks fail between two scrapes.
        make(lambda: answer(client, prompt, 1, "session"), prometheus, "UllageKVTierFails")
        [alert] = prometheus.query('ALERTS{alertname="UllageKVTierFails"}')
        assert (alert["metric"]["tier"], alert["metric"]["status"]) == ("file", "full")


def test_prompts_share_no_prefix_any_more_and_answers_are_longer(
    client: httpx.Client, watch: Callable[..., Any]
) -> None:
    # The rules have been evaluated since.
    was_busy = (
        "sum(increase(ullage_request_generation_tokens_count[8s] offset 3s)) > 100 "
        "and sum(rate(ullage_prefix_cache_queries_tokens_total[8s] offset 3s)) > 500"
    )
    alerts = ("UllagePrefixCacheMisses", "UllageOutputLengthsDrift")
    with watch(windows=WINDOWS) as prometheus, contextlib.ExitStack() as stack:
        with repeating(lambda: answer(client, PROMPT, 2), 4):
            until(lambda: prometheus.query(was_busy), "there is load enough for both", LONG_S)
            assert not {*alerts} & firing(prometheus)
        other = repeating(lambda: answer(client, new_prompt(), 8), 4)
        make(lambda: stack.enter_context(other), prometheus, *alerts)


def test_a_router_gets_more_than_a_core_computes(
    client: httpx.Client, watch: Callable[..., Any]
) -> None:
    numbers = itertools.count()

    def tokenize() -> None:
        prompt = f"{next(numbers)}. {TEXT * 150}"
        client.post("/tokenize", json={"model": MODEL, "prompt": prompt}).raise_for_status()

    with watch(windows=WINDOWS) as prometheus, contextlib.ExitStack() as stack:
        load = repeating(tokenize, 8)
        make(lambda: stack.enter_context(load), prometheus, "UllageRouterSaturated")


def test_a_rank_is_killed(
    service: Service, client: httpx.Client, watch: Callable[..., Any]
) -> None:
    rank = process_of(service, "ullage_engine.worker.rank_process")
    with repeating(functools.partial(answer, client, PROMPT, 64), 2), watch() as prometheus:
        make(rank.kill, prometheus, "UllageCollectiveErrors")


def test_weights_are_damaged_under_a_worker_and_before_the_next(
    service: Service, client: httpx.Client, weights: Path, watch: Callable[..., Any]
) -> None:
    [prepared] = weights.glob("*.weights")

    def damage() -> None:
        lose_weights(prepared)
        assert ask(client, PROMPT, 4) == 500

    with watch() as prometheus:
        make(damage, prometheus, "UllageNonFiniteLogits")
        worker = process_of(service, "ullage_engine.worker.main")
        make(worker.kill, prometheus, "UllageStartProofFailures")
