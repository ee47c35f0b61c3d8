"""Grammars for structured output: masks of the tokens that may come next in an answer.

Grammars are compiled in a background thread. The rank that runs the scheduler matches answers
against them on its CPU. A mask depends only on the grammar and the output so far, so a preempted or
resumed request continues with the same masks.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from msgspec.structs import replace

from ullage_common.process.memory import trim_heap
from ullage_engine.memory.out_of_memory import is_out_of_memory
from ullage_engine.protocol.grammar import COMPILE_STACK_BYTES, LIMITS
from ullage_engine.protocol.requests import EngineRequest
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.tokenizer.tokenizer import ModelTokenizer

log = logging.getLogger("ullage.engine.worker")

_MAX_COMPILED = 8
"""Maximum number of compiled grammars to keep for later requests."""


class GrammarError(Exception):
    """Raised if a grammar cannot be enforced. The message is a single line for the client."""


class VocabularyError(GrammarError):
    """Raised if no grammar can be enforced because the vocabulary cannot be loaded."""


def vocabulary(tokenizer: ModelTokenizer, vocab_size: int) -> LLTokenizer:
    """Build the vocabulary for matching grammars, which takes about 0.5 s for 50,000 tokens.

    Raises:
        GrammarError: the model does not support grammars.
    """
    if not tokenizer.eos_token_ids:
        raise GrammarError("the model has no end-of-sequence token, which ends an answer")

    try:
        text = tokenizer.json_bytes.decode()
        ends = list(tokenizer.eos_token_ids)
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
    except ValueError as error:
        raise GrammarError(f"the model's tokenizer cannot follow grammars: {error}") from error


class _Progress:
    """The state of matching one answer against its grammar."""

    def __init__(self, matcher: LLMatcher, stop_token_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._stop_token_ids = frozenset(stop_token_ids)
        self._num_taken = 0

    def allowed(self, chunk: Chunk) -> bytes:
        """Return a bit mask of the tokens that the grammar allows next in the answer.

        The answer so far is the part of the chunk's history after the prompt. From call to call, it
        may gain tokens but never lose any.

        Raises:
            GrammarError: the grammar has become too complex.
        """
        new = chunk.history[chunk.num_prompt_tokens + self._num_taken :]
        if new:
            self._matcher.consume_tokens(new)
            self._num_taken += len(new)

        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(_first_line(self._matcher.get_error()))
        return _without(mask, chunk.banned, self._stop_token_ids) if chunk.banned else mask


class Grammars:
    """The grammars of all requests in the engine. This class is not thread-safe."""

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        """Start the thread that compiles grammars.

        For the first grammar, the thread calls `load`, which returns the vocabulary or raises
        GrammarError if the model does not support grammars. If `load` fails for any other reason,
        the requests with that grammar fail. The exception is a lack of memory, for which no request
        is to blame.
        """
        self._load = load
        self._vocabulary: LLTokenizer | None = None

        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        usual = threading.stack_size(COMPILE_STACK_BYTES)
        # An empty task starts the thread now, since its stack cannot grow later.
        self._thread.submit(int).result()
        threading.stack_size(usual)

        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._open: dict[str, _Progress] = {}

    def compile(self, grammar: str) -> "Future[LLMatcher]":
        """Start compiling a grammar, unless it is already compiled or being compiled.

        Returns:
            A future that may raise GrammarError, or MemoryError if the host has too little memory.
        """
        compilation = self._compiled.get(grammar)
        if compilation is None:
            done = [text for text, future in self._compiled.items() if future.done()]
            for text in done[: max(0, len(done) + 1 - _MAX_COMPILED)]:
                del self._compiled[text]
            compilation = self._compiled[grammar] = self._thread.submit(self._make, grammar)
        self._compiled.move_to_end(grammar)
        return compilation

    def open(self, request: EngineRequest, compiled: LLMatcher) -> None:
        """Constrain a request's answer to its grammar until `close` is called."""
        self._open[request.request_id] = _Progress(compiled.deep_copy(), request.stop_token_ids)

    def close(self, request_id: str) -> None:
        """Drop the matching state of a request. Requests without a grammar are ignored."""
        self._open.pop(request_id, None)

    def constrain(self, plan: StepPlan) -> tuple[StepPlan, dict[str, str]]:
        """Add grammar masks to a step's plan.

        Returns:
            The plan with masks but without the chunks whose grammars failed, and the reason for
            each failure by request id.
        """
        if not self._open:
            return plan, {}

        chunks = []
        failed = {}
        for chunk in plan.chunks:
            progress = self._open.get(chunk.request_id) if chunk.sampling else None
            if progress is None:
                chunks.append(chunk)
                continue
            try:
                chunks.append(replace(chunk, allowed=progress.allowed(chunk), banned=[]))
            except GrammarError as error:
                failed[chunk.request_id] = str(error)

        return StepPlan(chunks, plan.moves), failed

    def _make(self, grammar: str) -> LLMatcher:
        if self._vocabulary is None:
            self._vocabulary = self._loaded_vocabulary()
            # The tokenizer is freed by now, and a heap keeps freed memory.
            trim_heap()
            log.info("grammars can be followed")

        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()))
        return matcher

    def _loaded_vocabulary(self) -> LLTokenizer:
        try:
            return self._load()
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError("the host has no memory for the model's vocabulary") from error
            if isinstance(error, GrammarError):
                raise
            log.exception("grammars cannot be followed: the vocabulary cannot be loaded")
            reason = _first_line(str(error)) if str(error) else type(error).__name__
            raise VocabularyError(f"the model's vocabulary cannot be loaded: {reason}") from error


def no_vocabulary() -> LLTokenizer:
    """Raise GrammarError. Engines without a tokenizer use this in place of a vocabulary loader."""
    raise GrammarError("this engine has no tokenizer, which grammars need")


def _without(mask: bytes, banned: Sequence[int], stop_token_ids: Set[int]) -> bytes:
    """Remove banned tokens from a mask. Stop tokens stay if no other allowed token would remain.

    Stop tokens are banned until the answer has `min_tokens` tokens. A grammar may end it sooner.
    """
    allowed = np.frombuffer(mask, np.uint8).copy()
    _clear(allowed, (token for token in banned if token not in stop_token_ids))
    with_stops = allowed.tobytes()

    _clear(allowed, (token for token in banned if token in stop_token_ids))
    return allowed.tobytes() if allowed.any() else with_stops


def _clear(mask: npt.NDArray[np.uint8], tokens: Iterable[int]) -> None:
    for token in tokens:
        mask[token // 8] &= ~np.uint8(1 << token % 8)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "unknown error"
