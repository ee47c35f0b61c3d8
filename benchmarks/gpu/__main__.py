"""Prove Ullage's promises on one NVIDIA GPU, and report pass or fail for each.

commands:
  first         the parts that judge the machine, its packages and the kernels
  second        the parts that judge the service: memory, recovery, speed
  NAME ...      single parts, by name (list shows them)
  list          every part, with its limit of seconds and its proof
  table FILE    the table of a results.jsonl, for docs/guide/gpu.md
  oracle        compute the reference tokens of the part `tokens` on this CPU

Results are appended to the folder --out as they come, so an interrupted run keeps its findings. A
second run with the same --out skips the parts that have passed. If a part does not end by itself,
its traceback is in NAME.traceback.log in the same folder. docs/guide/gpu.md has the aims of all
parts.

examples:
  python -m benchmarks.gpu first --out results --bundle dist/gpu-bundle
  python -m benchmarks.gpu second --out results --bundle dist/gpu-bundle
  python -m benchmarks.gpu overload faults --out results --again
  python -m benchmarks.gpu first second --tiny --device cpu --out rehearsal

exit status: 0 all parts passed, 1 a part did not pass, 2 wrong arguments or no GPU, 130 interrupted
"""

import argparse
import contextlib
import faulthandler
import fcntl
import importlib
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from benchmarks.gpu.figures import Fact, Figure, Job, Results, one_line
from benchmarks.gpu.programme import (
    BY_NAME,
    FIRST_S,
    PARTS,
    REHEARSAL_FACTOR,
    SECOND_S,
    Part,
    end_with_parent,
    run_parts,
    traceback_log,
)
from benchmarks.gpu.table import markdown

INTERRUPTED = 130
COMMANDS = ("first", "second", "list", "table", "oracle")
ORACLE = "oracle.json"

KERNEL_FILES = (".cubin", ".json", ".ptx", ".so")

MODELS_BYTES = 30 << 30
"""Maximum bytes that a run writes: a checkpoint, and its prepared weights in two data types."""

SCRATCH = "ullage-gpu-scratch-"
"""Prefix of the names of folders for models."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    command, *rest = options.command
    if command == "list":
        for part in PARTS:
            print(f"{part.call}  {part.name:10} {part.seconds:4.0f} s  {part.proves}")
        return 0
    if command == "table":
        if len(rest) != 1 or not Path(rest[0]).is_file():
            parser.error("table needs one results.jsonl; give the path of one")
        print(markdown(Results(Path(rest[0]).parent).read()))
        return 0
    if command == "part":
        return _run_part(rest[0], _job(options))

    if command == "oracle":
        from benchmarks.gpu.tokens import write_oracle

        options.out.mkdir(parents=True, exist_ok=True)
        write_oracle(options.out / ORACLE, tiny=options.tiny)
        return 0

    parts, limit_s = _chosen(parser, options)
    if limit_s <= 0:
        parser.error(f"--limit {limit_s:g} leaves no time; give the seconds of the whole call")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu takes hours at full size; add --tiny")
    if options.device == "cuda" and (reason := obstacle()):
        print(f"error: {reason}; --tiny --device cpu rehearses without a GPU", file=sys.stderr)
        return 2
    return _run_programme(options, parts, limit_s)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    add = parser.add_argument
    add("command", nargs="+", help=f"{', '.join(COMMANDS)}, or parts by name")
    add("--out", type=Path, default=Path("gpu-results"), help="folder of results (%(default)s)")
    add(
        "--bundle", type=Path, help="folder made by `make gpu-bundle`; oracle tokens are read there"
    )
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only with --tiny")
    add("--tiny", action="store_true", help="a rehearsal: small sizes, speeds are not judged")
    add("--again", action="store_true", help="repeat parts that have passed in this folder")
    add("--pack", action="store_true", help="leave few files: logs and kernels in an archive each")
    add(
        "--limit",
        type=float,
        help=f"seconds in all ({FIRST_S:g} for first, {SECOND_S:g} for second, times "
        f"{REHEARSAL_FACTOR:g} with --tiny)",
    )
    add("--scratch", type=Path, help="folder for models made on the way (a new one in /dev/shm)")

    return parser


def obstacle() -> str | None:
    """Return in one line why this machine cannot run the programme, or None if it can."""
    import torch

    if torch.version.cuda is None:
        return "torch here is without CUDA: install one with it"
    if not torch.cuda.is_available():
        return "torch finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


def _job(options: argparse.Namespace) -> Job:
    return Job(options.device, options.tiny, options.out.resolve(), options.scratch, options.bundle)


def _run_programme(options: argparse.Namespace, parts: list[Part], limit_s: float) -> int:
    # A time limit around the programme sends SIGTERM. End its processes and remove its models.
    signal.signal(signal.SIGTERM, _interrupt)
    options.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        options.scratch = options.scratch or stack.enter_context(scratch_folder())
        options.scratch.mkdir(parents=True, exist_ok=True)
        passed = run_parts(parts, _job(options), limit_s, again=options.again)
    if options.pack:
        pack_logs(options.out)
        pack_kernels(options.out)
    rows = Results(options.out).read()
    print(f"\n{markdown(rows)}\n")
    print("all passed" if passed else "NOT all passed", f"; {options.out}", sep="")
    return 0 if passed else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create a folder for models, locked while in use, and remove the folders of killed runs."""
    for place in {"/dev/shm", tempfile.gettempdir()}:
        remove_abandoned(Path(place))
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=_memory_folder()) as name:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def remove_abandoned(place: Path) -> None:
    """Remove the model folders that no run has locked. A lock is released when its process ends."""
    for folder in place.glob(f"{SCRATCH}*"):
        # A folder of another user cannot be opened, and one in use cannot be locked.
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def pack_logs(folder: Path) -> None:
    """Move all logs in a folder into its logs.tar.gz, which also keeps earlier parts' logs."""
    packed = folder / "logs.tar.gz"
    if packed.exists():
        with tarfile.open(packed) as archive:
            older = [each for each in archive if not (folder / each.name).exists()]
            archive.extractall(folder, older, filter="data")
    logs = sorted(folder.glob("*.log"))
    with tarfile.open(packed, "w:gz") as archive:
        for log in logs:
            archive.add(log, log.name)
    for log in logs:
        log.unlink()


def pack_kernels(folder: Path) -> None:
    """Pack the Triton cache named by TRITON_CACHE_DIR, for the next machine's bundle.

    For each kernel, this packs the binary, the metadata, the launcher and the files that `compile`
    reads.
    """
    cache = Path(os.environ.get("TRITON_CACHE_DIR", ""))
    if not os.environ.get("TRITON_CACHE_DIR") or not cache.is_dir():
        return
    with tarfile.open(folder / "triton-cache.tar.gz", "w:gz") as archive:
        for path in sorted(cache.rglob("*")):
            if path.suffix in KERNEL_FILES:
                archive.add(path, path.relative_to(cache))


def _chosen(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> tuple[list[Part], float]:
    """Return the chosen parts in order, and the time limit for all of them in seconds."""
    names = set[str]()
    limit_s = 0.0
    for word in options.command:
        if word in ("first", "second"):
            call = 1 if word == "first" else 2
            names |= {part.name for part in PARTS if part.call == call}
            limit_s += FIRST_S if call == 1 else SECOND_S
        elif word in BY_NAME:
            names.add(word)
            limit_s += BY_NAME[word].seconds
        else:
            parser.error(f"there is no part {word!r}; choose from {', '.join(BY_NAME)}")

    limit_s *= REHEARSAL_FACTOR if options.tiny else 1.0
    parts = [part for part in PARTS if part.name in names]
    return parts, limit_s if options.limit is None else options.limit


def _memory_folder() -> str | None:
    """Return an in-memory folder for models, whose gigabytes are written once and then mapped."""
    is_roomy = os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > MODELS_BYTES
    return "/dev/shm" if is_roomy else None


def _run_part(name: str, job: Job) -> int:
    """Run one part in this process, which the programme has started for this part.

    If the part raises an error, dies of a signal or reaches its time limit, its traceback stays
    next to the results.
    """
    end_with_parent()
    results = Results(job.out)

    def report(finding: Figure | Fact) -> None:
        results.add(name, finding)
        print(f"  {line(finding)}", flush=True)

    log = job.out / traceback_log(name)
    with log.open("w", encoding="utf-8") as file:
        faulthandler.enable(file)
        # The programme sends SIGTERM when a part's time is over.
        faulthandler.register(signal.SIGTERM, file, chain=True)
        try:
            importlib.import_module(f"benchmarks.gpu.{name}").run(job, report)
        except BaseException as error:
            results.crash(name, one_line(error))
            traceback.print_exc(file=file)
            raise
        finally:
            faulthandler.unregister(signal.SIGTERM)
            faulthandler.disable()
    log.unlink()
    return 0


def line(finding: Figure | Fact) -> str:
    """Format a finding as a readable line."""
    if isinstance(finding, Fact):
        return f"{finding.name}: {finding.text}"
    measured = f"{finding.name:52} {finding.value:11.4g} {finding.unit:12}"
    if finding.aim is None:
        return measured
    word = "at most" if finding.is_limit else "at least"
    return f"{measured} {word} {finding.aim:g}: {'ok' if finding.passes else 'FAILED'}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
