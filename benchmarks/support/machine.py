"""Describes the machine on which a benchmark runs."""

import os
import platform
from pathlib import Path

from ullage_engine.native.library import instruction_set

GIB = 1 << 30


def machine() -> str:
    """Return the processor, its instructions, cores, memory, load and kernel, as text."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    load = os.getloadavg()[0]
    kind = f"{processor()}, {os.cpu_count()} cores"
    return f"{kind}, {memory:.0f} GiB, load {load:.1f}, {platform.release()}"


def processor() -> str:
    """Return the processor and the instructions that Ullage uses of it, as text."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    return f"{name} ({instruction_set() or 'no C++ library'})"
