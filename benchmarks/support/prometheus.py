"""Runs a Prometheus on loopback, with its data in a temporary folder."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.processes import end, free_ports

READY_S = 60.0


def find() -> str | None:
    """Find Prometheus's executable: in ULLAGE_PROMETHEUS, next to python, or on PATH."""
    beside = Path(sys.prefix, "bin", "prometheus")
    binary = os.environ.get("ULLAGE_PROMETHEUS") or (str(beside) if beside.exists() else None)
    return binary or shutil.which("prometheus")


class Prometheus:
    """A client of a running Prometheus.

    Args:
        url: URL of the Prometheus server.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an API response.

        Raises:
            ValueError: the API returned an error. The message is the response body.
        """
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from None

    def query(self, text: str) -> list[dict[str, Any]]:
        """Return the time series in the result of an instant query."""
        samples: list[dict[str, Any]] = self.get("query", query=text)["result"]
        return samples


@contextlib.contextmanager
def running(
    program: str,
    folder: Path,
    jobs: Sequence[dict[str, Any]],
    groups: Sequence[dict[str, Any]],
    seconds: float = 1.0,
) -> Iterator[Prometheus]:
    """Run a Prometheus until the block ends.

    Args:
        program: path of the Prometheus executable.
        folder: empty folder for Prometheus's configuration, log and data.
        jobs: entries for `scrape_configs`.
        groups: rule groups, which are all evaluated at the scrape interval.
        seconds: scrape interval in seconds.
    """
    often = [{name: each for name, each in group.items() if name != "interval"} for group in groups]
    (folder / "rules.json").write_text(json.dumps({"groups": often}))

    interval = f"{round(1000 * seconds)}ms"
    config = {
        "global": {
            **dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), interval)
        },
        "rule_files": ["rules.json"],
        "scrape_configs": list(jobs),
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML

    command = [program, f"--config.file={folder / 'prometheus.yml'}", "--log.level=warn"]
    command += [f"--storage.tsdb.path={folder / 'data'}"]
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command += [f"--web.listen-address={address}"]

    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

    try:
        _wait_ready(process, f"http://{address}", folder / "log")
        yield Prometheus(f"http://{address}")
    finally:
        end(process)


def _wait_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=5):
            return
        time.sleep(0.05)
    raise RuntimeError(f"Prometheus does not become ready:\n{log.read_text()[-2000:]}")
