"""Startup and shutdown of the server process.

The gRPC and metrics servers start listening before the model is resolved, so that probes and
operators can see that the engine is loading.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from ullage.admin.v1 import admin_pb2, admin_pb2_grpc
from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage.kv.v1 import kv_pb2_grpc
from ullage_common.chat.guarded_tokenizer import GuardedTokenizer
from ullage_common.chat.special_tokens import SpecialTokenGuard
from ullage_common.chat.template import ChatTemplate, ChatTemplateError
from ullage_common.config.engine import EngineConfig, default_host_tier
from ullage_common.process.addresses import host_of, joined
from ullage_common.process.config_file import ConfigError
from ullage_common.process.memory import free_bytes, trim_heap
from ullage_common.process.metrics_endpoint import serve_metrics
from ullage_common.process.tracing import start_tracing
from ullage_common.tickets.tickets import TICKET_KEY
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.request_guard import RequestGuard
from ullage_common.wire.servers import Health, bind, new_probe_server, new_server
from ullage_common.wire.tls import Certificates, Material
from ullage_engine.gpu.monitor import GpuMonitor, MonitorTimes
from ullage_engine.gpu.throttling import BoostState
from ullage_engine.kv_tiers.broker import TierHits
from ullage_engine.kv_tiers.cost import ComputeSpeed
from ullage_engine.kv_tiers.tiers import KvTiers
from ullage_engine.model_loader.files import check_files
from ullage_engine.model_loader.source import ModelFiles, resolve_source
from ullage_engine.protocol.errors import WeightsError, one_line
from ullage_engine.server.adapters import AdapterSet
from ullage_engine.server.admin import AdminService
from ullage_engine.server.headroom import HeadroomService
from ullage_engine.server.health import EngineStatus
from ullage_engine.server.journal import Journal, TierHit
from ullage_engine.server.metrics import EngineMetrics
from ullage_engine.server.prompts import TokenizerBundle
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.server.server_link import EndpointError
from ullage_engine.server.service import InferenceService
from ullage_engine.server.supervisor import GaveUpError, StartError, WorkerLaunch, WorkerSupervisor
from ullage_engine.server.threads import in_daemon
from ullage_engine.server.tickets import TicketVerifier
from ullage_engine.server.worker_cpu import WorkerCpu
from ullage_engine.tokenizer.detokenizer import TokenBytes
from ullage_engine.tokenizer.tokenizer import TokenizerError, load_tokenizer
from ullage_kv import ArenaError

log = logging.getLogger("ullage.engine")

_SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    headroom_pb2.DESCRIPTOR.services_by_name["HeadroomService"].full_name,
)
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_GENERATE = f"/{_SERVICES[0]}/Generate"
_FOR_EVERYBODY = frozenset(
    {
        _SERVICES[1],
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    }
)
"""Services that anyone may call. Probes and operators call them with small requests."""
_LAST_MESSAGES_S = 1.0
"""Maximum time to wait for finished requests to send their last message, in seconds."""
_RETRY_S = 5.0
"""Seconds until a part of the server that has failed is started again."""

ChooseLaunch = Callable[[ModelFiles], WorkerLaunch]
"""Function that returns how to start workers for a model's files.

It raises AppError if no engine can serve the model.
"""
_Loaded = tuple[TokenizerBundle, WorkerLaunch]


class AppError(Exception):
    """The server cannot start with this configuration or model. The message is one line."""


class EngineApp:
    """One engine: its services, supervisor and health. Each instance can run only once."""

    def __init__(
        self,
        config: EngineConfig,
        choose_launch: ChooseLaunch,
        policy: RestartPolicy,
        gpu_times: MonitorTimes = MonitorTimes(),  # noqa: B008 - immutable
    ) -> None:
        self._config = config
        self._gpu_times = gpu_times
        self._choose_launch = choose_launch
        self._engine_status = EngineStatus()
        self._journal = Journal()
        self._health = Health()
        self._metrics = EngineMetrics(config.model.name)
        self._supervisor = WorkerSupervisor(
            run_dir=Path(config.server.run_dir),
            engine_status=self._engine_status,
            journal=self._journal,
            metrics=self._metrics,
            unservable=lambda ready: self._inference.unservable(ready),
            adapters=lambda: self._adapters.additions() if self._adapters else [],
            has_standby=config.server.standby_worker,
            policy=policy,
        )
        self._adapters: AdapterSet | None = None
        if config.max_loras:
            self._adapters = AdapterSet(config, self._engine_status, self._supervisor)
            self._adapters.prepare()
        self._metrics.watch_cpu(WorkerCpu(lambda: self._supervisor.worker_pid).seconds)
        self._ticket_verifier = _make_ticket_verifier(config)
        identity = {"service.instance.id": config.server.engine_id, "ullage.process": "server"}
        self._tracer = start_tracing(config.tracing, "ullage-engine", identity)
        self._inference = InferenceService(
            config,
            self._engine_status,
            self._journal,
            self._supervisor,
            self._metrics,
            self._ticket_verifier,
            self._tracer,
            self._adapters,
        )
        self._certificates: Certificates | None = None
        self._kv = self._make_tiers()
        self.port = 0
        """Port of the gRPC server, or 0 until `run` has bound it."""
        self.probe_port = 0
        self.listening = asyncio.Event()

    def worker_pids(self) -> list[int]:
        """Return the process ids of the ready worker and its other ranks."""
        return self._supervisor.serving_pids()

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain. Set `hurry` to cut draining short.

        Raises:
            AppError: the configuration or the model cannot be served.
            EndpointError: a worker's socket cannot be created.
            GaveUpError: workers keep dying, or cannot be started.
        """
        async with self._listening():
            loaded = await self._load(stop)
            if loaded is None:
                return
            tokenizer_bundle, launch = loaded
            self._inference.set_tokenizer(tokenizer_bundle)
            kv = await self._open_tiers(launch)
            supervising = asyncio.create_task(self._supervisor.run(launch, kv))
            following = asyncio.create_task(_retried(self._follow_health, "health reports"))
            adapting = asyncio.create_task(_retried(self._keep_adapters, "adapters"))
            watching = asyncio.create_task(_retried(self._watch_gpus, "the monitor of GPUs"))
            try:
                await _first_of(stop.wait(), supervising)
                if not supervising.done():
                    await self._drain(hurry)
            finally:
                following.cancel()
                watching.cancel()
                adapting.cancel()
                self._health.set_ready(False)
                await self._supervisor.stop()
                try:
                    await self._end(supervising)
                finally:
                    if kv is not None:
                        await asyncio.to_thread(kv.close)

    def _make_tiers(self) -> KvTiers | None:
        """Create the KV tiers outside the device. Return None if none are configured."""
        memory = self._config.memory
        if memory.tiers.host.size == 0 or not memory.prefix_cache:
            return None
        # A worker that waits for tiers finishes no step. It must not count as hung.
        wait_s = self._config.limits.step_deadline / 4
        kv = KvTiers(
            memory.tiers,
            self._note_hits,
            self._own_certificate,
            self._compute_speed,
            wait_s,
            self._has_begun,
        )
        self._metrics.watch_tiers(kv.stats, kv.not_loaded.copy)
        if kv.service is not None:
            self._metrics.watch_peers(kv.service.stats)
        self._engine_status.tiers = kv.stats
        return kv

    def _own_certificate(self) -> Material | None:
        return self._certificates.material if self._certificates is not None else None

    async def _open_tiers(self, launch: WorkerLaunch) -> KvTiers | None:
        """Allocate the host tier, and return the KV tiers for the workers.

        Return None if there is no host tier or the workers do not use it.

        Raises:
            AppError: the configured memory is not available.
        """
        if self._kv is None or not launch.uses_tiers:
            return None
        config = self._config
        asked = size = config.memory.tiers.asked_host_bytes
        if size is None:
            free = free_bytes()
            size = default_host_tier(config.memory, config.device, config.gpus, free)
            log.info(
                "memory.tiers.host.size is not set: the host tier takes its default size",
                extra={"bytes": size, "free_bytes": free},
            )
        if not size:
            return None
        try:
            await asyncio.to_thread(self._kv.open, size)
        except ArenaError as error:
            if asked is None:
                log.warning("there is no host tier", extra={"reason": str(error)})
                return None
            raise AppError(f"memory.tiers.host.size: {error}") from error
        return self._kv

    def _compute_speed(self) -> ComputeSpeed:
        state = self._engine_status.state
        if state is None:
            return ComputeSpeed()
        return ComputeSpeed(state.prefill_tokens_per_second, state.prefill_backlog_tokens)

    def _has_begun(self, request_id: str) -> bool:
        entry = self._journal.get(request_id)
        return entry is None or entry.is_over or entry.has_begun

    def _note_hits(self, request_id: str, hits: list[TierHits]) -> None:
        entry = self._journal.get(request_id)
        ready = self._engine_status.ready
        if entry is not None and ready is not None:
            size = ready.profile.block_tokens
            entry.add_tier_hits([TierHit(h.tier, h.num_blocks * size, h.seconds) for h in hits])

    async def _end(self, supervising: asyncio.Task[None]) -> None:
        """Wait for the supervisor to end, and for open requests to send their last messages.

        The sockets may be closed afterwards.
        """
        try:
            await supervising
        except StartError as error:
            raise AppError(str(error)) from error
        except (GaveUpError, EndpointError) as error:
            self._fail_all(str(error))
            raise
        except Exception as error:
            log.exception("the supervisor failed")
            message = f"no worker can be kept running: {error!r}"
            self._fail_all(message)
            raise GaveUpError(message) from error
        finally:
            await self._journal.emptied(_LAST_MESSAGES_S)

    def _fail_all(self, message: str) -> None:
        lost = _engine_lost(message)
        # A request may still arrive in the journal, once its prompt is tokenised.
        self._engine_status.stay_out(message)
        self._journal.end_all(lambda entry: entry.fail(lost))

    async def _drain(self, hurry: asyncio.Event) -> None:
        """Refuse new requests, and give open requests time to finish.

        After `limits.total_timeout`, or once `hurry` is set, cancel the remaining requests.
        """
        self._health.set_ready(False)
        self._engine_status.drain()
        log.info("draining", extra={"open_requests": len(self._journal)})
        await _first_of(hurry.wait(), self._journal.emptied(self._config.limits.total_timeout))
        self._journal.end_all(lambda entry: entry.end("cancelled"))
        unanswered = await self._journal.emptied(_LAST_MESSAGES_S)
        log.info("drained", extra={"unanswered_requests": unanswered})

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        server = self._config.server
        _make_run_dir(Path(server.run_dir))
        grpc_server = new_server(guard=RequestGuard(self._admit))
        services = (*_SERVICES, _ADMIN) if self._has_admin else _SERVICES
        self._health.attach(grpc_server, services)
        self._add_services(grpc_server)
        stop_metrics = self._serve_metrics()
        try:
            async with self._credentials() as credentials, self._probes():
                port = server.grpc_port
                self.port = _bind("grpc_port", grpc_server, server.host, port, credentials)
                await grpc_server.start()
                self._ticket_verifier.start()
                log.info("listening", extra={"host": server.host, "grpc_port": self.port})
                self.listening.set()
                yield
        finally:
            await self._ticket_verifier.close()
            await grpc_server.stop(grace=_LAST_MESSAGES_S)
            await asyncio.to_thread(stop_metrics)
            if self._tracer:
                await asyncio.to_thread(self._tracer.close)

    @contextlib.asynccontextmanager
    async def _credentials(self) -> AsyncIterator[grpc.ServerCredentials | None]:
        """Yield the gRPC server's TLS credentials, or None without TLS.

        Raises:
            ConfigError: the certificate cannot be used.
        """
        if self._config.server.tls_dir is None:
            yield None
            return
        folder = Path(self._config.server.tls_dir)
        certificates = Certificates(folder, folder)
        await certificates.start()
        self._certificates = certificates
        self._metrics.watch_certificates(certificates)
        try:
            yield certificates.server_credentials()
        finally:
            await certificates.close()

    @contextlib.asynccontextmanager
    async def _probes(self) -> AsyncIterator[None]:
        """Serve the health and headroom services on a separate port, without TLS.

        Kubelet probes do not support TLS. On this port, the operator can observe the engine but
        cannot send requests.
        """
        server = self._config.server
        if server.probe_port is None:
            yield
            return
        probes = new_probe_server()
        self._health.attach_alone(probes)
        headroom_pb2_grpc.add_HeadroomServiceServicer_to_server(
            HeadroomService(self._config, self._engine_status), probes
        )
        self.probe_port = _bind("probe_port", probes, server.host, server.probe_port)
        await probes.start()
        try:
            yield
        finally:
            await probes.stop(None)

    def _admit(self, method: str, metadata: Mapping[str, str]) -> str | None:
        """Check the ticket if this is a Generate RPC, and return the tenant to charge for the RPC.

        Returns:
            None for services that anyone may call, which have limits of their own. Otherwise "",
            which means that the tenant is unknown.

        Raises:
            ServiceError: a Generate RPC lacks a required ticket.
        """
        if method == _GENERATE:
            try:
                self._ticket_verifier.check(metadata.get(TICKET_KEY))
            except ServiceError as error:
                self._metrics.refused(error.reason)
                raise
        service = method.removeprefix("/").partition("/")[0]
        return None if service in _FOR_EVERYBODY else ""

    def _add_services(self, server: grpc.aio.Server) -> None:
        engine_status = self._engine_status
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, server)
        headroom_pb2_grpc.add_HeadroomServiceServicer_to_server(
            HeadroomService(self._config, engine_status), server
        )
        if self._kv is not None and self._kv.service is not None:
            kv_pb2_grpc.add_KVStoreServiceServicer_to_server(self._kv.service, server)
        if self._has_admin:
            admin = AdminService(self._config, engine_status, self._journal, self._supervisor)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)

    @property
    def _has_admin(self) -> bool:
        """Whether the admin service is served.

        It is not served if tickets are required, because the port is then reachable by clients.
        """
        tickets = self._config.tickets
        return tickets is None or not tickets.required

    def _serve_metrics(self) -> Callable[[], None]:
        server = self._config.server
        try:
            return serve_metrics(self._metrics.registry, server.metrics_port, server.host)
        except OSError as error:
            address = joined(host_of(server.host), server.metrics_port)
            raise AppError(
                f"server.metrics_port: cannot listen on {address} ({error.strerror}); "
                "choose a free port"
            ) from error

    async def _load(self, stop: asyncio.Event) -> _Loaded | None:
        """Load the tokenizer and choose the worker command, in a separate thread.

        Loading a large vocabulary takes seconds, and a download may take minutes.

        Returns:
            The tokenizer and the worker command, or None if the engine stops before loading is
            complete.
        """

        def load() -> _Loaded:
            files = resolve_source(self._config.model.source)
            # With load_format vLLM may find weights elsewhere.
            check_files(files, reads_weights="load_format" not in self._config.vllm.args)
            defaults = self._config.model.generation_defaults
            return _load_tokenizer(files.path, defaults), self._choose_launch(files)

        loading = in_daemon(load, "load-language")
        await _first_of(stop.wait(), loading)
        if not loading.done():
            return None
        try:
            return loading.result()
        except (WeightsError, TokenizerError, ChatTemplateError) as error:
            raise AppError(str(error)) from error
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            # The files have an unforeseen defect, so the next start would fail as well.
            log.debug("the model's files cannot be read", exc_info=True)
            raise AppError(
                f"model.source {self._config.model.source!r}: its files cannot be read: "
                f"{one_line(error)}; download the model again"
            ) from error

    async def _follow_health(self) -> None:
        """Update readiness and liveness whenever the engine's status changes.

        The engine is not ready while it has no worker. It fails its liveness check only if nothing
        short of replacing the pod can recover it.
        """
        while True:
            self._health.set_ready(
                self._engine_status.is_ready and not self._engine_status.draining
            )
            self._health.set_live(self._engine_status.live)
            await self._engine_status.changed(within_s=60.0)

    async def _keep_adapters(self) -> None:
        """Load and unload LoRA adapters whenever their configuration is edited."""
        if self._adapters is not None:
            await self._adapters.run()

    async def _watch_gpus(self) -> None:
        """Monitor this node's GPUs once a worker has reported that it runs on GPUs."""
        if self._config.device == "cpu":
            return
        while (ready := self._engine_status.ready) is None:
            await self._engine_status.changed(within_s=60.0)
        if not any(place.device.startswith("cuda") for place in ready.ranks):
            return
        monitor = GpuMonitor(
            self._config.num_local_ranks,
            self._config.degrade.throttling,
            self._on_boost,
            self._gpu_times,
        )
        try:
            monitor.start()
            self._metrics.watch_gpus(monitor)
            await asyncio.Event().wait()
        finally:
            monitor.close()

    def _on_boost(self, boost: BoostState) -> None:
        self._engine_status.set_throttle_reasons(boost.reasons)
        self._supervisor.limit_batch(boost.batch_share)


def _make_ticket_verifier(config: EngineConfig) -> TicketVerifier:
    try:
        return TicketVerifier(config.tickets, config.server.engine_id, config.model.name)
    except ConfigError as error:
        raise AppError(str(error)) from error


def _load_tokenizer(path: Path, generation_defaults: bool) -> TokenizerBundle:
    tokenizer = load_tokenizer(path, generation_defaults)
    chat = None
    if tokenizer.chat_template:
        chat = ChatTemplate(
            tokenizer.chat_template, tokenizer.special_tokens, tokenizer.tool_chat_template
        )
    guard = SpecialTokenGuard(tokenizer.tokenizer, chat.literals if chat else ())
    tokenizer_bundle = TokenizerBundle(
        tokenizer=tokenizer,
        token_bytes=TokenBytes(tokenizer.tokenizer),
        chat=chat,
        guard=guard,
        guarded=GuardedTokenizer(tokenizer.tokenizer, guard.guarded),
    )
    trim_heap()  # parsing needed as much memory again
    return tokenizer_bundle


def _make_run_dir(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AppError(
            f"server.run_dir: cannot create {path} ({error.strerror}); name a writable directory"
        ) from error


def _bind(
    field: str,
    server: grpc.aio.Server,
    host: str | None,
    port: int,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    address = joined(host_of(host), port)
    try:
        bound = bind(server, address, credentials)
    except RuntimeError:
        bound = 0
    if not bound:
        raise AppError(
            f"server.{field}: cannot listen on {address}; choose a free port and a host of this "
            "machine"
        )
    return bound


def _engine_lost(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "WORKER_LOST", message, retry_after_s=5.0)


async def _retried(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """Run `work` until it ends without an error. Log each error, and start it again."""
    while True:
        try:
            await work()
            return
        except Exception:
            log.exception("%s failed; retrying", name)
        await asyncio.sleep(_RETRY_S)


async def _first_of(*awaitables: "asyncio.Future[Any] | Coroutine[Any, Any, Any]") -> None:
    """Wait until any of the awaitables is done.

    The other coroutines are then cancelled. Awaitables passed as tasks or futures keep running.
    """
    given = {asyncio.ensure_future(item): asyncio.isfuture(item) for item in awaitables}
    try:
        await asyncio.wait(given, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future, is_kept in given.items():
            if not is_kept:
                future.cancel()
