"""KV of tiny models goes to shared memory and back, from one process and from four ranks, each of
which copies its own part: the next group finds it and says the same."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from ullage_testing.child_process import start_child

from ullage_common.config.engine import EngineConfig
from ullage_common.process.config_file import read_file
from ullage_engine.kv_tiers.broker import BlockFormat, KvBroker, TierHits
from ullage_engine.protocol.messages import KvFound, KvGranted
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.protocol.worker_state import WorkerState
from ullage_engine.worker.forks import ForkedProcess
from ullage_engine.worker.rank import HostTier
from ullage_engine.worker.started import Started
from ullage_engine.worker.startup import start
from ullage_kv import Arena, Store

ATTENTION = {"model_type": "llama", "num_hidden_layers": 5, "tie_word_embeddings": False}
LFM2 = {
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "sliding_window": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "attention_bias": True,
    "swiglu_limit": 7.0,
}
PROMPT = [(17 * place) % 200 + 5 for place in range(90)]


class Group:
    """A started engine, with this process in the place of its server."""

    def __init__(self, config: EngineConfig, folder: Path, arena: Arena, name: str) -> None:
        def start_rank(rank: int, endpoint: str, device_bytes: int | None) -> ForkedProcess:
            script = (
                "import sys; from ullage_engine.worker.rank_process import main; sys.exit(main())"
            )
            options = {
                "config": folder / "engine.yaml",
                "rank": rank,
                "endpoint": endpoint,
                "device-bytes": device_bytes,
                "kv-arena": arena.path,
                "kv-bytes": arena.num_bytes,
            }
            arguments = [part for n, v in options.items() for part in (f"--{n}", str(v))]
            return start_child([sys.executable, "-c", script, *arguments])

        host_tier = HostTier(arena.path, arena.num_bytes)
        self.started: Started = start(config, lambda _: None, folder / name, start_rank, host_tier)
        self.answers: list[KvGranted | KvFound] = []

    def run(self, broker: KvBroker, request: EngineRequest) -> list[int]:
        engine = self.started.engine
        tokens = list[int]()
        assert engine.tiers is not None
        num_blocks = broker.arrived(request)
        engine.submit(msgspec.structs.replace(request, num_stored_blocks=num_blocks))
        deadline = time.monotonic() + 120
        while engine.has_work or self.answers:
            assert time.monotonic() < deadline, "it never ends"
            if engine.has_work:
                for output in engine.step():
                    tokens += output.token_ids
            for message in engine.tiers.take_messages():
                broker.on_message(message)
            answers = list(self.answers)
            self.answers[:] = []
            for answer in answers:
                if isinstance(answer, KvGranted):
                    engine.tiers.on_granted(answer.slots)
                else:
                    engine.tiers.on_found(answer)
        assert not engine.take_failed()
        return tokens


@pytest.mark.parametrize(
    ("model", "gpus", "parallelism"),
    [
        (ATTENTION, 4, {"tensor": 2, "pipeline": 2}),
        (LFM2, 1, {}),
        (GPT_OSS, 1, {}),
    ],
    ids=["tp2pp2", "convolutions", "windows"],
)
def test_the_next_group_finds_what_the_last_one_had(
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    gpus: int,
    parallelism: dict[str, int],
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    folder = make_checkpoint(7, **model)
    values: dict[str, Any] = {
        "model": {
            "source": f"file://{folder}",
            "name": "tiny",
            "max_model_len": 160,
            "dtype": "float32",
            "deterministic": model is not GPT_OSS,  # which has no such steps
        },
        "device": "cpu",
        "gpus": gpus,
        "parallelism": parallelism,
        "memory": {"threshold_percent": 100, "safety_reserve": 0, "max_kv": 2 << 20},
        "batching": {"max_sequences": 2, "prefill_chunk_tokens": 32},
        "server": {"weights_dir": str(tmp_path / "weights"), "threads": 1},
    }
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(values))
    config = read_file(tmp_path / "engine.yaml", EngineConfig)
    arena = Arena.create(4 << 20)
    request = EngineRequest(
        request_id="r",
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        max_tokens=24,
        sampling=SamplingParams(temperature=0.0),
    )
    hits: list[TierHits] = []
    texts: list[list[int]] = []
    stores: list[Store] = []
    spaces: list[bytes] = []
    for turn in range(2):
        group = Group(config, tmp_path, arena, f"g{turn}")
        ready = group.started.ready(group.started.state())
        spaces.append(ready.kv_space)
        if not stores:
            stores.append(Store(arena, ready.profile.block_bytes))
        profile = ready.profile
        kv_format = BlockFormat(ready.kv_space, profile.block_tokens, profile.window_tokens)
        assert profile.window_tokens == (24 if model is GPT_OSS else 0)
        broker = KvBroker(
            stores[0],
            kv_format,
            group.answers.append,
            lambda _, each: hits.extend(each),
            lambda call: call(),
        )
        texts.append(group.run(broker, request))
        broker.check_integrity()
        assert_steady(group.started.state())
        group.started.stop()
        broker.worker_lost()
    assert spaces[0] == spaces[1] != b""
    assert texts[0] == texts[1]
    assert len(texts[0]) == 24
    assert [(each.tier, each.num_blocks) for each in hits] == [("host", 5)]


def assert_steady(state: WorkerState) -> None:
    lines = {line.name: line for line in state.ledger}
    assert lines["kv_host_tier"].on_host
    assert lines["kv_host_tier"].allocated_bytes == 4 << 20
    assert state.headroom_bytes == state.kv_pool_bytes
