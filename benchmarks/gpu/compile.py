"""Compile the Triton kernels of the programme, in several processes, without a GPU.

On a GPU machine, this fills Triton's cache before the programme measures anything: one kernel takes
a second, and the programme launches some two hundred kernels. On other machines, it shows that
every kernel compiles for an architecture, fits into its shared memory and spills no registers.

This module has no list of kernels. ModelRunner runs the steps of its warm-up on the CPU, with one
layer of each kind and the widths of the programme's models. Each kernel is compiled for the same
arguments instead of being launched. New kernels are therefore included without a change. --every
adds the list in tests/engine/kernels/triton/compile_kernels.py.

examples:
  python -m benchmarks.gpu.compile                        for this machine's GPU, else sm90
  python -m benchmarks.gpu.compile --arch sm90 --processes 2 --cache /tmp/triton
  python -m benchmarks.gpu.compile --arch sm90 --every --json compiled.jsonl
  python -m benchmarks.gpu.compile --arch sm100 "llama-8b int8"

exit status: 0 all kernels compiled, 1 a kernel did not compile or needs too much shared memory, 2
there is no Triton, 130 interrupted
"""

import argparse
import contextlib
import ctypes.util
import functools
import importlib.util
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.figures import one_line
from benchmarks.support.small_models import MODELS
from ullage_engine.kernels import triton as kernels
from ullage_engine.kernels.arena import GATHER_TOKENS, StepLimits
from ullage_engine.layers.linear import Linear, PlainLinear
from ullage_engine.layers.moe import ExpertLinears, LoopedExperts, PickedExperts, packed_experts
from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.model_config import ExpertsSpec, LayerSpec, ModelConfig
from ullage_engine.model_config.registry import read_model_config
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.model_loader.prepare import is_matrix
from ullage_engine.model_loader.tensor_plan import TensorPlan, plan_tensors
from ullage_engine.quantization.formats import Encoding, Format, chosen_encoding, pieces_of
from ullage_engine.runner.model_runner import ModelRunner

ROOT = Path(__file__).parents[2]
LISTS = ROOT / "tests" / "engine" / "kernels" / "triton" / "compile_kernels.py"
INTERRUPTED = 130

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Maximum shared memory per thread block, by architecture (CUDA programming guide)."""

MAX_TOKENS = 1024
"""Tokens in the longest step. With four experts each, they fill 32 experts' largest tiles."""
MAX_ROWS = 128
MAX_MODEL_LEN = 16_384
NUM_BLOCKS = 64
"""Number of KV blocks. All steps share these blocks, because nothing is read from them."""
VOCAB = 16_384
"""Vocabulary size. Larger multiples of 16 compile to the same kernels, with equally wide tiles."""
MXFP4_GROUP = 32


@dataclass(frozen=True)
class Case:
    """A model that the programme runs, in one data type or weight format."""

    config: ModelConfig
    dtype: torch.dtype = torch.bfloat16
    format: Format | None = None
    """Format of the weight matrices, or None for the data type of the computation."""
    has_fp8_kv: bool = False


@dataclass(frozen=True)
class Compiled:
    """A kernel that was compiled for one set of arguments."""

    case: str
    name: str
    arch: int
    seconds: float
    shared: int = 0
    """Shared memory of one program in bytes."""
    spilled: int | None = None
    """Bytes of spilled registers (None for a kernel from the cache, which does not record them)."""
    uses_tensor_cores: bool = False
    error: str = ""

    @property
    def fault(self) -> str:
        """The reason why this kernel cannot run on its architecture (empty if it can)."""
        if self.error:
            return self.error
        limit = SHARED_BYTES.get(self.arch)
        if limit is not None and self.shared > limit:
            return f"needs {self.shared} bytes of shared memory, sm{self.arch} has {limit}"
        return ""


def llama() -> ModelConfig:
    """Return a model configuration with Llama-3-8B's sizes and one layer."""
    return ModelConfig(
        architecture="llama", layers=(LayerSpec(),), hidden=4096, num_heads=32, num_kv_heads=8,
        head_dim=128, intermediate=14_336, vocab=VOCAB, max_position=MAX_MODEL_LEN,
        rope_theta=5e5, rms_eps=1e-5, tied=False,
    )  # fmt: skip


def lfm2_moe() -> ModelConfig:
    """Return a model configuration with LFM2-8B-A1B's sizes and one layer of each kind."""
    return ModelConfig(
        architecture="lfm2_moe",
        layers=(LayerSpec(mixer="conv"), LayerSpec(feed_forward="experts")),
        hidden=2048, num_heads=32, num_kv_heads=8, head_dim=64, intermediate=7168, vocab=VOCAB,
        max_position=MAX_MODEL_LEN, rope_theta=1e6, rms_eps=1e-5, tied=True, has_qk_norm=True,
        conv_kernel=3, conv_channels=2048,
        experts=ExpertsSpec(
            num_experts=32, experts_per_token=4, intermediate=1792, scoring="sigmoid"
        ),
    )  # fmt: skip


def gpt_oss() -> ModelConfig:
    """Return a model configuration with gpt-oss-20b's sizes and one layer of each kind."""
    return ModelConfig(
        architecture="gpt_oss",
        layers=(
            LayerSpec(window=128, feed_forward="experts"),
            LayerSpec(feed_forward="experts"),
        ),
        hidden=2880, num_heads=64, num_kv_heads=8, head_dim=64, intermediate=2880, vocab=VOCAB,
        max_position=MAX_MODEL_LEN, rope_theta=150_000.0, rms_eps=1e-5, tied=False,
        has_attention_bias=True, has_sinks=True,
        experts=ExpertsSpec(
            num_experts=32, experts_per_token=4, intermediate=2880, scoring="softmax",
            is_biased=True,
        ),
    )  # fmt: skip


def family(name: str) -> Case:
    """Return a small model from `small_models`, whose greedy tokens the programme compares."""
    values = MODELS[name]
    format: Format | None = "mxfp4" if "quantization_config" in values else None
    return Case(read_model_config(HFConfig(Path(name), values)), torch.float32, format)


CASES: Mapping[str, Callable[[], Case]] = {
    # The longest begin first.
    "llama-8b float32": lambda: Case(llama(), torch.float32),
    "lfm2-8b-a1b float32": lambda: Case(lfm2_moe(), torch.float32),
    **{f"small {name}": functools.partial(family, name) for name in MODELS},
    "gpt-oss-20b mxfp4": lambda: Case(gpt_oss(), format="mxfp4"),
    "lfm2-8b-a1b": lambda: Case(lfm2_moe()),
    "lfm2-8b-a1b int8": lambda: Case(lfm2_moe(), format="int8"),
    "lfm2-8b-a1b int4": lambda: Case(lfm2_moe(), format="int4"),
    "lfm2-8b-a1b fp8": lambda: Case(lfm2_moe(), format="fp8"),
    "lfm2-8b-a1b mxfp4": lambda: Case(lfm2_moe(), format="mxfp4"),
    "llama-8b fp8 KV": lambda: Case(llama(), has_fp8_kv=True),
    "llama-8b": lambda: Case(llama()),
    "llama-8b int8": lambda: Case(llama(), format="int8"),
    "llama-8b int4": lambda: Case(llama(), format="int4"),
    "llama-8b fp8": lambda: Case(llama(), format="fp8"),
}
"""The models for which the programme launches kernels."""


class SkippedLinear:
    """A matmul that no Triton kernel computes. It is skipped, because nobody reads its result."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Skip the matmul."""

    def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Skip the matmul."""


def skip_plain(name: str, linear: Linear) -> Linear:
    """Return the matrix if a Triton kernel multiplies it, otherwise a SkippedLinear."""
    return SkippedLinear(linear.shape) if isinstance(linear, PlainLinear) else linear


def as_on_cuda(loaded: LoadedModel, name: str, experts: ExpertLinears) -> ExpertLinears:
    """Return the experts in the form that they have on CUDA.

    For plain weights, a kernel multiplies few rows, and a library multiplies many rows.
    """
    if not isinstance(experts, LoopedExperts):
        return experts
    plain = packed_experts(loaded.tensors[name], None, "plain")
    return PickedExperts(few=plain, many=plain)


def empty_model(case: Case) -> LoadedModel:
    """Return a model whose weights are all zero."""
    tensors: dict[str, torch.Tensor] = {}
    encodings: dict[str, Encoding] = {}
    for plan in plan_tensors(case.config):
        encoding = encoding_of(plan, case.format)
        if encoding is None:
            tensors[plan.name] = torch.zeros(plan.shape, dtype=case.dtype)
            continue
        encodings[plan.name] = encoding
        for piece in pieces_of(encoding, case.dtype):
            tensors[f"{plan.name}.{piece.name}"] = torch.zeros(piece.shape, dtype=piece.dtype)
    return LoadedModel(case.config, tensors, 0, encodings)


def encoding_of(plan: TensorPlan, format: Format | None) -> Encoding | None:
    """Return a tensor's encoding, or None for plain values. MXFP4 is only for experts."""
    if format is None or not is_matrix(plan):
        return None
    *stacked, columns = plan.shape
    shape = (functools.reduce(int.__mul__, stacked), columns)
    if format != "mxfp4":
        return chosen_encoding(format, shape)
    is_expert = ".experts_" in plan.name
    return Encoding(format="mxfp4", shape=shape, group=MXFP4_GROUP) if is_expert else None


def run_steps(case: Case) -> None:
    """Run the steps of a warm-up, in which kernels are compiled instead of launched."""
    loaded = empty_model(case)

    limits = StepLimits(
        max_tokens=MAX_TOKENS,
        max_rows=MAX_ROWS,
        max_model_len=MAX_MODEL_LEN,
        gather_tokens=GATHER_TOKENS,
        itemsize=case.dtype.itemsize,
        fp8_kv=case.has_fp8_kv,
    )

    runner = ModelRunner(
        loaded,
        torch.device("cpu"),
        case.dtype,
        limits,
        wrap=skip_plain,
        wrap_experts=functools.partial(as_on_cuda, loaded),
    )

    runner.allocate_arena()
    runner.allocate_kv(NUM_BLOCKS)
    runner.warm_up()


class Recorder:
    """Compiles each launched kernel once for each set of arguments."""

    def __init__(self, case: str, arch: int, finish: Callable[[Any], None] | None = None) -> None:
        """Create a recorder that calls `finish` with each new binary."""
        self._case = case
        self._arch = arch
        self._finish = finish
        self._compiled: dict[str, Compiled] = {}
        """Compiled kernels, by the binary's hash or by the name of a failed kernel."""

    @property
    def compiled(self) -> list[Compiled]:
        return list(self._compiled.values())

    def launch(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        """Replace kernel[grid], and return a launcher that only compiles the kernel."""

        def compile_only(*args: object, **constants: object) -> None:
            attempt = f"{kernel.__name__} {constants}"
            if attempt in self._compiled:
                return

            log = io.StringIO()
            started = time.perf_counter()
            try:
                with contextlib.redirect_stdout(log):
                    binary = kernel.warmup(*args, grid=grid, **constants)
                    if self._finish is not None and binary.hash not in self._compiled:
                        self._finish(binary)
            except Exception as error:  # Triton, LLVM and ptxas raise many types
                took = time.perf_counter() - started
                self._compiled[attempt] = self._failed(kernel.__name__, took, error)
            else:
                took = time.perf_counter() - started
                facts = self._facts(binary, took, log.getvalue())
                self._compiled.setdefault(binary.hash, facts)

        return compile_only

    def _failed(self, name: str, seconds: float, error: Exception) -> Compiled:
        return Compiled(self._case, name, self._arch, seconds, error=one_line(error))

    def _facts(self, binary: Any, seconds: float, log: str) -> Compiled:
        spills = re.findall(r"(\d+) bytes spill stores", log)
        return Compiled(
            case=self._case,
            name=binary.metadata.name,
            arch=self._arch,
            seconds=seconds,
            shared=binary.metadata.shared,
            spilled=sum(map(int, spills)) if spills else None,
            uses_tensor_cores="mma" in binary.asm["ptx"],
        )


def build_launcher(binary: Any) -> None:
    """Compile the host side of a launch, which Triton before 3.7 builds for each signature.

    The launcher links the driver's library, and takes half a second to compile.
    """
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(binary.src, binary.metadata)


def compile_case(name: str, arch: int, threads: int) -> list[Compiled]:
    """Compile the kernels of one case in a separate process, because Triton stays patched."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Absent:
        """A stand-in for a GPU of this architecture, on which nothing is launched."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    has_driver = ctypes.util.find_library("cuda") is not None
    recorder = Recorder(name, arch, build_launcher if has_driver else None)
    torch.set_num_threads(threads)
    driver.set_active(Absent())
    knobs.nvidia.dump_ptxas_log = True
    JITFunction.__getitem__ = lambda kernel, grid: recorder.launch(kernel, grid)
    kernels.runs_on = lambda device: True  # type: ignore[assignment]

    if name in CASES:
        run_steps(CASES[name]())
    else:
        for _, launch in listed()[name]():
            launch()
    return recorder.compiled


def listed() -> dict[str, Callable[[], Iterator[tuple[str, Callable[[], None]]]]]:
    """Return the lists of kernel variants that the tests compile, by name."""
    spec = importlib.util.spec_from_file_location("compile_kernels", LISTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    lists: dict[str, Any] = module.LISTS
    return lists


def compile_all(names: list[str], arch: int, processes: int) -> Iterator[Compiled]:
    """Compile several cases in parallel, and yield each kernel once when its case is done.

    No kernel is launched, and no process opens a context on a GPU.
    """
    os.environ["TRITON_INTERPRET"] = "0"
    threads = max(1, (os.cpu_count() or 1) // processes)
    with ProcessPoolExecutor(min(processes, len(names)), mp_context=get_context("spawn")) as pool:
        running = {pool.submit(compile_case, name, arch, threads): name for name in names}
        for done in as_completed(running):
            try:
                yield from done.result()
            except Exception as error:  # a step that fails on the CPU hides its kernels
                yield Compiled(running[done], "steps", arch, 0.0, error=one_line(error))


def main(argv: list[str] | None = None) -> int:
    arguments = read_arguments(argv)
    if importlib.util.find_spec("triton") is None:
        print("error: there is no Triton: pip install triton", file=sys.stderr)
        return 2
    if arguments.cache:
        os.environ["TRITON_CACHE_DIR"] = arguments.cache

    names = arguments.cases or [*CASES]
    if arguments.every:
        names.append("every")
    started = time.perf_counter()
    faults: list[str] = []
    num_kernels = 0
    lines = open(arguments.json, "w", encoding="utf-8") if arguments.json else None  # noqa: SIM115
    with lines or contextlib.nullcontext():
        for each in compile_all(names, arguments.arch, arguments.processes):
            num_kernels += 1
            print(line(each), flush=True)
            if lines:
                print(json.dumps(asdict(each)), file=lines, flush=True)
            if each.fault:
                faults.append(f"{each.case}: {each.name} {each.fault}")

    took = time.perf_counter() - started
    print(f"{num_kernels} kernels for sm{arguments.arch} in {took:.0f} s, {len(faults)} failed")
    for fault in faults:
        print(f"FAILED {fault}")
    return 1 if faults else 0


def line(compiled: Compiled) -> str:
    """Format a kernel as a line of the table."""
    spilled = "cached" if compiled.spilled is None else f"{compiled.spilled} B spilled"
    cores = "tensor cores" if compiled.uses_tensor_cores else ""
    return (
        f"{compiled.case:22} {compiled.name:20} {compiled.seconds:6.2f} s "
        f"{compiled.shared:7} B shared, {spilled:14} {cores}{compiled.fault}"
    ).rstrip()


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.compile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="compile only these cases")
    parser.add_argument("--arch", type=read_arch, default=None, help="sm80, sm89, sm90, sm100")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    parser.add_argument(
        "--every", action="store_true", help="also compile the variants of the tests"
    )
    parser.add_argument("--cache", metavar="DIR", help="Triton's cache; TRITON_CACHE_DIR")
    parser.add_argument("--json", metavar="FILE", help="write a line of JSON for each kernel")

    arguments = parser.parse_args(argv)
    if arguments.arch is None:
        arguments.arch = arch_here()

    if unknown := sorted(set(arguments.cases) - set(CASES)):
        parser.error(f"there is no case {unknown[0]!r}; choose from {', '.join(CASES)}")
    if arguments.processes < 1:
        parser.error(f"--processes {arguments.processes}: give at least 1")
    return arguments


def read_arch(text: str) -> int:
    """Parse an architecture such as sm90, and return its number."""
    number = text.removeprefix("sm_").removeprefix("sm")
    if not number.isdigit() or int(number) < 80:
        raise argparse.ArgumentTypeError(f"{text!r} is no architecture: give sm80, sm90 or later")
    return int(number)


def arch_here() -> int:
    """Return the architecture of this machine's GPU, or sm90 without a GPU.

    The driver reports the architecture without a context on the GPU.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except Exception:  # no NVML, no driver, no GPU
        return 90
    return int(10 * major + minor)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
