"""Measuring a service, as far as it goes wrong."""

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from ullage.admin.v1 import admin_pb2, admin_pb2_grpc
from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_replay import measure as measuring
from ullage_replay.hardware import EngineHardware, Hardware
from ullage_replay.measure import EngineAddress, MeasureError, measure
from ullage_replay.timeline import read_timeline

LIMITS = {
    "max_model_len": 512,
    "max_sequences": 2,
    "prompt_tokens": 16,
    "is_chunked": True,
    "decode_tokens": 99,
}

FACTS = {"device": "cpu", "dtype": "float32", "quantization": "int8", "kv_dtype": "bfloat16"}


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Refuses every request, the first one for a reason of its own."""

    def __init__(self) -> None:
        self.num_refused = 0

    async def GetModel(self, request: Any, context: Any) -> pb.GetModelResponse:
        model = pb.GetModelResponse(model="m", vocab_size=1000, max_model_len=512)
        model.fingerprint_facts.update(FACTS)
        model.profile.kv_pool_bytes = 1 << 20
        model.profile.block_tokens = 16
        model.profile.groups.add(bytes_per_token=64)
        return model

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.num_refused += 1
        first = self.num_refused == 1
        code = grpc.StatusCode.INTERNAL if first else grpc.StatusCode.UNAVAILABLE
        await context.abort(code, "no")
        yield


class Headroom(headroom_pb2_grpc.HeadroomServiceServicer):
    async def GetHeadroom(self, request: Any, context: Any) -> headroom_pb2.GetHeadroomResponse:
        headroom = headroom_pb2.Headroom(max_sequences=2, total_bytes=1 << 30, threshold=0.85)
        return headroom_pb2.GetHeadroomResponse(headroom=headroom)


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Records timelines without a step."""

    async def Profile(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0.02)
        about = {"began_unix_s": 0.0, "limits": LIMITS, "longest_step_s": 0.1}
        document = {"traceEvents": [], "otherData": about}
        yield admin_pb2.ProfileResponse(chunk=gzip.compress(json.dumps(document).encode()))


@contextlib.asynccontextmanager
async def serving(inference: Inference) -> AsyncIterator[str]:
    """Serve a fake engine, and yield its address."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
    headroom_pb2_grpc.add_HeadroomServiceServicer_to_server(Headroom(), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def test_a_stage_without_an_answer_ends_with_its_first_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "_RECORDS_S", 0.0)
    inference = Inference()

    async def main() -> None:
        async with serving(inference) as target:
            await measure(target, [EngineAddress("single", target)])

    with pytest.raises(MeasureError, match="requests failed, the first one with INTERNAL;"):
        asyncio.run(main())
    assert inference.num_refused > 2


def test_the_file_states_the_data_types_that_the_engine_reports(hardware: Hardware) -> None:
    known = hardware.engines["single"]

    async def main() -> EngineHardware:
        async with serving(Inference()) as target:
            engine = measuring._Engine(EngineAddress("single", target))
            await engine.describe()
            timeline = read_timeline(await engine.profile())
            try:
                return engine.hardware(timeline, known.cost, known.overheads)
            finally:
                await engine.close()

    measured = asyncio.run(main())
    assert {name: getattr(measured, name) for name in FACTS} == FACTS
