"""The admin service, which drains the engine, injects faults and profiles the worker."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal

import grpc

from ullage.admin.v1 import admin_pb2 as admin_pb
from ullage.admin.v1 import admin_pb2_grpc as admin_rpc
from ullage_common.config.engine import EngineConfig
from ullage_common.wire.errors import ServiceError, abort, invalid
from ullage_engine.protocol.messages import StartProfile
from ullage_engine.server.health import EngineStatus
from ullage_engine.server.journal import Journal
from ullage_engine.server.supervisor import WorkerSupervisor

PROFILE_STEPS = 50
"""Default number of steps in a profile."""
MAX_PROFILE_STEPS = 1000
PROFILE_MS = 60_000
"""Default maximum duration of a profile, in milliseconds."""
MAX_PROFILE_MS = 300_000
PROFILE_CHUNK_BYTES = 1 << 20
"""Maximum number of profile bytes per message."""
PROGRESS_S = 1.0
"""Interval between progress messages, in seconds."""

_PROFILE_KINDS: Mapping[int, Literal["operations", "timeline"]] = {
    admin_pb.PROFILE_KIND_UNSPECIFIED: "operations",
    admin_pb.PROFILE_KIND_OPERATIONS: "operations",
    admin_pb.PROFILE_KIND_TIMELINE: "timeline",
}


class AdminService(admin_rpc.AdminServiceServicer):
    """Drains this engine, injects faults into it and profiles it.

    The service performs no permission checks. It is therefore not served if `tickets.required` is
    set, because clients can then reach the engine's port.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine_status: EngineStatus,
        journal: Journal,
        supervisor: WorkerSupervisor,
    ) -> None:
        self._config = config
        self._engine_status = engine_status
        self._journal = journal
        self._supervisor = supervisor
        self._profiles = itertools.count(1)

    async def Drain(
        self, request: admin_pb.DrainRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> admin_pb.DrainResponse:
        self._engine_status.drain()
        within_s = request.timeout_ms / 1000 or self._config.limits.total_timeout
        return admin_pb.DrainResponse(unfinished=await self._journal.emptied(within_s))

    async def InjectFault(
        self, request: admin_pb.InjectFaultRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> admin_pb.InjectFaultResponse:
        try:
            return admin_pb.InjectFaultResponse(worker_pid=self._inject(request))
        except ServiceError as error:
            await abort(context, error)

    def _inject(self, request: admin_pb.InjectFaultRequest) -> int:
        if not self._config.server.allow_fault_injection:
            raise ServiceError(
                grpc.StatusCode.PERMISSION_DENIED,
                "FAULTS_NOT_ALLOWED",
                "fault injection is off; set spec.allowFaultInjection: true "
                "(server.allow_fault_injection)",
            )
        pid = self._hit(request)
        if pid is None:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "NO_ENGINE",
                "no worker is ready; try again",
                retry_after_s=1.0,
            )
        return pid

    def _hit(self, request: admin_pb.InjectFaultRequest) -> int | None:
        if request.kind == admin_pb.FAULT_KIND_WORKER_KILL:
            return self._supervisor.kill_worker()
        if request.kind == admin_pb.FAULT_KIND_OOM:
            return self._supervisor.inject_oom(request.after_steps)
        if request.kind == admin_pb.FAULT_KIND_BUSY_HANG:
            return self._supervisor.inject_hang()
        names = ", ".join(name for name, number in admin_pb.FaultKind.items() if number)
        raise invalid("kind", f"kind is {request.kind}; give one of {names}")

    async def Profile(
        self, request: admin_pb.ProfileRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[admin_pb.ProfileResponse]:
        path = Path(self._config.server.run_dir, f"profile-{next(self._profiles)}.json.gz")
        try:
            async for response in self._profile(request, path):
                yield response
        except ServiceError as error:
            await abort(context, error)
        finally:
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def _profile(
        self, request: admin_pb.ProfileRequest, path: Path
    ) -> AsyncIterator[admin_pb.ProfileResponse]:
        start = self._profile_start(request, path)
        first_step = self._num_steps
        done = self._supervisor.start_profile(start)
        try:
            while not done.done():
                await asyncio.wait({done}, timeout=PROGRESS_S)
                steps = max(0, min(start.steps, self._num_steps - first_step))
                yield admin_pb.ProfileResponse(progress=admin_pb.ProfileProgress(steps=steps))
            if error := done.result().error:
                raise ServiceError(grpc.StatusCode.INTERNAL, "PROFILE_FAILED", error)
            progress = admin_pb.ProfileProgress(steps=done.result().num_steps)
            yield admin_pb.ProfileResponse(progress=progress)
        finally:
            if not done.done():
                self._supervisor.stop_profile()
                # The worker is still writing the file. Remove it when that is done.
                done.add_done_callback(lambda _: path.unlink(missing_ok=True))
        with path.open("rb") as file:
            while chunk := await asyncio.to_thread(file.read, PROFILE_CHUNK_BYTES):
                yield admin_pb.ProfileResponse(chunk=chunk)

    @property
    def _num_steps(self) -> int:
        state = self._engine_status.state
        return state.num_steps if state else 0

    def _profile_start(self, request: admin_pb.ProfileRequest, path: Path) -> StartProfile:
        if not self._config.profiling.enabled:
            raise ServiceError(
                grpc.StatusCode.PERMISSION_DENIED,
                "PROFILING_NOT_ALLOWED",
                "profiling is off; set observability.profiling.enabled to true",
            )
        if request.kind not in _PROFILE_KINDS:
            raise invalid(
                "kind", f"kind is {request.kind}; give PROFILE_KIND_OPERATIONS or TIMELINE"
            )
        if request.steps > MAX_PROFILE_STEPS:
            raise invalid("steps", f"steps is {request.steps}; give at most {MAX_PROFILE_STEPS}")
        if request.timeout_ms > MAX_PROFILE_MS:
            raise invalid(
                "timeout_ms", f"timeout_ms is {request.timeout_ms}; at most {MAX_PROFILE_MS}"
            )
        return StartProfile(
            kind=_PROFILE_KINDS[request.kind],
            steps=request.steps or PROFILE_STEPS,
            seconds=(request.timeout_ms or PROFILE_MS) / 1000,
            path=str(path.resolve()),
        )
