"""Files that are followed: every change is taken up, even after one that could not be."""

import asyncio
from pathlib import Path

import pytest

from ullage_common.process.file_watch import fingerprint, follow


def test_a_change_that_fails_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        tries = 0
        taken = asyncio.Event()

        async def reload() -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise OSError("no space")
            taken.set()

        following = asyncio.create_task(follow((tmp_path,), fingerprint((tmp_path,)), reload))
        (tmp_path / "new").write_text("x")
        async with asyncio.timeout(30):
            await taken.wait()
        following.cancel()
        assert tries == 2

    asyncio.run(scenario())
    assert "retrying" in caplog.text


def test_what_is_no_file_counts_for_nothing(tmp_path: Path) -> None:
    before = fingerprint((tmp_path, tmp_path / "missing"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert fingerprint((tmp_path, tmp_path / "missing")) == before == ()
