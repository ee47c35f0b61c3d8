"""Draws figures of benchmarks as SVG lines or bars, readable on light and dark pages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from xml.sax.saxutils import escape

COLORS = ("#3b82c4", "#d9822b", "#3f9c5a", "#a05cc0")
WIDTH = 760
HEIGHT = 150
LEFT = 60
RIGHT = 20
TOP = 34
GAP = 44
BARS_LEFT = 110
MOST_POINTS = 400


@dataclass(frozen=True)
class Line:
    name: str
    values: Sequence[float]


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]
    xs: Sequence[float] = ()
    """Positions of this panel (empty to use the positions that all panels share)."""
    unit: str = ""
    """Unit of the positions of this panel."""


def draw(path: Path, unit: str, xs: Sequence[float], panels: Sequence[Panel]) -> None:
    """Draw panels of lines below one another.

    The panels share the increasing positions `xs`, or each panel has separate positions.
    """
    body: list[str] = []
    top = TOP
    for panel in panels:
        body += _panel(panel, panel.xs or xs, top)
        top += HEIGHT
        if panel.xs:
            body += _positions(panel.xs, panel.unit, top)
            top += GAP
        top += GAP
    if xs:
        body += _positions(xs, unit, top - GAP)
    _write(path, top - GAP + 40 * bool(xs), body)


def _positions(xs: Sequence[float], unit: str, top: float) -> list[str]:
    body = [_text(WIDTH / 2, top + 32, unit, "middle")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        body.append(_text(x, top + 16, f"{share * xs[-1]:.5g}", "middle"))
    return body


def _panel(panel: Panel, xs: Sequence[float], top: float) -> list[str]:
    most = max((max(line.values) for line in panel.lines), default=0.0) or 1.0
    body = [_text(LEFT, top - 8, panel.title, "start")]

    for share in (0.0, 0.5, 1.0):
        y = top + (1 - share) * HEIGHT
        body.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="#888" stroke-opacity="0.4"/>'
        )
        body.append(_text(LEFT - 6, y + 4, f"{share * most:.4g}", "end"))

    end = WIDTH - RIGHT
    for line, color in reversed(list(zip(panel.lines, COLORS, strict=False))):
        body.append(_text(end, top - 8, line.name, "end", color))
        end -= 8 * len(line.name) + 12
        step = -(-len(xs) // MOST_POINTS)
        points = " ".join(
            f"{LEFT + x / xs[-1] * (WIDTH - LEFT - RIGHT):.1f},{top + (1 - y / most) * HEIGHT:.1f}"
            for x, y in zip(xs[::step], line.values[::step], strict=True)
        )
        stroke = f'fill="none" stroke="{color}" stroke-width="1.5"'
        body.append(f'<polyline points="{points}" {stroke}/>')
    return body


def draw_bars(path: Path, panels: Sequence[tuple[str, Mapping[str, float]]]) -> None:
    """Draw panels of named bars below one another. Each panel has a separate scale from 0."""
    body: list[str] = []
    top = float(TOP)
    for title, bars in panels:
        body.append(_text(BARS_LEFT, top - 8, title, "start"))

        most = max(bars.values(), default=0.0) or 1.0
        for (name, value), color in zip(bars.items(), cycle(COLORS), strict=False):
            width = value / most * (WIDTH - BARS_LEFT - 3 * RIGHT)
            body.append(
                f'<rect x="{BARS_LEFT}" y="{top}" width="{width:.1f}" height="16" fill="{color}"/>'
            )
            body.append(_text(BARS_LEFT - 6, top + 13, name, "end"))
            body.append(_text(BARS_LEFT + width + 6, top + 13, f"{value:.4g}", "start"))
            top += 22
        top += GAP - 6

    _write(path, top - GAP + 20, body)


def _text(x: float, y: float, text: str, anchor: str, color: str = "#888") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
    )


def _write(path: Path, height: float, body: Sequence[str]) -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        'font-family="sans-serif" font-size="12">'
    )
    path.write_text("\n".join([head, *body, "</svg>"]) + "\n", encoding="utf-8")
