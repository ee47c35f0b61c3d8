"""`ullage models` shows the memory that models need, by format and length, before a download."""

import argparse
import json
import sys

import msgspec
from rich.console import Console
from rich.table import Table

from ullage_cli.serve.command import local_source, tensor_counts
from ullage_cli.serve.decide import ServeMachine, ServeOptions, budget_of, preferred_forms
from ullage_cli.serve.fit import Budget, choose_fit
from ullage_cli.sizes import compute_sizes, readable
from ullage_common.model_sizes import (
    QUANTIZATIONS,
    GpuMemory,
    ModelSizes,
    SizesReport,
    SizesRequest,
    SourceSizes,
)
from ullage_common.process.cores import usable_cores
from ullage_common.process.memory import usable_bytes
from ullage_operator.api.quantities import parse_bytes

LENGTHS = (8192, 32_768)
"""Lengths of requests whose KV the table shows, in tokens."""

PIPE_COLUMNS = 200
"""Width of the table in characters if no terminal shows it."""

HELP = """examples:
  ullage models                                  well-known models, on this machine
  ullage models --memory 24Gi --device cuda      on a GPU with 24 GiB
  ullage models Qwen/Qwen3-8B ./model.gguf       these models
  ullage models --json | jq '.models[] | select(.fits.quantization == "auto") | .name'

The columns of formats are bytes of weights, which the engine's own loader computes from each
model's published configuration, or from its files. KV is that of one request. Serves is the
format and the longest request that ullage serve would choose. Of a hub's model, only
config.json is fetched.

exit status: 0 shown, 1 a given source cannot be read
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage models`."""
    parser = commands.add_parser(
        "models",
        help="show which models fit, by format and length",
        description="Show the memory that models need, and which of them a machine can serve.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sources", nargs="*", metavar="SOURCE", help="models (default: well-known ones)"
    )
    parser.add_argument("--memory", type=_memory, metavar="SIZE", help="memory, such as 24Gi")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device whose memory is used (auto)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def _memory(text: str) -> int:
    """Parse a size. argparse shows this function's message."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> int:
    """Print the table or JSON, and return the exit status."""
    sources = tuple(local_source(text) for text in options.sources)
    request = SizesRequest(
        sources=sources,
        has_catalogue=not sources,
        device=options.device,
        tensors=tensor_counts(options.device),
    )
    report = compute_sizes(request)
    budget = budget_of(machine_of(report, options.memory), ServeOptions(source=""))

    if options.json:
        json.dump(as_json(report, budget), sys.stdout, indent=2)
        print()
    else:
        print_table(report, budget)
    for model in report.models:
        if model.error:
            print(f"error: {model.name}: {model.error}", file=sys.stderr)
    return 1 if any(model.error for model in report.models) else 0


def machine_of(report: SizesReport, memory: int | None) -> ServeMachine:
    """Return the machine that the report describes, or one with the given memory instead.

    Args:
        report: the sizes, with what the engine found on this machine.
        memory: bytes of memory of a CPU or of one GPU, or None for those of this machine.
    """
    facts = report.machine
    if memory is not None and facts.device == "cuda":
        gpu = GpuMemory(name="--memory", total_bytes=memory, free_bytes=memory)
        facts = msgspec.structs.replace(facts, gpus=(gpu,))
    return ServeMachine(
        facts=facts,
        memory_bytes=usable_bytes() if memory is None else memory,
        cores=usable_cores(),
    )


def as_json(report: SizesReport, budget: Budget) -> dict[str, object]:
    """Return the report as JSON, with the format that fits for each model."""
    return {
        "device": report.machine.device,
        "memory_bytes": budget.device_bytes,
        "usable_bytes": budget.rank_bytes(1),
        "models": [
            msgspec.to_builtins(model) | {"fits": _fits(model, budget)} for model in report.models
        ],
    }


def _fits(model: SourceSizes, budget: Budget) -> dict[str, object] | None:
    if model.sizes is None:
        return None
    forms = preferred_forms(model.sizes, "cpu" if budget.is_cpu else "cuda")
    fit = choose_fit(forms, budget, None)
    if fit is None:
        return None
    return {
        "quantization": fit.form.quantization,
        "max_model_len": fit.length.tokens,
        "kv_bytes": fit.kv_room,
        "ranks": fit.ranks,
    }


def print_table(report: SizesReport, budget: Budget) -> None:
    """Print a table with a row for each model."""
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else PIPE_COLUMNS)
    where = "memory" if budget.is_cpu else "GPU memory"
    console.print(
        f"{readable(budget.device_bytes)} of {where}, and an engine may use "
        f"{readable(max(0, budget.rank_bytes(1)))} of it"
    )

    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for name in ("parameters", *QUANTIZATIONS, *(f"KV {tokens // 1024}k" for tokens in LENGTHS)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("serves", no_wrap=True)
    for model in report.models:
        if model.sizes is not None:
            table.add_row(model.name, *_cells(model.sizes), _served(model, budget))
    console.print(table, soft_wrap=True)


def _cells(sizes: ModelSizes) -> list[str]:
    fewest = [form for form in sizes.forms if form.tensor == sizes.forms[0].tensor]
    weights = [readable(form.weights_bytes) if form.lengths else "-" for form in fewest]
    first = next(form for form in sizes.forms if form.lengths)
    kv = {length.tokens: readable(length.kv_bytes) for length in first.lengths}
    return [_count(sizes.parameters), *weights, *(kv.get(tokens, "-") for tokens in LENGTHS)]


def _served(model: SourceSizes, budget: Budget) -> str:
    fits = _fits(model, budget)
    if fits is None:
        return "does not fit"
    ranks = fits["ranks"]
    where = "" if ranks == 1 else f" on {ranks} GPUs"
    return f"{fits['quantization']}, {fits['max_model_len']} tokens{where}"


def _count(parameters: int) -> str:
    if parameters >= 10**9:
        return f"{parameters / 10**9:.1f}B"
    return f"{parameters / 10**6:.0f}M"
