"""A hand-made worker: no model, the real protocol, tokens that are a function of position.

The first prompt token chooses a behaviour. See `Script`. Run as a process:
`python fake_worker.py '{"step_s": 0.01}' --endpoint PATH`
"""

import contextlib
import enum
import os
import resource
import signal
import struct
import sys
import time

import msgspec

from ullage_common.config.engine import DegradeSection
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_common.wire.fingerprint import UNKNOWN, Fingerprint, fingerprint_of
from ullage_engine.memory.pressure import PressureController
from ullage_engine.protocol.errors import UNPROVEN
from ullage_engine.protocol.frames import connect
from ullage_engine.protocol.messages import (
    AdapterAdded,
    AddAdapter,
    Admitted,
    Cancel,
    Fault,
    Hang,
    LimitBatch,
    Loading,
    Ready,
    Rejected,
    RemoveAdapter,
    RequestFailed,
    Shutdown,
    StartFailed,
    StartProfile,
    StateReport,
    StepDone,
    StopProfile,
    Submit,
    ToServer,
    ToWorker,
)
from ullage_engine.protocol.request_events import RequestEvents
from ullage_engine.protocol.requests import (
    Embedding,
    EngineRequest,
    PromptLogprobs,
    TokenLogprobs,
    TokenOutput,
)
from ullage_engine.protocol.worker_state import (
    RankPlace,
    ReleaseState,
    ReservationState,
    WorkerState,
)
from ullage_engine.worker.profiler import Profile


class Script(enum.IntEnum):
    """What the first prompt token makes the worker do."""

    NEVER_FITS = 7
    FITS_NOT_NOW = 8
    FAILS = 9
    KILLS_WORKER = 10
    ENDS_AFTER_FIVE = 11
    WEDGES_ONCE = 12
    SILENT = 13
    NONSENSE_ONCE = 14
    LOST_TWICE = 15
    FAULTY = 16
    KILLS_BEFORE_ADMISSION = 17
    SPINS_ONCE = 18
    LOST_TWICE_AND_SILENT = 19
    KILLS_AT_DECODE = 20
    """Each worker that has given it one token dies of it."""


class Options(msgspec.Struct, forbid_unknown_fields=True):
    step_s: float = 0.005
    """Between two steps."""
    load_s: float = 0.0
    start_failed: str = ""
    may_retry: bool = False
    """A failed start is a crash, not a wrong configuration."""
    unproven: int = 0
    """Starts of this server that fail their proof, before one does not."""
    unproven_restarts: bool = False
    """All starts but the first fail their proof."""
    exit_code: int | None = None
    """Exit status with which the worker exits before it reports anything."""
    ends_with: int | None = None
    """Exit status of the worker for `Script.KILLS_WORKER`, or None if it is killed."""
    standby_hangs: bool = False
    """Whether a standby worker hangs while it imports its libraries."""
    crashes: int = 0
    """Number of this server's workers that die while loading, before one succeeds."""
    trace: str = ""
    """File that gets a line for every request and cancel taken."""
    task: str = "generate"
    longest_step_s: float = 0.0
    has_kv: bool = True
    """Whether the model has KV, which an encoder does not."""
    device: str = "cpu"
    weights: str = ""
    """Digest of the weights, which is a fact of the fingerprint, or empty for no digest."""
    later_weights: str = ""
    """Digest for later workers of this server, or empty for the same digest."""
    degrade: DegradeSection = DegradeSection()
    """Each sequence takes 2 % of the pool's headroom."""


def token_at(position: int, seed: int) -> int:
    """The token at a position: printable, multi-byte ones among them."""
    return 300 + (position * 7919 + seed * 31) % 40_000


def _name_of(request: EngineRequest) -> str:
    """Return the name of a request's adapter, without what tells its versions apart."""
    return request.adapter.partition("@")[0]


class Sequence:
    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.token_ids = list(request.token_ids)
        self.num_cached_tokens = 2 if request.session_id else 0
        self._found: list[int] = []
        self.num_scored = max(1, request.num_scored)
        self.has_stepped = False

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    def step(self) -> TokenOutput | None:
        """Generate one token. A beam search has no output before its end."""
        self.has_stepped = True
        output = self._next()
        if self.request.beam is None:
            return output
        self._found += output.token_ids
        return msgspec.structs.replace(output, token_ids=self._found) if output.finish else None

    def score(self) -> PromptLogprobs | None:
        """Score two prompt tokens, the last ones in the step before the first token."""
        request = self.request
        if request.prompt_logprobs is None or self.num_scored >= request.num_prompt_tokens:
            return None
        start = self.num_scored
        self.num_scored = min(start + 2, request.num_prompt_tokens)
        tokens = request.token_ids[start : self.num_scored]
        top = list(range(400, 400 + request.prompt_logprobs))
        return PromptLogprobs(
            request.request_id,
            start,
            struct.pack(
                f"<{len(tokens) * (1 + len(top))}f",
                *(x for token in tokens for x in (-(token % 97) / 8, *[-0.5] * len(top))),
            ),
            struct.pack(f"<{len(tokens) * len(top)}i", *top * len(tokens)),
            struct.pack(f"<{len(tokens)}i", *range(start, self.num_scored)),
        )

    def _next(self) -> TokenOutput:
        request = self.request
        token_id = token_at(len(self.token_ids), request.sampling.seed + len(_name_of(request)))
        if request.token_ids[0] == Script.ENDS_AFTER_FIVE and self.num_output == 5:
            token_id = request.stop_token_ids[0]
        self.token_ids.append(token_id)
        logprobs = None
        if request.sampling.top_logprobs is not None:
            top = list(range(400, 400 + request.sampling.top_logprobs))
            logprob = -(token_id % 97) / 97
            logprobs = [TokenLogprobs(logprob, top_ids=top, top_logprobs=[-1.0] * len(top))]
        return TokenOutput(
            request_id=request.request_id,
            token_ids=[token_id],
            finish=self._finish(token_id),
            logprobs=logprobs,
            num_cached_tokens=self.num_cached_tokens,
        )

    def _finish(self, token_id: int) -> str:
        if token_id in self.request.stop_token_ids:
            return "stop"
        return "length" if self.num_output >= self.request.max_tokens else ""


def vector_of(token_ids: list[int], adapter: str = "") -> tuple[float, ...]:
    """The embedding of a prompt."""
    return (float(len(token_ids)), sum(token_ids) / 8, float(len(adapter)))


class FakeWorker:
    def __init__(self, options: Options, endpoint: str) -> None:
        self._options = options
        self._link = connect(endpoint, 30.0)
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._sequences: dict[str, Sequence] = {}
        self._embeds: list[EngineRequest] = []
        self._pressure = PressureController(options.degrade)
        self._profile: Profile | None = None
        self._events = RequestEvents()
        self._num_ooms = 0
        self._num_steps = 0
        self._parent = os.getppid()
        self._marker = endpoint.rsplit("-", 1)[0] + ".hit"

    def run(self) -> int:
        for done in (0, 50, 100):
            self._send(Loading(stage="weights", done_bytes=done, total_bytes=100))
        time.sleep(self._options.load_s)
        if any(self._once(f"crash-{number}") for number in range(self._options.crashes)):
            return 1
        is_unproven = self._options.unproven_restarts and not self._once("proven")
        is_unproven |= any(self._once(f"unproven-{n}") for n in range(self._options.unproven))
        if is_unproven:
            error = "this start computes otherwise than the verified one: cos"
            self._send(StartFailed(error=error, may_retry=True, is_unproven=True))
            self._link.close()
            return UNPROVEN
        if self._options.start_failed:
            options = self._options
            self._send(StartFailed(error=options.start_failed, may_retry=options.may_retry))
            self._link.close()
            return 1 if options.may_retry else 2
        self._send(self._ready())
        while os.getppid() == self._parent:
            wait_s = self._options.step_s if self._sequences or self._embeds else 0.2
            while (message := self._link.receive(wait_s)) is not None:
                if not self._take(self._decoder.decode(message)):
                    return 0
                wait_s = 0
            self._step()
            if self._profile and (done := self._profile.advance(self._num_steps)):
                self._profile = None
                self._send(done)
        return 1

    def _take(self, message: ToWorker) -> bool:
        match message:
            case Submit(requests=requests):
                names = ",".join(request.request_id for request in requests)
                adapter = f" {requests[0].adapter}" if requests[0].adapter else ""
                self._trace(f"submit {names} {message.resumed} {requests[0].token_ids}{adapter}")
                self._submit(requests)
            case AddAdapter(name=name):
                self._trace(f"add {name} {message.is_checked}")
                if "kills" in name:
                    _crash()
                error = "its rank is wrong" if "broken" in name else ""
                self._send(AdapterAdded(name=name, error=error))
            case RemoveAdapter(name=name):
                self._trace(f"remove {name}")
            case LimitBatch(share=share):
                self._pressure.limit_batch(share)
                self._send(StateReport(state=self._state()))
            case Cancel(request_id=request_id):
                self._trace(f"cancel {request_id}")
                self._sequences.pop(request_id, None)
                self._send(StateReport(state=self._state()))
            case Fault():
                self._num_ooms += 1
                self._send(StateReport(state=self._state()))
            case Hang():
                while True:
                    pass
            case StartProfile():
                self._profile = Profile(message, self._events, self._num_steps)
            case StopProfile() if self._profile:
                self._profile.stop_soon()
            case Shutdown():
                return False
        return True

    def _submit(self, requests: list[EngineRequest]) -> None:
        if requests[0].token_ids[0] in (Script.NEVER_FITS, Script.FITS_NOT_NOW):
            requests = requests[:1]
        for request in requests:
            self._admit(request)

    def _admit(self, request: EngineRequest) -> None:
        first = request.token_ids[0]
        if first == Script.KILLS_BEFORE_ADMISSION:
            _crash()
        is_lost_twice = first in (Script.LOST_TWICE, Script.LOST_TWICE_AND_SILENT)
        if is_lost_twice and (self._once("first") or self._once("second")):
            _crash()
        if first not in (Script.NEVER_FITS, Script.FITS_NOT_NOW):
            self._send(Admitted(request_id=request.request_id))
        if first in (Script.NEVER_FITS, Script.FITS_NOT_NOW):
            self._send(
                Rejected(
                    request_id=request.request_id,
                    needed_bytes=5000,
                    available_bytes=1000,
                    never=first == Script.NEVER_FITS,
                    retry_after_s=1.5,
                    message="5000 bytes needed, 1000 available",
                )
            )
        elif first == Script.FAILS:
            self._send(RequestFailed(request_id=request.request_id, message="no memory for it"))
        elif first == Script.FAULTY:
            failure = RequestFailed(request_id=request.request_id, message="no", field="grammar")
            self._send(failure)
        elif first == Script.WEDGES_ONCE and self._once():
            time.sleep(3600)
        elif first == Script.SPINS_ONCE and self._once():
            while True:
                pass
        elif first == Script.NONSENSE_ONCE and self._once():
            self._link.send(b"nonsense")
        elif request.embed:
            self._embeds.append(request)
        elif len(request.token_ids) - request.num_prompt_tokens >= request.max_tokens:
            done = TokenOutput(request_id=request.request_id, token_ids=[], finish="length")
            self._send(StepDone(outputs=[done]))
        elif first not in (Script.SILENT, Script.LOST_TWICE_AND_SILENT):
            self._sequences[request.request_id] = Sequence(request)
            self._send(StateReport(state=self._state()))

    def _once(self, name: str = "") -> bool:
        """True the first time in the life of one server's run directory."""
        if os.path.exists(self._marker + name):
            return False
        open(self._marker + name, "w").close()
        return True

    def _embed(self) -> list[Embedding]:
        requests = self._embeds
        self._embeds = []
        return [
            Embedding(
                each.request_id, struct.pack("<3f", *vector_of(each.token_ids, _name_of(each)))
            )
            for each in requests
        ]

    def _step(self) -> None:
        if self._embeds:
            self._num_steps += 1
            self._send(StepDone(outputs=[], embeddings=self._embed()))
            self._send(StateReport(state=self._state()))
        if not self._sequences:
            return
        for sequence in self._sequences.values():
            if sequence.request.token_ids[0] == Script.KILLS_WORKER:
                if self._options.ends_with is not None:
                    os._exit(self._options.ends_with)
                _crash()
            if sequence.request.token_ids[0] == Script.KILLS_AT_DECODE and sequence.has_stepped:
                _crash()
        prompts = [each for one in self._sequences.values() if (each := one.score()) is not None]
        if prompts:
            self._send(StepDone(outputs=[], prompts=prompts))
        scoring = {each.request_id for each in prompts}
        stepped = [
            sequence.step() for name, sequence in self._sequences.items() if name not in scoring
        ]
        outputs = [output for output in stepped if output is not None]
        self._num_steps += 1
        self._events.note_step(self._options.step_s, len(stepped), len(stepped), 0)
        self._send(StepDone(outputs=outputs))
        for output in outputs:
            if output.finish:
                del self._sequences[output.request_id]
                self._send(StateReport(state=self._state()))

    def _ready(self) -> Ready:
        profile = MemoryProfile(
            block_tokens=16,
            groups=(CacheGroup(bytes_per_token=100),) if self._options.has_kv else (),
            state_bytes_per_sequence=0,
            activation_bytes_per_token=10,
            sampler_bytes_per_sequence=10,
            prefill_chunk_tokens=512,
            kv_pool_bytes=self._pool_bytes,
        )
        return Ready(
            profile=profile,
            max_model_len=8192,
            vocab_size=49152,
            dtype="float32",
            task=self._options.task,
            ranks=[self._place()],
            longest_step_s=self._options.longest_step_s,
            fingerprint=self._fingerprint(),
            state=self._state(),
        )

    def _fingerprint(self) -> Fingerprint:
        options = self._options
        if not options.weights:
            return UNKNOWN
        is_first = self._once("ready")
        weights = options.weights if is_first else options.later_weights or options.weights
        return fingerprint_of({"weights": weights, "engine": "fake"})

    def _place(self) -> RankPlace:
        return RankPlace(
            rank=0,
            stage=0,
            tensor_rank=0,
            device=self._options.device,
            first_layer=0,
            num_layers=1,
            num_attention_layers=1,
            num_heads=1,
            num_kv_heads=1,
        )

    @property
    def _pool_bytes(self) -> int:
        return 160_000 if self._options.has_kv else 0

    def _state(self) -> WorkerState:
        used = 1600 * len(self._sequences)
        pool = self._pool_bytes
        state = WorkerState(
            total_bytes=1_000_000,
            threshold=0.85,
            kv_pool_bytes=pool,
            kv_free_bytes=pool - used,
            kv_reclaimable_bytes=0,
            kv_committed_bytes=used,
            num_running=len(self._sequences),
            num_waiting=0,
            expected_output_tokens=256,
            decode_tokens_per_second=100.0,
            prefill_tokens_per_second=1000.0,
            prefill_backlog_tokens=0,
            num_preemptions=0,
            num_oom_events=self._num_ooms,
            releases=[ReleaseState(after_s=2.0, num_bytes=2), ReleaseState(after_s=1, num_bytes=1)],
            ledger=[
                ReservationState(name="kv_pool", reserved_bytes=160_000, allocated_bytes=160_000)
            ],
            rss_bytes=12_345,
            num_steps=self._num_steps,
        )
        return self._pressure.judge(state)

    def _send(self, message: ToServer) -> None:
        self._link.send(msgspec.msgpack.encode(message))

    def _trace(self, line: str) -> None:
        if self._options.trace:
            with open(self._options.trace, "a") as file:
                file.write(line + "\n")


def _crash() -> None:
    """Die as of a fault in a kernel, by a signal that nobody sends from outside."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = msgspec.json.decode(given[0], type=Options)
    if "--standby" in given:
        if not options.standby_hangs:
            with contextlib.suppress(BrokenPipeError):
                os.write(sys.stdin.fileno(), b"\n")
        if not sys.stdin.readline():
            return 0
    if options.exit_code is not None:
        return options.exit_code
    with contextlib.suppress(OSError):  # the server has gone
        return FakeWorker(options, given[given.index("--endpoint") + 1]).run()
    return 1


if __name__ == "__main__":
    sys.exit(main())
