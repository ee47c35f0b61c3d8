"""HeadroomService: the engine's memory, on request and pushed."""

import asyncio
import itertools
import time
from typing import Any

import grpc

from ullage.headroom.v1 import headroom_pb2 as pb
from ullage.headroom.v1 import headroom_pb2_grpc as rpc
from ullage_engine.config import EngineConfig
from ullage_engine.messages import Profile, WorkerState
from ullage_engine.server.board import Board

HEARTBEAT_S = 1.0
DEFAULT_INTERVAL_S = 0.1
MAX_RELEASES = 32


class HeadroomService(rpc.HeadroomServiceServicer):
    """Reads the board; every stream numbers its own pushes."""

    def __init__(self, config: EngineConfig, board: Board) -> None:
        self._config = config
        self._board = board

    async def GetHeadroom(
        self,
        request: pb.GetHeadroomRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> pb.GetHeadroomResponse:
        return pb.GetHeadroomResponse(headroom=self._headroom(sequence=0))

    async def WatchHeadroom(
        self,
        request: pb.WatchHeadroomRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> None:
        interval_s = request.min_interval_ms / 1000 or DEFAULT_INTERVAL_S
        for sequence in itertools.count(1):
            pushed_at = time.monotonic()
            change = asyncio.ensure_future(self._board.changed(HEARTBEAT_S))
            try:
                headroom = self._headroom(sequence)
                await context.write(pb.WatchHeadroomResponse(headroom=headroom))
                await change
            finally:
                change.cancel()
            await asyncio.sleep(pushed_at + interval_s - time.monotonic())

    def _headroom(self, sequence: int) -> pb.Headroom:
        board, server = self._board, self._config.server
        headroom = pb.Headroom(
            engine=server.engine_id,
            epoch=board.epoch,
            sequence=sequence,
            model=self._config.model.name,
            pool=server.pool,
            ready=board.serving,
            draining=board.draining,
            health=board.health,
            worker_restarts=board.worker_restarts,
            headroom_bytes=board.headroom_bytes,
            max_sequences=self._config.batching.max_sequences,
            kv_bytes_per_token=_growing_bytes(board.profile),
        )
        if board.state is not None:
            _fill(headroom, board.state)
        return headroom


def _growing_bytes(profile: Profile) -> int:
    """Of the cache groups without a window: the others end growing."""
    return sum(group.bytes_per_token for group in profile.groups if not group.window_tokens)


def _fill(headroom: pb.Headroom, state: WorkerState) -> None:
    headroom.total_bytes = state.total_bytes
    headroom.threshold = state.threshold
    headroom.kv_pool_bytes = state.kv_pool_bytes
    headroom.kv_free_bytes = state.kv_free_bytes
    headroom.kv_reclaimable_bytes = state.kv_reclaimable_bytes
    headroom.kv_committed_bytes = state.kv_committed_bytes
    headroom.requests_running = state.num_running
    headroom.requests_waiting = state.num_waiting
    headroom.expected_output_tokens = state.expected_output_tokens
    headroom.decode_tokens_per_second = state.decode_tokens_per_second
    headroom.prefill_backlog_tokens = state.prefill_backlog_tokens
    headroom.prefill_tokens_per_second = state.prefill_tokens_per_second
    headroom.pressure_level = state.pressure_level
    soonest = sorted(state.releases, key=lambda release: release.after_s)[:MAX_RELEASES]
    for release in soonest:
        after_ms = max(0, round(release.after_s * 1000))
        headroom.releases.add(after_ms=after_ms, bytes=release.num_bytes)
    for line in state.ledger:
        headroom.ledger.add(
            name=line.name,
            reserved_bytes=line.reserved_bytes,
            allocated_bytes=line.allocated_bytes,
        )
