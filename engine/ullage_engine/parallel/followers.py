"""The other ranks' processes, seen from rank 0: one group that lives and ends as one."""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
import zmq

from ullage_engine.messages import Loading
from ullage_engine.parallel.commands import (
    Answer,
    Done,
    Failed,
    Sampled,
    Stop,
    ToFollower,
    ToLeader,
)
from ullage_engine.parallel.ends import ended_ranks
from ullage_engine.parallel.errors import GroupLostError, RankFailedError

log = logging.getLogger("ullage.engine.group")

GROUP_LOST = 3
"""Exit status of a rank that ends because another did."""
CANNOT_SERVE = 2
"""Exit status of a rank that has said why it cannot serve."""
START_FAILED = 4
"""Exit status of a rank that has said what nobody foresaw in its start."""
_POLL_MS = 100
_STOP_GRACE_S = 3.0

FollowerCommand = Callable[[int, str], Sequence[str]]
"""The command line of a rank that connects to the given endpoint."""
Report = Callable[[Loading], None]


class Followers:
    """Ranks 1 to n - 1. When one of them dies this process ends at once: a collective that waits
    for it would wait until its timeout, and the supervisor starts all of them again anyway."""

    def __init__(
        self, world: int, endpoint_base: Path, command: FollowerCommand, report: Report
    ) -> None:
        """Starts the processes. Call it on the main thread: the kernel ends them with it.

        `report` is told how far ranks are that are waited for.
        """
        self._report = report
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToLeader] = msgspec.msgpack.Decoder(ToLeader)
        self._links: dict[int, zmq.Socket[bytes]] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._is_stopping = threading.Event()
        for rank in range(1, world):
            endpoint = f"ipc://{endpoint_base}-{rank}"
            self._links[rank] = self._bind(endpoint)
            self._processes[rank] = subprocess.Popen(command(rank, endpoint))
        threading.Thread(target=self._watch, name="group-watch", daemon=True).start()

    @property
    def ranks(self) -> list[int]:
        return list(self._links)

    def tell(self, rank: int, command: ToFollower) -> None:
        self._links[rank].send(self._encoder.encode(command))

    def tell_all(self, command: ToFollower) -> None:
        encoded = self._encoder.encode(command)
        for link in self._links.values():
            link.send(encoded)

    def done(self) -> list[Done]:
        """Every rank's answer to the last command, in their order.

        Raises:
            RankFailedError: one of them cannot go on.
        """
        answers = {rank: self._answer(rank) for rank in self._links}
        failed = {rank: each for rank, each in answers.items() if isinstance(each, Failed)}
        if failed:
            raise rank_failed(failed)
        return [answer for answer in answers.values() if isinstance(answer, Done)]

    def failure(self, within_s: float) -> RankFailedError | None:
        """Why ranks say that they cannot go on, if one does in this time. Their other answers are
        lost."""
        deadline, failed = time.monotonic() + within_s, dict[int, Failed]()
        while True:
            # Looked at first: what a rank sent before it ended is there soon after.
            are_gone = all(each.poll() is not None for each in self._processes.values())
            for rank, link in self._links.items():
                while link.poll(_POLL_MS // len(self._links)):
                    answer = self._decoder.decode(link.recv())
                    if isinstance(answer, Failed):
                        failed[rank] = answer
            is_final = any(not each.may_retry for each in failed.values())
            if is_final or are_gone or time.monotonic() > deadline:
                return rank_failed(failed) if failed else None

    def sampled(self, rank: int) -> Sampled:
        """The tokens of the step that was told last."""
        answer = self._answer(rank)
        if not isinstance(answer, Sampled):
            raise GroupLostError(f"rank {rank} answered {type(answer).__name__}, not tokens")
        return answer

    def resident_bytes(self) -> int:
        """Resident memory of all these processes."""
        total = 0
        for process in self._processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += psutil.Process(process.pid).memory_info().rss
        return total

    def stop(self) -> None:
        """Ends the processes: asked, then made to."""
        self._is_stopping.set()
        encoded = self._encoder.encode(Stop())
        for link in self._links.values():
            # One that is gone takes nothing, and waiting for it would last for ever.
            with contextlib.suppress(zmq.Again):
                link.send(encoded, zmq.DONTWAIT)
        deadline = time.monotonic() + _STOP_GRACE_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends the processes without asking: one that still loads does not listen."""
        self._is_stopping.set()
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._context.destroy(linger=0)

    def _bind(self, endpoint: str) -> zmq.Socket[bytes]:
        link = self._context.socket(zmq.PAIR)
        link.set_hwm(0)
        link.setsockopt(zmq.LINGER, 0)
        link.bind(endpoint)
        return link

    def _answer(self, rank: int) -> Answer:
        """The next answer of a rank; a rank that is gone has sent its last already."""
        while isinstance(answer := self._message(rank), Loading):
            self._report(answer)
        return answer

    def _message(self, rank: int) -> ToLeader:
        link, process = self._links[rank], self._processes[rank]
        is_gone = False
        while not link.poll(_POLL_MS):
            if is_gone:
                raise GroupLostError(f"rank {rank} ended with status {process.returncode}")
            is_gone = process.poll() is not None
        return self._decoder.decode(link.recv())

    def _watch(self) -> None:
        """Ends this process as soon as one of the others has ended without a word."""
        for rank in ended_ranks(self._processes):
            self._judge(rank)

    def _judge(self, rank: int) -> None:
        status = self._processes[rank].wait()
        if self._is_stopping.is_set() or status in (CANNOT_SERVE, START_FAILED):
            return
        log.error("rank %d ended with status %d; the group starts again", rank, status)
        sys.stderr.flush()
        os._exit(GROUP_LOST)


def rank_failed(failed: Mapping[int, Failed]) -> RankFailedError:
    """One line of what ranks said. A reason that another start would not mend is the cause of
    those that nobody foresaw; of these none is known to be."""
    for rank, each in failed.items():
        if not each.may_retry:
            return RankFailedError(f"rank {rank}: {each.error}")
    lines = (f"rank {rank}: {each.error}" for rank, each in failed.items())
    return RankFailedError("; ".join(lines), may_retry=True)
