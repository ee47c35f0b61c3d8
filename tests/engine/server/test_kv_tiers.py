"""Tiers of KV as the server opens them: what keeps a start, and what does not."""

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from ullage_common.config.engine import FileTierSection, RemoteTierSection, TiersSection
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.kv_tiers import tiers as kv_tiers
from ullage_engine.kv_tiers.tiers import KvTiers
from ullage_engine.protocol.messages import KvDamaged, Ready
from ullage_engine.protocol.worker_state import WorkerState
from ullage_kv import FileTier, FileTierError
from ullage_kv.arena import Arena

SPACE = bytes(32)
STATE = WorkerState(
    kv_pool_bytes=0,
    kv_free_bytes=0,
    kv_reclaimable_bytes=0,
    kv_committed_bytes=0,
    num_running=0,
    num_waiting=0,
    num_steps=0,
    expected_output_tokens=1,
    prefill_backlog_tokens=0,
    num_preemptions=0,
    total_bytes=1,
    threshold=1.0,
    decode_tokens_per_second=0.0,
    prefill_tokens_per_second=0.0,
    num_oom_events=0,
    releases=[],
    ledger=[],
    rss_bytes=0,
)


def make_ready(space: bytes = SPACE) -> Ready:
    profile = MemoryProfile(block_tokens=16, groups=(CacheGroup(1024),))
    return Ready(
        profile=profile,
        max_model_len=64,
        vocab_size=9,
        dtype="float32",
        kv_space=space,
        state=STATE,
    )


async def tiers_of(folder: Path) -> list[str]:
    """The tiers that a worker gets whose engine keeps files in a folder."""
    file = FileTierSection(path=str(folder), size=8 << 20)
    kv = KvTiers(TiersSection(file=file), lambda *_: None)
    kv.open(1 << 20)
    try:
        await kv.worker_ready(make_ready(), lambda _: None)
        return [tier.name for tier in kv.stats()]
    finally:
        kv.close()


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (
            1 << 20,
            "the worker keeps no KV outside its device, and its log says why. The 1048576 bytes",
        ),
        (8192, "8192 bytes hold no KV block of 16384 bytes"),
    ],
)
def test_the_memory_of_a_worker_that_keeps_nothing_is_given_back(
    caplog: pytest.LogCaptureFixture, num_bytes: int, words: str
) -> None:
    caplog.set_level("INFO", "ullage.engine")
    kv = KvTiers(TiersSection(), lambda *_: None)
    kv.open(num_bytes)
    [_, path, _, _] = kv.worker_options
    try:
        for _ in range(2):
            worker = Arena.attach(path, num_bytes)
            worker.make_resident()
            assert os.stat(path).st_blocks * 512 >= num_bytes
            asyncio.run(kv.worker_ready(make_ready(space=b""), lambda _: None))
            assert os.stat(path).st_blocks == 0
            worker.close()
    finally:
        kv.close()
    assert caplog.text.count(words) == 2
    assert not kv.stats()


def test_files_are_below_host_memory(tmp_path: Path) -> None:
    assert asyncio.run(tiers_of(tmp_path / "kv")) == ["host", "file"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_is_full_or_broken_keeps_no_engine_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*arguments: object) -> FileTier:
        raise FileTierError("cannot be used") from OSError(number, "broken")

    monkeypatch.setattr(kv_tiers, "FileTier", fail)
    assert asyncio.run(tiers_of(tmp_path)) == ["host"]


def test_a_path_that_is_no_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    with pytest.raises(FileTierError, match="kv"):
        asyncio.run(tiers_of(tmp_path / "kv"))


def test_a_mount_that_hangs_is_done_without_and_closed_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    closed = threading.Event()

    class Late(FileTier):
        def close(self) -> None:
            super().close()
            closed.set()

    def open_late(*arguments: object) -> FileTier:
        assert answers.wait(60)
        return Late(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kv_tiers, "FileTier", open_late)
    monkeypatch.setattr(kv_tiers, "_OPEN_S", 0.01)
    assert asyncio.run(tiers_of(tmp_path)) == ["host"], "and nothing waits for its thread"
    answers.set()
    assert closed.wait(60)


def test_peers_that_a_worker_made_distrusted_are_trusted_by_the_next_one() -> None:
    async def scenario() -> list[str]:
        kv = KvTiers(
            TiersSection(remote=RemoteTierSection(peers=("127.0.0.1:1",))), lambda *_: None
        )
        kv.open(1 << 20)
        backends = []

        async def ready(*, is_damaged: bool = False) -> None:
            await kv.worker_ready(make_ready(), lambda _: None)
            if is_damaged:
                kv.on_message(KvDamaged(chains=None))
            backends.append(kv.stats()[1].backend)

        try:
            await ready(is_damaged=True)
            kv.worker_lost()
            await ready()
        finally:
            kv.close()
        return backends

    assert asyncio.run(scenario()) == ["gRPC, distrusted", "gRPC"]
