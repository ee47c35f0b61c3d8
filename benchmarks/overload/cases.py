"""Measures figures of the requirements on real engines, all in one sitting."""

import asyncio
import json
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.overload import large, peak, prefill, pressure, returning
from benchmarks.overload.rounds import Verdict, progress
from benchmarks.support.machine import machine

Case = Callable[[Path, int, float], Coroutine[Any, Any, list[Verdict]]]

CASES: dict[str, tuple[Case, int]] = {
    "pressure": (pressure.measure, 5),
    "peak": (peak.measure, 3),
    "large": (large.measure, 2),
    "returning": (returning.measure, 2),
    "prefill": (prefill.measure, 4),
}
"""Every case, with its default number of rounds."""


def measure(
    names: Sequence[str], rounds: int | None, patience_s: float, json_path: Path | None
) -> int:
    """Measure the cases in turn, print their figures, and return the exit status.

    Args:
        names: names of the cases.
        rounds: number of rounds of each case, or None for the case's own number.
        patience_s: most seconds to wait for a quiet machine before each measurement.
        json_path: file for the verdicts, written after each case, or None.
    """
    results: dict[str, Any] = {"machine": machine()}
    print(results["machine"], flush=True)
    is_well = True
    for name in names:
        run, own_rounds = CASES[name]
        progress(f"case {name}")
        with tempfile.TemporaryDirectory(prefix="ullage-overload-") as folder:
            verdicts = asyncio.run(run(Path(folder), rounds or own_rounds, patience_s))
        for verdict in verdicts:
            verdict.show()
        is_well &= all(verdict.is_met for verdict in verdicts)
        results[name] = [asdict(verdict) for verdict in verdicts]
        if json_path:
            json_path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(not is_well)
