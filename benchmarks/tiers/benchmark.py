"""Measure the value of KV tiers: bandwidth, time to first token by tier, and overhead.

store     Measure put_batch and get_batch of the host tier next to memcpy (numpy's copyto with the
          same sizes between the same kinds of memory), with one thread and with several. Measure
          saves and loads of the file tier next to fio with the same folder, block size, number of
          threads and O_DIRECT. Both take turns within each round, so the ratios hold even if
          absolute figures depend on the machine's load. Each ratio is the median of its rounds.
engine    Send the same prompts in turn to three services with SmolLM2: without tiers, with a host
          tier, and with files below a small host tier. Report the time to first token and between
          tokens for prompts that are cold, on the device, in host memory, in files, or recomputed,
          with hits and bytes. Then compare the texts of deterministic services, which must be
          equal to the last token. If an answer did not come from the tier of its row, the
          benchmark ends.
vllm      Start vLLM's own offloading to host memory, and report whether it runs on this machine.

limits: the host tier reaches 80 % of memcpy's bandwidth, and the file tier 80 % of fio's. The first
token comes from host memory within 1/5, and from files within 1/3, of the time for recomputing.
Tokens come at most 3 % slower with tiers. The exit status is 1 if a limit is missed. With --quick,
it is 1 only if texts differ.

examples:
  python -m benchmarks tiers --json tiers.json --plot docs/reasons/kv-tiers.svg   on a quiet machine
  python -m benchmarks tiers --quick                                         does it work?
  python -m benchmarks tiers --only store --path /mnt/nvme --size-mib 8192   three times as memory
  python -m benchmarks tiers --only store --block-kib 128 --threads 4
  python -m benchmarks tiers --only vllm --vllm .venv-vllm/bin/python
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.support.machine import machine
from benchmarks.support.options import new_parser
from benchmarks.support.plots import draw_bars
from benchmarks.tiers.engine import measure_engine, print_engine
from benchmarks.tiers.offloading import measure_vllm
from benchmarks.tiers.store import measure_store, print_store

PARTS = ("store", "engine", "vllm")
VLLM = Path(__file__).resolve().parents[2] / ".venv-vllm/bin/python"


def plot(rows: dict[str, dict[str, float]], path: Path) -> None:
    """Plot the rows of the part `engine` as bars."""
    panels = [
        (f"{title}, ms", {where: row[name] for where, row in rows.items()})
        for title, name in (
            ("first token, p50", "ttft_p50_ms"),
            ("first token, p99", "ttft_p99_ms"),
            ("between tokens, p50", "inter_token_p50_ms"),
        )
    ]
    draw_bars(path, panels)


def parse() -> argparse.Namespace:
    parser = new_parser("tiers", __doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--quick", action="store_true", help="a small, brief run that judges no floors"
    )
    parser.add_argument(
        "--path",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder of the file tier and of fio",
    )
    parser.add_argument("--block-kib", type=int, default=720, help="size of a block")
    parser.add_argument("--size-mib", type=int, default=512, help="size of all blocks together")
    parser.add_argument("--threads", type=int, default=2, help="most threads of the host tier")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--prompt-tokens", type=int, default=4096, help="tokens of a prompt's prefix"
    )
    parser.add_argument("--vllm", type=Path, default=VLLM, help="python that has vLLM")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="draw the engine's figures as SVG")

    options = parser.parse_args()
    if options.quick:
        options.size_mib = 64
        options.rounds = 1
        options.prompt_tokens = 512
    return options


def main() -> int:
    options = parse()
    result: dict[str, Any] = {"machine": machine()}
    print(result["machine"])

    is_well = True

    if "store" in options.only:
        print(f"blocks of {options.block_kib} KiB, {options.size_mib} MiB, {options.path}")
        comparisons = measure_store(options)
        is_well &= print_store(comparisons)
        result["store"] = [{**asdict(each), "ratio": each.ratio} for each in comparisons]

    if "engine" in options.only:
        engine = measure_engine(options.prompt_tokens, options.rounds)
        is_well &= print_engine(engine)
        result["engine"] = engine
        if options.plot:
            plot(engine["rows"], options.plot)

    if "vllm" in options.only:
        result["vllm"] = measure_vllm(options.vllm)
        print("vLLM's own offloading to host memory: {outcome}: {detail}".format(**result["vllm"]))

    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    if options.quick:
        equal, total = result.get("engine", {}).get("equal_texts", (0, 0))
        return int(equal != total)
    return int(not is_well)
