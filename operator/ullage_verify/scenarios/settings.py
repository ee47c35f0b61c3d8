"""Options that scenarios share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ullage_verify.faults import Fault
from ullage_verify.processes import ServerProcesses


@dataclass(frozen=True)
class Settings:
    """What the command line says about a run."""

    minutes: float = 2.0
    """Duration of the soak. The shift takes half of it."""
    large_tokens: int = 8_000
    """Prompt size from which Ullage uses the pool for large requests."""
    num_faults: int = 0
    """Number of faults at random moments, after each fault was made once."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """Faults that may be made, by name."""
    processes: ServerProcesses | None = None
    """The server's processes, if the server runs on this machine and its pid is known."""
    progress: Callable[[str], None] = lambda _: None
    """Shows the current step to somebody who waits."""
