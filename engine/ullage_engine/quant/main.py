"""`python -m ullage_engine.quant.main`: quantises a model; `ullage quantize` runs it."""

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from ullage_engine.cores import usable_cores
from ullage_engine.quant.convert import Conversion, Progress, convert
from ullage_engine.tokenizer import TokenizerError
from ullage_engine.weights.errors import WeightsError

EXAMPLES = """\
examples:
  ullage quantize --model hf://org/name@main --format int8 --output ./name-int8
  ullage quantize --model file:///models/name --format w8a8 --calibrate text.txt --output ./w8a8
  ullage quantize --model pvc://models/name --format int4 --output /models/name-int4

Serve the result with model.source: file:///... and model.quantization: none.
w8a8 needs a text of the kind that the model is used for; 16,384 tokens of it are read.
exit status: 0 written, 2 wrong model, text or folder, 130 and 143 interrupted
"""

_REPORT_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the conversion; the exit status."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads or usable_cores())
    conversion = Conversion(
        model=options.model,
        format=options.format,
        output=options.output,
        text=options.calibrate,
        alpha=options.alpha,
    )
    try:
        with ended_by_exit():
            nbytes = convert(conversion, reporter())
    except KeyboardInterrupt:
        return 130
    except (WeightsError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {nbytes / 2**20:.0f} MiB of weights to {options.output}")
    return 0


@contextmanager
def ended_by_exit() -> Iterator[None]:
    """Turns SIGTERM into an exit that removes what is half written."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def reporter() -> Progress:
    """Prints how far each stage is, at most once in a second."""
    last = 0.0

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _REPORT_S:
            last = time.monotonic()
            print(f"{stage} {done} of {total}", file=sys.stderr, flush=True)

    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ullage quantize",
        description="Write a model with its matrices in a smaller format.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="hf://, file://, pvc:// or pkg:// URI")
    parser.add_argument("--format", required=True, choices=["int8", "int4", "fp8", "w8a8"])
    parser.add_argument("--output", type=Path, required=True, help="folder to write, new or empty")
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="text for w8a8, UTF-8")
    parser.add_argument(
        "--alpha", type=_share, default=0.5, help="how far w8a8 smooths activations, 0 to 1 (0.5)"
    )
    parser.add_argument("--threads", type=_count, help="CPU threads (every core)")
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
