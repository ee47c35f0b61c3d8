"""`ullage profile` records a running engine's next steps as a Perfetto trace."""

import argparse
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import grpc

from ullage.admin.v1 import admin_pb2, admin_pb2_grpc
from ullage_cli.port_forward import PortForward
from ullage_cli.processes.state import engines_of, running_folders
from ullage_common.wire.errors import from_rpc_error
from ullage_operator.api import naming
from ullage_operator.api.errors import LocalFailure

MAX_STEPS = 1000
"""Maximum number of steps in a profile. The engine enforces this limit."""
MAX_SECONDS = 300
"""Maximum number of seconds to wait for the steps to run. The engine enforces this limit."""

NOT_SERVED = (
    "the engine serves no profiles at that port, because clients reach it (tickets.required) or "
    "the engine's version is too old"
)
"""Error text for an engine that does not serve the Profile RPC."""

HELP = """examples:
  ullage profile smollm2                          record 50 steps of a local engine
  ullage profile smollm2 --steps 200 -o slow.json.gz
  ullage profile smollm2 --timeline               show which requests are in which steps
  ullage profile chat --namespace prod --pool large --engine 1
  ullage profile chat --address 10.0.0.7:9000

Open the file at https://ui.perfetto.dev or chrome://tracing. In a cluster the service needs
observability.profiling.enabled. An engine computes steps only while it has requests.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage profile`."""
    parser = commands.add_parser(
        "profile",
        help="record an engine's next steps",
        description="Record the next steps of an engine while it serves.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("service", metavar="SERVICE", help="name of the LLMService")
    parser.add_argument("--steps", type=steps, default=50, help=f"steps, 1 to {MAX_STEPS} (50)")
    longest = f"seconds to wait for them, 1 to {MAX_SECONDS} (60)"
    parser.add_argument("--seconds", type=seconds, default=60, help=longest)
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("trace.json.gz"), help="(trace.json.gz)"
    )
    parser.add_argument("--timeline", action="store_true", help="record batches, not operations")
    parser.add_argument("--pool", help="pool of the engine (default: for ordinary requests)")
    parser.add_argument(
        "--engine", type=int, default=0, metavar="N", help="number of the engine in its pool (0)"
    )
    parser.add_argument(
        "-n", "--namespace", help="namespace of the LLMService, through kubectl port-forward"
    )
    parser.add_argument("--address", metavar="HOST:PORT", help="gRPC address of the engine")
    parser.set_defaults(run=run)


def steps(text: str) -> int:
    """Parse a number of steps for argparse, whose errors show this function's name."""
    return _between(text, MAX_STEPS, "steps")


def seconds(text: str) -> int:
    """Parse a number of seconds for argparse, whose errors show this function's name."""
    return _between(text, MAX_SECONDS, "seconds")


def _between(text: str, most: int, unit: str) -> int:
    number = int(text)
    if not 1 <= number <= most:
        raise argparse.ArgumentTypeError(f"{text} {unit}; use 1 to {most}")
    return number


def run(options: argparse.Namespace) -> int:
    """Record a profile, and write it to the chosen file.

    Raises:
        LocalFailure: the engine does not exist or does not serve profiles, or the file cannot be
            written.
    """
    request = admin_pb2.ProfileRequest(
        kind="PROFILE_KIND_TIMELINE" if options.timeline else "PROFILE_KIND_OPERATIONS",
        steps=options.steps,
        timeout_ms=1000 * options.seconds,
    )
    # The chosen file stays unchanged unless the profile is complete.
    partial = options.output.with_name(f"{options.output.name}.part")

    try:
        with _address(options) as (address, name), grpc.insecure_channel(address) as channel:
            print(f"profiling {name}: {options.steps} steps", file=sys.stderr)
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            size, steps = _receive(stub.Profile(request), partial, options.steps)
        partial.replace(options.output)
    except grpc.RpcError as error:
        failure = from_rpc_error(cast(grpc.Call, error))
        is_unknown = failure.code is grpc.StatusCode.UNIMPLEMENTED
        raise LocalFailure(NOT_SERVED if is_unknown else failure.message) from None
    except OSError as error:
        raise LocalFailure(f"-o {options.output}: {error.strerror}; choose another file") from None
    except KeyboardInterrupt:
        return 130
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)

    if not steps:
        print("the engine computed no steps: send requests while it records", file=sys.stderr)
    print(
        f"{options.output}: {steps} steps, {size / 1e6:.1f} MB; open it at https://ui.perfetto.dev"
    )
    return 0


def _receive(call: Any, path: Path, steps: int) -> tuple[int, int]:
    """Write the profile as it arrives, and return its size in bytes and its number of steps."""
    size = num_seen = 0
    is_live = sys.stderr.isatty()
    with path.open("wb") as file:
        for response in call:
            if response.HasField("progress"):
                num_seen = response.progress.steps
                if is_live:
                    print(f"\r{num_seen} of {steps} steps", end="", file=sys.stderr)
            elif response.chunk:
                size += file.write(response.chunk)

    if is_live:
        print(file=sys.stderr)
    return size, num_seen


@contextlib.contextmanager
def _address(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the chosen engine's gRPC address and name.

    Raises:
        LocalFailure: there is no such engine.
    """
    if options.address:
        yield options.address, options.address
    elif options.namespace:
        pool = options.pool or _first_pool(options.namespace, options.service)
        pod = f"{naming.pool_name(options.service, pool)}-{options.engine}"
        with PortForward(options.namespace, f"pod/{pod}", naming.GRPC_PORT) as forward:
            yield forward.url().removeprefix("http://"), pod
    else:
        engine = _local_engine(options)
        yield engine["grpc_target"], engine["id"]


def _first_pool(namespace: str, service: str) -> str:
    """Return the name of the service's default pool from the service's status.

    Raises:
        LocalFailure: kubectl is not installed, or the service has no status.
    """
    command = ["kubectl", "--namespace", namespace, "get", "llms", service]
    try:
        done = subprocess.run(
            [*command, "-o", "jsonpath={.status.selector}"], capture_output=True, text=True
        )
    except FileNotFoundError:
        raise LocalFailure("kubectl is missing; install it, or give --address") from None

    label = re.search(rf"{re.escape(naming.POOL_LABEL)}=([a-z0-9]+)", done.stdout)
    if label is None:
        reason = done.stderr.strip() or f"{service} has no status yet"
        raise LocalFailure(f"{reason}; give --pool")
    return label[1]


def _local_engine(options: argparse.Namespace) -> Mapping[str, Any]:
    """Return the chosen engine's entry in the state.json of a running `ullage up`.

    Raises:
        LocalFailure: there is no such engine on this machine.
    """
    pool = re.escape(options.pool) if options.pool else "[a-z0-9]+"
    pattern = re.compile(f"{re.escape(options.service)}-{pool}-{options.engine}")
    engines = [engine for folder in running_folders() for engine in engines_of(folder)]
    matching = [each for each in engines if pattern.fullmatch(each["id"])]

    if not matching:
        owner = f"{options.service}-{options.pool}" if options.pool else options.service
        ids = ", ".join(each["id"] for each in engines) or "none"
        raise LocalFailure(
            f"no engine {options.engine} of {owner} runs here (running: {ids}); "
            "for a cluster give --namespace"
        )
    return matching[0]
