"""A scheduler whose runner invents tokens."""

from collections.abc import Iterable

from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.protocol.requests import EngineRequest, SamplingParams, TokenOutput
from ullage_engine.protocol.step_plan import SampledToken, StepPlan
from ullage_engine.scheduler.batch_plan import PromptCost
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import Scheduler, SchedulerLimits


class Bench:
    """Makes schedulers and requests, and steps them."""

    @staticmethod
    def make_profile(blocks: int) -> MemoryProfile:
        return MemoryProfile(
            block_tokens=16,
            groups=(CacheGroup(bytes_per_token=10),),
            state_bytes_per_sequence=0,
            activation_bytes_per_token=1,
            sampler_bytes_per_sequence=1,
            prefill_chunk_tokens=64,
            kv_pool_bytes=blocks * 160,
        )

    @staticmethod
    def make_scheduler(
        *,
        blocks: int = 64,
        max_model_len: int = 512,
        max_sequences: int = 8,
        prompt_tokens: int = 64,
        is_chunked: bool = True,
        decode_tokens: int = 8192,
        expected: int = 32,
        prompt_cost: PromptCost = PromptCost(),  # noqa: B008 - immutable
    ) -> Scheduler:
        limits = SchedulerLimits(
            max_model_len,
            max_sequences,
            prompt_tokens,
            is_chunked,
            decode_tokens,
            prompt_cost=prompt_cost,
        )
        estimate = OutputLengthEstimator(max_model_len, start=expected)
        return Scheduler(Bench.make_profile(blocks), limits, ThroughputEstimator(), estimate)

    @staticmethod
    def make_request(
        name: str,
        prompt: int,
        max_tokens: int = 16,
        priority: int = 0,
        output: Iterable[int] = (),
        stop: Iterable[int] = (),
        top_logprobs: int | None = None,
    ) -> EngineRequest:
        return EngineRequest(
            request_id=name,
            # A name's own tokens, so that only requests of one name share a prefix.
            token_ids=[1000 + int.from_bytes(name.encode())] * prompt + list(output),
            num_prompt_tokens=prompt,
            max_tokens=max_tokens,
            sampling=SamplingParams(top_logprobs=top_logprobs),
            stop_token_ids=list(stop),
            priority=priority,
        )

    @staticmethod
    def sample(plan: StepPlan, token: int = 2) -> list[SampledToken]:
        return [
            SampledToken(chunk.request_id, token, -0.5, [token], [-0.5])
            for chunk in plan.chunks
            if chunk.sampling is not None
        ]

    @staticmethod
    def step(scheduler: Scheduler, token: int = 2) -> list[TokenOutput]:
        outputs = scheduler.commit(Bench.sample(scheduler.schedule(), token))
        scheduler.check_integrity()
        return outputs

    @staticmethod
    def run(scheduler: Scheduler, max_steps: int = 5000) -> dict[str, list[int]]:
        """Step until nothing is left, and return the tokens of each request."""
        tokens: dict[str, list[int]] = {}
        for _ in range(max_steps):
            if not scheduler.has_work:
                return tokens
            for output in Bench.step(scheduler):
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        raise AssertionError("it never ends")

    @staticmethod
    def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
        return [(chunk.request_id, chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]
