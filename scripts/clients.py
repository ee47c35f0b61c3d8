"""Judge unmodified clients of other projects against a real service, and write their table.

Each client runs in an environment of its own below .clients, with pinned versions. Environments are
made once, and made again when pins change. The service is `ullage up -f examples/smollm2.yaml`: a
model of 135 million parameters, so checks judge the protocol and never the model's answers.

examples:
  python scripts/clients.py                           all clients
  python scripts/clients.py --only openai,anthropic   two of them
  python scripts/clients.py --only lm-eval --json results.json
  python scripts/clients.py --record                  write results and docs/guide/clients.md, too
  python scripts/clients.py --write-docs              write the page from the recorded results
  python scripts/clients.py --check                   compare the page with the recorded results
  python scripts/clients.py --list                    clients, versions and checks

exit status: 0 no check failed, 1 a check failed or the page is out of date, 2 the service or an
option is wrong, 3 no client could be installed, 130 interrupted
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ullage_clients.catalogue import CLIENTS, ClientError, JudgedClient, choose
from ullage_clients.environments import Environments, packages
from ullage_clients.judging import Service, judge_client
from ullage_clients.results import Result, from_json, merge, summary, table, to_json

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "examples" / "smollm2.yaml"
FOLDER = ROOT / ".clients"
VLLM = ROOT / ".venv-vllm"
PAGE = ROOT / "docs" / "guide" / "clients.md"
RESULTS = ROOT / "scripts" / "ullage_clients" / "results.json"
BEGIN = "<!-- Written by scripts/clients.py from its results. -->\n"
END = "\n<!-- End of the written part. -->"

FAILED = 1
WRONG = 2
NOTHING_JUDGED = 3
INTERRUPTED = 130


def main(words: Sequence[str]) -> int:
    """Run the lane or write its page, and return the exit status."""
    options = parser().parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.check:
            return check_page()
        if options.write_docs:
            PAGE.write_text(page(), encoding="utf-8")
            return 0
        clients = choose(options.only)
        if options.list:
            print("\n".join(map(description, clients)))
            return 0
        if options.json:
            check_writable(options.json)
        results = run(clients)
        if options.json:
            options.json.write_text(to_json(results), encoding="utf-8")
        if options.record:
            record(results)
    except ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED

    print(summary(results), flush=True)
    if any(result.failures for result in results.values()):
        return FAILED
    return 0 if any(result.passed for result in results.values()) else NOTHING_JUDGED


def check_writable(path: Path) -> None:
    """Check before a long run that its results can be written.

    Raises:
        ClientError: they cannot.
    """
    try:
        path.touch()
    except OSError as error:
        raise ClientError(f"--json {path}: {error.strerror}; name a file to write") from None


def run(clients: Sequence[JudgedClient]) -> dict[str, Result]:
    """Judge clients one after the other, against one service."""
    environments = Environments(FOLDER, VLLM)
    with service(FOLDER) as ready:
        return {client.name: judge_client(client, environments, ready) for client in clients}


@contextmanager
def service(folder: Path) -> Iterator[Service]:
    """Yield a new service, which ends with the block.

    Args:
        folder: for the model's tokenizer.

    Raises:
        ClientError: the service cannot run on this machine.
    """
    # The other uses of this script need neither gRPC nor the command.
    from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
    from ullage_cli.background import BackgroundService, StatusLine
    from ullage_common.wire.channels import open_blocking_channel
    from ullage_operator.api.errors import LocalFailure

    with StatusLine() as status:
        background = BackgroundService(MANIFEST, on_progress=status.show)
        try:
            background.start()
        except LocalFailure as error:
            raise ClientError(f"{MANIFEST.relative_to(ROOT)}: {error}") from None
    try:
        state = background.state
        with open_blocking_channel(state["grpc_target"]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            model = stub.GetModel(inference_pb2.GetModelRequest())
        tokenizer = folder / "tokenizer"
        write_tokenizer(tokenizer, model.tokenizer_json)
        print(f"serving {state['model']} at {state['http_url']}", flush=True)
        yield Service(state["http_url"], state["model"], model.max_model_len, tokenizer)
    finally:
        background.close()


def write_tokenizer(folder: Path, tokenizer_json: bytes) -> None:
    """Write the model's tokenizer as a folder that transformers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def record(results: dict[str, Result]) -> None:
    """Write results to the committed file, and the page from it."""
    RESULTS.write_text(to_json(merge(recorded(), results, CLIENTS)), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


def recorded() -> dict[str, Result]:
    """Return the results of the committed file."""
    return from_json(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def page() -> str:
    """Return the text of the page, with the table of the recorded results.

    Raises:
        ClientError: the page has no place for the table.
    """
    text = PAGE.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ClientError(f"{PAGE.relative_to(ROOT)} lacks the line {(END if begin else BEGIN)!r}")
    pins = {name: packages(client) for name, client in CLIENTS.items()}
    return f"{head}{begin}\n{table(CLIENTS.values(), recorded(), pins)}\n{end}{tail}"


def check_page() -> int:
    """Compare the page with the recorded results."""
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.relative_to(ROOT)} is out of date; run python scripts/clients.py --write-docs")
    return FAILED


def description(client: JudgedClient) -> str:
    """Return a client's name, packages and checks, for `--list`."""
    pinned = ", ".join(client.requirements) or f"the version in {VLLM.name}"
    checks = [f"  {name}: {shows}" for name, shows in client.checks.items()]
    return "\n".join([f"{client.name} ({client.kind}; {pinned})", *checks])


def names(text: str) -> list[str]:
    """Parse a list of clients' names for argparse."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parser() -> argparse.ArgumentParser:
    summary_line, _, rest = (__doc__ or "").partition("\n\n")
    options = argparse.ArgumentParser(
        description=summary_line, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--only", type=names, default=[], metavar="NAMES", help="clients, separated by commas"
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    options.add_argument(
        "--record", action="store_true", help="keep the results in the repository, with the page"
    )
    action = options.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="only print the clients")
    action.add_argument("--write-docs", action="store_true", help="only write the page")
    action.add_argument("--check", action="store_true", help="only compare the page")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
