"""The gRPC service that streams the engine's free memory and health to routers."""

import asyncio
import itertools
import time
from typing import Any

import grpc

from ullage.headroom.v1 import headroom_pb2 as headroom_pb
from ullage.headroom.v1 import headroom_pb2_grpc as headroom_rpc
from ullage_common.config.engine import EngineConfig
from ullage_engine.protocol.worker_state import WorkerState
from ullage_engine.server.health import EngineStatus

HEARTBEAT_S = 1.0
"""Maximum interval between two messages of a stream, in seconds."""
DEFAULT_INTERVAL_S = 0.1
"""Default minimum interval between two messages of a stream, in seconds."""
MAX_REPORTS_PER_S = 1000
"""Maximum number of messages per second in all streams together.

Streams need no key. Without this limit, a few bytes for each would keep the event loop busy.
"""
MAX_RELEASES = 32
"""Maximum number of predicted memory releases per message. The earliest releases are kept."""


class HeadroomService(headroom_rpc.HeadroomServiceServicer):
    """Streams the engine's free memory. Messages are numbered from 1 within each stream."""

    def __init__(self, config: EngineConfig, engine_status: EngineStatus) -> None:
        self._config = config
        self._engine_status = engine_status
        self._num_streams = 0

    async def GetHeadroom(
        self,
        request: headroom_pb.GetHeadroomRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> headroom_pb.GetHeadroomResponse:
        return headroom_pb.GetHeadroomResponse(headroom=self.report(sequence=0))

    async def WatchHeadroom(
        self,
        request: headroom_pb.WatchHeadroomRequest,
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> None:
        self._num_streams += 1
        try:
            await self._push(request.min_interval_ms / 1000 or DEFAULT_INTERVAL_S, context)
        finally:
            self._num_streams -= 1

    async def _push(self, asked_s: float, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        for sequence in itertools.count(1):
            pushed_at = time.monotonic()
            change = asyncio.ensure_future(self._engine_status.changed(HEARTBEAT_S))
            try:
                headroom = self.report(sequence)
                await context.write(headroom_pb.WatchHeadroomResponse(headroom=headroom))
                await change
            finally:
                change.cancel()
            pause_s = interval_s(asked_s, self._num_streams)
            await asyncio.sleep(pushed_at + pause_s - time.monotonic())

    def report(self, sequence: int) -> headroom_pb.Headroom:
        """Return the engine's report as it is now, with this number in its stream."""
        engine_status = self._engine_status
        server = self._config.server
        headroom = headroom_pb.Headroom(
            engine=server.engine_id,
            epoch=engine_status.epoch,
            sequence=sequence,
            model=self._config.model.name,
            pool=server.pool,
            ready=engine_status.is_ready,
            draining=engine_status.draining,
            health=engine_status.health,
            worker_restarts=engine_status.worker_restarts,
            worker_start_s=engine_status.worker_start_s,
            headroom_bytes=engine_status.headroom_bytes,
            max_sequences=self._config.batching.max_sequences,
            batch_share=1.0,
            throttle_reasons=sorted(engine_status.throttle_reasons),
            kv_bytes_per_token=engine_status.profile.growing_bytes_per_token,
            step_limit_s=engine_status.step_limits.shortest_s,
            not_ready_reason=engine_status.not_ready_reason,
        )
        if engine_status.state is not None:
            _fill(headroom, engine_status.state)
        if engine_status.ready is not None:
            fingerprint = engine_status.ready.fingerprint
            headroom.fingerprint = fingerprint.digest
            headroom.fingerprint_facts.update(fingerprint.facts)
        for adapter in engine_status.adapters:
            headroom.adapters.add(
                name=adapter.name,
                rank=adapter.rank,
                served=adapter.is_served,
                digest=adapter.digest,
                error=adapter.error,
            )
        for tier in engine_status.tiers():
            headroom.tiers.add(
                name=tier.name,
                backend=tier.backend,
                capacity_bytes=tier.capacity_bytes,
                used_bytes=tier.used_bytes,
                blocks=tier.num_blocks,
                hits=tier.hits,
                misses=tier.misses,
                queued=tier.queued,
            )
        return headroom


def interval_s(asked_s: float, num_streams: int) -> float:
    """Return the minimum interval between two messages of a stream, in seconds.

    Args:
        asked_s: the interval that the client asked for.
        num_streams: the number of open streams.
    """
    return max(asked_s, num_streams / MAX_REPORTS_PER_S)


def _fill(headroom: headroom_pb.Headroom, state: WorkerState) -> None:
    headroom.total_bytes = state.total_bytes
    headroom.threshold = state.threshold
    headroom.kv_pool_bytes = state.kv_pool_bytes
    headroom.kv_free_bytes = state.kv_free_bytes
    headroom.kv_reclaimable_bytes = state.kv_reclaimable_bytes
    headroom.kv_committed_bytes = state.kv_committed_bytes
    headroom.kv_peak_bytes = state.kv_peak_bytes
    headroom.kv_peak_promised_bytes = state.kv_peak_promised_bytes
    headroom.requests_running = state.num_running
    headroom.requests_waiting = state.num_waiting
    headroom.expected_output_tokens = state.expected_output_tokens
    headroom.decode_tokens_per_second = state.decode_tokens_per_second
    headroom.prefill_backlog_tokens = state.prefill_backlog_tokens
    headroom.prefill_tokens_per_second = state.prefill_tokens_per_second
    headroom.step_seconds.extend(state.step_seconds)
    headroom.pressure_level = state.pressure_level
    headroom.batch_share = state.batch_share
    headroom.max_sequences = max(1, int(headroom.max_sequences * state.batch_share))
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
