"""The table of a run: one line a part, and one for each figure that was judged or failed."""

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.programme import PARTS

Rows = Sequence[dict[str, Any]]


def markdown(rows: Rows) -> str:
    """Return the table in Markdown, of the last run of each part."""
    lines = ["| part | result | s | figures |", "|---|---|---|---|"]
    for part in PARTS:
        run = last_run(rows, part.name)
        if not run:
            continue
        end = run[-1] if "ended" in run[-1] else {"ended": "cut", "seconds": 0, "message": ""}
        judged = [describe(row) for row in run if row.get("aim") is not None]
        shown = "; ".join(filter(None, [*judged, end["message"]])) or "-"
        lines.append(f"| {part.name} | {end['ended']} | {end['seconds']:.0f} | {shown} |")
    return "\n".join(lines)


def last_run(rows: Rows, part: str) -> Rows:
    """Return the lines of a part's last run, which ends with how it ended or was cut."""
    own = [row for row in rows if row["part"] == part]
    ended = [place for place, row in enumerate(own) if "ended" in row]
    if not ended or ended[-1] < len(own) - 1:
        return own[ended[-1] + 1 :] if ended else own
    begins = ended[-2] + 1 if len(ended) > 1 else 0
    return own[begins:]


def describe(row: dict[str, Any]) -> str:
    """Return one judged figure as text, failures in bold."""
    sign = "≤" if row["is_limit"] else "≥"
    text = f"{row['figure']} {row['value']:.4g} {row['unit']} ({sign} {row['aim']:g})"
    text = " ".join(text.split())
    return text if row["passes"] else f"**{text}**"
