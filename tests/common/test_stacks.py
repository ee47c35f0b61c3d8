"""SIGUSR1 prints stacks and ends nothing."""

import signal
import subprocess
import sys

LOOP = """
import asyncio
from ullage_common.process.stacks import dump_loop_on_signal

async def waits_for_ever():
    print("ready", flush=True)
    await asyncio.Event().wait()

async def main():
    dump_loop_on_signal()
    await waits_for_ever()

asyncio.run(main())
"""
PLAIN = """
import sys, time
from ullage_common.process.stacks import dump_on_signal

def hangs():
    print("ready", flush=True)
    sys.stdin.read()

dump_on_signal()
hangs()
"""


def test_threads_and_tasks_are_dumped_and_the_process_goes_on() -> None:
    for program, words in (
        (LOOP, ["thread 0x", "Task-1", "in waits_for_ever"]),
        (PLAIN, ["in hangs"]),
    ):
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            assert process.stdout
            assert process.stderr
            try:
                assert process.stdout.readline() == "ready\n"
                for _ in range(2):
                    process.send_signal(signal.SIGUSR1)
                    seen = ""
                    while not all(word in seen for word in words):
                        line = process.stderr.readline()
                        assert line, seen
                        seen += line
            finally:
                process.kill()
