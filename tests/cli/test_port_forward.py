"""Forwarded ports, with a program in the place of kubectl."""

import os
import time
from pathlib import Path

import pytest

from ullage_cli.port_forward import PortForward
from ullage_operator.api.errors import LocalFailure

DEADLINE_S = 60.0


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path at which tests write a shell script that runs as kubectl."""
    path = tmp_path / "kubectl"
    path.touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return path


def test_kubectl_may_print_megabytes(kubectl: Path, tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    kubectl.write_text(
        f"""#!/bin/sh
echo "Forwarding from 127.0.0.1:43211 -> 8000"
echo "Forwarding from [::1]:43211 -> 8000"
yes "Handling connection for 43211" | head -n 100000
yes "an error of one connection" | head -n 100000 >&2
touch {printed}
exec sleep 600
"""
    )
    with PortForward("default", "deployment/chat-router", 8000) as forward:
        assert forward.url() == "http://127.0.0.1:43211"
        deadline = time.monotonic() + DEADLINE_S
        while not printed.exists():
            assert time.monotonic() < deadline, "kubectl waits for a reader of its output"
            time.sleep(0.02)
        assert forward.url() == "http://127.0.0.1:43211"


def test_an_error_has_kubectls_words(kubectl: Path) -> None:
    kubectl.write_text("#!/bin/sh\necho 'error: pods \"chat\" not found' >&2\nexit 1\n")
    words = 'port-forward pod/chat :9000: error: pods "chat" not found'
    forward = PortForward("default", "pod/chat", 9000)
    with forward, pytest.raises(LocalFailure, match=words):
        forward.url()


def test_an_exited_kubectl_is_started_again(kubectl: Path) -> None:
    # With `exec` the shell reads no more of the file, which is rewritten next.
    kubectl.write_text("#!/bin/sh\nexec echo 'Forwarding from 127.0.0.1:1 -> 8000'\n")
    with PortForward("default", "pod/chat", 8000) as forward:
        assert forward.url() == "http://127.0.0.1:1"
        kubectl.write_text(
            "#!/bin/sh\necho 'Forwarding from 127.0.0.1:2 -> 8000'\nexec sleep 600\n"
        )
        deadline = time.monotonic() + DEADLINE_S
        while forward.url() != "http://127.0.0.1:2":
            assert time.monotonic() < deadline, "kubectl is not started again"
            time.sleep(0.02)
