"""Metrics of vLLM's steps: durations, computed tokens and prefix cache hits."""

from collections.abc import Mapping

from ullage_engine.protocol.figures import Figures
from ullage_engine.protocol.request_events import RequestEvents
from ullage_engine.scheduler.estimates import ThroughputEstimator
from ullage_engine.vllm_worker.interface import Blocks, CoreOutput
from ullage_engine.vllm_worker.sequence import VllmSequence


class StepMetrics:
    """Measures the durations, computed tokens and prefix cache hits of vLLM's steps."""

    def __init__(self, blocks: Blocks) -> None:
        self.throughput = ThroughputEstimator()
        self.events = RequestEvents()
        self.figures = Figures()
        self.num_steps = 0
        """Number of steps in which vLLM processed at least one request."""
        self.prefix_lookup_tokens = 0
        self.prefix_hit_tokens = 0
        self._blocks = blocks

    def observe(
        self, seconds: float, outputs: list[CoreOutput], sequences: Mapping[str, VllmSequence]
    ) -> None:
        """Count a step. Call this before the step's outputs are added to their sequences.

        Args:
            seconds: duration of the step in seconds.
            outputs: the step's outputs.
            sequences: all admitted sequences, by request id.
        """
        num_decodes = 0
        num_prompts = 0
        num_parts = len(outputs)
        is_advanced = bool(outputs)

        for output in outputs:
            sequence = sequences.get(output.request_id)
            if sequence is not None and sequence.has_token:
                num_decodes += len(output.token_ids)
            elif sequence is not None:
                done = max(sequence.num_computed, output.num_reused_tokens)
                self._note_start(sequence, seconds)
                self.events.on_prefilled(sequence.request_id)
                num_prompts += len(sequence.token_ids) - done
                sequence.num_computed = len(sequence.token_ids)

        # A step that computes only a chunk of a prompt has no output for it.
        for each in sequences.values():
            if each.is_running and not each.has_token:
                num_computed = self._blocks.num_computed(each.request_id)
                if num_computed > each.num_computed:
                    is_advanced = True
                    self._note_start(each, seconds)
                    num_parts += 1
                    num_prompts += num_computed - each.num_computed
                    each.num_computed = num_computed

        self.throughput.observe(seconds, num_decodes=num_decodes, num_prompt_tokens=num_prompts)
        # Do not count an empty step: the server would take it for progress and miss a hang.
        if is_advanced:
            self.num_steps += 1
            self.figures.observe_step(seconds, num_decodes + num_prompts, num_parts)
            self.events.note_step(seconds, num_parts, num_decodes + num_prompts, num_prompts)

    def observe_prefix(self, sequence: VllmSequence, num_cached_tokens: int) -> int:
        """Count a prompt's tokens and its cached tokens, and return the number of cached ones.

        Each sequence is counted only once.
        """
        if sequence.num_cached_tokens is None:
            num_prompt = sequence.request.num_prompt_tokens
            sequence.num_cached_tokens = min(num_prompt, num_cached_tokens)
            self.prefix_lookup_tokens += num_prompt
            self.prefix_hit_tokens += sequence.num_cached_tokens
        return sequence.num_cached_tokens

    def _note_start(self, sequence: VllmSequence, seconds: float) -> None:
        """Record a sequence's start if it started in this step, which took `seconds` seconds."""
        if sequence.is_new:
            self.figures.observe_start(sequence.request.accepted_at, seconds)
        if not sequence.num_computed:
            self.events.on_started(sequence.request, sequence.num_cached_tokens or 0, seconds)
