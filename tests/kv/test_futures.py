"""Alarms that complete futures in time."""

import contextlib
import time
from concurrent.futures import Future

import pytest
from ullage_testing.thread_limit import no_new_threads

from ullage_kv.futures import Alarms

ENOUGH_S = 20.0


def test_an_alarm_without_a_thread_fails_and_the_next_one_starts_it() -> None:
    with contextlib.closing(Alarms(time.monotonic)) as alarms:
        with no_new_threads(), pytest.raises(RuntimeError, match="thread"):
            alarms.finish_at(0.0, Future())

        future = Future[None]()
        alarms.finish_at(0.0, future)
        future.result(ENOUGH_S)
