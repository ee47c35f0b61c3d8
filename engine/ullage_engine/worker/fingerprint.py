"""Fingerprints of the processor and the software, which affect the exact bits of answers."""

import hashlib
import json
from functools import cache
from pathlib import Path

import msgspec
import torch

import ullage_engine
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.native import library

_COMPUTING = ("kernels", "layers", "runner")
"""Packages whose code computes tokens, with torch, Triton or the C++ library."""

_DIGITS = 16
"""Number of hexadecimal digits of a digest in a fingerprint."""

_ORDER = "16 sums, 1"
"""Identifier of the C++ library's summation order, shared by AVX2 and AVX-512 (decision 52).

Change it whenever the order or a polynomial approximation changes.
"""

_CPU_NAMES = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
"""Fields of /proc/cpuinfo that identify the CPU model on x86 and on Arm."""
_CPU_FLAGS = {
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "sve", "bf16", "i8mm"),
}
"""CPU instruction set extensions by which libraries choose their kernels."""


def canonical_order() -> str:
    """Return an identifier for the order in which the C++ library evaluates sums and polynomials.

    With the same build of the library, processors with the same identifier produce bit-identical
    results. The identifier is empty if the library is not available.
    """
    return "" if library.instruction_set() is None else _ORDER


@cache
def build_digest(*, with_library: bool) -> str:
    """Return a digest of the code that computes tokens: Python files and the C++ library."""
    root = Path(ullage_engine.__file__).parent
    digest = hashlib.sha256(_library_bytes() if with_library else b"")
    for path in sorted(path for name in _COMPUTING for path in (root / name).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"\n{path.relative_to(root)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:_DIGITS]


def _library_bytes() -> bytes:
    return library.PATH.read_bytes()


def digest_of(model_config: ModelConfig) -> str:
    """Return a digest of the dimensions and constants in a model configuration."""
    return digest_of_json(msgspec.to_builtins(model_config))


def digest_of_json(value: object) -> str:
    """Return a digest of a JSON value that does not depend on key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def processor_of(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the GPU's name, or the result of `cpu_kind` if the device is a CPU.

    The choice of kernels and the order of summation depend on this hardware.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_kind(cpuinfo)


def cpu_kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's vendor, family and model, and the instruction sets that kernels use."""
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        first, *_ = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n")
    except OSError:
        return capability

    pairs = (line.partition(":") for line in first.splitlines())
    entries = {name.strip(): value.strip() for name, _, value in pairs}
    # The entry is "flags" on x86 and "Features" on Arm.
    flags = f"{entries.get('flags', '')} {entries.get('Features', '')}".split()
    names = [entries[name] for name in _CPU_NAMES if name in entries]
    return " ".join([*names, capability, *sorted(_CPU_FLAGS.intersection(flags))])


def yes_or_no(value: bool) -> str:
    """Convert a boolean to "yes" or "no" for use in fingerprints."""
    return "yes" if value else "no"
