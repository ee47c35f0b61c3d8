"""Everything at once: nothing leaks, everything ends, and every token is the one it should be."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ullage_engine.protocol.step_plan import StepPlan
from ullage_engine.scheduler.scheduler import KvPolicy, Scheduler

BLOCKS = 18
MAX_MODEL_LEN = 220
STOP = [10, 11]


def prompt_of(document: int, length: int, own: int, own_length: int) -> list[int]:
    """A beginning of one of a few documents, and a few tokens of its own."""
    return [1000 * document + at for at in range(length)] + [own] * own_length


def check_usage(scheduler: Scheduler) -> None:
    """Compares what is reported, of few blocks, with a walk over all of them."""
    cache = scheduler._cache
    size = scheduler._cache.block_tokens
    filled: dict[int, int] = {}
    held = 0.0
    for each in scheduler._sequences:
        held += each.num_reserved + sum(1 / cache.ref_count(block) for block in each.held_blocks)
        places = [*enumerate(each.blocks.ids)]
        places += enumerate(each.windows.ids, each.windows.first)
        for index, block in places:
            tokens = each.num_computed - index * size
            if not cache.is_cached(block):
                filled[block] = max(filled.get(block, 0), min(size, tokens))
    num_tokens = cache.num_cached_used * size + sum(filled.values())
    block_bytes = scheduler._profile.block_bytes
    stats = scheduler.stats()
    assert stats.kv_used_bytes == num_tokens * block_bytes // size
    assert stats.kv_held_bytes <= stats.kv_peak_bytes <= stats.kv_peak_promised_bytes
    promised = stats.kv_pool_bytes - stats.headroom_bytes
    assert promised <= stats.kv_peak_promised_bytes <= stats.kv_pool_bytes
    released = sum(release.num_bytes for release in scheduler.releases())
    assert abs(released - held * block_bytes) <= len(scheduler._sequences)


PROMPTS = st.builds(
    prompt_of, st.integers(1, 2), st.integers(0, 120), st.integers(200, 203), st.integers(1, 20)
)
POLICIES = st.builds(
    KvPolicy,
    prefix_cache=st.sampled_from([True, True, True, False]),
    session_blocks=st.sampled_from([0, 3, 100]),
    session_idle=st.just(5.0),
    host_slots=st.sampled_from([0, 4, 30]),
)


@pytest.mark.parametrize(
    ("conv_layers", "window", "tier_slots", "examples"),
    [
        (0, 0, 0, 30),
        (0, 0, 40, 30),
        (4, 0, 40, 25),
        (0, 20, 80, 25),
        pytest.param(0, 0, 0, 400, marks=pytest.mark.slow),
        pytest.param(0, 0, 24, 400, marks=pytest.mark.slow),
        pytest.param(4, 0, 24, 250, marks=pytest.mark.slow),
        pytest.param(0, 20, 80, 400, marks=pytest.mark.slow),
    ],
)
def test_nothing_leaks_all_ends_and_no_token_is_wrong(
    make_rig: Callable[..., Any], conv_layers: int, window: int, tier_slots: int, examples: int
) -> None:
    num_operations = 0

    class AnyTraffic(RuleBasedStateMachine):
        @initialize(
            policy=POLICIES,
            rate=st.sampled_from([1.0, 1e9]),
            budget=st.sampled_from([48, 48, 5]),
            in_flight=st.sampled_from([1, 2, 3]),
            num_answers=st.sampled_from([1, 100]),
            speculative=st.sampled_from([0, 3]),
        )
        def begin(
            self,
            policy: KvPolicy,
            rate: float,
            budget: int,
            in_flight: int,
            num_answers: int,
            speculative: int,
        ) -> None:
            self.num_answers = num_answers
            self.rig = make_rig(
                blocks=BLOCKS,
                policy=policy,
                max_model_len=MAX_MODEL_LEN,
                max_sequences=5,
                prompt_tokens=budget,
                decode_tokens=400,
                expected=8,
                prefill_rate=rate,
                conv_layers=conv_layers,
                window=window,
                in_flight=in_flight,
                speculative=speculative,
                tier_slots=tier_slots,
            )
            self.left: dict[str, list[int]] = {}
            self.seeds: dict[str, int] = {}
            self.num_requests = 0
            self.budget = budget
            self.in_flight = in_flight

        @rule(
            prompt=PROMPTS,
            max_tokens=st.integers(1, 60),
            samples=st.sampled_from([1, 1, 1, 1, 2, 3, 4]),
            produced=st.sampled_from([0, 0, 0, 1, 7]),
            priority=st.sampled_from([0, 0, 0, 2]),
            session=st.sampled_from(["", "", "s", "t"]),
            resumed=st.booleans(),
        )
        def submit(
            self,
            prompt: list[int],
            max_tokens: int,
            samples: int,
            produced: int,
            priority: int,
            session: str,
            resumed: bool,
        ) -> None:
            requests = []
            for seed in range(samples):
                output = self.rig.undisturbed(prompt, seed, produced)
                requests.append(
                    self.rig.request(
                        self.new_name(),
                        prompt + output,
                        max_tokens,
                        num_prompt_tokens=len(prompt),
                        seed=seed,
                        session=session,
                        priority=priority,
                        stop=STOP,
                    )
                )
            available = self.rig.scheduler.stats().headroom_bytes
            waiting = self.rig.scheduler.stats().num_waiting
            refused = self.rig.submit(*requests, resumed=resumed)
            if refused:
                assert not resumed
                assert refused.request_id == requests[0].request_id
                assert refused.needed_bytes > available or waiting + samples > 20
                assert refused.never or refused.retry_after_s > 0
                return
            for request in requests:
                self.enter(request.request_id, request.token_ids, request.sampling.seed)
            self.hear()

        @precondition(lambda self: self.left)
        @rule(count=st.integers(1, 12))
        def steps(self, count: int) -> None:
            for _ in range(count):
                self.step()

        @precondition(lambda self: self.left)
        @rule(
            prompt_tokens=st.integers(1, 24),
            preempts=st.integers(0, 2),
            fails=st.sampled_from([False, False, True]),
            is_given_up=st.booleans(),
        )
        def step_out_of_memory(
            self, prompt_tokens: int, preempts: int, fails: bool, is_given_up: bool
        ) -> None:
            self.end_all()
            self.compute_in_vain(self.rig.scheduler.schedule())
            for _ in range(preempts):
                if self.rig.scheduler.stats().num_running > 1:
                    self.rig.scheduler.preempt_newest()
                self.compute_in_vain(self.replan(2 * prompt_tokens))
            failed = self.rig.scheduler.fail_newest() if fails else None
            if failed is not None:
                del self.left[failed]
            plan = self.replan(prompt_tokens)
            may_idle = failed is not None or tier_slots
            assert plan.chunks or not self.left or may_idle, "work and nothing planned"
            if plan.chunks and is_given_up:
                self.compute_in_vain(plan)
                self.rig.scheduler.abandon()
                return
            self.rig.finish(plan)
            self.hear()

        @precondition(lambda self: self.left)
        @rule()
        def preempt(self) -> None:
            self.end_all()
            self.rig.scheduler.preempt_newest()

        @precondition(lambda self: self.left)
        @rule()
        def fail_a_plan(self) -> None:
            """All requests of a plan fail before it is computed, but its copies are made."""
            while len(self.rig.computed) >= self.in_flight:
                self.rig.end()
            self.hear()
            plan = self.rig.scheduler.schedule()
            for chunk in plan.chunks:
                self.rig.scheduler.cancel(chunk.request_id)
                del self.left[chunk.request_id]
            if plan.chunks:
                self.rig.scheduler.abandon()
            self.rig.begin(StepPlan([], plan.moves))

        @precondition(lambda self: self.left)
        @rule(number=st.integers(0, 100), is_damaged=st.booleans())
        def cancel(self, number: int, is_damaged: bool) -> None:
            name = self.pick(number)
            scheduler = self.rig.scheduler
            (scheduler.discard if is_damaged else scheduler.cancel)(name)
            del self.left[name]

        @precondition(lambda self: self.left)
        @rule(
            number=st.integers(0, 100), token=st.integers(302, 303), back=st.sampled_from([1, 1, 4])
        )
        def fork(self, number: int, token: int, back: int) -> None:
            parent = self.pick(number)
            tokens = self.left[parent]
            start = len(self.rig.tokens(parent))
            if not start or len(tokens) >= MAX_MODEL_LEN - 1:
                return
            child = self.new_name()
            request = self.rig.request(
                child,
                [*tokens[:-back], token],
                40 + len(tokens),
                num_prompt_tokens=1,
                seed=number,
                stop=STOP,
            )
            self.rig.scheduler.fork(parent, request)
            self.enter(child, request.token_ids, number)

        @rule(seconds=st.sampled_from([1.0, 6.0]), share=st.sampled_from([0.1, 0.5, 1.0]))
        def pass_time(self, seconds: float, share: float) -> None:
            self.rig.now += seconds
            self.rig.scheduler.set_batch_share(share)

        @precondition(lambda self: tier_slots)
        @rule()
        def lose_worker(self) -> None:
            """Another worker goes on with all that is left, whose KV tiers still have."""
            self.rig.lose_worker()
            left = self.left
            self.left = {}
            for name, token_ids in left.items():
                request = self.rig.request(
                    name, token_ids, 40, num_prompt_tokens=1, seed=self.seeds[name], stop=STOP
                )
                assert self.rig.submit(request, resumed=True) is None
                self.left[name] = list(token_ids)
            self.hear()

        @precondition(lambda self: tier_slots)
        @rule(count=st.integers(1, 3))
        def exchange(self, count: int) -> None:
            self.rig.exchange(count)

        @rule(are_damaged=st.sampled_from([False, False, False, True]))
        def evict(self, are_damaged: bool) -> None:
            if are_damaged or not tier_slots:
                self.rig.scheduler.evict_all()
            else:
                self.rig.scheduler._cache.evict_all()

        def replan(self, prompt_tokens: int) -> StepPlan:
            return self.rig.scheduler.replan(min(prompt_tokens, self.budget))

        def compute_in_vain(self, plan: StepPlan) -> None:
            """A step whose result is lost, but not what it wrote."""
            self.rig.device.move(plan.moves)
            self.rig.device.execute(plan)

        def new_name(self) -> str:
            self.num_requests += 1
            return f"r{self.num_requests}"

        def pick(self, number: int) -> str:
            return sorted(self.left)[number % len(self.left)]

        def enter(self, name: str, token_ids: list[int], seed: int) -> None:
            self.left[name] = list(token_ids)
            self.seeds[name] = seed

        def step(self) -> None:
            nonlocal num_operations
            num_operations += 1
            self.rig.exchange(self.num_answers)
            self.begin_plans()
            for _ in range(3):
                # What waits for tiers is computed when they have answered, twice where they have
                # some of it at once and load the rest.
                if not self.left or self.rig.computed:
                    break
                self.rig.exchange()
                self.begin_plans()
            assert self.rig.computed or not self.left, "work and nothing planned"
            self.rig.end()
            self.hear()

        def begin_plans(self) -> None:
            while len(self.rig.computed) < self.in_flight:
                if not self.rig.begin(self.rig.scheduler.schedule()):
                    break

        def end_all(self) -> None:
            """Commits all plans in flight."""
            while self.rig.computed:
                self.rig.end()
            self.hear()

        def hear(self) -> None:
            """Takes the new outputs; every token must be the one of an undisturbed run."""
            outputs = self.rig.heard
            self.rig.heard = []
            for output in outputs:
                context = self.left[output.request_id]
                for token in output.token_ids:
                    seed = self.seeds[output.request_id]
                    assert [token] == self.rig.undisturbed(context, seed, 1)
                    context.append(token)
                if output.finish:
                    del self.left[output.request_id]

        @invariant()
        def nothing_leaks(self) -> None:
            nonlocal num_operations
            num_operations += 1
            scheduler = self.rig.scheduler
            scheduler.check_integrity()
            kept = scheduler.stats().kv_free_bytes + scheduler.stats().kv_reclaimable_bytes
            assert 0 <= scheduler.stats().headroom_bytes <= kept
            assert 0.0 <= scheduler.stats().kv_waste_ratio <= 1.0
            check_usage(scheduler)
            if self.rig.broker:
                self.rig.broker.check_integrity()

        def teardown(self) -> None:
            for _ in range(20_000):
                if not self.left:
                    break
                self.step()
            self.end_all()
            self.rig.exchange()
            while self.rig.scheduler.has_work:
                self.rig.step()
            scheduler = self.rig.scheduler
            pool = BLOCKS * self.rig.block_bytes
            assert not self.left
            assert not scheduler.has_work
            assert scheduler.stats().kv_free_bytes + scheduler.stats().kv_reclaimable_bytes == pool
            assert scheduler.stats().headroom_bytes == pool
            scheduler.evict_all()
            assert scheduler.stats().kv_free_bytes == pool
            scheduler.check_integrity()

    # Not shrunk: that takes minutes, and the steps of a failure are printed either way.
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    run_state_machine_as_test(
        AnyTraffic,
        settings=settings(
            max_examples=examples, stateful_step_count=60, deadline=None, phases=phases
        ),
    )
    assert num_operations > 10 * examples
