"""Processes that abort with and without memory, which the kernel really refuses."""

import signal
import subprocess
import sys

import pytest

from ullage_engine.native.library import instruction_set

pytestmark = pytest.mark.skipif(not instruction_set(), reason="the C++ library is not for here")

STATUS = 8
BEGIN = f"""
import ctypes, os, resource, signal

from ullage_engine.native.aborts import end_aborts_for_memory

new = ctypes.CDLL("libstdc++.so.6")._Znwm
end_aborts_for_memory({STATUS})
size = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
"""
LIMIT = "resource.setrlimit(resource.{0}, (size + (8 << 20), size + (8 << 20)))\n"
BAD_ALLOC = "new(ctypes.c_size_t(256 << 20))\n"


def status_of(script: str) -> int:
    ended = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, timeout=120)
    return ended.returncode


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_process_that_aborts_without_memory_says_so(limit: str) -> None:
    """C++ asks for memory behind Python's back, where nobody catches std::bad_alloc."""
    assert status_of(LIMIT.format(limit) + BAD_ALLOC) == STATUS


@pytest.mark.parametrize("ending", ["os.abort()", "os.kill(os.getpid(), signal.SIGABRT)"])
def test_other_aborts_stay_what_they_are(ending: str) -> None:
    assert status_of(ending) == -signal.SIGABRT
