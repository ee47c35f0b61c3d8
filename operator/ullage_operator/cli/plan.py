"""`ullage plan`: print what the operator would apply."""

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import yaml

from ullage_operator.cli.manifest import read_service
from ullage_operator.plan import Manifest, Observed, plan
from ullage_operator.settings import Settings
from ullage_operator.surroundings import MONITORING

HELP = """examples:
  ullage plan -f examples/smollm2.yaml
  ullage plan -f service.yaml -o json | jq '.items[].kind'
  ullage plan -f service.yaml --pod-monitors | kubectl diff -f -

Images come from ULLAGE_ENGINE_IMAGE and ULLAGE_ROUTER_IMAGE, as in the operator.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="print what the operator would apply",
        description="Prints every object that the operator would apply for an LLMService.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-f", "--file", type=Path, required=True, help="manifest of an LLMService")
    parser.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="(yaml)")
    parser.add_argument(
        "--pod-monitors", action="store_true", help="as where the Prometheus operator is installed"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    service = read_service(options.file)
    serves = frozenset(MONITORING if options.pod_monitors else ())
    observed = Observed(now=datetime.now(UTC), serves=serves)
    objects = plan(service, observed, Settings.from_env(os.environ)).apply
    sys.stdout.write(render(list(objects), options.output))
    return 0


def render(objects: list[Manifest], output: str) -> str:
    """YAML documents, or a JSON List."""
    if output == "json":
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2) + "\n"
    return yaml.dump_all(objects, Dumper=PlainDumper, sort_keys=False)


class PlainDumper(yaml.SafeDumper):
    """Writes shared values in full: anchors would only distract readers."""

    def ignore_aliases(self, data: object) -> bool:
        return True
