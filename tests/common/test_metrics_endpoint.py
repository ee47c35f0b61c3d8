"""The endpoint for metrics under clients that are gone, and without free descriptors."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from ullage_testing.ports import free_port

from ullage_common.process.metrics_endpoint import MAX_CONNECTIONS, serve_metrics

DEADLINE_S = 60.0

OUT_OF_FILES = """
import os, resource, socket, sys, time
from prometheus_client import CollectorRegistry
from ullage_common.process.metrics_endpoint import serve_metrics

stop = serve_metrics(CollectorRegistry(), int(sys.argv[1]), "127.0.0.1")
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
client.settimeout(60)
client.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
assert client.recv(8) == b"HTTP/1.0"
client.close()

client = socket.socket()
client.settimeout(60)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, most))
spare = []
try:
    while True:
        spare.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass

before = time.process_time()
client.connect(("127.0.0.1", int(sys.argv[1])))
time.sleep(1.0)
print(time.process_time() - before)

for number in spare:
    os.close(number)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
client.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
assert client.recv(8) == b"HTTP/1.0"
stop()
"""


def test_a_connection_without_a_request_is_closed() -> None:
    port = free_port()
    stop = serve_metrics(CollectorRegistry(), port, "127.0.0.1", idle_timeout_s=0.2)
    try:
        threads = threading.active_count()
        with socket.create_connection(("127.0.0.1", port)) as half_open:
            half_open.settimeout(DEADLINE_S)
            half_open.sendall(b"GET /metr")
            assert half_open.recv(1) == b""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert answer.status == 200
        ends_at = time.monotonic() + DEADLINE_S
        while threading.active_count() > threads:
            assert time.monotonic() < ends_at, "a handler's thread never ended"
            time.sleep(0.01)
    finally:
        stop()


def test_the_oldest_of_too_many_connections_is_closed() -> None:
    """Each has a thread, and a client that trickles bytes could keep it for ever."""
    port = free_port()
    stop = serve_metrics(CollectorRegistry(), port, "127.0.0.1", idle_timeout_s=DEADLINE_S)
    try:
        with contextlib.ExitStack() as stack:
            clients = []
            for _ in range(MAX_CONNECTIONS + 1):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                client.settimeout(DEADLINE_S / 2)
                client.sendall(b"GET /metr")
                clients.append(client)
            assert clients[0].recv(1) == b""
            for client in (clients[1], clients[-1]):
                client.sendall(b"ics HTTP/1.0\r\n\r\n")
                assert client.recv(8) == b"HTTP/1.0"
    finally:
        stop()


class SlowCollector(Collector):
    """Metrics that are read when the test allows it."""

    def __init__(self) -> None:
        self.num_reading = 0
        self.most_reading = 0
        self.num_read = 0
        self.may_end = threading.Event()

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        self.num_reading += 1
        self.most_reading = max(self.most_reading, self.num_reading)
        self.may_end.wait(DEADLINE_S)
        time.sleep(0.001)  # a turn for the others
        self.num_reading -= 1
        self.num_read += 1
        return []


def test_one_page_is_rendered_at_a_time() -> None:
    port = free_port()
    registry = CollectorRegistry()
    slow = SlowCollector()
    registry.register(slow)
    stop = serve_metrics(registry, port, "127.0.0.1")
    try:
        with contextlib.ExitStack() as stack:
            clients = []
            for _ in range(8):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                client.settimeout(DEADLINE_S)
                client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                clients.append(client)
            slow.may_end.set()
            for client in clients:
                assert client.recv(8) == b"HTTP/1.0"
        assert (slow.num_read, slow.most_reading) == (8, 1)
    finally:
        stop()


def test_the_endpoint_waits_for_free_descriptors_without_spinning() -> None:
    """A second without descriptors takes little time of the CPU, and the client is answered."""
    command = [sys.executable, "-c", OUT_OF_FILES, str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.3
