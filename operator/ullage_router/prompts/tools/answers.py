"""Extracts tool calls and reasoning from the events of answers."""

import contextlib
import uuid
from collections.abc import AsyncGenerator, Iterator

from ullage.inference.v1 import inference_pb2
from ullage_router.prompts.tools.pieces import (
    Arguments,
    CallStart,
    Piece,
    Reader,
    Text,
    Thought,
)
from ullage_router.prompts.tools.tool_use import ToolUse

Event = inference_pb2.GenerateResponse
Delta = inference_pb2.Delta
Finished = inference_pb2.Finished | inference_pb2.SampleFinished


async def read_calls(
    events: AsyncGenerator[Event, None], use: ToolUse, num_samples: int
) -> AsyncGenerator[Event, None]:
    """Yield the events, with tool calls and reasoning separated from the text.

    Args:
        events: any number of Delta and SampleFinished events, then one Finished event.
        use: how the conversation uses tools. It creates a reader for each answer.
        num_samples: number of answers.
    """
    answers = [_Answer(use, sample) for sample in range(num_samples)]
    async with contextlib.aclosing(events):
        async for event in events:
            for visible in _visible(event, answers):
                yield visible


def _visible(event: Event, answers: list["_Answer"]) -> Iterator[Event]:
    match event.WhichOneof("event"):
        case "delta":
            yield from answers[event.delta.sample].read(event.delta)
            return
        case "sample_finished":
            yield from answers[event.sample_finished.sample].end(event.sample_finished)
        case "finished":
            for answer in answers:
                yield from answer.end(event.finished)
            num_tokens = sum(answer.num_reasoning_tokens for answer in answers)
            usage = event.finished.usage
            usage.reasoning_tokens = min(round(num_tokens), usage.completion_tokens)
    yield event


class _Answer:
    """Separates the text, reasoning and tool calls of one answer, and counts them."""

    def __init__(self, use: ToolUse, sample: int) -> None:
        assert use.new_reader, "text alone needs no reading"
        self._reader: Reader = use.new_reader()
        self._single_call = use.single_call
        self._sample = sample
        self._num_calls = 0
        self.num_reasoning_tokens = 0.0
        self._is_over = False

    def read(self, delta: Delta) -> Iterator[Event]:
        """Yield the text, reasoning and calls that the reader found in the delta's raw text.

        What the delta says about its tokens goes with the first text, or else with the first piece.
        """
        was_thinking = self._reader.is_thinking
        pieces = self._reader.push(delta.text)
        self._count(delta.num_tokens, pieces, was_thinking)
        delta.text = ""
        parts = self._parts(pieces) or [Delta()]
        next((part for part in parts if part.text), parts[0]).MergeFrom(delta)
        for part in parts:
            yield Event(delta=part)

    def _count(self, num_tokens: int, pieces: list[Piece], was_thinking: bool) -> None:
        """Count the reasoning tokens of a delta.

        Where it has reasoning and text, its tokens are divided by their characters.
        """
        thought = sum(len(piece.text) for piece in pieces if isinstance(piece, Thought))
        other = sum(len(piece.text) for piece in pieces if isinstance(piece, Text | Arguments))
        if thought + other:
            self.num_reasoning_tokens += num_tokens * thought / (thought + other)
        elif was_thinking or self._reader.is_thinking:
            self.num_reasoning_tokens += num_tokens

    def end(self, finished: Finished) -> Iterator[Event]:
        """Yield any text that was held back, and set the finish reason if the answer has calls."""
        if not self._is_over:
            self._is_over = True
            for part in self._parts(self._reader.close()):
                yield Event(delta=part)
        if self._num_calls and finished.reason == inference_pb2.FINISH_REASON_STOP:
            finished.reason = inference_pb2.FINISH_REASON_TOOL_CALLS

    def _parts(self, pieces: list[Piece]) -> list[Delta]:
        """Return deltas in the order of the pieces, each with pieces of one kind."""
        parts: list[Delta] = []
        last = ""
        for piece in pieces:
            kind = _kind(piece)
            if self._is_dropped(piece):
                continue
            if kind != last:
                parts.append(Delta(sample=self._sample))
                last = kind
            if isinstance(piece, Text):
                parts[-1].text += piece.text
            elif isinstance(piece, Thought):
                parts[-1].reasoning += piece.text
            else:
                self._fill_call(parts[-1], piece)
        return parts

    def _is_dropped(self, piece: Piece) -> bool:
        """Count the piece if it starts a call. Return whether it says nothing to the client."""
        self._num_calls += isinstance(piece, CallStart)
        if not isinstance(piece, CallStart) and not piece.text:
            return True
        is_call = isinstance(piece, CallStart | Arguments)
        return is_call and self._single_call and self._num_calls > 1

    def _fill_call(self, delta: Delta, piece: CallStart | Arguments) -> None:
        index = self._num_calls - 1
        if isinstance(piece, CallStart):
            call_id = f"call_{uuid.uuid4().hex[:24]}"
            delta.tool_calls.add(index=index, id=call_id, name=piece.name)
        elif delta.tool_calls and delta.tool_calls[-1].index == index:
            delta.tool_calls[-1].arguments += piece.text
        else:
            delta.tool_calls.add(index=index, arguments=piece.text)


def _kind(piece: Piece) -> str:
    """Return the field of deltas that has pieces like this one."""
    if isinstance(piece, Text):
        return "text"
    return "reasoning" if isinstance(piece, Thought) else "tool_calls"
