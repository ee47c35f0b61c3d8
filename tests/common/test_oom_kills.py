"""Kills by the kernel for memory, as a cgroup counts them."""

from pathlib import Path

import pytest

from ullage_common.process.memory import RECENT_LOOKS, OomKills

V1 = "9:name=systemd:/\n4:memory:/kubepods/pod7\n1:cpu,cpuacct:/\n"
V2 = "0::/kubepods/pod7\n"
PID = 4711


class Machine:
    """A /proc and a /sys/fs/cgroup with one process."""

    def __init__(self, folder: Path, text: str, events: Path) -> None:
        self.proc = folder / "proc"
        self.root = folder / "cgroup"
        self._process = self.proc / str(PID) / "cgroup"
        self._sizes = self.proc / str(PID) / "statm"
        self._process.parent.mkdir(parents=True)
        self._process.write_text(text)
        self._sizes.write_text("9000 5000 300 1 0 4000 0\n")
        self._events = self.root / events
        self._events.parent.mkdir(parents=True)
        self.count(0)

    def count(self, oom_kill: int) -> None:
        self._events.write_text(f"low 0\nunder_oom 0\noom_kill {oom_kill}\n")

    def end_process(self) -> None:
        self._process.unlink()
        self._sizes.unlink()

    def leave_zombie(self) -> None:
        """End the process, of which the kernel keeps the status until somebody asks."""
        self._process.write_text("4:memory:/\n")
        self._sizes.write_text("0 0 0 0 0 0 0\n")
        root = self.root / "memory/memory.oom_control"
        if not root.exists():
            root.write_text("oom_kill 0\n")

    def watch(self) -> OomKills:
        return OomKills(PID, self.root, self.proc)


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (V1, "memory/kubepods/pod7/memory.oom_control"),
        (V1, "memory/memory.oom_control"),
        (V2, "kubepods/pod7/memory.events"),
        (V2, "memory.events"),
    ],
    ids=["v1", "v1 in a container", "v2", "v2 in a container"],
)
def test_a_kill_is_seen_when_the_process_is_gone(tmp_path: Path, text: str, events: str) -> None:
    machine = Machine(tmp_path, text, Path(events))
    machine.count(3)
    kills = machine.watch()
    for _ in range(RECENT_LOOKS):
        kills.look()
    assert kills.recent() == 0
    machine.count(4)
    for _ in range(RECENT_LOOKS - 1):
        kills.look()  # when it was killed and had not ended
    machine.end_process()
    kills.look()
    assert kills.recent() == 1


def test_a_kill_is_seen_while_nobody_has_waited_for_the_process(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V1, Path("memory/kubepods/pod7/memory.oom_control"))
    kills = machine.watch()
    machine.count(1)
    machine.leave_zombie()
    kills.look()
    assert kills.recent() == 1


def test_kills_of_before_are_not_recent(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V2, Path("memory.events"))
    kills = machine.watch()
    machine.count(2)  # of a neighbour in the same container
    for _ in range(RECENT_LOOKS):
        kills.look()
    machine.end_process()
    assert kills.recent() == 0


def test_a_process_that_moves_is_followed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V2, Path("kubepods/pod7/memory.events"))
    machine.count(5)
    kills = machine.watch()
    kills.look()
    (machine.proc / str(PID) / "cgroup").write_text("0::/kubepods/pod8\n")
    other = machine.root / "kubepods/pod8/memory.events"
    other.parent.mkdir()
    other.write_text("oom_kill 9\n")
    kills.look()
    assert kills.recent() == 0
    other.write_text("oom_kill 10\n")
    assert kills.recent() == 1


def test_without_a_cgroup_nothing_is_counted(tmp_path: Path) -> None:
    kills = OomKills(PID, tmp_path, tmp_path)
    kills.look()
    assert kills.recent() == 0
