"""How addresses are written with ports, and that processes listen at both families of them."""

import socket
import string
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from ullage_testing.ports import free_port

from ullage_common.process.addresses import joined, listen, split
from ullage_common.process.metrics_endpoint import serve_metrics

BOTH = {"127.0.0.1", "::1"}
NAMES = st.text(string.ascii_lowercase + string.digits + "-.", min_size=1, max_size=40)
HOSTS = NAMES | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(str)


def reached(port: int) -> set[str]:
    """The loopback addresses at which somebody listens."""
    found = set()
    for address in BOTH:
        try:
            socket.create_connection((address, port), timeout=10).close()
            found.add(address)
        except OSError:
            continue
    return found


@given(HOSTS, st.integers(1, 65535))
def test_what_is_joined_is_split_again(host: str, port: int) -> None:
    assert split(joined(host, port)) == (host, port)


@pytest.mark.parametrize(
    "target",
    [
        *("", "engines", "engines:", ":9000", "engines:0", "engines:65536", "engines:http"),
        *("::1:9000", "fd00::7", "[fd00::7]", "[fd00::7]9000", "[engines]:9000", "[]:9000"),
        "[10.0.0.7]:9000",
    ],
)
def test_what_is_no_address_with_a_port_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match=r"is not host:port, such as .* or \[fd00::7\]:9000"):
        split(target)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (None, BOTH),
        ("::", BOTH),
        ("[::]", BOTH),
        ("0.0.0.0", {"127.0.0.1"}),
        ("127.0.0.1", {"127.0.0.1"}),
        ("::1", {"::1"}),
    ],
)
def test_a_process_listens_where_it_is_told_and_else_everywhere(
    host: str | None, expected: set[str]
) -> None:
    with listen(host, 0) as listener:
        assert reached(listener.getsockname()[1]) == expected


def test_a_kernel_without_ipv6_is_listened_to_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen(None, 0) as listener:
        assert listener.family == socket.AF_INET
        assert reached(listener.getsockname()[1]) == {"127.0.0.1"}


def test_metrics_are_served_at_both() -> None:
    port = free_port()
    stop = serve_metrics(CollectorRegistry(), port, None, lambda: True)
    try:
        for address in BOTH:
            url = f"http://{joined(address, port)}/readyz"
            with urllib.request.urlopen(url, timeout=30) as answer:
                assert answer.read() == b"ready\n"
    finally:
        stop()
    assert reached(port) == set()
