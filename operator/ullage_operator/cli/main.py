"""`ullage`: serve a manifest here, show what the operator would apply, make keys, quantise."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import yaml

from ullage_common.process.api_keys import TENANT_NAME, entry, new_key
from ullage_operator.api.errors import LocalFailure, OperatorError
from ullage_operator.api.naming import HTTP_ROUTE, ROUTER_SCALER
from ullage_operator.api.spec import VERSION, Service, Settings
from ullage_operator.cli import profile, top, trace, up
from ullage_operator.cli.manifest_file import (
    BASE_HELP,
    overruled,
    read_service,
    upgraded_manifest,
)
from ullage_operator.conditions.conditions import MONITORING
from ullage_operator.controller.plan import Manifest, Observed, plan
from ullage_operator.manifests.engine_choice import engine_image, expected_engine, image_has_vllm
from ullage_operator.manifests.resources import tiers_line

HELP = """examples:
  ullage up -f examples/smollm2.yaml         serve on 127.0.0.1:8000 until Ctrl-C
  ullage top                                 watch it live
  ullage plan -f examples/smollm2.yaml       print what the operator would apply
  ullage trace REQUEST_ID                    print one request's way from all logs
  ullage profile smollm2 --steps 50          look at an engine's steps in Perfetto
  ullage key new alice                       make an API key
  ullage upgrade-manifest -f old.yaml        print a manifest of 0.1.0 in today's form
  ullage quantize --model file:///m --format int8 --output ./m-int8
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ullage",
        description="Language models that never run out of GPU memory.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ullage {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up.add_parser(commands)
    top.add_parser(commands)
    trace.add_parser(commands)
    profile.add_parser(commands)
    add_plan_parser(commands)
    add_quantize_parser(commands)
    add_key_parser(commands)
    add_upgrade_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a clean stop, 2 when the manifest or the model cannot work."""
    options = make_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except OperatorError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    return status


PLAN_HELP = """examples:
  ullage plan -f examples/smollm2.yaml
  ullage plan -f service.yaml -o json | jq '.items[].kind'
  ullage plan -f service.yaml --base shared.yaml
  ullage plan -f service.yaml --pod-monitors | kubectl diff -f -

Images come from ULLAGE_ENGINE_IMAGE, ULLAGE_CUDA_ENGINE_IMAGE, ULLAGE_VLLM_ENGINE_IMAGE and
ULLAGE_ROUTER_IMAGE, as in the operator. Which engine each pool will have, and why, and where its
engines keep KV, is printed on the standard error output.
"""


def add_plan_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="print what the operator would apply",
        description="Prints every object that the operator would apply for an LLMService.",
        epilog=PLAN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-f", "--file", type=Path, required=True, help="manifest of an LLMService")
    parser.add_argument("--base", type=Path, action="append", default=[], help=BASE_HELP)
    parser.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="(yaml)")
    parser.add_argument(
        "--pod-monitors", action="store_true", help="as where the Prometheus operator is installed"
    )
    parser.set_defaults(run=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    service = read_service(options.file, options.base)
    # Objects of optional kinds are printed as if the cluster served their kinds.
    serves = frozenset((HTTP_ROUTE, ROUTER_SCALER, *(MONITORING if options.pod_monitors else ())))
    observed = Observed(now=datetime.now(UTC), serves=serves)
    settings = Settings.from_env(os.environ)
    objects = plan(service, observed, settings).apply
    sys.stdout.write(render(list(objects), options.output))
    for path in overruled(options.file, options.base):
        print(f"{path} is the default, so a base decides: leave it out", file=sys.stderr)
    for line in pool_lines(service, settings):
        print(line, file=sys.stderr)  # what is printed is for kubectl
    return 0


def pool_lines(service: Service, settings: Settings) -> list[str]:
    """Return for each pool the engine that its pods will be, why, and their image, and where they
    keep KV beside the device."""
    spec = service.spec
    image = engine_image(spec, settings)
    expected = {
        name: expected_engine(
            spec,
            pool,
            on_cuda=spec.device != "cpu",
            has_vllm=image_has_vllm(image, settings),
            place=f"image {image}",
        )
        for name, pool in spec.pools.items()
    }
    lines = [f"pool {name}: engine {line} (image {image})" for name, line in expected.items()]
    tiers = {name: tiers_line(service, pool, settings) for name, pool in spec.pools.items()}
    return [*lines, *(f"pool {name}: {line}" for name, line in tiers.items())]


def render(objects: list[Manifest], output: str) -> str:
    """YAML documents, or a JSON List."""
    if output == "json":
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2) + "\n"
    return yaml.dump_all(objects, Dumper=PlainDumper, sort_keys=False)


class PlainDumper(yaml.SafeDumper):
    """Writes shared values in full: anchors would only distract readers."""

    def ignore_aliases(self, data: object) -> bool:
        return True


KEY_HELP = """examples:
  ullage key new alice                          print a key and the entry that lets it in
  ullage key new alice --into secrets/my-keys   also add the entry to that folder (ullage up)
"""


def add_upgrade_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "upgrade-manifest",
        help="print a manifest of 0.1.0 in today's form",
        description="Prints a manifest of 0.1.0 with today's fields (docs/upgrading.md). Comments "
        "are lost. Values that cannot stay the same are named on the standard error output.",
    )
    parser.add_argument("-f", "--file", type=Path, required=True, help="manifest of 0.1.0")
    parser.set_defaults(run=run_upgrade)


def run_upgrade(options: argparse.Namespace) -> int:
    text, changes = upgraded_manifest(options.file)
    print(text, end="")
    for each in changes:
        print(f"note: {each}", file=sys.stderr)
    return 0


def add_key_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "key",
        help="make an API key",
        description="Makes API keys of tenants (spec.tenants).",
        epilog=KEY_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="print a new key and its entry")
    new.add_argument("tenant", metavar="TENANT", help="name of the key in the Secret")
    new.add_argument("--into", type=Path, metavar="DIR", help="add the entry to DIR/TENANT")
    new.set_defaults(run=run_key)


def run_key(options: argparse.Namespace) -> int:
    name = options.tenant
    key = new_key()
    if not TENANT_NAME.fullmatch(name):
        raise LocalFailure(
            f"TENANT {name!r}: use at most 63 lower-case letters, digits, '-', '_' and '.'"
        )
    if options.into:
        add_entry(options.into / name, entry(key))
    print(f"key    {key}")
    print(f"entry  {entry(key)}")
    print(f"\nThe key is for {name} alone and is kept nowhere; the entry is a line of {name}'s key")
    print("in the Secret of spec.tenants.secretName. See docs/tenants.md.")
    return 0


def add_entry(path: Path, line: str) -> None:
    """Add a line, so that earlier keys go on working."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        gap = "\n" if old and not old.endswith("\n") else ""
        path.write_text(f"{old}{gap}{line}\n", encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LocalFailure(f"--into {path.parent}: {error}; choose another folder") from error


QUANTIZE_MODULE = "ullage_engine.quantize.convert"


def add_quantize_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "quantize",
        help="write a model in a smaller format",
        add_help=False,
        # Whatever follows belongs to the engine's own parser, -h included.
        prefix_chars="\0",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run_quantize)


def run_quantize(options: argparse.Namespace) -> int:
    return quantize([sys.executable, "-m", QUANTIZE_MODULE, *options.arguments])


def quantize(command: list[str]) -> int:
    """Exit status of the engine's command, which prints its own progress and errors.

    Raises:
        LocalFailure: it could not run at all.
    """
    try:
        status = _wait_for(command)
    except OSError as error:
        raise LocalFailure(f"cannot run {command[0]}: {error.strerror}") from error
    except KeyboardInterrupt:
        return 130
    if status < 0:
        raise LocalFailure(
            f"quantize was ended by signal {-status}; if that was for memory, it needs room for "
            "the largest matrix and a shard of 2 GiB"
        )
    if status not in (0, 2, 130, 143):
        raise LocalFailure(
            f"quantize ended with status {status} for the reason above; "
            "if a module is missing, install ullage[engine]"
        )
    return status


def _wait_for(command: list[str]) -> int:
    """Wait for the command to clean up, however this process is ended."""
    with subprocess.Popen(command) as process:
        previous = signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
