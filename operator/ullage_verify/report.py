"""Formats the report of a run as lines for a terminal, JSON, a Markdown table or an SVG picture."""

import json
from collections.abc import Sequence
from xml.sax.saxutils import escape

from ullage_verify.criteria import Criterion
from ullage_verify.run import VerifyReport

MARKS = {"passed": "✓", "failed": "✗", "skipped": "-"}
COLORS = {"passed": "#3f9c5a", "failed": "#c0392b", "skipped": "#888"}
LINE_HEIGHT = 20
WIDTH = 860
SEEN_X = 470
MAX_SEEN_CHARS = 60


def line(criterion: Criterion) -> str:
    """Format a criterion as one line for a terminal."""
    limit = f"  (limit: {criterion.limit})" if criterion.verdict == "failed" else ""
    return f"  {MARKS[criterion.verdict]} {criterion.name}: {criterion.seen}{limit}"


def summary(report: VerifyReport) -> str:
    """Return one line with the number of criteria by verdict."""
    counts = ", ".join(f"{report.count(verdict)} {verdict}" for verdict in MARKS)
    end = "" if report.is_complete else ", interrupted"
    return f"{counts} in {report.seconds:.0f} s{end}"


def as_json(report: VerifyReport) -> str:
    """Format a report as JSON with a final newline."""
    document = {
        "url": report.url,
        "model": report.model,
        "context": report.context,
        "seconds": round(report.seconds, 1),
        "complete": report.is_complete,
        "passed": report.count("passed"),
        "failed": report.count("failed"),
        "skipped": report.count("skipped"),
        "criteria": [criterion.as_json() for criterion in report.criteria],
        "figures": report.figures,
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def as_markdown(report: VerifyReport) -> str:
    """Format a report as a Markdown table with one row per criterion."""
    rows = [
        ("scenario", "criterion", "limit", "seen", ""),
        ("---",) * 5,
        *((c.scenario, c.name, c.limit, c.seen, MARKS[c.verdict]) for c in report.criteria),
    ]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows)


def as_svg(report: VerifyReport) -> str:
    """Draw a report as an SVG picture that is readable on light and dark pages."""
    body = [_text(20, 24, f"{report.model}: {summary(report)}", "#888", "bold")]
    y = 24
    scenario = ""
    for criterion in report.criteria:
        y += LINE_HEIGHT
        if criterion.scenario != scenario:
            scenario = criterion.scenario
            y += LINE_HEIGHT // 2
            body.append(_text(20, y, scenario, "#888", "bold"))
            y += LINE_HEIGHT
        body += _row(criterion, y)

    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + LINE_HEIGHT}" '
        'font-family="sans-serif" font-size="13">'
    )
    return "\n".join([head, *body, "</svg>"]) + "\n"


def _row(criterion: Criterion, y: int) -> Sequence[str]:
    color = COLORS[criterion.verdict]
    seen = criterion.seen[:MAX_SEEN_CHARS]
    return [
        _text(28, y, MARKS[criterion.verdict], color, "bold"),
        _text(48, y, criterion.name, "#888"),
        _text(SEEN_X, y, f"{seen}   {criterion.limit}".rstrip(), color),
    ]


def _text(x: int, y: int, text: str, color: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" font-weight="{weight}">{escape(text)}</text>'
