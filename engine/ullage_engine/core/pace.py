"""How fast the worker is, measured while it works."""

_WEIGHT = 0.2
"""Share of the newest measurement in the average."""
_UNKNOWN_DECODE = 20.0
"""Tokens a second assumed of one sequence before any was measured; only shapes a Retry-After."""


class Pace:
    """Moving averages of decode and prefill speed; 0 while unknown."""

    def __init__(self) -> None:
        self.decode_tokens_per_second = 0.0
        """Of one running sequence."""
        self.prefill_tokens_per_second = 0.0

    def observe(self, seconds: float, *, num_decodes: int, num_prompt_tokens: int) -> None:
        """Counts one step."""
        if seconds <= 0:
            return
        if num_decodes:
            self.decode_tokens_per_second = _average(self.decode_tokens_per_second, 1.0 / seconds)
        if num_prompt_tokens:
            self.prefill_tokens_per_second = _average(
                self.prefill_tokens_per_second, num_prompt_tokens / seconds
            )

    def seconds_until(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Predicted time to compute a prompt and produce an output."""
        decode = self.decode_tokens_per_second or _UNKNOWN_DECODE
        prefill = self.prefill_tokens_per_second or _UNKNOWN_DECODE * 16
        return num_prompt_tokens / prefill + num_output_tokens / decode


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)
