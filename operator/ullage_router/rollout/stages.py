"""The pipeline stages that implement the router's part of a canary rollout."""

import functools
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from ullage_common.wire.continuation import Progress
from ullage_common.wire.errors import ServiceError
from ullage_router.admission.admission import NotOnCanary
from ullage_router.admission.prefill_window import Reservation
from ullage_router.call import Call, EngineStream, Handler, ResponseStream, asked_of_engine
from ullage_router.engines.engines import Engines
from ullage_router.errors import stopped
from ullage_router.policy.facts import Side
from ullage_router.prompts.prompts import PromptBuilder
from ullage_router.rollout.canary import Canary, RolloutFile, trial
from ullage_router.rollout.outcomes import ObservedStream, Outcomes
from ullage_router.rollout.replay import Replayer

Send = Callable[[Call, Reservation, Progress], Awaitable[EngineStream]]
"""Function that sends a request to the engine in its reservation and awaits the first token."""


class Rollout:
    """Picks sides for requests, tries canary engines, and counts each side's outcomes.

    Args:
        path: path of the rollout file, or None if canaries are not configured.
        engines: follows the engines of both sides.
        model: the service's model name, for error messages.
        prompts: re-renders a request for the stable engines if they have a different model.
        replayer: compares the answers of both sides.
        on_stop: called whenever the file changes, with True if the service is stopped.
    """

    def __init__(
        self,
        path: str | None,
        engines: Engines,
        prompts: PromptBuilder,
        model: str,
        replayer: Replayer,
        on_stop: Callable[[bool], None],
    ) -> None:
        self._model = model
        self._on_stop = on_stop
        self._engines = engines
        self._prompts = prompts
        self.replayer = replayer
        self.canary = Canary(path, self._on_file_change)
        self.outcomes = Outcomes(engines.workers_lost, engines.workers_lost_before)

    def _on_file_change(self, file: RolloutFile) -> None:
        self._engines.declare_adapters(file.adapters)
        self._engines.set_canary(file.canary.pools if file.canary else ())
        self.outcomes.follow(trial(file.canary), self.canary.revision(Side.CANARY))
        self.replayer.follow(trial(file.canary), file.canary.answers if file.canary else None)
        self._on_stop(file.stopped)

    def refuse_when_stopped(self) -> None:
        """Refuse the request if the service was stopped intentionally.

        Raises:
            ServiceError: the service is stopped.
        """
        if self.canary.is_stopped:
            raise stopped(self._model)

    def draw_side(self, call: Call) -> Side:
        """Pick a side, falling back to the other side if the picked one has no ready engine.

        Only engines that serve the request's adapter and know its fields count. If neither side has
        one, the picked side is returned.
        """
        drawn = self.canary.draw(call.request.session_id)
        other = Side.STABLE if drawn is Side.CANARY else Side.CANARY
        is_ready = functools.partial(
            self._engines.is_ready_on, adapter=call.adapter, needed=self._needed_fields(call)
        )
        return other if not is_ready(drawn) and is_ready(other) else drawn

    async def try_canary(self, call: Call, proceed: Handler, once: Handler) -> ResponseStream:
        """Try the request once on the canary without waiting, then fall back to the stable engines.

        If the request is on the stable side, or if no stable engine is ready, `proceed` is called
        directly.

        Args:
            proceed: runs the request, and tries several engines if necessary.
            once: makes one attempt on one canary engine.
        """
        needed = self._needed_fields(call)
        has_stable = self._engines.is_ready_on(Side.STABLE, call.adapter, needed)
        if call.side is Side.STABLE or not has_stable:
            return await proceed(call)

        failure = None
        try:
            return await once(call)
        except NotOnCanary:
            self.outcomes.on_declined()
        except ServiceError as error:
            if call.deadline.first_token_remaining_s <= 0:
                raise
            call.decisions.add_step("engine", error.reason)
            failure = error

        stream = await proceed(await self._for_stable(call))
        if failure:
            self.outcomes.on_contradicted(failure)
        return stream

    def _needed_fields(self, call: Call) -> frozenset[str]:
        asked = functools.partial(asked_of_engine, call.request, call.prompt)
        return self._engines.needed_fields(asked)

    async def _for_stable(self, call: Call) -> Call:
        """Return a copy of the call with its prompt rendered for the stable engines' model."""
        prompt = call.prompt
        model = self._engines.served_model(
            call.request.model, Side.STABLE, call.tenant.rules.models
        )
        if model.fingerprint != prompt.model.fingerprint:
            prompt = await self._prompts.build(model, call.request, call.tenant.name)
        call.decisions.add_step("stable", "CANARY", degraded=prompt.degraded)
        return replace(call, side=Side.STABLE, prompt=prompt)

    async def observe(
        self, call: Call, reservation: Reservation, progress: Progress, send: Send
    ) -> EngineStream:
        """Send a request to its engine, and record the outcome for the current trial."""
        side = reservation.engine.side
        self.replayer.offer(call, reservation.prompt)
        call.decisions.change(revision=self.canary.revision(side))
        observation = self.outcomes.observe(side)
        try:
            stream = await send(call, reservation, progress)
        except ServiceError as error:
            observation.on_failure(error)
            raise
        except BaseException:
            if call.deadline.first_token_remaining_s <= 0:
                observation.on_timeout()
            raise
        observation.on_first_token()
        return ObservedStream(stream, observation)

    def as_json(self) -> dict[str, object]:
        """Return the rollout's state and counts for /stats."""
        canary = self.canary
        return {
            "stable_revision": canary.revision(Side.STABLE),
            "canary_revision": canary.revision(Side.CANARY),
            "weight": canary.weight,
            "problem": canary.problem,
            **self.outcomes.as_json(),
            "answers": self.replayer.as_json(),
        }
