"""The programs that the wheel installs.

Each program needs the packages of one extra. A wheel that was installed without it says so in one
line.
"""

import importlib
import sys


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


def _run(program: str, module: str, extra: str) -> int:
    """Run the module's `main`, and return the status of the process."""
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        print(
            f"{program}: the package {missing} is missing; pip install 'ullage[{extra}]'",
            file=sys.stderr,
        )
        return 1
    status: int = main()
    return status
