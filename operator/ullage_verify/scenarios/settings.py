"""Command-line options that all scenarios share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ullage_verify.faults import Fault
from ullage_verify.processes import ServerProcesses

DEFAULT_TTFT_S = 7.0
DEFAULT_E2E_S = 20.0
DEFAULT_LARGE_TOKENS = 8_000
DEFAULT_GAP_S = 30.0


@dataclass(frozen=True)
class ScenarioSettings:
    """Options of a run from the command line, shared by all scenarios."""

    minutes: float = 1.0
    """Duration of the soak scenario and of the shift scenario, in minutes each."""
    large_tokens: int | None = None
    """Prompt size, in tokens, above which Ullage routes a request to the large pool.

    If None, the server's own threshold applies, or DEFAULT_LARGE_TOKENS if it reports none.
    """
    ttft_s: float | None = None
    """Maximum 95th percentile, in seconds, of the TTFT of accepted requests under overload.

    If None, the server's own objective applies, or DEFAULT_TTFT_S if it reports none.
    """
    e2e_s: float | None = None
    """Maximum 95th percentile, in seconds, of the time to the end of a response.

    If None, the server's own objective applies, or DEFAULT_E2E_S if it reports none.
    """
    gap_s: float = DEFAULT_GAP_S
    """Maximum pause, in seconds, of other clients' streams when a fault happens."""
    num_faults: int = 0
    """Number of faults to inject at random times, after each fault has been injected once."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """Faults that may be injected, by name."""
    missing_faults: Mapping[str, str] = field(default_factory=dict)
    """Reasons why faults and criteria of `inject` are skipped, by their names."""
    processes: ServerProcesses | None = None
    """The server's processes, if the server runs on this machine and its pid is known."""
    progress: Callable[[str], None] = lambda _: None
    """Called with a description of the current step, to show it to the user."""
