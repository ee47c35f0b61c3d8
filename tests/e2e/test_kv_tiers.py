"""KV outside the device, on the real model with deterministic steps: every text is the one that is
computed without, whatever is killed."""

import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    Engine = Any

MIB = 1 << 20
PROMPT = [(37 * place) % 4000 + 100 for place in range(300)]
NUM_STORED = 288
"""Tokens of its whole blocks, of which the last is computed for its logits."""
DETERMINISTIC = {"dtype": "auto", "deterministic": True}
DEADLINE_S = 120.0


def ask(engine: "Engine", token_ids: list[int], session: str = "") -> tuple[list[int], pb.Usage]:
    """The answer to a prompt, and what it says of its KV; waits for an engine that starts again."""
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids),
        sampling=pb.SamplingParams(temperature=0.0),
        stop=pb.StopConditions(max_tokens=12, ignore_eos=True),
        output=pb.OutputOptions(return_token_ids=True),
        session_id=session,
    )
    output: list[int] = []
    with grpc.insecure_channel(engine.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for response in stub.Generate(request, timeout=DEADLINE_S, wait_for_ready=True):
            output += response.delta.token_ids
            if response.HasField("finished"):
                return output, response.finished.usage
    raise AssertionError("no end")


def tiers_of(usage: pb.Usage) -> dict[str, int]:
    return {each.tier: each.tokens for each in usage.cached_by_tier}


def metric(engine: "Engine", name: str, tier: str = "") -> float:
    text = urllib.request.urlopen(engine.metrics_url, timeout=10).read().decode()
    lines = [
        line
        for line in text.splitlines()
        if line.startswith(f"{name}{{") and (not tier or f'tier="{tier}"' in line)
    ]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def reported_tiers(engine: "Engine") -> dict[str, headroom_pb2.KvTier]:
    """What the engine tells routers, which show it in /stats."""
    with grpc.insecure_channel(engine.target) as channel:
        stub = headroom_pb2_grpc.HeadroomServiceStub(channel)
        headroom = stub.GetHeadroom(headroom_pb2.GetHeadroomRequest(), timeout=DEADLINE_S).headroom
    return {tier.name: tier for tier in headroom.tiers}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def expected(start_engine: Callable[..., "Engine"]) -> Iterator[Callable[[list[int]], list[int]]]:
    """Answers of an engine that keeps no KV at all."""
    engine = start_engine(model=DETERMINISTIC, memory={"prefix_cache": False})
    return lambda token_ids: ask(engine, token_ids)[0]


def test_a_killed_worker_finds_its_sessions_again(
    start_engine: Callable[..., "Engine"], expected: Callable[[list[int]], list[int]]
) -> None:
    engine = start_engine(model=DETERMINISTIC)
    first, usage = ask(engine, PROMPT, session="s")
    assert first == expected(PROMPT)
    assert not usage.cached_tokens
    # The last block of the answer is not complete; those before it are stored.
    until(lambda: metric(engine, "ullage_kv_tier_blocks", "host") >= NUM_STORED // 16)
    before = set(Path("/dev/shm").iterdir())
    engine.kill_worker()
    second_prompt = [*PROMPT, *first, 7, 8]
    second, usage = ask(engine, second_prompt, session="s")
    assert second == expected(second_prompt)
    assert tiers_of(usage) == {"host": NUM_STORED + 16 * ((len(second_prompt) - 1) // 16 - 18)}
    assert usage.cached_tokens == sum(tiers_of(usage).values())
    assert set(Path("/dev/shm").iterdir()) <= before, "a crash leaks nothing"


def test_a_session_survives_its_engine(
    start_engine: Callable[..., "Engine"],
    expected: Callable[[list[int]], list[int]],
    tmp_path: Path,
) -> None:
    tiers = {
        "host": {"size": 32 * MIB},
        "file": {"path": str(tmp_path / "kv"), "size": 64 * MIB},
    }
    engine = start_engine(model=DETERMINISTIC, memory={"tiers": tiers})
    prompt = [number + 2 for number in PROMPT]
    first, _ = ask(engine, prompt, session="s")
    # Several threads write them, in no order: all whole blocks, the one of prompt and answer too.
    num_blocks = (len(prompt) + len(first) - 1) // 16
    until(lambda: metric(engine, "ullage_kv_tier_blocks", "file") >= num_blocks)
    assert metric(engine, "ullage_kv_tier_info", "file") == 1
    assert reported_tiers(engine)["file"].backend.startswith("threads")
    engine.kill()
    engine.start_again()
    engine.wait_serving()
    second_prompt = [*prompt, *first, 7]
    # Its worker has computed nothing, so its speed is unknown: everything there is is waited for.
    second, usage = ask(engine, second_prompt, session="s")
    assert second == expected(second_prompt)
    assert tiers_of(usage)["file"] >= NUM_STORED, tiers_of(usage)


def test_files_that_cannot_be_had_are_a_clear_error(
    start_engine: Callable[..., "Engine"], tmp_path: Path
) -> None:
    (tmp_path / "kv").write_text("not a folder")
    file = {"path": str(tmp_path / "kv"), "size": 64 * MIB}
    with pytest.raises(AssertionError, match=r"error: memory\.tiers\.file\.path: .*kv"):
        start_engine(memory={"tiers": {"host": {"size": 8 * MIB}, "file": file}})


def test_engines_share_a_prefix_over_the_network(
    start_engine: Callable[..., "Engine"], expected: Callable[[list[int]], list[int]]
) -> None:
    source = start_engine(
        model=DETERMINISTIC,
        memory={"tiers": {"host": {"size": 32 * MIB}, "remote": {"peers": ["127.0.0.1:1"]}}},
        server={"engine_id": "source"},
    )
    reader = start_engine(
        model=DETERMINISTIC,
        memory={
            "tiers": {
                "host": {"size": 32 * MIB},
                "remote": {"peers": [source.target], "deadline": 30.0},
            }
        },
        server={"engine_id": "reader"},
    )
    prompt = [number + 1 for number in PROMPT]
    ask(source, prompt)
    until(lambda: metric(source, "ullage_kv_tier_blocks", "host") >= NUM_STORED // 16)
    longer = [*prompt, 9]
    # Its worker has computed nothing, so its speed is unknown: everything there is is waited for.
    answer, usage = ask(reader, longer)
    assert answer == expected(longer)
    assert tiers_of(usage) == {"remote": NUM_STORED}
    block_bytes = metric(source, "ullage_kv_tier_used_bytes", "host") / metric(
        source, "ullage_kv_tier_blocks", "host"
    )
    read_bytes = metric(reader, "ullage_kv_tier_read_bytes_total", "remote")
    assert read_bytes == NUM_STORED // 16 * block_bytes
    assert metric(source, "ullage_kv_peers_read_bytes_total") == read_bytes
