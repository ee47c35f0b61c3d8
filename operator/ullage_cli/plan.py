"""`ullage plan` prints every object that the operator would apply for a manifest."""

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import yaml

from ullage_cli.manifest_file import BASE_HELP, overruled, read_service
from ullage_operator.api.naming import HTTP_ROUTE, ROUTER_SCALER
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.conditions.conditions import MONITORING
from ullage_operator.manifests.engine_choice import engine_image, expected_engine, image_has_vllm
from ullage_operator.manifests.resources import tiers_line
from ullage_operator.planning.observed import Manifest, Observed
from ullage_operator.planning.plan import plan

HELP = """examples:
  ullage plan -f examples/smollm2.yaml
  ullage plan -f service.yaml -o json | jq '.items[].kind'
  ullage plan -f service.yaml --base shared.yaml
  ullage plan -f service.yaml --pod-monitors | kubectl diff -f -

Images come from ULLAGE_ENGINE_IMAGE, ULLAGE_CUDA_ENGINE_IMAGE, ULLAGE_VLLM_ENGINE_IMAGE and
ULLAGE_ROUTER_IMAGE, as in the operator. Standard error names each pool's engine, the
reason for it, and the places where its engines keep KV.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage plan`."""
    parser = commands.add_parser(
        "plan",
        help="print the objects that the operator would apply",
        description="Print every object that the operator would apply for an LLMService.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-f", "--file", type=Path, required=True, help="manifest of an LLMService")
    parser.add_argument("--base", type=Path, action="append", default=[], help=BASE_HELP)
    parser.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="(yaml)")
    parser.add_argument(
        "--pod-monitors", action="store_true", help="assume that the Prometheus operator is there"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the planned objects, with notes about them on standard error."""
    service = read_service(options.file, options.base)
    # Objects of optional kinds are printed as if the cluster served their kinds.
    serves = frozenset((HTTP_ROUTE, ROUTER_SCALER, *(MONITORING if options.pod_monitors else ())))
    observed = Observed(now=datetime.now(UTC), serves=serves)
    settings = Settings.from_env(os.environ)
    objects = plan(service, observed, settings).apply
    sys.stdout.write(_render(list(objects), options.output))

    # The standard output is for kubectl.
    for path in overruled(options.file, options.base):
        print(f"{path} is the default, so a base overrides it: leave it out", file=sys.stderr)
    for line in _pool_lines(service, settings):
        print(line, file=sys.stderr)
    return 0


def _render(objects: list[Manifest], output: str) -> str:
    """Return the objects as YAML documents, or as a JSON List."""
    if output == "json":
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2) + "\n"
    return yaml.dump_all(objects, Dumper=_PlainDumper, sort_keys=False)


class _PlainDumper(yaml.SafeDumper):
    """A YAML dumper that writes shared values in full instead of anchors, for readability."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _pool_lines(service: Service, settings: Settings) -> list[str]:
    """Return two lines per pool: its engine with the reason and the image, then its KV tiers."""
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
    tiers = {name: tiers_line(service, pool, settings) for name, pool in spec.pools.items()}

    lines = [f"pool {name}: engine {line} (image {image})" for name, line in expected.items()]
    lines += [f"pool {name}: {line}" for name, line in tiers.items()]
    return lines
