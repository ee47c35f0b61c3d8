"""`ullage-operator`: keeps every LLMService of a cluster as it is declared."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

import kopf
import yaml
from prometheus_client import CollectorRegistry

from ullage_operator.controller import Controller, Options
from ullage_operator.election import own_namespace
from ullage_operator.errors import OperatorError
from ullage_operator.handlers import Handlers
from ullage_operator.lease import Times
from ullage_operator.naming import METRICS_PORT
from ullage_operator.settings import VERSION, Settings
from ullage_operator.transport import connection
from ullage_rpc import logs
from ullage_rpc.metrics import serve_metrics

PROBES_PORT = 8081
_EXAMPLES = """\
examples:
  ullage-operator                                  serve all namespaces
  ullage-operator --namespace a --namespace b      serve two, with rights in these only
  KUBECONFIG=~/.kube/config ullage-operator        run beside the cluster, for development

Images and names that it gives to pods come from the environment: ULLAGE_ENGINE_IMAGE,
ULLAGE_ROUTER_IMAGE, ULLAGE_IMAGE_PULL_POLICY, ULLAGE_IMAGE_PULL_SECRETS, ULLAGE_LOG_LEVEL,
ULLAGE_DNS_LAG (seconds for which the cluster's DNS may answer what it knew; 30).
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="ullage-operator",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="serve this namespace only; may be given several times (default: all)",
    )
    made.add_argument("--host", default="0.0.0.0", help="address of probes and metrics")
    made.add_argument(
        "--probes-port", type=int, default=PROBES_PORT, help="port of /healthz (%(default)s)"
    )
    made.add_argument(
        "--metrics-port", type=int, default=METRICS_PORT, help="port of /metrics (%(default)s)"
    )
    made.add_argument(
        "--resync",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="look at every service at least this often (%(default)s)",
    )
    add_election(made)
    made.add_argument("--log-level", choices=["debug", "info", "warning", "error"])
    made.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    return made


def add_election(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--no-leader-election",
        action="store_true",
        help="act without a lease: for clusters in which no second operator can be running",
    )
    made.add_argument(
        "--lease-namespace", metavar="NAME", help="where the lease is (default: the pod's own)"
    )
    made.add_argument(
        "--lease-name",
        default="ullage-operator",
        metavar="NAME",
        help="operators of one lease stand by for one another (%(default)s)",
    )
    made.add_argument(
        "--lease-duration",
        type=duration,
        default=Times(),
        metavar="SECONDS",
        help="another takes over so long after the last sign of life, 1 to 300 (15)",
    )


def duration(text: str) -> Times:
    seconds = float(text)
    if not 1 <= seconds <= 300:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 300 seconds")
    return Times(seconds)


def controller_options(options: argparse.Namespace) -> Options:
    namespace = options.lease_namespace or own_namespace(options.namespace)
    return Options(
        namespaces=tuple(options.namespace),
        resync_s=options.resync,
        lease=None if options.no_leader_election else (namespace, options.lease_name),
        times=options.lease_duration,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    settings = Settings.from_env(os.environ)
    logs.configure(options.log_level or settings.log_level)
    # kopf tells every event and every handler call; the reconciler's own lines say what changed.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    # Nor is every probe of /healthz worth a line.
    for probed in ("aiohttp.access", "kopf.activities.probe"):
        logging.getLogger(probed).setLevel(logging.WARNING)
    try:
        connection()
    except (OperatorError, kopf.LoginError, yaml.YAMLError, OSError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    metrics_registry = CollectorRegistry()
    chosen = controller_options(options)
    handlers = Handlers(lambda: Controller(chosen, settings, metrics_registry))
    try:
        stop_metrics = serve_metrics(metrics_registry, options.metrics_port, options.host)
    except OSError as error:
        print(f"error: port {options.metrics_port} for metrics: {error}", file=sys.stderr)
        return 2
    try:
        asyncio.run(operate(handlers, options))
    finally:
        stop_metrics()
    return 0


async def operate(handlers: Handlers, options: argparse.Namespace) -> None:
    """Runs kopf until SIGINT or SIGTERM."""
    registry = kopf.OperatorRegistry()
    handlers.register(registry)
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True  # kopf watches nothing
    settings.posting.enabled = False
    await kopf.operator(
        registry=registry,
        settings=settings,
        standalone=True,
        clusterwide=True,
        liveness_endpoint=f"http://{options.host}:{options.probes_port}/healthz",
    )


if __name__ == "__main__":
    sys.exit(main())
