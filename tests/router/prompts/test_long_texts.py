"""Texts of megabytes take little memory, whatever the tokenizer and whatever they consist of."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "long_texts.py"
MAX_GROWTH = 64 << 20


@pytest.mark.parametrize(
    "kind", ["gpt-2", "qwen", "lower NFKC", "legacy", "gemma", "unigram", "wordpiece"]
)
def test_eight_long_texts_at_once_take_little_memory(kind: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), kind],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= MAX_GROWTH
