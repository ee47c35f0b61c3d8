"""Messages with wrong bytes, what they are sent with, and what a server must not do over them."""

import contextlib
import gc
import itertools
import os
import random
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ullage_testing.background_loop import BackgroundLoop
from ullage_testing.loop_watch import MOST_S

ANSWER_TIMEOUT_S = 30.0
QUIET_S = 0.1
"""Seconds without an answer after which a client ends what it sends."""
AT_ONCE = 16
"""Connections that are open at a time."""
MOST_GROWN_BYTES = 16 << 20
MOST_GARBAGE = 200
"""Objects that a round may leave to a search for garbage."""
_EDGES = (0x00, 0x09, 0x0A, 0x0D, 0x20, 0x7F, 0x80, 0xFF)
_LONGEST_RUN = 5_000


class Mutator:
    """Makes messages wrong, always in the same way with the same seed.

    Args:
        messages: parts of which may come into another one.
        words: what may be written into one.
    """

    def __init__(self, messages: Sequence[bytes], words: Sequence[bytes], seed: int) -> None:
        self.rng = random.Random(seed)
        self._messages = messages
        self._words = words
        self._changes: tuple[Callable[[bytearray], None], ...] = (
            self._flip,
            self._write_edge,
            self._remove,
            self._repeat,
            self._cut,
            self._insert_word,
            self._insert_word,
            self._insert_part,
            self._splice,
        )

    def mutated(self) -> bytes:
        """Return one of the messages with a few wrong bytes."""
        return self.changed(self.rng.choice(self._messages))

    def changed(self, message: bytes) -> bytes:
        """Return a message with a few wrong bytes."""
        data = bytearray(message)
        for _ in range(self.rng.choice((1, 1, 1, 2, 3, 6))):
            self.rng.choice(self._changes)(data)
        return bytes(data)

    def _part(self, data: bytearray | bytes) -> slice:
        """Return the place of a short part."""
        start = self.rng.randint(0, len(data))
        return slice(start, start + self.rng.choice((0, 1, 1, 2, 4, 16, 64)))

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)

    def _write_edge(self, data: bytearray) -> None:
        if data:
            data[self.rng.randrange(len(data))] = self.rng.choice(_EDGES)

    def _remove(self, data: bytearray) -> None:
        del data[self._part(data)]

    def _repeat(self, data: bytearray) -> None:
        place = self._part(data)
        part = data[place]
        count = min(self.rng.choice((1, 2, 50, 1000)), _LONGEST_RUN // max(1, len(part)))
        data[place] = part * (1 + count)

    def _cut(self, data: bytearray) -> None:
        del data[self.rng.randint(0, len(data)) :]

    def _insert_word(self, data: bytearray) -> None:
        data[self._part(data)] = self.rng.choice(self._words)

    def _insert_part(self, data: bytearray) -> None:
        other = self.rng.choice(self._messages)
        data[self._part(data)] = other[self._part(other)]

    def _splice(self, data: bytearray) -> None:
        other = self.rng.choice(self._messages)
        data[self.rng.randint(0, len(data)) :] = other[self.rng.randint(0, len(other)) :]


class _Exchange:
    """A connection on which a message is sent in pieces and all is received. A client that has
    nothing to send and gets nothing says that it will send no more."""

    def __init__(self, port: int, message: bytes, pieces: Iterable[bytes]) -> None:
        self.message = message
        self.received = bytearray()
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self._pieces = iter(pieces)
        self._unsent = b""
        self._last_event = time.monotonic()
        self._is_ended = False
        self.is_sent = False

    def send_some(self) -> None:
        self._last_event = time.monotonic()
        self._unsent = self._unsent or next(self._pieces, b"")
        try:
            if self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            else:
                self.is_sent = True
        except BlockingIOError:
            pass
        except OSError:  # the server has closed
            self.is_sent = True

    def receive_some(self) -> bool:
        """Return whether the server may send more."""
        self._last_event = time.monotonic()
        try:
            part = self.socket.recv(1 << 16)
        except ConnectionResetError:
            part = b""
        self.received += part
        return bool(part)

    def end_if_quiet(self) -> None:
        """Send the end where nothing happened for a while. The server must then close.

        Raises:
            TimeoutError: it does not.
        """
        quiet_s = time.monotonic() - self._last_event
        if quiet_s > ANSWER_TIMEOUT_S:
            raise TimeoutError(f"the connection stays open: {self.message!r}, {self.received!r}")
        if self.is_sent and quiet_s > QUIET_S and not self._is_ended:
            self._is_ended = True
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)


def exchanged(
    port: int, messages: Iterable[bytes], rng: random.Random
) -> Iterator[tuple[bytes, bytes]]:
    """Send each message on a connection of its own, in pieces of any size, a few at a time. Yield
    each with what came back.

    Raises:
        TimeoutError: the server did not close a connection whose client sends no more.
    """
    waiting = iter(messages)
    open_ones = set[_Exchange]()
    with selectors.DefaultSelector() as selector:
        while True:
            for message in itertools.islice(waiting, AT_ONCE - len(open_ones)):
                one = _Exchange(port, message, _pieces(message, rng))
                selector.register(one.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, one)
                open_ones.add(one)
            if not open_ones:
                return
            for key, events in selector.select(timeout=QUIET_S):
                one = key.data
                if events & selectors.EVENT_WRITE:
                    one.send_some()
                    if one.is_sent:
                        selector.modify(one.socket, selectors.EVENT_READ, one)
                if events & selectors.EVENT_READ and not one.receive_some():
                    selector.unregister(one.socket)
                    one.socket.close()
                    open_ones.remove(one)
                    yield one.message, bytes(one.received)
            for one in open_ones:
                one.end_if_quiet()


def answer_of(port: int, message: bytes) -> bytes:
    """Return what comes back for a message that ends its connection."""
    answer = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_TIMEOUT_S) as client:
        client.sendall(message)
        while part := client.recv(1 << 16):
            answer += part
    return bytes(answer)


def _pieces(message: bytes, rng: random.Random) -> Iterator[bytes]:
    size = rng.choice((1, 7, 100, 1 << 20))
    least = max(size, len(message) // 200)
    for start in range(0, len(message), least):
        yield message[start : start + least]


def check_rounds(
    loop: BackgroundLoop,
    seeds: Iterable[int],
    send_round: Callable[[int], None],
    leaves_garbage: bool = False,
    leaked_bytes: int = 0,
) -> None:
    """Send rounds of messages to a server in a loop, and assert that they leave nothing behind and
    that the loop served others all the time. The first round is for what is made once.

    A search for garbage stops everybody, and until it comes whole bodies may wait for it. So none
    runs meanwhile, and next to none may be left.

    Args:
        leaves_garbage: whether clients or libraries leave some of their own.
        leaked_bytes: memory that libraries are known to lose in a round.
    """
    seeds = iter(seeds)
    gc.collect()
    gc.disable()
    try:
        with loop.watching() as watch:
            for seed in itertools.islice(seeds, 1):
                send_round(seed)
            files = _open_files()
            tasks = loop.num_tasks
            size = _resident_bytes()
            gc.collect()
            num_rounds = 0
            littered = 0  # rounds in a row: a process leaves some now and then, without messages
            for seed in seeds:
                send_round(seed)
                num_rounds += 1
                assert watch.turn_s <= MOST_S, f"seed {seed}: the loop computed {watch.turn_s} s"
                littered = littered + 1 if gc.collect() > MOST_GARBAGE else 0
                assert littered < 2 or leaves_garbage, f"seed {seed} leaves garbage"
        _wait_until(lambda: _open_files() <= files, lambda: f"{_open_files()} files, not {files}")
        _wait_until(lambda: loop.num_tasks <= tasks, lambda: f"{loop.num_tasks} tasks, not {tasks}")
        assert _resident_bytes() - size <= MOST_GROWN_BYTES + num_rounds * leaked_bytes
    finally:
        gc.enable()


def new_seeds(seconds: float) -> Iterator[int]:
    """Yield seeds that were not tried before, for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield random.SystemRandom().getrandbits(32)


def _wait_until(is_true: Callable[[], bool], shown: Callable[[], str]) -> None:
    began = time.monotonic()
    while not is_true():
        assert time.monotonic() - began < ANSWER_TIMEOUT_S, shown()
        time.sleep(0.01)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
