"""Has the served model write a summary: a request of the router's own through its pipeline."""

import asyncio
import uuid
from collections.abc import Callable

from ullage.inference.v1 import inference_pb2
from ullage_router.answer import Call
from ullage_router.stats import Record
from ullage_router.stream import Pipeline
from ullage_router.tenants import Errand
from ullage_router.tokenize import PromptError
from ullage_rpc.errors import ServiceError
from ullage_rpc.tool_formats import Turn

INSTRUCTION = (
    "Sum up the conversation below as briefly as you can. Keep every name, number, date, address "
    "and piece of code exactly as it is written. Write the summary and nothing else.\n\n"
)


class Writer:
    """Asks an engine.

    Args:
        pipeline: serves the request; called for when there is something to ask, since the pipeline
            itself needs who asks.
        timeout_s: for the whole answer.
    """

    def __init__(self, pipeline: Callable[[], Pipeline], timeout_s: float) -> None:
        self._pipeline = pipeline
        self._timeout_s = timeout_s

    async def write(self, text: str, max_tokens: int, errand: Errand) -> str:
        """The model's summary; empty when no engine serves it, it has no end, or `errand` cannot
        pay for it."""
        pipeline = self._pipeline()
        try:
            turns: list[Turn] = [{"role": "user", "content": INSTRUCTION + text}]
            render = pipeline.model("").render
            prompt = await asyncio.to_thread(render, turns)  # a long text, which takes its time
            return await self._answer(pipeline, self._call(prompt, max_tokens, errand))
        except (ServiceError, PromptError):
            return ""

    def _call(self, prompt: list[int], max_tokens: int, errand: Errand) -> Call:
        # Token ids are never condensed themselves, so this ends.
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling=inference_pb2.SamplingParams(temperature=0),
            stop=inference_pb2.StopConditions(max_tokens=max_tokens),
        )
        record = Record(f"summary-{uuid.uuid4().hex}")
        return Call(request, record, self._timeout_s, visit=errand, is_streamed=False)

    async def _answer(self, pipeline: Pipeline, call: Call) -> str:
        parts, reason = [], inference_pb2.FINISH_REASON_UNSPECIFIED
        async with pipeline.serve(call) as answer:
            async for event in answer.events():
                parts.append(event.delta.text)
                if event.HasField("finished"):
                    reason = event.finished.reason
        return "".join(parts).strip() if reason == inference_pb2.FINISH_REASON_STOP else ""
