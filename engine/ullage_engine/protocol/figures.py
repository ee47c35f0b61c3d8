"""Histograms of step and queueing times, recorded by the worker and exported by the server.

Worker and server use the same fixed buckets, so the size of a report does not grow with the number
of steps.
"""

import time

import msgspec

from ullage_common.process.metrics import Tally

STEP_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
# The buckets of vllm:iteration_tokens_total.
STEP_TOKENS = (1.0, *(float(1 << power) for power in range(3, 15)))
STEP_SEQUENCES = tuple(float(1 << power) for power in range(10))
# vLLM's buckets from 0.3 on, and finer ones below for servers without a queue.
QUEUE_SECONDS = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Figures(msgspec.Struct, array_like=True):
    """Histograms and counters of a worker since it started."""

    step_seconds: Tally = msgspec.field(default_factory=Tally)
    step_tokens: Tally = msgspec.field(default_factory=Tally)
    step_sequences: Tally = msgspec.field(default_factory=Tally)
    queue_seconds: Tally = msgspec.field(default_factory=Tally)
    """Histogram of the seconds between accepting a request and starting to compute it."""
    num_grown: int = 0
    """Number of steps with more sequences than the previous step."""
    num_shrunk: int = 0
    """Number of steps with fewer sequences than the previous step."""
    last_sequences: int = 0
    """Number of sequences in the last step."""

    def observe_step(self, seconds: float, num_tokens: int, num_sequences: int) -> None:
        """Record the duration and size of a completed step."""
        self.step_seconds.observe(STEP_SECONDS, seconds)
        self.step_tokens.observe(STEP_TOKENS, num_tokens)
        self.step_sequences.observe(STEP_SEQUENCES, num_sequences)
        self.num_grown += num_sequences > self.last_sequences
        self.num_shrunk += num_sequences < self.last_sequences
        self.last_sequences = num_sequences

    def observe_start(self, accepted_at: float, ago_s: float = 0.0) -> None:
        """Record the queueing time of a request whose computation began `ago_s` seconds ago.

        Args:
            accepted_at: `time.monotonic` when the server accepted the request. If 0, the
                request is not counted.
            ago_s: seconds since the request's computation began.
        """
        if accepted_at:
            seconds = time.monotonic() - accepted_at - ago_s
            self.queue_seconds.observe(QUEUE_SECONDS, max(0.0, seconds))

    def copy(self) -> "Figures":
        """Return a copy that is unaffected by later observations."""
        return Figures(
            self.step_seconds.copy(),
            self.step_tokens.copy(),
            self.step_sequences.copy(),
            self.queue_seconds.copy(),
            self.num_grown,
            self.num_shrunk,
            self.last_sequences,
        )
