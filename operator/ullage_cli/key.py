"""`ullage key` generates API keys for tenants."""

import argparse
from pathlib import Path

from ullage_common.process.api_keys import TENANT_NAME, entry, new_key
from ullage_operator.api.errors import LocalFailure

HELP = """examples:
  ullage key new alice                          print a key and its entry for the Secret
  ullage key new alice --into secrets/my-keys   also add the entry to that folder (ullage up)
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage key`."""
    parser = commands.add_parser(
        "key",
        help="make an API key",
        description="Make API keys for the tenants of a service (spec.tenants).",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="print a new key and its entry")
    new.add_argument("tenant", metavar="TENANT", help="tenant, and its key in the Secret")
    new.add_argument("--into", type=Path, metavar="DIR", help="add the entry to DIR/TENANT")
    new.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a new API key and its hashed entry for the tenants' Secret.

    Raises:
        LocalFailure: the tenant's name is not valid, or the entry cannot be written.
    """
    name = options.tenant
    key = new_key()
    if not TENANT_NAME.fullmatch(name):
        raise LocalFailure(
            f"TENANT {name!r}: use at most 63 lower-case letters, digits, '-', '_' and '.'"
        )

    if options.into:
        _add_entry(options.into / name, entry(key))
    print(f"key    {key}")
    print(f"entry  {entry(key)}")
    print(f"\nGive the key only to {name}. It is stored nowhere. Add the entry to {name}'s")
    print("key in the Secret of spec.tenants.secretName. See docs/guide/tenants.md.")
    return 0


def _add_entry(path: Path, line: str) -> None:
    """Append an entry to a tenant's key file. The tenant's earlier keys remain valid."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        gap = "\n" if old and not old.endswith("\n") else ""
        path.write_text(f"{old}{gap}{line}\n", encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LocalFailure(f"--into {path.parent}: {error}; choose another folder") from error
