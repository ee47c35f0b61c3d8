"""A gRPC client in another process, so that a test can measure the server's memory alone."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import grpc

TIMEOUT_S = 60.0

Requests = Sequence[tuple[str, bytes]]
"""Names of methods, each with a serialized request message."""


@contextlib.contextmanager
def grpc_client_process(port: int) -> Iterator[Callable[[Requests], list[grpc.StatusCode]]]:
    """Yield a function that sends requests one after the other and returns their statuses."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        yield lambda requests: pool.submit(partial(_statuses, port, requests)).result()


def _statuses(port: int, requests: Requests) -> list[grpc.StatusCode]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return [_status(channel, name, message) for name, message in requests]


def _status(channel: grpc.Channel, name: str, message: bytes) -> grpc.StatusCode:
    try:
        for _ in channel.unary_stream(name)(message, timeout=TIMEOUT_S):
            pass
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK
