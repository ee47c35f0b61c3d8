"""Show what clients see if memory runs out, a worker dies or hangs, or a request is excessive.

Each server runs in a container: a control group, which it sees as its own, and a /dev/shm of
1 GiB. Three clients each stream an answer. The case happens in the middle of their answers. The
first table has a row for each case and server:

who caused it  the answers to the requests that caused the case
bystanders     how many of the three streams ended well, with which words, and the longest pause
afterwards     seconds until the server answered a new request; "dead" if it did not in time, with
               what its /health reported then

The second table says in a few words what the three clients saw, with a column for each server.

Requests, most of them with 300 MiB of memory left:

full-context  a prompt that fills the context
too-long      a prompt that is twice as long as the context
logprobs      `prompt_logprobs` and `echo` for a long prompt
adapters      a long prompt to a LoRA adapter
images        four images of 8192 x 8192 pixels
choices       64 answers to a long prompt
schema        a JSON schema of 400 levels
long-answers  24 long answers at once
unique        120 prompts that no cache has seen
crowd         sixty long requests at once
thrash        24 long answers, three times what the KV cache holds
kv-full       24 prompts, four times what the KV cache holds

The start:

neighbour     another process takes and frees 512 MiB again and again, from before the start
one-memory    3 GiB for everything, and no setting says who may take how much
crash-loop    all processes get SIGKILL and the server is started again, ten times

The faults:

kill          SIGKILL to the process that computes
hang          SIGSTOP to the same process
oom           the kernel kills the largest process, because the group's memory is full

With two workers or engines (servers sglang-router, dynamo, dynamo-migrating, and ullage2):

worker-dies   SIGKILL to all processes of one of them
worker-hangs  SIGSTOP to the same processes

Peers are installed below DIR unless they are there, as by `python -m benchmarks compare`. Control
groups and mounts need root.

examples:
  python -m benchmarks survive .peers
  python -m benchmarks survive .peers --only ullage,vllm --cases oom,logprobs --json survive.json
  python -m benchmarks survive .peers --only sglang-router,dynamo,ullage2
  python -m benchmarks survive .peers --cases neighbour,thrash --record

exit status: 0 every bystander of Ullage got its whole answer with the same words, and Ullage
answered again, 1 one did not or Ullage did not, 2 an option is wrong or a server cannot be tried,
130 interrupted
"""

import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

from benchmarks.compare.servers import Server
from benchmarks.support.load import ServerError
from benchmarks.support.machine import processor
from benchmarks.support.options import new_parser
from benchmarks.survive import gateway
from benchmarks.survive.cases import CASES
from benchmarks.survive.container import container
from benchmarks.survive.outcome import Outcome, summary, table
from benchmarks.survive.play import GROUP, KILLS, Sitting, outcomes_of
from benchmarks.survive.record import record
from benchmarks.survive.servers import OURS, SERVERS, ServerMaker, Setting, two_engines
from ullage_verify.target import TargetError

FAILED = 2
INTERRUPTED = 130
TERMINATED = 143
GATEWAYS: Mapping[str, Callable[[Path], Server]] = {
    "sglang-router": gateway.sglang_router,
    "dynamo": gateway.dynamo,
    gateway.MIGRATING: gateway.dynamo_migrating,
    "ullage2": two_engines,
}
"""Servers with two workers, for the cases in which one of them is lost."""


class OptionError(Exception):
    """An option names something that does not exist."""


def setting_of(case: str) -> Setting:
    return CASES[case].setting


def outcomes_for(
    name: str, cases: Sequence[str], folder: Path, sitting: Sitting
) -> Iterator[Outcome]:
    """Yield the outcomes of the cases that are for this server."""
    if name in GATEWAYS:
        chosen = [case for case in cases if CASES[case].is_for_gateways]
        yield from outcomes_of(GATEWAYS[name](folder), chosen, sitting) if chosen else ()
        return

    make: ServerMaker = SERVERS[name]
    chosen = [case for case in cases if not CASES[case].is_for_gateways]
    chosen.sort(key=setting_of)
    for setting, group in groupby(chosen, setting_of):
        server = make(folder, setting)
        if server is None:
            yield from (Outcome(name, case, skipped=f"no {setting}") for case in group)
            continue
        for outcome in outcomes_of(server, list(group), sitting):
            yield replace(outcome, server=name)


def show(outcome: Outcome) -> None:
    print(" | ".join(outcome.cells), flush=True)
    for error in sorted(set(outcome.errors)):
        print(f"    {error}", flush=True)


def chosen(wanted: str, known: Mapping[str, object], option: str) -> list[str]:
    names = wanted.split(",") if wanted else list(known)
    if unknown := [name for name in names if name not in known]:
        raise OptionError(f"{option} {unknown[0]!r} is none of {', '.join(known)}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser("survive", __doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--only", default="", metavar="NAMES", help="servers, joined by commas")
    parser.add_argument("--cases", default="", metavar="NAMES", help="cases, joined by commas")
    parser.add_argument(
        "--quick", action="store_true", help="short streams, whose words are not compared"
    )
    parser.add_argument(
        "--kills", type=int, default=KILLS, metavar="N", help=f"of crash-loop (default {KILLS})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep the outcomes in the repository, and write the tables of README.md and "
        "docs/reasons/benchmarks.md",
    )
    options = parser.parse_args(arguments)
    if options.record and options.quick:
        parser.error("--record and --quick: tables have compared words; leave --quick out")

    try:
        names = chosen(options.only, {**SERVERS, **GATEWAYS}, "--only")
        cases = chosen(options.cases, CASES, "--cases")
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED

    try:
        with container(GROUP):
            pass
    except OSError as error:
        print(
            f"error: no container for the servers: {error}; run this as root, on the host",
            file=sys.stderr,
        )
        return FAILED

    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    # As an exception, the signal ends the server of the case, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    outcomes = list[Outcome]()
    try:
        with tempfile.TemporaryDirectory(prefix="ullage-survive-") as logs:
            sitting = Sitting(Path(logs), options.quick, options.kills)
            for name in names:
                for outcome in outcomes_for(name, cases, folder, sitting):
                    show(outcome)
                    outcomes.append(outcome)
                    if options.record:
                        record([outcome], processor())
                    if options.json:
                        options.json.write_text(json.dumps([asdict(each) for each in outcomes]))
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ServerError, TargetError) as error:
        print(f"error: {str(error).removeprefix('error: ')}", file=sys.stderr)
        return FAILED
    finally:
        if outcomes:
            print(f"\n{table(outcomes)}\n\n{summary(outcomes)}")

    ours = [outcome for outcome in outcomes if outcome.server in OURS and outcome.fault]
    for outcome in ours:
        print(f"{outcome.server}, {outcome.case}: {outcome.fault}", file=sys.stderr)
    return int(bool(ours))


if __name__ == "__main__":
    sys.exit(main())
