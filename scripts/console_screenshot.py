#!/usr/bin/env python3
"""Take docs/guide/console.png: the console of a real model under overload, in headless Chromium.

usage: scripts/console_screenshot.py [--out docs/guide/console.png] [--width 1320] [--dark]

The script starts `ullage up -f examples/smollm2.yaml`, sends a chat message, starts the overload,
and takes the picture while requests are refused. This needs the system's Chromium: apt-get install
chromium.
"""

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 180.0
REFUSED_TIMEOUT_MS = 60_000
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@contextlib.contextmanager
def service(manifest: Path) -> Iterator[str]:
    """Serve a manifest on free ports while the block runs, and yield the service's URL."""
    with tempfile.TemporaryDirectory(prefix="ullage-shot-") as folder:
        state_file = Path(folder, "state.json")
        ports = ["--http-port", "0", "--grpc-port", "0", "--state-file", str(state_file)]
        command = [sys.executable, "-m", "ullage_cli.main", "up", "-f", str(manifest)]
        with subprocess.Popen([*command, *ports], stdout=sys.stderr) as process:
            try:
                deadline = time.monotonic() + START_TIMEOUT_S
                while not state_file.exists():
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit("error: the service did not start; its output says why")
                    time.sleep(0.1)
                yield json.loads(state_file.read_text())["http_url"]
            finally:
                process.send_signal(signal.SIGINT)


def overload(page: Page, url: str) -> None:
    """Use the console to create an overload, until requests are refused."""
    page.goto(f"{url}/console")
    expect(page.locator(".engine")).to_have_count(2)

    page.fill("#max-tokens", "48")
    page.fill("#text", "What is a ledger? Answer in one sentence.")
    page.click("#send")
    answer = page.locator(".said.answer .trace")
    expect(answer).to_be_visible(timeout=REFUSED_TIMEOUT_MS)

    page.click("#overload button")
    expect(page.locator("#tally-text")).to_contain_text("retry in", timeout=REFUSED_TIMEOUT_MS)

    time.sleep(6)  # until some requests have reached the queue's timeout
    page.locator("#decisions .more").first.click()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "guide" / "console.png")
    parser.add_argument("--url", help="of a running `ullage up`; default: one is started")
    parser.add_argument("--width", type=int, default=1320)
    parser.add_argument("--height", type=int, default=1020)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()

    chromium = shutil.which("chromium")
    if not chromium:
        print("error: no chromium here; apt-get install chromium", file=sys.stderr)
        return 2

    manifest = ROOT / "examples" / "smollm2.yaml"
    with (
        contextlib.nullcontext(options.url) if options.url else service(manifest) as url,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium, args=FLAGS) as browser,
    ):
        page = browser.new_page(
            viewport={"width": options.width, "height": options.height},
            color_scheme="dark" if options.dark else "light",
            reduced_motion="reduce",
        )
        page.on("console", lambda message: print(f"console: {message.text}", file=sys.stderr))

        overload(page, url)
        page.screenshot(path=options.out)

    print(f"{options.out}: {options.out.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
