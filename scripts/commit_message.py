#!/usr/bin/env python3
"""Check a commit message: the subject `room: verb object`, and a body that explains why.

usage: commit_message.py FILE

The script exits with 1 and prints one line for each fault. Merges and reverts always pass, because
git writes their subjects.

example: commit_message.py .git/COMMIT_EDITMSG
"""

import re
import sys
from pathlib import Path

MAX_SUBJECT = 72
_SUBJECT = re.compile(r"[a-z][\w/-]*: [a-z0-9`]")
_BY_GIT = ("Merge ", 'Revert "', "fixup! ", "squash! ")


def faults(message: str) -> list[str]:
    """Return the faults of a message from which git has not yet removed the comments."""
    lines = [line.rstrip() for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(_BY_GIT):
        return []

    found = list[str]()
    if not _SUBJECT.match(subject):
        found.append(f"subject {subject!r} is not `room: verb object`, as in `router: log once`")
    if len(subject) > MAX_SUBJECT:
        found.append(f"subject has {len(subject)} characters; at most {MAX_SUBJECT}")
    if subject.endswith("."):
        found.append("subject ends with a full stop; leave it out")
    if len(lines) > 1 and lines[1]:
        found.append("line 2 is not empty; leave a blank line after the subject")
    if not any(lines[2:]):
        found.append("there is no body; say why the change is made")
    return found


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    found = faults(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for fault in found:
        print(f"commit message: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
