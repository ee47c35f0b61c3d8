"""Which number format a device computes in."""

from pathlib import Path

import pytest
import torch

from ullage_engine.model_config.dtypes import cpu_computes_bfloat16, dtype_name, resolve_dtype


def test_a_named_type_is_itself() -> None:
    assert resolve_dtype("float16", torch.device("cpu")) is torch.float16
    assert dtype_name(torch.float16) == "float16"


def test_cuda_computes_in_bfloat16() -> None:
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16


@pytest.mark.parametrize(
    ("text", "fast"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags : fpu amx_bf16\n", True),
        ("Features : fp asimd bf16 i8mm\n", True),
        ("flags : fpu avx512f avx_vnni\n", False),
        ("", False),
    ],
)
def test_a_cpu_does_where_its_flags_say_so(tmp_path: Path, text: str, fast: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert cpu_computes_bfloat16(path) is fast
    assert not cpu_computes_bfloat16(tmp_path / "none")
