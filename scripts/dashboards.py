"""Write the chart's Grafana dashboards from scripts/ullage_dashboards.

usage: python scripts/dashboards.py [--check]

With --check, only compare the files.
"""

import sys
from pathlib import Path

from ullage_dashboards.engines import ENGINE, TIERS
from ullage_dashboards.gpus import GPU
from ullage_dashboards.grafana import render
from ullage_dashboards.services import FLEET, OPERATOR, ROUTER

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "charts" / "ullage" / "files" / "dashboards"
DASHBOARDS = (FLEET, ENGINE, ROUTER, GPU, TIERS, OPERATOR)


def main() -> int:
    generated = {FOLDER / f"{each.uid}.json": render(each) for each in DASHBOARDS}
    there = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}

    if "--check" in sys.argv[1:]:
        if generated == there:
            return 0
        wrong = [
            path.name for path in {*generated, *there} if generated.get(path) != there.get(path)
        ]
        names = ", ".join(sorted(wrong))
        print(
            f"out of date in {FOLDER.relative_to(ROOT)}: {names}; run python scripts/dashboards.py"
        )
        return 1

    for path in there.keys() - generated.keys():
        path.unlink()
    for path, text in generated.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
