"""What tests of several of the engine's rooms share.

Support that loads torch is imported by the fixtures that need it, so that tests of the scheduler
start without it.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from ullage_testing.fake_device import Rig
from ullage_testing.fake_nvml import FakeNvml, compile_library
from ullage_testing.scheduler_bench import Bench

if TYPE_CHECKING:
    import torch
    from ullage_testing.fake_cudart import FakeCudart

    from ullage_engine.model_loader.loader import LoadedModel
    from ullage_engine.runner.model_runner import ModelRunner


@pytest.fixture
def seed() -> int:
    """The same in every run."""
    import torch

    value = 20_261
    torch.manual_seed(value)
    return value


@pytest.fixture(scope="session")
def nvml_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library that processes take for NVIDIA's."""
    folder = tmp_path_factory.mktemp("nvml")
    compile_library(folder)
    return folder


@pytest.fixture(scope="module")
def gpus(nvml_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return FakeNvml(nvml_dir, tmp_path_factory.mktemp("gpus") / "state")


@pytest.fixture
def fake_cudart(monkeypatch: pytest.MonkeyPatch) -> "FakeCudart":
    """CUDA's runtime as far as host memory is registered with it."""
    import torch
    from ullage_testing.fake_cudart import FakeCudart

    fake = FakeCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch, "ones", fake.launch)
    return fake


@pytest.fixture(scope="session")
def make_rig() -> Callable[..., Rig]:
    return Rig


@pytest.fixture(scope="session")
def bench() -> type[Bench]:
    return Bench


@pytest.fixture
def new_weights(seed: int) -> "Callable[..., torch.Tensor]":
    """Weights of rows that differ much in size, as those of models do."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def make(rows: int, columns: int) -> torch.Tensor:
        sizes = torch.rand(rows, 1, generator=generator) * 3 - 2
        return torch.randn(rows, columns, generator=generator) * 10**sizes

    return make


@pytest.fixture(scope="session")
def load(weights_dir: Path) -> "Callable[..., LoadedModel]":
    """Loads a source through one folder of prepared weights."""
    import torch

    from ullage_common.config.engine import ModelSection
    from ullage_engine.model_loader.loader import load_weights

    def load_source(
        source: str,
        dtype: torch.dtype = torch.float32,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
        quantization: Literal["auto", "none"] = "none",
    ) -> "LoadedModel":
        section = ModelSection(source=source, name="test", quantization=quantization)
        return load_weights(section, device, dtype, weights_dir, lambda done, total: None)

    return load_source


@pytest.fixture(scope="session")
def load_smollm2(load: "Callable[..., LoadedModel]") -> "Callable[..., LoadedModel]":
    from ullage_testing.small_models import SOURCE

    return partial(load, SOURCE)


@pytest.fixture(scope="session")
def smollm2(load_smollm2: "Callable[..., LoadedModel]") -> "LoadedModel":
    return load_smollm2()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    from ullage_testing.small_models import smollm2_path

    return smollm2_path()


@pytest.fixture(scope="session")
def smollm2_reference() -> Any:
    from ullage_testing.small_models import load_smollm2_reference

    return load_smollm2_reference()


@pytest.fixture(scope="session")
def reference() -> Callable[[Any, list[int], int], list[int]]:
    from ullage_testing.small_models import continue_greedily

    return continue_greedily


@pytest.fixture
def save_llama(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    from ullage_testing.small_models import make_llama

    return partial(make_llama, tmp_path)


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Any]:
    from ullage_testing.small_models import make_family

    return make_family


@pytest.fixture(scope="session")
def save_mxfp4() -> Callable[..., Any]:
    from ullage_testing.small_models import save_packed

    return save_packed


@pytest.fixture(scope="session")
def new_runner() -> "Callable[..., ModelRunner]":
    from ullage_testing.small_models import make_runner

    return make_runner


@pytest.fixture(scope="session")
def generate() -> Callable[..., list[list[int]]]:
    from ullage_testing.small_models import run_all

    return run_all
