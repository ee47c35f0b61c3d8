"""Alerts about what a router sees: engines that tests play, and certificates, treat it badly."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from ullage_kubeapi.trial import until
from ullage_testing.alerts import firing, make
from ullage_testing.background_loop import background_loop
from ullage_testing.fake_engine import MODEL, FakeEngine
from ullage_testing.local_service import end
from ullage_testing.ports import free_port

from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.manifests.monitoring import rule_groups

if TYPE_CHECKING:
    from ullage_testing.certificates import Authority

HOST = "127.0.0.1"
NO_ENGINE = "127.0.0.1:1"


@pytest.fixture
def watched(
    observe: Any, manifest: dict[str, Any], tmp_path: Path
) -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """watched(targets, **sections): a router of these engines, and the Prometheus that reads it."""
    meta = manifest["metadata"]
    pod = f"{meta['name']}-router-6c9f8d7b5-x2x4z"
    labels = {"namespace": meta["namespace"], "pod": pod}

    @contextlib.contextmanager
    def start(targets: list[str], **sections: dict[str, Any]) -> Iterator[Any]:
        port = free_port()
        document = {
            "model": MODEL,
            "http": {"host": HOST, "port": 0},
            "grpc": {"host": HOST, "port": 0},
            "metrics": {"host": HOST, "port": port},
            "pools": [{"name": "single", "targets": targets}],
            **sections,
        }
        config = tmp_path / "router.yaml"
        config.write_text(json.dumps(document))
        command = [sys.executable, "-m", "ullage_router.main", "--config", str(config)]
        target = {"targets": [f"{HOST}:{port}"], "labels": labels}
        job = {"job_name": "router", "static_configs": [target], "honor_labels": True}
        groups = rule_groups(parse(manifest), Settings())
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((tmp_path / "log").open("wb"))
            stack.callback(end, subprocess.Popen(command, stderr=log))
            prometheus = stack.enter_context(observe([job], groups))
            until(lambda: prometheus.query("up == 1"), "the router is scraped", 300)
            until(lambda: "UllageServiceAbsent" not in firing(prometheus), "it is seen")
            yield prometheus

    return start


def test_engines_differ_and_their_reports_do_not_come(watched: Callable[..., Any]) -> None:
    with background_loop() as loop:
        engines = [FakeEngine(name, "single", 100, 2000) for name in ("one", "other")]
        for engine in engines:
            loop.run(engine.start())

        async def differ() -> None:
            for number, engine in enumerate(engines):
                engine.set_facts(processor=f"kind {number}")

        async def lose_reports() -> None:
            engines[0].lost_reports += 5
            engines[0].push()

        with watched([engine.address for engine in engines]) as prometheus:
            until(lambda: prometheus.query("ullage_router_engines_ready == 2"), "both are known")
            make(lambda: loop.run(differ()), prometheus, "UllageEnginesDiffer")
            make(lambda: loop.run(lose_reports()), prometheus, "UllageEnginesSilent")
        for engine in engines:
            loop.run(engine.stop())


def test_a_certificate_ends_soon_and_the_next_one_is_damaged(
    watched: Callable[..., Any], make_authority: "Callable[[], Authority]", tmp_path: Path
) -> None:
    folder = make_authority().issue(tmp_path / "tls", "demo-router.test")
    with watched([NO_ENGINE], tls={"router": {"dir": str(folder)}}) as prometheus:
        until(lambda: "UllageCertificateExpires" in firing(prometheus), "it ends within a day")

        def damage() -> None:
            (folder / "tls.crt").write_text("no certificate")

        make(damage, prometheus, "UllageCertificateUnusable")


def test_the_folder_of_files_cannot_be_used_and_then_it_is_full(
    watched: Callable[..., Any], tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.write_text("not a folder")
    port = free_port()
    files = {"dir": str(disk / "files"), "max_files": 2}

    def upload() -> int:
        url = f"http://{HOST}:{port}/v1/files"
        form = {"file": ("notes.txt", b"The harbour keeps a ledger.")}
        answer = httpx.post(url, files=form, data={"purpose": "user_data"}, trust_env=False)
        return answer.status_code

    with watched([NO_ENGINE], http={"host": HOST, "port": port}, files=files) as prometheus:
        until(lambda: "UllageFileStoreClosed" in firing(prometheus), "the folder is missed")
        assert upload() == 503
        disk.unlink()
        until(lambda: "UllageFileStoreClosed" not in firing(prometheus), "the folder is used")

        def fill() -> None:
            assert [upload() for _ in range(3)] == [200, 200, 507]

        make(fill, prometheus, "UllageFileStoreFull")
