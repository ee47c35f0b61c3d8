"""Formats a load test's report as terminal lines, JSON, a Markdown table or an SVG picture."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

import msgspec

from ullage_bench.levels import Level, Objectives, ServingCost

HEADS = ("load", "req/s", "tok/s", "TTFT p50", "p95", "per token", "E2E p50", "p95", "refused")
WIDTHS = (6, 8, 9, 9, 8, 10, 8, 8, 8)
WIDTH = 760
HEIGHT = 320
LEFT = 70
RIGHT = 30
TOP = 40
BOTTOM = 50


class Report(msgspec.Struct, frozen=True):
    """The settings and results of a load test."""

    url: str
    model: str
    mode: str
    input_tokens: int
    output_tokens: int
    prefix_tokens: int
    num_engines: int
    """Number of engines that the figures of the knee are divided by."""
    levels: Sequence[Level]
    objectives: Objectives
    knee: Level | None
    """The best load level, or None if no level meets the objectives."""
    cost: ServingCost | None = None
    rate: float | None = None
    """Requests per second for which to calculate the number of engines, or None."""
    engines: int | None = None
    """Number of engines that `rate` needs, or None if no rate was given."""
    regressions: Sequence[str] = ()
    engines_from: str = ""
    """Sentence that says where `num_engines` comes from (empty in reports of version 0.2.0)."""


def head() -> str:
    """Return the header line of the table for a terminal."""
    return " ".join(name.rjust(width) for name, width in zip(HEADS, WIDTHS, strict=True))


def row(level: Level) -> str:
    """Format a load level as a line of the table for a terminal."""
    return " ".join(cell.rjust(width) for cell, width in zip(_cells(level), WIDTHS, strict=True))


def _cells(level: Level) -> Sequence[str]:
    lost = f"{level.refused}" + (f"+{level.failed}!" if level.failed else "")
    return (
        f"{level.load:g}",
        f"{level.requests_per_s:.2f}",
        f"{level.tokens_per_s:.1f}",
        _time(level.ttft_p50),
        _time(level.ttft_p95),
        _time(level.token_p50),
        _time(level.e2e_p50),
        _time(level.e2e_p95),
        lost,
    )


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def conclusions(report: Report) -> Sequence[str]:
    """Return the sentences to print below the table, such as the knee and the cost."""
    if report.knee is None:
        return ["no level of load keeps the objectives; raise them, or send less"]
    level = report.knee
    lines = [
        f"knee: load {level.load:g}, {level.requests_per_s:.2f} requests/s, "
        f"{level.tokens_per_s:.1f} tokens/s, TTFT p95 {_time(level.ttft_p95)}"
    ]
    if report.engines is not None:
        plural = "" if report.engines == 1 else "s"
        lines.append(f"{report.rate:g} requests/s need {report.engines} engine{plural}")
    if report.cost is not None:
        lines.append(
            f"a request costs {report.cost.per_request:.6g}, a million output tokens "
            f"{report.cost.per_million_tokens:.4g}"
        )
    if (report.engines is not None or report.cost is not None) and report.engines_from:
        lines.append(report.engines_from)
    lines += [f"worse than the baseline: {each}" for each in report.regressions]
    return lines


def as_json(report: Report) -> str:
    """Format a report as JSON with a final newline. Limits that are not set become null."""
    return msgspec.json.format(msgspec.json.encode(report)).decode() + "\n"


def read(text: bytes) -> Report:
    """Parse a report from JSON that `as_json` wrote.

    Raises:
        msgspec.ValidationError: the JSON is not a load test's report.
        msgspec.DecodeError: the text is not JSON.
    """
    document = msgspec.json.decode(text)
    if isinstance(document, dict):
        limits = document.get("objectives")
        if isinstance(limits, dict):
            # JSON has no infinity, which is the value of a limit that is off.
            document["objectives"] = {k: v for k, v in limits.items() if v is not None}
    return msgspec.convert(document, Report)


def as_markdown(report: Report) -> str:
    """Format a report as a Markdown table with one row per load level."""
    rows = [HEADS, ("---:",) * len(HEADS), *map(_cells, report.levels)]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
    return table + "".join(f"\n{line}\n" for line in conclusions(report))


def as_svg(report: Report) -> str:
    """Draw throughput against latency as an SVG curve, with the knee marked."""
    levels = [level for level in report.levels if level.requests]
    most_x = max((level.e2e_p50 for level in levels), default=1.0)
    most_y = max((level.requests_per_s for level in levels), default=1.0)

    def place(level: Level) -> tuple[float, float]:
        x = LEFT + level.e2e_p50 / most_x * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - level.requests_per_s / most_y * (HEIGHT - TOP - BOTTOM)
        return x, y

    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, levels))
    body = [
        f'<polyline points="{points}" fill="none" stroke="#3b82c4" stroke-width="2"/>',
        _text(WIDTH / 2, HEIGHT - 12, f"median latency, up to {most_x:.3g} s", "middle"),
        _text(LEFT, TOP - 16, f"requests per second, up to {most_y:.3g}", "start"),
    ]
    for level in levels:
        x, y = place(level)
        is_knee = level == report.knee
        color = "#d9822b" if is_knee else "#3b82c4"
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if is_knee else 3}" fill="{color}"/>')
        body.append(_text(x + 8, y - 8, f"{level.load:g}" + (" knee" if is_knee else ""), "start"))
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join([opening, *body, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#888">{escape(text)}</text>'
