"""The reference of configuration keys is that of the tables that the engine checks by."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_is_of_these_tables() -> None:
    script = ROOT / "scripts" / "model_keys_reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
