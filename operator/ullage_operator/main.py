"""`ullage-operator` keeps every LLMService in a cluster in its declared state."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from ullage_common.process import logs
from ullage_common.process.metrics_endpoint import serve_metrics
from ullage_operator.api.errors import OperatorError
from ullage_operator.api.naming import METRICS_PORT
from ullage_operator.api.settings import VERSION, Settings
from ullage_operator.controller.controller import Controller, Options
from ullage_operator.kube.connection import load_configuration
from ullage_operator.kube.leader_election import own_namespace
from ullage_operator.kube.lease import Times
from ullage_operator.kube.operator import Operator, PortTaken

log = logging.getLogger(__name__)

PROBES_PORT = 8081
_EXAMPLES = """\
examples:
  ullage-operator                                  serve all namespaces
  ullage-operator --namespace a --namespace b      serve two, with rights in these only
  KUBECONFIG=~/.kube/config ullage-operator        run outside the cluster, for development

These environment variables set images and other defaults:
  ULLAGE_ENGINE_IMAGE           image of engines
  ULLAGE_CUDA_ENGINE_IMAGE      image of engines with GPUs (by default the same, if that is set)
  ULLAGE_VLLM_ENGINE_IMAGE      image of engines that run vLLM (by default the images above)
  ULLAGE_ROUTER_IMAGE           image of routers
  ULLAGE_IMAGE_PULL_POLICY      Always, IfNotPresent (the default) or Never
  ULLAGE_IMAGE_PULL_SECRETS     names of pull secrets, separated by commas
  ULLAGE_LOG_LEVEL              level of the operator's log (info)
  ULLAGE_MAX_ROLLOUTS           services that are rolled out at once without an edit (3)
  ULLAGE_DNS_LAG                seconds for which DNS may return an outdated answer (30)
  ULLAGE_MESH                   istio or linkerd (by default no mesh)
  ULLAGE_METRICS_NAMESPACE      namespace whose pods may read metrics (monitoring)
  ULLAGE_OPERATOR_NAMESPACE     namespace of the operator's own pods (by default any)
  ULLAGE_RUNBOOKS               URL of docs/runbooks, for the alerts of services
  ULLAGE_TRACING_ENDPOINT       collector of reconciliation spans (by default none)
  ULLAGE_TRACING_PROTOCOL       grpc (the default) or http
"""


def arguments_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(
        prog="ullage-operator",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="serve this namespace only (repeat for several; default: all)",
    )
    parser.add_argument(
        "--host", help="address of probes and metrics (default: all IPv4 and IPv6 addresses)"
    )
    parser.add_argument(
        "--probes-port", type=int, default=PROBES_PORT, help="port of /healthz (%(default)s)"
    )
    parser.add_argument(
        "--metrics-port", type=int, default=METRICS_PORT, help="port of /metrics (%(default)s)"
    )
    parser.add_argument(
        "--resync",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="reconcile every service at least this often (%(default)s)",
    )
    add_election(parser)
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    return parser


def add_election(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options for leader election to a parser."""
    parser.add_argument(
        "--no-leader-election",
        action="store_true",
        help="act without a lease, in a cluster where no second operator can run",
    )
    parser.add_argument(
        "--lease-namespace", metavar="NAME", help="namespace of the lease (default: the pod's own)"
    )
    parser.add_argument(
        "--lease-name",
        default="ullage-operator",
        metavar="NAME",
        help="name of the lease: one operator per lease acts, the others stand by (%(default)s)",
    )
    parser.add_argument(
        "--lease-duration",
        type=duration,
        default=Times(),
        metavar="SECONDS",
        help="time after the last renewal until another operator takes over, 1 to 300 (15)",
    )


def duration(text: str) -> Times:
    seconds = float(text)
    if not 1 <= seconds <= 300:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 300 seconds")
    return Times(seconds)


def controller_options(options: argparse.Namespace, defaults: Options) -> Options:
    watch_times = defaults.watch_times
    namespace = options.lease_namespace or own_namespace(options.namespace)
    return replace(
        defaults,
        namespaces=tuple(options.namespace),
        reconcile_times=replace(defaults.reconcile_times, resync_s=options.resync),
        watch_times=replace(watch_times, recheck_s=min(options.resync, watch_times.recheck_s)),
        lease=None if options.no_leader_election else (namespace, options.lease_name),
        name=f"{namespace}/{options.lease_name}",
        election_times=options.lease_duration,
    )


def main(arguments: Sequence[str] | None = None, defaults: Options | None = None) -> int:
    """Run the operator until it is stopped by a signal.

    Args:
        arguments: the command-line arguments (by default those of the process).
        defaults: values of options that the arguments do not set.

    Returns:
        The exit status.
    """
    options = arguments_parser().parse_args(arguments)
    settings = Settings.from_env(os.environ)
    logs.configure(options.log_level or settings.log_level)
    # The reconciler logs changes, and informers log failing watches.
    for chatty in ("kopf.objects", "kopf.activities", "kopf._core", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        asyncio.run(load_configuration())
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    metrics_registry = CollectorRegistry()
    ProcessCollector(registry=metrics_registry)
    chosen = controller_options(options, defaults or Options())
    served = ", ".join(chosen.namespaces) or "all namespaces"
    log.info("ullage-operator %s serves %s", VERSION, served)
    operator = Operator(partial(Controller, chosen, settings, metrics_registry))
    try:
        stop_metrics = serve_metrics(
            metrics_registry, options.metrics_port, options.host, lambda: operator.is_ready
        )
    except OSError as error:
        print(f"error: port {options.metrics_port} for metrics: {error}", file=sys.stderr)
        return 2

    try:
        asyncio.run(operator.run(options.host, options.probes_port))
    except PortTaken as error:
        print(f"error: port {options.probes_port} for probes: {error}", file=sys.stderr)
        return 2
    finally:
        stop_metrics()
    return 0


if __name__ == "__main__":
    sys.exit(main())
