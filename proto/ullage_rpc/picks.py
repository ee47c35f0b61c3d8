"""Gathers what is to be placed, and what ended, into few `Pick` calls.

One call is under way at a time. What comes meanwhile goes with the next one, so batches grow with
the load and a lone request waits for nobody. Requests of the same sizes are asked for as one with a
count and share tickets, which costs the router a fraction of placing each.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_rpc.errors import ServiceError

MAX_BATCH = 256
MAX_REPORTS = 4096
"""In one call; and most that wait when the router does not answer."""
PICK_TIMEOUT_S = 5.0
OFF_S = 30.0
"""How long Generate is used alone after the router said that it gives no tickets."""
QUIET_S = 0.05
"""After it reports are sent by themselves."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pick:
    """A place on an engine."""

    id: int
    """Of its ticket, which may hold for several requests."""
    engine: str
    """`host:port`."""
    ticket: str
    max_tokens: int


@dataclass(eq=False, slots=True)
class _Wish:
    priced: pb.PricedRequest
    placed: "asyncio.Future[Pick | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Picks:
    """Asks one router for places.

    Args:
        router: its stub.
        metadata: sent with every call.
    """

    def __init__(
        self,
        router: inference_pb2_grpc.InferenceServiceStub,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._router = router
        self._metadata = metadata
        self._wishes: list[_Wish] = []
        self._accepted: list[int] = []
        self._ended: list[int] = []
        self._news = asyncio.Event()
        self._off_until = 0.0
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Tells the router what ended; requests that wait for a place go to it."""
        self._is_closing = True
        self._news.set()
        if self._task:
            await self._task

    async def place(
        self, request: pb.GenerateRequest, avoid: Sequence[str], deadline: float
    ) -> Pick | None:
        """A place for a request in token ids; None: the router shall do it all.

        Args:
            avoid: engines that refused it just now.
            deadline: on the event loop's clock.

        Raises:
            ServiceError: INTERNAL, the router's answer makes no sense or it could not be asked.
        """
        now = asyncio.get_running_loop().time()
        if now < self._off_until or self._is_closing:
            return None
        wish = _Wish(_price(request, avoid))
        self._wishes.append(wish)
        self._wake()
        try:
            async with asyncio.timeout(max(0.0, deadline - now)):
                return await wish.placed
        except TimeoutError:
            return None

    def accepted(self, pick: Pick) -> None:
        """Its engine answered Accepted."""
        self._note(self._accepted, pick)

    def ended(self, pick: Pick) -> None:
        """Its request ended, or will not be sent."""
        self._note(self._ended, pick)

    def _note(self, reports: list[int], pick: Pick) -> None:
        if len(reports) < MAX_REPORTS:  # otherwise its ticket's end tells the router
            reports.append(pick.id)
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="pick")

    async def _run(self) -> None:
        while not self._is_closing:
            await self._news.wait()
            self._news.clear()
            if not self._wishes and not self._is_closing:
                await self._quiet()
            while self._wishes:
                await self._call()
            if self._accepted or self._ended:
                await self._call()
        _leave(self._wishes)
        if self._accepted or self._ended:
            await self._call()

    async def _quiet(self) -> None:
        """Waits a moment for a wish that the reports can go with."""
        try:
            async with asyncio.timeout(QUIET_S):
                await self._news.wait()
        except TimeoutError:
            return

    async def _call(self) -> None:
        wishes = [wish for wish in self._wishes[:MAX_BATCH] if not wish.placed.done()]
        del self._wishes[:MAX_BATCH]
        try:
            await self._ask(wishes)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._off_until = asyncio.get_running_loop().time() + OFF_S
            _leave(wishes)
        except Exception as error:  # whatever it is, those who come next must be served
            log.exception("pick failed")
            _fail(wishes, error)
        except asyncio.CancelledError:
            _leave(wishes)
            raise

    async def _ask(self, wishes: list[_Wish]) -> None:
        groups = _alike(wishes)
        accepted, self._accepted = self._accepted, []
        ended, self._ended = self._ended, []
        try:
            request = pb.PickRequest(
                requests=[_merged(group) for group in groups], accepted=accepted, ended=ended
            )
            response = await self._router.Pick(
                request, timeout=PICK_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._keep(accepted, ended)  # whatever else it is, the router may have heard them
            raise
        self._deal(groups, response)

    def _keep(self, accepted: list[int], ended: list[int]) -> None:
        """They go with the next call: a tenant's place is not free before."""
        self._accepted = (accepted + self._accepted)[:MAX_REPORTS]
        self._ended = (ended + self._ended)[:MAX_REPORTS]

    def _deal(self, groups: list[list[_Wish]], response: pb.PickResponse) -> None:
        answers = iter(response.placed)
        for group in groups:
            places = _places(len(group), answers, response.engines)
            for wish in group:
                pick = next(places, None)  # what the answer leaves out goes to the router
                if not wish.placed.done():
                    wish.placed.set_result(pick)
                elif pick:  # whoever wanted it has gone
                    self._ended.append(pick.id)


def _alike(wishes: Iterable[_Wish]) -> list[list[_Wish]]:
    """Those that may share a ticket together; what depends on an engine stays by itself."""
    groups: dict[object, list[_Wish]] = {}
    for wish in wishes:
        priced = wish.priced
        is_free = not (priced.session_id or priced.avoid)
        size = (priced.prompt_tokens, priced.max_tokens, priced.samples, priced.priority)
        groups.setdefault(size if is_free else wish, []).append(wish)
    return list(groups.values())


def _merged(group: list[_Wish]) -> pb.PricedRequest:
    priced = group[0].priced
    if len(group) > 1:
        priced.count = len(group)
    return priced


def _places(
    wanted: int, answers: Iterator[pb.Placed], engines: Sequence[str]
) -> Iterator[Pick | None]:
    """Takes the answers to so many like requests; each as often as it is for."""
    while wanted > 0 and (placed := next(answers, None)):
        pick = _pick(placed, engines)
        for _ in range(min(wanted, placed.count or 1)):
            yield pick
        # An older router knows no counts: it answers an entry once, for one request.
        wanted = wanted - placed.count if placed.count else 0


def _price(request: pb.GenerateRequest, avoid: Sequence[str]) -> pb.PricedRequest:
    samples = request.samples
    return pb.PricedRequest(
        prompt_tokens=len(request.token_ids.ids),
        max_tokens=request.stop.max_tokens,
        samples=max(samples.n, samples.best_of, samples.beam.width),
        session_id=request.session_id,
        priority=request.priority,
        avoid=avoid,
    )


def _pick(placed: pb.Placed, engines: Sequence[str]) -> Pick | None:
    if placed.HasField("refusal"):
        return None
    return Pick(placed.id, engines[placed.engine], placed.ticket, placed.max_tokens)


def _leave(wishes: list[_Wish]) -> None:
    """To the router."""
    for wish in wishes:
        if not wish.placed.done():
            wish.placed.set_result(None)
    wishes.clear()


def _fail(wishes: list[_Wish], error: Exception) -> None:
    for wish in wishes:
        if not wish.placed.done():
            message = f"asking the router for a place failed: {type(error).__name__}: {error}"
            wish.placed.set_exception(
                ServiceError(grpc.StatusCode.INTERNAL, "PICK_FAILED", message)
            )
    wishes.clear()
