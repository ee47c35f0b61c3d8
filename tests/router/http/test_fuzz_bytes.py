"""Wrong bytes in heads, chunks and trailers, over raw sockets to a real router."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest
from ullage_testing.background_loop import background_loop
from ullage_testing.byte_fuzz import Mutator, answer_of, check_rounds, exchanged, new_seeds

if TYPE_CHECKING:
    StartService = Any

BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}).encode()
STREAM = BODY[:-1] + b', "stream": true}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"


def with_length(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes, trailers: bytes = b"") -> bytes:
    half = len(body) // 2
    pieces = b"".join(b"%x;a=b\r\n%b\r\n" % (len(p), p) for p in (body[:half], body[half:]))
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n" + trailers + b"\r\n"


GET = b"GET /v1/models HTTP/1.1\r\nHost: router\r\n\r\n"
MESSAGES = (
    with_length(BODY),
    with_length(STREAM),
    chunked(BODY),
    chunked(STREAM, b"X-One: 1\r\nAuthorization: Bearer x\r\nContent-Length: 4\r\n"),
    GET * 3,
    with_length(BODY) + GET + chunked(BODY) + GET,
    b"HEAD /openapi.json HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n",
    b"OPTIONS /v1/completions HTTP/1.0\r\n\r\n",
    b"GET http://router/v1/models?a=%20b HTTP/1.1\r\nHost: router\r\n\r\n",
    HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    GET[:-2] + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n",
)
LAST = with_length(BODY).replace(b"Host", b"Connection: close\r\nHost", 1)
WORDS = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b": ",
    b"%",
    b"%00",
    b"%ff",
    b"\xff\xfe",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"-1",
    b"18446744073709551616",
    b"Content-Length: 5\r\n",
    b"Content-Length: 99999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Connection: keep-alive\r\n",
    b"Connection: close\r\n",
    b"Expect: 100-continue\r\n",
    b"Host: a\r\n",
    b"x: " + b"a" * 70_000,
    b"a: b\r\n" * 150,
    b"CONNECT ",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"../..",
    b"http://",
    b"\xed\xa0\x80",
    b"[" * 2000,
)
HONEST = frozenset({501, 503, 505})
"""Statuses above 500 that a router may give: a coding or a version of HTTP that is not spoken, and
nothing that serves."""
COUNT = 400
"""Messages of a round."""
SLOW_S = 420.0
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


def test_wrong_bytes(start_service: "StartService", caplog: pytest.LogCaptureFixture) -> None:
    statuses = fuzz(start_service, caplog, range(3))
    assert {200, 400, 404, 411, 431, 501, 505} <= statuses.keys()


@pytest.mark.slow
@pytest.mark.timeout(2 * SLOW_S)
def test_many_wrong_bytes(start_service: "StartService", caplog: pytest.LogCaptureFixture) -> None:
    fuzz(start_service, caplog, new_seeds(SLOW_S))


def fuzz(
    start_service: "StartService", caplog: pytest.LogCaptureFixture, seeds: Iterable[int]
) -> Counter[int]:
    """Send messages, and return how many answers had each status."""
    statuses = Counter[int]()
    with background_loop() as loop, caplog.at_level(logging.ERROR):
        port = loop.enter(start_service()).router.http_port

        def send_round(seed: int) -> None:
            mutator = Mutator(MESSAGES, WORDS, seed)
            messages = (mutator.mutated() for _ in range(COUNT))
            for message, answer in exchanged(port, messages, mutator.rng):
                found = [int(status) for status in STATUS.findall(answer)]
                statuses.update(found)
                is_honest = all(status < 500 or status in HONEST for status in found)
                assert is_honest, (message, answer)
                assert STATUS.match(answer or b"HTTP/1.1 200 "), (message, answer)
            assert answer_of(port, LAST).startswith(b"HTTP/1.1 200 OK")
            assert not caplog.records, (seed, [record.getMessage() for record in caplog.records])

        check_rounds(loop, seeds, send_round)
    return statuses
