"""Code shared by the operator, the router and engines.

This package depends on the generated protobuf code, but on none of the packages that import it.
"""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """Return the installed version of Ullage, or "unknown" if it is not installed.

    The version is for display only: in `--version`, traces, labels and image tags.
    """
    try:
        return installed_version("ullage")
    except PackageNotFoundError:
        return "unknown"
