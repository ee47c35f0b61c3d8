"""Commands in a pseudo-terminal, as a person uses them."""

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path


class Terminal:
    """A command of `ullage` in a pseudo-terminal.

    Args:
        arguments: the command's arguments.
        home: folder of the command's history.
    """

    def __init__(self, arguments: list[str], home: Path) -> None:
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            # A shell's background process ignores SIGINT, and would pass that on.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.environ.update(XDG_STATE_HOME=str(home), TERM="dumb")
            command = [sys.executable, "-m", "ullage_cli.main", *arguments]
            os.execv(sys.executable, command)
        self.text = ""

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Read until the text appears after all that was waited for before."""
        end = time.monotonic() + seconds
        while text not in self.text:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} did not appear in {self.text!r}"
            self.text += os.read(self._fd, 4096).decode(errors="replace")
        self.text = self.text.partition(text)[2]

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def ended(self) -> int:
        """Return the exit status of the process, which must have ended or end now."""
        try:
            while os.read(self._fd, 4096):
                pass
        except OSError:  # the terminal is closed
            pass
        _, status = os.waitpid(self._pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)
