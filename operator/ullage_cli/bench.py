"""`ullage bench` load-tests a running server, and finds its throughput-latency knee."""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ullage_bench import report as reports
from ullage_bench.levels import Level, Objectives, cost_of, engines_for, knee, regressions
from ullage_bench.load import LOOPS, TURNS, Sender, Shape, sweep
from ullage_bench.report import Report
from ullage_cli import interruptible
from ullage_cli.server_url import (
    add_report_files,
    add_target,
    check_report_files,
    server_url,
    write_reports,
)
from ullage_operator.api.errors import LocalFailure
from ullage_verify.client import OpenAIClient
from ullage_verify.target import Target, TargetError, describe

INTERRUPTED = 130
LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
OPEN_SHARES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25)
"""Request rates to try in an open loop, as fractions of the rate that eight clients reach."""
PROBE_CLIENTS = 8
PERCENT = 100

HELP = """examples:
  ullage bench http://127.0.0.1:8000
  ullage bench http://127.0.0.1:8000 --mode open --ttft 2 --e2e 20 --rate 50
  ullage bench chat --namespace prod --mode conversations --prefix-tokens 1000
  ullage bench http://127.0.0.1:8000 --price 2.10 --json today.json --svg curve.svg
  ullage bench http://127.0.0.1:8000 --baseline last-week.json --tolerance 10

A closed loop keeps a number of clients busy; each sends its next request when the last has ended.
An open loop sends at random times with a mean rate, whether or not the server keeps up. The knee is
the load with the largest throughput divided by latency, or with --ttft or --e2e the largest
throughput that keeps them. The sweep stops when more load brings less. Set ULLAGE_API_KEY if the
server needs a key.

exit status: 0 the knee is found, 1 it is worse than the baseline or no load keeps the objectives,
2 an option is wrong or the server does not answer, 130 interrupted
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage bench`."""
    parser = commands.add_parser(
        "bench",
        help="measure a server's throughput over latency",
        description="Measure throughput over latency of a running server, and find the knee.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_target(parser)
    parser.add_argument("--mode", choices=LOOPS, default="closed", help="kind of load (closed)")
    parser.add_argument(
        "--loads",
        type=loads,
        help="clients or requests/s to try, such as 1,2,4",
    )
    parser.add_argument("--seconds", type=seconds, default=15.0, help="time for each load (15)")
    parser.add_argument("--input-tokens", type=count, default=180, metavar="N", help="(180)")
    parser.add_argument("--output-tokens", type=count, default=64, metavar="N", help="(64)")
    parser.add_argument(
        "--prefix-tokens", type=count, default=0, metavar="N", help="shared by all prompts (0)"
    )
    parser.add_argument("--ttft", type=seconds, default=math.inf, help="limit of its p95, seconds")
    parser.add_argument("--e2e", type=seconds, default=math.inf, help="limit of its p95, seconds")
    parser.add_argument("--rate", type=rate, help="wanted requests/s: how many engines?")
    parser.add_argument(
        "--engines", type=engines, metavar="N", help="that serve (default: those that answer)"
    )
    parser.add_argument("--price", type=rate, help="price of one engine's hour: what is a request?")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="an earlier --json")
    parser.add_argument(
        "--tolerance", type=rate, default=10.0, metavar="PERCENT", help="against the baseline (10)"
    )
    add_report_files(parser, "curve")
    parser.set_defaults(run=run)


def count(text: str) -> int:
    """Parse a count for argparse, whose errors show this function's name."""
    number = int(text)
    if not 0 <= number <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text}; use 0 to 1000000")
    return number


def seconds(text: str) -> float:
    """Parse a number of seconds for argparse, whose errors show this function's name."""
    number = float(text)
    if not 0 < number <= 24 * 3600:
        raise argparse.ArgumentTypeError(f"{text} s; use more than 0 and at most a day")
    return number


def engines(text: str) -> int:
    """Parse a number of engines for argparse, whose errors show this function's name."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def rate(text: str) -> float:
    """Parse a positive number for argparse, whose errors show this function's name."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def loads(text: str) -> tuple[float, ...]:
    """Parse increasing loads for argparse, whose errors show this function's name."""
    numbers = tuple(rate(part) for part in text.split(","))
    if list(numbers) != sorted(set(numbers)):
        raise argparse.ArgumentTypeError(f"{text} does not increase")
    return numbers


def run(options: argparse.Namespace) -> int:
    """Measure each load, print the results, and write the reports.

    Raises:
        LocalFailure: the server cannot be measured, or a file cannot be read or written.
    """
    check_report_files(options)
    baseline = _read(options.baseline) if options.baseline else None
    # As an exception, the signal ends kubectl.
    interruptible.raise_at_sigterm()
    try:
        with server_url(options) as url:
            report = interruptible.run(_bench(url, baseline, options))
    except TargetError as error:
        raise LocalFailure(str(error)) from None
    except KeyboardInterrupt:
        return INTERRUPTED

    for line in reports.conclusions(report):
        print(line)
    write_reports(
        report,
        [
            (options.json, reports.as_json),
            (options.markdown, reports.as_markdown),
            (options.svg, reports.as_svg),
        ],
    )
    return int(report.knee is None or bool(report.regressions))


async def _bench(url: str, baseline: Report | None, options: argparse.Namespace) -> Report:
    key = options.api_key or os.environ.get("ULLAGE_API_KEY", "")
    async with OpenAIClient(url, key) as client:
        target = await describe(client, options.model, options.context)
        shape = Shape(options.input_tokens, max(1, options.output_tokens), options.prefix_tokens)
        _check_fits(shape, target, options.mode)
        report = Report(
            url=url,
            model=target.model,
            mode=options.mode,
            input_tokens=shape.input_tokens,
            output_tokens=shape.output_tokens,
            prefix_tokens=shape.prefix_tokens,
            num_engines=0,
            levels=(),
            objectives=Objectives(options.ttft, options.e2e),
            knee=None,
        )
        if baseline:
            _check_same_test(report, baseline)
        print(f"{client.url}: {target.model}, {shape.input_tokens} in, {shape.output_tokens} out")

        tried = options.loads or await _loads(target, shape, options)
        print(reports.head(), flush=True)
        sender = Sender(target, shape, seed=1)
        levels = await sweep(LOOPS[options.mode], sender, tried, options.seconds, _show)

        best = knee(levels, report.objectives)
        num_engines, engines_from = await _engines(target, best, options.engines)

    report = msgspec.structs.replace(
        report, num_engines=num_engines, levels=levels, knee=best, engines_from=engines_from
    )
    return _with_conclusions(report, baseline, options)


def _with_conclusions(
    report: Report, baseline: Report | None, options: argparse.Namespace
) -> Report:
    """Return the report with the cost, engine count and regressions that the options request.

    Without a knee, the report is returned unchanged.
    """
    best = report.knee
    if best is None:
        return report
    worse: Sequence[str] = ()
    if baseline and baseline.knee:
        worse = regressions(best, baseline.knee, options.tolerance / PERCENT)
    cost = cost_of(best, options.price, report.num_engines) if options.price else None
    wanted = engines_for(options.rate, best, report.num_engines) if options.rate else None
    return msgspec.structs.replace(
        report, cost=cost, rate=options.rate, engines=wanted, regressions=worse
    )


def _check_same_test(report: Report, baseline: Report) -> None:
    """Check that two reports are from tests with the same model, mode and request sizes.

    Raises:
        TargetError: the tests differ.
    """
    for name in ("model", "mode", "input_tokens", "output_tokens", "prefix_tokens"):
        now = getattr(report, name)
        before = getattr(baseline, name)
        if now != before:
            raise TargetError(
                f"--baseline has {name} {before}, and this run {now}; make a new baseline"
            )


async def _loads(target: Target, shape: Shape, options: argparse.Namespace) -> Sequence[float]:
    """Return the loads to try.

    The request rates of an open loop are derived from the throughput of a short closed-loop run.
    """
    if options.mode != "open":
        return LOADS
    probe = await LOOPS["closed"](Sender(target, shape), PROBE_CLIENTS, options.seconds)
    if not probe.requests:
        raise TargetError(f"{target.client.url}: no request was answered; give --loads")
    return [round(share * probe.requests_per_s, 3) for share in OPEN_SHARES]


def _check_fits(shape: Shape, target: Target, mode: str) -> None:
    """Check that the longest request fits in the context of the server.

    Raises:
        TargetError: it does not.
    """
    if mode == "conversations":
        longest = shape.conversation_tokens
        subject = f"conversations of {TURNS} turns"
        remedy = "lower --input-tokens, --output-tokens or --prefix-tokens"
    else:
        longest = shape.request_tokens
        subject = "requests"
        remedy = "lower --input-tokens or --prefix-tokens"
    if longest > target.usable:
        raise TargetError(
            f"{subject} of {longest} tokens do not fit the context of {target.context}; {remedy}"
        )


async def _engines(target: Target, level: Level | None, given: int | None) -> tuple[int, str]:
    """Return how many engines served a load level, and a sentence that says how they were counted.

    Args:
        target: the server.
        level: the load level, or None if no level meets the objectives.
        given: number of engines that the user states, or None.
    """
    if given:
        return given, f"engines: {given}, as --engines says"

    answering = level.engines if level else ()
    if answering:
        names = ", ".join(answering)
        return len(answering), f"engines: {len(answering)} that answered at the knee ({names})"

    reported = (await target.stats()).get("engines", ())
    ready = sum(engine.get("state") == "ready" for engine in reported)
    if ready:
        return ready, f"engines: all {ready} that are ready; the answers do not name theirs"
    return 1, "engines: 1 is assumed, because the server names none; give --engines"


def _show(level: Level) -> None:
    print(reports.row(level), flush=True)


def _read(path: Path) -> Report:
    """Read the report of an earlier run from a file.

    Raises:
        LocalFailure: the file cannot be read, is not a report, or has no knee.
    """
    try:
        report = reports.read(path.read_bytes())
    except OSError as error:
        raise LocalFailure(f"--baseline {path}: {error.strerror}") from None
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise LocalFailure(f"--baseline {path}: not a report of ullage bench ({error})") from None
    if report.knee is None:
        raise LocalFailure(f"--baseline {path}: it has no knee; make a new baseline")
    return report
