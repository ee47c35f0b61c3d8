"""Draws a frame of `ullage top` as text and tables."""

from datetime import datetime

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ullage_cli.top.frame import EngineRow, Frame, LatestRow, total_headroom

BAR_CELLS = 20
"""Width of a KV pool's bar in characters."""
PLAIN_WIDTH = 140
"""Width of the output in characters if it does not go to a terminal."""
MAX_DECISIONS = 8
MAX_LATEST = 12

ACTION_STYLES = {
    "accept": "green",
    "shrink": "yellow",
    "queue": "magenta",
    "route4": "cyan",
    "reject": "bold red",
}
PARTS = (("used", "blue"), ("committed", "bright_blue"), ("reclaimable", "green"))
"""Uses of KV memory that a bar shows separately, with their colours."""
BLOCKS = "█▓▒░"
"""Characters of a bar: one for each use of memory in PARTS, then one for free memory."""
LETTERS = "#=+."
"""ASCII replacements for BLOCKS, for terminals that cannot print block characters."""


def make_console() -> Console:
    """Return a console as wide as the terminal, or PLAIN_WIDTH columns wide if there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def has_blocks(console: Console) -> bool:
    """Return whether the console can print block characters."""
    return console.encoding.startswith("utf")


def draw(frame: Frame, problem: str, with_blocks: bool) -> Group:
    """Draw a frame as text lines and tables for the console.

    Args:
        frame: the latest frame.
        problem: reason why no newer frame is available (empty if the frame is current).
        with_blocks: whether the terminal can show block characters.
    """
    lines: list[Text | Table] = [_headline(frame)]
    if problem:
        lines.append(Text(f"no answer, retrying: {problem}", style="bold red"))

    lines += [Text(), _engines_table(frame, with_blocks), _legend(with_blocks)]
    lines += [Text(), _queue_line(frame)]
    lines += [Text(), _decisions_table(frame)]
    lines += [Text(), _latest_table(frame.latest)]
    return Group(*lines)


def _headline(frame: Frame) -> Text:
    headroom, pool = total_headroom(frame.engines)
    text = Text.assemble((frame.model, "bold"), "  ")
    text.append("ready" if frame.ready else "not ready", "green" if frame.ready else "bold red")
    text.append(
        f"   {frame.requests_per_s:.1f} requests/s   {frame.tokens_per_s:.1f} tokens/s   "
        f"{frame.inflight} in flight   headroom {_size(headroom)} of {_size(pool)}"
    )
    return text


def _make_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def _legend(with_blocks: bool) -> Text:
    text = Text("KV: ", "dim")
    cells = BLOCKS if with_blocks else LETTERS
    for cell, (name, style) in zip(cells, (*PARTS, ("free", "dim")), strict=True):
        text.append(cell, style).append(f" {name}  ", "dim")
    return text


def _engines_table(frame: Frame, with_blocks: bool) -> Table:
    cells = BLOCKS if with_blocks else LETTERS
    table = _make_table()
    for name in ("engine", "pool", "state", "pressure", "KV"):
        table.add_column(name, no_wrap=True)
    for name in ("headroom", "of", "used", "run", "wait", "tokens/s", "restarts"):
        table.add_column(name, justify="right", no_wrap=True)

    for engine in frame.engines:
        table.add_row(
            engine.id,
            engine.pool if engine.route == engine.pool else f"{engine.pool} {engine.route}",
            Text(engine.state, "green" if engine.state == "ready" else "bold red"),
            Text(str(engine.pressure_level), "yellow" if engine.pressure_level else ""),
            bar(engine, cells) if engine.pool_bytes else Text(engine.trouble, "red"),
            _size(engine.headroom_bytes),
            _size(engine.pool_bytes),
            _size(engine.used_bytes),
            str(engine.running),
            str(engine.waiting),
            f"{engine.tokens_per_s:.1f}",
            str(engine.restarts),
        )

    if not frame.engines:
        table.add_row("no engine has reported yet")
    return table


def bar(engine: EngineRow, cells: str) -> Text:
    """Draw a KV pool as a bar, with at least one character for each part that is not empty."""
    sizes = (engine.used_bytes, engine.committed_bytes, engine.reclaimable_bytes)
    text = Text()
    num_free = BAR_CELLS
    for cell, (_, style), part in zip(cells, PARTS, sizes, strict=False):
        count = min(num_free, max(part > 0, round(BAR_CELLS * part / engine.pool_bytes)))
        text.append(cell * count, style)
        num_free -= count
    return text.append(cells[-1] * num_free, "dim")


def _queue_line(frame: Frame) -> Text:
    text = Text.assemble(
        ("queue ", "bold"), f"{frame.queue_requests} of {frame.queue_max_requests}"
    )
    if frame.queue_requests:
        text.append(f"   {_size(frame.queue_bytes)}   oldest {frame.queue_oldest_s:.1f} s")
    text.append("   ")
    style = ACTION_STYLES["reject"] if frame.refused_per_s else ""
    text.append(f"refused {frame.refused_per_s:.1f}/s", style)
    if waits := frame.retry_after_s:
        text.append(f"   Retry-After {waits[0]} to {waits[1]} s, of the latest")
    return text


def _decisions_table(frame: Frame) -> Table:
    table = _make_table()
    table.add_column("decision")
    table.add_column("reason")
    table.add_column("per second", justify="right")
    table.add_column("total", justify="right")
    for row in frame.decisions[:MAX_DECISIONS]:
        action = Text(row.action, ACTION_STYLES.get(row.action, ""))
        table.add_row(action, row.reason, f"{row.per_s:.1f}", str(row.total))
    if not frame.decisions:
        table.add_row("none yet")
    return table


def _latest_table(rows: tuple[LatestRow, ...]) -> Table:
    table = _make_table()
    for name in ("latest", "decision", "reason", "status", "engine"):
        table.add_column(name, no_wrap=True)
    for name in ("needs", "available", "queued", "first token"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("request", no_wrap=True, overflow="ellipsis")

    for row in rows[:MAX_LATEST]:
        retry = f" retry {row.retry_after_s} s" if row.retry_after_s is not None else ""
        table.add_row(
            datetime.fromtimestamp(row.arrived).strftime("%H:%M:%S"),
            Text(row.action or "-", ACTION_STYLES.get(row.action, "")),
            row.reason,
            f"{row.status}{retry}",
            row.engine or row.route,
            _size(row.predicted_bytes),
            _size(row.available_bytes and max(0, row.available_bytes)),
            f"{row.queued_s:.2f} s" if row.queued_s else "",
            f"{row.ttft_s:.2f} s" if row.ttft_s is not None else "",
            row.request_id,
        )
    return table


def _size(count: int | None) -> str:
    """Format a number of bytes with a binary unit (empty for None)."""
    if count is None:
        return ""
    number = float(count)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number = number / 1024
        units = units[1:]
    return (
        f"{number:.0f} {units[0]}"
        if number >= 100 or units[0] == "B"
        else f"{number:.1f} {units[0]}"
    )
