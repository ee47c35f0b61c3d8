"""AdminService: draining, and real faults where the configuration allows them."""

from typing import Any

import grpc

from ullage.admin.v1 import admin_pb2 as pb
from ullage.admin.v1 import admin_pb2_grpc as rpc
from ullage_engine.config import EngineConfig
from ullage_engine.server.board import Board
from ullage_engine.server.journal import Journal
from ullage_engine.server.supervisor import Supervisor
from ullage_rpc.errors import ServiceError, abort, invalid


class AdminService(rpc.AdminServiceServicer):
    """Operation of this engine; whoever reaches the port may drain it, so it is not served where
    clients do (`tickets.required`)."""

    def __init__(
        self, config: EngineConfig, board: Board, journal: Journal, supervisor: Supervisor
    ) -> None:
        self._config = config
        self._board = board
        self._journal = journal
        self._supervisor = supervisor

    async def Drain(
        self, request: pb.DrainRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.DrainResponse:
        self._board.drain()
        within_s = request.timeout_ms / 1000 or self._config.limits.request_timeout
        return pb.DrainResponse(unfinished=await self._journal.emptied(within_s))

    async def InjectFault(
        self, request: pb.InjectFaultRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.InjectFaultResponse:
        try:
            return pb.InjectFaultResponse(worker_pid=self._inject(request))
        except ServiceError as error:
            await abort(context, error)

    def _inject(self, request: pb.InjectFaultRequest) -> int:
        if not self._config.server.allow_fault_injection:
            raise ServiceError(
                grpc.StatusCode.PERMISSION_DENIED,
                "FAULTS_NOT_ALLOWED",
                "fault injection is off; set server.allow_fault_injection to true",
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

    def _hit(self, request: pb.InjectFaultRequest) -> int | None:
        if request.kind == pb.FAULT_KIND_WORKER_KILL:
            return self._supervisor.kill_worker()
        if request.kind == pb.FAULT_KIND_OOM:
            return self._supervisor.inject_oom(request.after_steps)
        raise invalid(
            "kind", f"kind is {request.kind}; give FAULT_KIND_WORKER_KILL or FAULT_KIND_OOM"
        )
