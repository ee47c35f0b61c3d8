"""KV of vLLM's blocks outside the device: it comes back, and the text is the one that was
computed."""

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ullage_common.config.engine import TiersSection
from ullage_engine.kv_tiers.broker import TierHits
from ullage_engine.kv_tiers.tiers import KvTiers
from ullage_engine.protocol.messages import KvFound, KvGranted
from ullage_engine.protocol.requests import EngineRequest, SamplingParams, TokenOutput
from ullage_engine.worker.device import HostTier
from ullage_kv import Arena

HOST_BYTES = 16 << 20
LENGTH = 40
BLOCK = 32
TEXT = [(7 * each * each + 3) % 40_000 + 100 for each in range(6 * BLOCK + 8)]
"""Six whole blocks and a few tokens."""


class Rig:
    """An engine in this process, and the tiers of the server that it would have."""

    def __init__(self, start: Callable[[HostTier], Any]) -> None:
        self._hits: list[tuple[str, list[TierHits]]] = []
        self._loop = asyncio.new_event_loop()
        self._kv = KvTiers(TiersSection(), lambda name, hits: self._hits.append((name, hits)))
        self._kv.open(HOST_BYTES)
        self._start = start
        self.start_worker()

    def start_worker(self) -> None:
        """Starts a worker, in the place of one that is gone as if it were killed."""
        self._kv.worker_lost()
        _, path, _, num_bytes = self._kv.worker_options
        self.started = self._start(HostTier(path, int(num_bytes)))
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        await self._kv.worker_ready(self.started.ready(self.started.state()), self._post)

    def submit(self, name: str, token_ids: list[int], **fields: Any) -> None:
        fields = {"num_prompt_tokens": len(token_ids), "max_tokens": LENGTH, **fields}
        greedy = SamplingParams(temperature=0.0)
        request = EngineRequest(request_id=name, token_ids=token_ids, sampling=greedy, **fields)
        resumed = len(token_ids) > request.num_prompt_tokens
        [request] = self._kv.with_stored([request])
        assert self.started.engine.submit_group([request], resumed=resumed) == []

    def step(self) -> list[TokenOutput]:
        outputs = list(self.started.engine.step())
        for message in self.started.engine.tiers.take_messages():
            self._kv.on_message(message)
        return outputs

    def answer(self, name: str, token_ids: list[int] = TEXT, **fields: Any) -> list[TokenOutput]:
        """Returns what a request gets, when all that follows from it is done."""
        self.submit(name, token_ids, **fields)
        outputs: list[TokenOutput] = []
        while self.started.engine.has_work:
            outputs += self.step()
        return outputs

    def forget(self) -> None:
        """Loses what the device has cached."""
        assert self.started.core._scheduler.reset_prefix_cache()

    def hits_of(self, request: str) -> list[tuple[str, int]]:
        """Returns the tiers that a request began with, and how many blocks."""
        own = [hits for name, hits in self._hits if name == request]
        return [(each.tier, each.num_blocks) for hits in own for each in hits]

    def check_nothing_held(self) -> None:
        """Asserts that the worker holds no slot of the store."""
        broker = self._kv._broker
        assert broker is not None
        broker.check_integrity()
        assert not broker._pinned
        assert not broker._reserved

    def close(self) -> None:
        self._kv.close()
        self._loop.close()

    def _post(self, message: KvGranted | KvFound) -> None:
        tiers = self.started.engine.tiers
        if isinstance(message, KvFound):
            tiers.on_found(message)
        else:
            tiers.on_granted(message.slots)


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for each in outputs for token in each.token_ids]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two tensor ranks"])
def rig(
    request: pytest.FixtureRequest, start_here: Callable[..., Any], write_checkpoint: Any
) -> Iterator[Rig]:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = write_checkpoint(LlamaConfig(**sizes, **heads))
    ranks = {"gpus": request.param, "parallelism": {"tensor": request.param}}
    # Of the engine before, which may have had other ranks.
    os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    rig = Rig(lambda host_tier: start_here(folder, host_tier=host_tier, **ranks))
    yield rig
    rig.close()


def test_evicted_kv_comes_back(rig: Rig) -> None:
    text = rig.answer("first")
    rig.forget()
    again = rig.answer("again")
    assert tokens(again) == tokens(text)
    assert rig.hits_of("again") == [("host", 6)]
    assert again[0].num_cached_tokens == 0


def test_what_the_device_has_is_not_copied(rig: Rig) -> None:
    start = [5, *TEXT[: 3 * BLOCK - 1]]
    longer = [*start, *TEXT[3 * BLOCK : 6 * BLOCK], 9]
    text = tokens(rig.answer("longer", longer))
    rig.forget()
    rig.answer("start", [*start, 11])
    again = rig.answer("longer again", longer)
    assert tokens(again) == text
    assert rig.hits_of("longer again") == [("host", 3)]
    assert again[0].num_cached_tokens == 3 * BLOCK


def test_requests_of_another_salt_find_nothing(rig: Rig) -> None:
    own = [6, *TEXT[1:]]
    text = tokens(rig.answer("of a", own, cache_salt="a"))
    rig.forget()
    assert tokens(rig.answer("of b", own, cache_salt="b")) == text
    assert rig.hits_of("of b") == []
    rig.forget()
    assert tokens(rig.answer("of a again", own, cache_salt="a")) == text
    assert rig.hits_of("of a again") == [("host", 6)]


def test_one_that_ends_while_it_waits_holds_nothing(rig: Rig) -> None:
    own = [7, *TEXT[1:]]
    text = tokens(rig.answer("ended", own))
    rig.forget()
    rig.submit("cancelled", own)
    rig.step()
    rig.started.engine.cancel("cancelled")
    assert tokens(rig.answer("after", own)) == text
    assert rig.hits_of("cancelled") == []
    assert rig.hits_of("after") == [("host", 6)]
    rig.check_nothing_held()


def test_memory_of_the_tier_is_not_charged_to_the_device(rig: Rig) -> None:
    state = rig.started.state()
    [tier] = [each for each in state.ledger if each.name == "kv_host_tier"]
    assert tier.on_host
    assert tier.reserved_bytes == HOST_BYTES
    assert state.rss_bytes <= state.total_bytes


def test_another_worker_goes_on_with_what_the_dead_one_had(rig: Rig) -> None:
    own = [8, *TEXT[1:]]
    text = tokens(rig.answer("whole", own))
    rig.start_worker()
    sent = text[:30]
    rest = rig.answer("resumed", own + sent, num_prompt_tokens=len(own))
    assert sent + tokens(rest) == text
    # The seventh is of the output.
    assert rig.hits_of("resumed") == [("host", 7)]
    rig.check_nothing_held()


def test_blocks_of_a_request_that_ends_during_its_step_are_free_at_once(
    start_here: Callable[..., Any], write_checkpoint: Any
) -> None:
    """Two stages compute two steps at a time. Without a request no other step would follow."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    folder = write_checkpoint(LlamaConfig(**sizes, **heads))
    sections = {
        "gpus": 2,
        "parallelism": {"pipeline": 2},
        # Twelve blocks. A stage's block has keys and values of one layer.
        "memory": {"max_kv": 12 * 2 * BLOCK * 64 * 4},
    }
    os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    rig = Rig(lambda host_tier: start_here(folder, host_tier=host_tier, **sections))
    engine = rig.started.engine
    blocks = rig.started.core.blocks
    assert rig.started.core._config.max_concurrent_batches == 2

    rig.submit("ended", TEXT)
    outputs: list[TokenOutput] = []
    is_in_flight = False
    while not (outputs and is_in_flight) or engine.tiers.has_moves:
        computed = rig.step()
        outputs += computed
        is_in_flight = not computed
    assert blocks.num_held("ended") >= 6
    engine.cancel("ended")
    assert not engine.has_work
    assert blocks.num_free == blocks.num_blocks
    # It takes blocks that the step in flight still writes.
    own = [9, *TEXT[1:]]
    assert len(tokens(rig.answer("after", own))) == LENGTH
    rig.check_nothing_held()
    rig.close()


def test_what_has_windows_stays_on_its_device(
    start_here: Callable[..., Any], write_checkpoint: Any
) -> None:
    from transformers import Gemma3TextConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    layers = ["sliding_attention", "full_attention"] * 2
    model = Gemma3TextConfig(**sizes, **heads, sliding_window=64, layer_types=layers)
    arena = Arena.create(1 << 20)
    host_tier = HostTier(arena.path, arena.num_bytes)
    started = start_here(write_checkpoint(model), host_tier=host_tier)
    assert started.engine.tiers is None
    assert started.ready(started.state()).kv_space == b""
    arena.close()
