"""Every compiler makes a library of the same bits, and so do the sources for AVX-512 where each of
its instructions is emulated."""

import importlib.util
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ullage_testing.native_models import (
    LIMITS,
    SHAPES,
    chunk,
    logits,
    make_model,
    make_runner,
    random_tokens,
)

from ullage_engine.native import library
from ullage_engine.native.library import Draw, Team

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("seed")]

ROOT = Path(__file__).parents[3]
COMPILERS = {"g++": "g++ -w", "clang++": "clang++", "ziglang": ""}
EMULATED = ["-mavx2", "-mfma", "-mf16c", "-DSIMDE_ENABLE_NATIVE_ALIASES", "-w"]

ComputeWith = Callable[[str], None]


def build_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Have the package compute with another library from then on."""

    def load(path: Path) -> None:
        monkeypatch.setattr(library, "PATH", path)
        library.load.cache_clear()

    yield load
    monkeypatch.undo()
    library.load.cache_clear()


def answers(isa: str, compute_with: ComputeWith) -> list[torch.Tensor]:
    """Compute steps of every shape and tokens of random rows with the library in use."""
    compute_with(isa)
    torch.manual_seed(20_261)
    found = []
    for shape in SHAPES:
        tokens = random_tokens(290)
        runner = make_runner(make_model(shape), limits=LIMITS)
        for start, end in itertools.pairwise((0, 200, 289, 290)):
            found.append(logits(runner, chunk(0, tokens, start, end)))
    team = Team(2, isa)
    rows = torch.randn(200, 3008) * 3
    for filters in ({}, {"top_k": 40}, {"top_p": 0.95}, {"min_p": 0.01, "top_p": 0.9}):
        draws = [
            Draw(temperature=1.3, **({"top_p": 1.0} | filters), noise=i / 200) for i in range(200)
        ]
        found.append(torch.tensor(team.sample(rows, draws)))
    return [*found, team.log_masses(rows)]


@pytest.mark.parametrize("name", COMPILERS)
def test_every_compiler_makes_a_library_of_the_same_bits(
    name: str,
    use: Callable[[Path], None],
    compute_with: ComputeWith,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not (importlib.util.find_spec(name) if name == "ziglang" else shutil.which(name)):
        pytest.skip(f"{name} is not installed")
    isa = library.instruction_set()
    if isa is None:
        pytest.skip("the library cannot be used here")
    wanted = answers(isa, compute_with)
    monkeypatch.setenv("ULLAGE_CXX", COMPILERS[name])
    build_module().compile_library(ROOT, tmp_path / "other.so")
    use(tmp_path / "other.so")
    assert all(map(torch.equal, answers(isa, compute_with), wanted))


def test_emulated_avx512_has_the_bits_of_the_portable_set(
    use: Callable[[Path], None],
    compute_with: ComputeWith,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With SIMDe, which writes every instruction in C (`pip install simde-py`)."""
    simde = importlib.util.find_spec("simde_py")
    if simde is None or simde.origin is None or not shutil.which("g++"):
        pytest.skip("simde-py or g++ is not installed")
    if library.instruction_set() is None:
        pytest.skip("the library cannot be used here")
    headers = Path(simde.origin).parent / "simde"
    build = build_module()
    file, options = build.OBJECTS["avx512"]
    own = [option for option in options if not option.startswith("-m")]
    include = ["-I", str(headers), "-include", "simde/x86/avx512.h"]
    build.OBJECTS["avx512"] = (file, [*own, *EMULATED, *include])
    build.OPTIONS.append("-O1")
    monkeypatch.setenv("ULLAGE_CXX", "g++")
    build.compile_library(ROOT, tmp_path / "emulated.so")
    use(tmp_path / "emulated.so")
    wanted = answers(library.PORTABLE, compute_with)
    assert all(map(torch.equal, answers("avx512", compute_with), wanted))
