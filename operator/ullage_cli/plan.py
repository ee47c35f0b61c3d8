"""`ullage plan` prints every object that the operator would apply for a manifest.

With a trace, it predicts how the service would serve it instead.
"""

import argparse
import json
import math
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import yaml

from ullage_cli import replay
from ullage_cli.manifest_file import BASE_HELP, overruled, read_service
from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.naming import HTTP_ROUTE, ROUTER_SCALER
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.conditions.conditions import MONITORING
from ullage_operator.manifests.engine_choice import engine_image, expected_engine, image_has_vllm
from ullage_operator.manifests.resources import tiers_line
from ullage_operator.planning.observed import Manifest, Observed
from ullage_operator.planning.plan import plan
from ullage_operator.policy.scaling_status import SCALED_OBJECT

HELP = """examples:
  ullage plan -f examples/smollm2.yaml
  ullage plan -f service.yaml -o json | jq '.items[].kind'
  ullage plan -f service.yaml --base shared.yaml
  ullage plan -f service.yaml --pod-monitors | kubectl diff -f -
  ullage plan --measure smollm2 --hardware here.json
  ullage plan -f service.yaml --trace requests.jsonl --hardware here.json
  ullage plan -f service.yaml --trace requests.jsonl --hardware here.json --ttft 0.5 --tpot 0.05

Images come from ULLAGE_ENGINE_IMAGE, ULLAGE_CUDA_ENGINE_IMAGE, ULLAGE_VLLM_ENGINE_IMAGE and
ULLAGE_ROUTER_IMAGE, as in the operator. Standard error names each pool's engine, the
reason for it, and the places where its engines keep KV.

With --trace, the router and the engines of the service serve the trace in virtual time, and the
predicted memory, latency and refusals are printed. A trace has a JSON object a line, such as
{"at": 0.5, "prompt_tokens": 200, "output_tokens": 64}; Mooncake's JSONL and Azure's CSV are read,
too. docs/guide/planning.md explains the fields.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage plan`."""
    parser = commands.add_parser(
        "plan",
        help="print the objects that the operator would apply",
        description="Print every object that the operator would apply for an LLMService, or "
        "predict how the service would serve a trace of requests.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-f", "--file", type=Path, help="manifest of an LLMService")
    parser.add_argument("--base", type=Path, action="append", default=[], help=BASE_HELP)
    parser.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="(yaml)")
    parser.add_argument(
        "--pod-monitors", action="store_true", help="assume that the Prometheus operator is there"
    )
    replaying = parser.add_argument_group("predictions")
    replaying.add_argument("--trace", type=Path, metavar="FILE", help="requests to replay")
    replaying.add_argument(
        "--hardware", metavar="FILE", help="measured engines, which --measure writes"
    )
    replaying.add_argument("--json", action="store_true", help="print JSON instead of a table")
    objective = "objective for the 95th percentile of the time"
    engines = "prints the number of engines that meet it"
    replaying.add_argument(
        "--ttft",
        type=_seconds,
        metavar="SECONDS",
        help=f"{objective} to the first token; {engines}",
    )
    replaying.add_argument(
        "--tpot", type=_seconds, metavar="SECONDS", help=f"{objective} between tokens; {engines}"
    )
    replaying.add_argument(
        "--measure", metavar="SERVICE", help="measure a service of ullage up, which must be idle"
    )
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    """Parse an objective. argparse shows this function's name in its error message."""
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time; use seconds above 0, such as 0.5")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Print the planned objects or a prediction, with notes on standard error.

    Raises:
        LocalFailure: options do not go together, or the manifest is wrong.
    """
    _check(options)
    if options.measure:
        return replay.measure(options.measure, options.hardware)

    service = read_service(options.file, options.base)
    # Objects of optional kinds are printed as if the cluster served their kinds.
    monitoring = MONITORING if options.pod_monitors else ()
    serves = frozenset((HTTP_ROUTE, ROUTER_SCALER, SCALED_OBJECT, *monitoring))
    observed = Observed(now=datetime.now(UTC), serves=serves)
    settings = Settings.from_env(os.environ)
    objects = plan(service, observed, settings).apply
    if options.trace:
        return replay.replay(service, objects, options)
    sys.stdout.write(_render(list(objects), options.output))

    # The standard output is for kubectl.
    for path in overruled(options.file, options.base):
        print(f"{path} is the default, so a base overrides it: leave it out", file=sys.stderr)
    for line in _pool_lines(service, settings):
        print(line, file=sys.stderr)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise an error if an option lacks another one that it needs."""
    if options.measure and (options.file or options.trace):
        raise LocalFailure("--measure measures a running service; leave out -f and --trace")
    if not options.measure and options.file is None:
        raise LocalFailure("-f: give the manifest of an LLMService, such as examples/smollm2.yaml")
    if (options.trace or options.measure) and not options.hardware:
        raise LocalFailure(
            "--hardware: give the file of measured engines, which "
            "ullage plan --measure SERVICE --hardware FILE writes"
        )
    needs_trace = {"--hardware": options.hardware, "--ttft": options.ttft, "--tpot": options.tpot}
    for name, value in {**needs_trace, "--json": options.json or None}.items():
        if value is not None and not (options.trace or options.measure):
            raise LocalFailure(f"{name} is for predictions; give --trace, or leave it out")


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
    """Return each pool's engine, with the reason and the image, and then each pool's KV tiers."""
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
