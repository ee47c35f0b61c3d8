"""The table of a run, with a line for each part and for each figure that was judged or failed."""

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.programme import NOT_RUN, PARTS

Rows = Sequence[dict[str, Any]]


def markdown(rows: Rows) -> str:
    """Return a Markdown table of the last run of each part."""
    lines = ["| part | result | s | figures |", "|---|---|---|---|"]
    for part in PARTS:
        run = last_run(rows, part.name)
        if not run:
            continue
        end = run[-1] if "ended" in run[-1] else {"ended": "cut", "seconds": 0, "message": ""}
        result = f"{end['ended']}, tiny" if end.get("tiny") else end["ended"]
        judged = [describe(row) for row in run if row.get("aim") is not None]
        shown = "; ".join(filter(None, [*judged, end["message"]])) or "-"
        shown = shown.replace("|", "\\|")
        lines.append(f"| {part.name} | {result} | {end['seconds']:.0f} | {shown} |")
    return "\n".join(lines)


def last_run(rows: Rows, part: str) -> Rows:
    """Return the lines of a part's last run, and how it ended. An interrupted run has no end."""
    own = [row for row in rows if row["part"] == part]
    # A call that had no time for a part does not replace an earlier run.
    own = [row for row in own if row.get("ended") != NOT_RUN] or own[-1:]
    begins = [place for place, row in enumerate(own) if "began" in row]
    return own[begins[-1] :] if begins else own


def describe(row: dict[str, Any]) -> str:
    """Format a judged figure as text, in bold if it failed."""
    sign = "≤" if row["is_limit"] else "≥"
    text = f"{row['figure']} {row['value']:.4g} {row['unit']} ({sign} {row['aim']:g})"
    text = " ".join(text.split())
    return text if row["passes"] else f"**{text}**"
