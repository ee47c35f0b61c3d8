"""The servers in the settings that the cases need: a small pool of KV, two ranks, an adapter."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml

from benchmarks.compare import servers
from benchmarks.compare.servers import ROOT, Server, checkpoint_of
from benchmarks.survive import adapter

Setting = Literal["ordinary", "small pool", "no sizes", "two ranks", "adapter"]
"""How a server is started.

* `ordinary`: as by default in this benchmark.
* `small pool`: KV for POOL_BYTES, and a context of POOL_CONTEXT tokens.
* `no sizes`: nothing says how much memory the server may take.
* `two ranks`: the model's layers are on two processes.
* `adapter`: a LoRA adapter is loaded.
"""
ServerMaker = Callable[[Path, Setting], Server | None]
"""Function that returns a server for the folder of the installations and a setting.

It returns None if the server has no such setting.
"""
OURS = ("ullage", "ullage+vllm", "ullage2")

LLAMA_OPTIONS = "-np 16 -c 65536"
"""Sixteen slots of 4096 tokens."""
POOL_TOKENS = 2048
TOKEN_BYTES = 23_040
"""KV of a token of SmolLM2-135M in bfloat16."""
POOL_BYTES = POOL_TOKENS * TOKEN_BYTES
POOL_CONTEXT = 1024
RANK_BYTES = 1500 << 20
"""Memory of each of two ranks."""
RANK_KV_BYTES = 200 << 20
HOST_TIER_BYTES = 256 << 20
"""KV in host memory, where host and device share one memory."""
LONG_WAITS: Mapping[str, Any] = {
    name: yaml.safe_load(servers.MANIFEST.read_text())["spec"][name]
    for name in ("routing", "batching", "limits", "slo")
}
"""Limits that do not interfere, as the comparison of servers has them."""


def llama_cpp(folder: Path, setting: Setting) -> Server | None:
    if setting == "adapter":
        return None  # it reads adapters only from GGUF files
    options = {
        "small pool": f"-np 16 -c {POOL_TOKENS} --kv-unified",
        "no sizes": "",
    }.get(setting, LLAMA_OPTIONS)
    server = servers.llama_cpp(folder)

    def command(port: int) -> list[str]:
        words = server.command(port)
        plain = words[: words.index("-np")]
        return [*plain, *options.split()]

    return replace(server, command=command, how=options)


def vllm(folder: Path, setting: Setting) -> Server | None:
    server = servers.vllm(folder)
    environment = dict(server.environment)
    more = list[str]()
    if setting == "small pool":
        more = ["--kv-cache-memory-bytes", str(_pool_bytes(server))]
        more += ["--max-model-len", str(POOL_CONTEXT)]
    elif setting == "two ranks":
        more = ["--pipeline-parallel-size", "2", "--enforce-eager"]
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(_halves(servers.CORES))
    elif setting == "adapter":
        place = adapter.write_adapter(checkpoint_of(server), folder / "adapter")
        more = ["--enable-lora", "--max-lora-rank", str(adapter.RANK)]
        more += ["--lora-modules", f"{adapter.NAME}={place}"]
    if setting in ("small pool", "no sizes"):
        del environment["VLLM_CPU_KVCACHE_SPACE"]

    return replace(
        server,
        command=lambda port: [*server.command(port), *more],
        environment=environment,
        how=" ".join(more),
    )


def _pool_bytes(server: Server) -> int:
    """Return the bytes of a pool of POOL_TOKENS. A server that computes float32 stores float32."""
    return 2 * POOL_BYTES if _is_float32(server) else POOL_BYTES


def _is_float32(server: Server) -> bool:
    words = server.command(0)
    return words[words.index("--dtype") + 1] == "float32"


def ullage(folder: Path, setting: Setting) -> Server | None:
    if setting == "adapter":
        return None  # only vLLM serves adapters
    return servers.ullage(_manifest(servers.MANIFEST, folder, "native", _spec(setting)))


def ullage_vllm(folder: Path, setting: Setting) -> Server | None:
    """Return a server that runs Ullage with vLLM, from the environment that has vLLM."""
    python = folder / "vllm" / "bin" / "python"
    plain = servers.vllm(folder)
    changes = _spec(setting, _pool_bytes(plain))
    if setting == "adapter":
        place = adapter.write_adapter(checkpoint_of(plain), folder / "adapter")
        source = f"file://{place}"
        changes = {"adapters": [{"name": adapter.NAME, "source": source, "rank": adapter.RANK}]}

    # The example refuses what waits for five seconds. Here nothing may be refused for time alone,
    # and the weights have the type that vLLM has without Ullage.
    changes = {**LONG_WAITS, **changes}
    if _is_float32(plain):
        changes["model"] = {**changes.get("model", {}), "dtype": "Float32"}
    manifest = _manifest(ROOT / "examples" / "vllm.yaml", folder, "vllm", changes)
    server = servers.ullage(manifest)
    return replace(
        server,
        name="ullage+vllm",
        command=lambda port: [str(python), *server.command(port)[1:]],
        environment={"HF_HUB_OFFLINE": "1", "PATH": f"{python.parent}:{os.environ['PATH']}"},
    )


def two_engines(folder: Path) -> Server:
    """Return Ullage with two engines, as beside a gateway with two workers."""
    changes = {"pools": {"single": {"replicas": 2}}, "memory": {"maxKV": "400Mi"}}
    manifest = _manifest(servers.MANIFEST, folder, "two-engines", changes)
    return replace(servers.ullage(manifest), name="ullage2")


def _spec(setting: Setting, pool_bytes: int = POOL_BYTES) -> dict[str, Any]:
    """Return the changes of a setting to a manifest's spec. None removes a field."""
    if setting == "small pool":
        pools = {"single": {"memory": {"maxKV": pool_bytes}}}
        return {"model": {"maxModelLen": POOL_CONTEXT}, "pools": pools}
    if setting == "no sizes":
        sizes = dict.fromkeys(("deviceBytes", "maxKV"))
        tiers = {"host": {"size": HOST_TIER_BYTES}}
        return {"memory": {**sizes, "tiers": tiers}, "pools": {"single": {"memory": None}}}
    if setting == "two ranks":
        pool = {"gpus": 2, "parallelism": {"tensor": 1, "pipeline": 2}}
        memory = {"deviceBytes": RANK_BYTES, "maxKV": RANK_KV_BYTES}
        return {"memory": memory, "pools": {"single": {**pool, "memory": None}}}
    return {}


def _manifest(base: Path, folder: Path, name: str, changes: Mapping[str, Any]) -> Path:
    """Return a manifest with changes to the spec of another one."""
    if not changes:
        return base
    manifest = yaml.safe_load(base.read_text())
    _merge(manifest["spec"], changes)
    path = folder / "manifests" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(manifest))
    return path


def _merge(into: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


def _halves(cores: Sequence[int]) -> list[str]:
    """Return the cores for each of two ranks, as vLLM reads them."""
    middle = max(1, len(cores) // 2)
    return [",".join(map(str, part or cores)) for part in (cores[:middle], cores[middle:])]


SERVERS: Mapping[str, ServerMaker] = {
    "llama.cpp": llama_cpp,
    "vllm": vllm,
    "ullage+vllm": ullage_vllm,
    "ullage": ullage,
}
