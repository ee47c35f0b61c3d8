"""Mounted files that cannot be read when they change are read again, until they can."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from ullage_testing.failing_disk import FailingDisk

from ullage_common.config.router import TenantsSection
from ullage_common.process import file_watch
from ullage_router.cascade.peer import PeerKey
from ullage_router.policy.facts import Side
from ullage_router.rollout.canary import Canary
from ullage_router.tenants.registry import Tenants

ENOUGH_S = 20.0
OLD_KEY = "sk-old-0123456789"
NEW_KEY = "sk-new-0123456789"


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    monkeypatch.setattr(file_watch, "INTERVAL_S", 0.01)
    return FailingDisk(tmp_path, monkeypatch)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(ENOUGH_S):
        while not condition():  # noqa: ASYNC110 - the files are looked at by others
            await asyncio.sleep(0.01)


def test_the_key_for_another_service(tmp_path: Path, disk: FailingDisk) -> None:
    (tmp_path / "key").write_text(OLD_KEY)

    async def scenario() -> None:
        key = PeerKey(tmp_path)
        await key.start()
        disk.num_failures_left = 3
        (tmp_path / "key").write_text(NEW_KEY)
        await until(lambda: key.authorization == f"Bearer {NEW_KEY}")
        await key.close()

    asyncio.run(scenario())
    assert not disk.num_failures_left


def test_keys_of_tenants(tmp_path: Path, disk: FailingDisk) -> None:
    (tmp_path / "one").write_text(OLD_KEY)

    async def scenario() -> None:
        tenants = Tenants(TenantsSection(keys_dir=str(tmp_path)), None)
        await tenants.start()
        disk.num_failures_left = 3
        (tmp_path / "one").write_text(NEW_KEY)
        await until(lambda: bool(tenants.problems))
        assert tenants.open_session(f"Bearer {OLD_KEY}")
        await until(lambda: not tenants.problems)
        assert tenants.open_session(f"Bearer {NEW_KEY}")
        await tenants.close()

    asyncio.run(scenario())
    assert not disk.num_failures_left


@pytest.mark.parametrize("fails_at_start", [True, False])
def test_the_rollout_file(tmp_path: Path, disk: FailingDisk, fails_at_start: bool) -> None:
    path = tmp_path / "rollout.yaml"
    path.write_text("revision: old")

    async def scenario() -> None:
        canary = Canary(str(path), lambda content: None)
        disk.num_failures_left = 3 if fails_at_start else 0
        await canary.start()
        assert bool(canary.problem) == fails_at_start
        if not fails_at_start:
            disk.num_failures_left = 3
            path.write_text("revision: new")
        await until(lambda: not disk.num_failures_left and not canary.problem)
        assert canary.revision(Side.STABLE) == ("old" if fails_at_start else "new")
        await canary.close()

    asyncio.run(scenario())
