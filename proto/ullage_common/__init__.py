"""Code that the operator, the router and engines share.

This package depends on the generated protobuf code, and on none of the packages that use it.
"""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """Return the installed version of Ullage, or "unknown" if its sources run uninstalled.

    The version is only shown to people: in `--version`, traces, labels and image tags.
    """
    try:
        return installed_version("ullage")
    except PackageNotFoundError:
        return "unknown"
