"""Runs a client's program against a service, and reads its results."""

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ullage_clients.catalogue import ClientKind, JudgedClient
from ullage_clients.environments import Environments, NotInstalled, packages
from ullage_clients.results import Result, judge, parse_line

PROGRAMS = Path(__file__).parent / "programs"
KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPYCACHEPREFIX")
"""Variables that a program keeps. Others could name a proxy, another server or its key."""
API_KEY = "none"
"""The SDKs refuse to start without a key. A service without tenants reads none."""


@dataclass(frozen=True)
class Service:
    """A ready service.

    url
        of its HTTP API, without a path
    model
        name of the served model
    context
        the longest prompt and answer together, in tokens
    tokenizer
        folder with the model's tokenizer.json, for load generators that count tokens themselves
    server_version
        version of another project's server (empty for Ullage)
    """

    url: str
    model: str
    context: int
    tokenizer: Path
    server_version: str = ""


def judge_client(client: JudgedClient, environments: Environments, service: Service) -> Result:
    """Judge one client. Each check is printed as soon as its result is there."""
    pins = packages(client)
    try:
        command = environments.command(client)
    except NotInstalled as error:
        print(f"{client.name}: not installed: {error}", flush=True)
        return Result(client.version, pins, service.server_version, not_installed=str(error))

    home = environments.home(client)
    work = home / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    program = program_path(client, home)
    log = work / "log"
    shown = log.relative_to(home.parents[1])

    lines: list[str] = []
    with (
        log.open("w", encoding="utf-8") as output,
        subprocess.Popen(
            [*command, str(program)],
            env=variables(os.environ, service, work),
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        timer = threading.Timer(client.timeout_s, kill, [process.pid])
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                show(client, line)
                if not parse_line(line):
                    output.write(line)
            status = process.wait()
        finally:
            timer.cancel()
            # A client may have started processes of its own.
            kill(process.pid)

    ending = f"exited with {status}; see {shown}"
    if status == -signal.SIGKILL:
        ending = f"was killed, at most {client.timeout_s:.0f} s after its start; see {shown}"
    checks = judge(client, lines, ending)
    return Result(environments.version(client), pins, service.server_version, checks=checks)


def show(client: JudgedClient, line: str) -> None:
    """Print the check that a line of a program states."""
    if parsed := parse_line(line):
        name, check = parsed
        print(
            f"{client.name}: {name}: {'passed' if check.passed else 'FAILED'} ({check.seen})",
            flush=True,
        )


def program_path(client: JudgedClient, home: Path) -> Path:
    """Return the path of a client's program. Node finds packages beside the program only."""
    if client.kind != ClientKind.NODE:
        return PROGRAMS / client.program
    for name in (client.program, "checks.mjs"):
        shutil.copyfile(PROGRAMS / name, home / name)
    return home / client.program


def variables(given: Mapping[str, str], service: Service, work: Path) -> dict[str, str]:
    """Return the environment of a program: the SDKs' own variables, and facts of the service."""
    kept = {name: given[name] for name in KEPT if name in given}
    return kept | {
        "HOME": str(work),
        "TMPDIR": str(work),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "OPENAI_BASE_URL": f"{service.url}/v1",
        "OPENAI_API_KEY": API_KEY,
        "ANTHROPIC_BASE_URL": service.url,
        "ANTHROPIC_API_KEY": API_KEY,
        "SERVICE_URL": service.url,
        "SERVICE_MODEL": service.model,
        "SERVICE_CONTEXT": str(service.context),
        "SERVICE_TOKENIZER": str(service.tokenizer),
    }


def kill(group: int) -> None:
    """Kill a program and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
