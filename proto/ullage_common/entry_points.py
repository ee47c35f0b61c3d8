"""The programs that the wheel installs.

Each program needs the packages of one extra. If the wheel was installed without this extra, the
program exits with a one-line error that names the extra.
"""

import importlib
import sys
from importlib.util import find_spec

OWN_PACKAGES = {
    "cli": ("kopf", "rich", "httpx", "tqdm"),
    "operator": ("kopf", "kubernetes", "aiohttp"),
    "router": ("sortedcontainers", "uvicorn", "wsproto", "tokenizers", "jinja2"),
    "engine": ("torch", "safetensors", "tokenizers", "jinja2", "psutil", "setproctitle", "zmq"),
}
"""Packages that each extra installs and that the extra's program requires."""


def command() -> int:
    """Run `ullage`."""
    return _run("ullage", "ullage_cli.main", "cli")


def operator() -> int:
    """Run `ullage-operator`."""
    return _run("ullage-operator", "ullage_operator.main", "operator")


def router() -> int:
    """Run `ullage-router`."""
    return _run("ullage-router", "ullage_router.main", "router")


def engine() -> int:
    """Run `ullage-engine`."""
    return _run("ullage-engine", "ullage_engine.main", "engine")


def missing_extra(extra: str) -> str | None:
    """Return an error message if one of the extra's packages is not installed, or else None.

    The message names the package and the command that installs the extra.
    """
    missing = next((name for name in OWN_PACKAGES[extra] if find_spec(name) is None), None)
    if missing is None:
        return None
    return f"the package {missing} is missing; pip install 'ullage[{extra}]'"


def _run(program: str, module: str, extra: str) -> int:
    """Run the module's `main`, and return the exit status of the process."""
    if error := missing_extra(extra):
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    status: int = importlib.import_module(module).main()
    return status
