"""Makes up the tokens of prompts and answers, which are equal exactly where the trace says so.

A token's value has no meaning in a replay, but equal beginnings of prompts share KV. Tokens of one
stream, such as a session or a prefix, are consecutive numbers. Streams never overlap.
"""

from collections.abc import Callable

from ullage_replay.trace import MOONCAKE_BLOCK, TraceRequest

STOP = 0
"""The token that ends an answer before its limit."""
STREAM_TOKENS = 1 << 18
"""Longest stream, which is longer than the context of models that the engine serves."""
_FIRST = 1 << 16


class TokenSource:
    """Hands out streams of tokens, by name or anonymous ones.

    Numbers are unique over the whole replay, so they exceed any vocabulary. The router and the
    scheduler only compare and hash them.
    """

    def __init__(self) -> None:
        self._next = _FIRST
        self._streams: dict[tuple[str, str | int], int] = {}

    def prompt(self, request: TraceRequest) -> list[int]:
        """Return the prompt's tokens."""
        count = request.prompt_tokens
        if request.session:
            first = self._stream("session", request.session)
            return list(range(first, first + count))

        tokens: list[int] = []
        if request.prefix:
            first = self._stream("prefix", request.prefix)
            tokens = list(range(first, first + request.prefix_tokens))
        for block in request.blocks:
            first = self._stream("block", block, MOONCAKE_BLOCK)
            tokens += range(first, first + MOONCAKE_BLOCK)
        del tokens[count:]

        first = self._reserve(count - len(tokens))
        tokens += range(first, first + count - len(tokens))
        return tokens

    def output(self, request: TraceRequest) -> Callable[[int], int]:
        """Return a function from a position in the sequence to the answer's token there.

        The answer to a session's turn is part of the next turn's prompt.
        """
        if request.session:
            return self._stream("session", request.session).__add__
        return self._reserve(request.output_tokens).__add__

    def _stream(self, kind: str, name: str | int, length: int = STREAM_TOKENS) -> int:
        first = self._streams.get((kind, name))
        if first is None:
            first = self._streams[kind, name] = self._reserve(length)
        return first

    def _reserve(self, count: int) -> int:
        first = self._next
        self._next += count
        return first
