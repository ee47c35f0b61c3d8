"""LoRA adapters that the engine loads and unloads while it serves requests.

The configuration either lists the desired adapters, or names a file that does. The server rereads
that file whenever it changes. A server thread finds each adapter's files and downloads missing
files. Once the worker has loaded an adapter, requests may name it. If an adapter is unavailable,
the status reports it by name, and the other adapters are unaffected.

The worker identifies an adapter by a key derived from its name and content, so that KV computed
with one version is never reused with another. Running requests keep the version with which they
started, and new requests get the latest version.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ullage_common.config.engine import (
    AdapterSection,
    AdaptersFile,
    EngineConfig,
    name_taken_twice,
)
from ullage_common.process.config_file import ConfigError, read_file
from ullage_common.process.file_watch import follow
from ullage_common.wire.fingerprint import adapter_key
from ullage_engine.model_loader.digest import Digests
from ullage_engine.model_loader.files import ADAPTER, read_safetensors_header
from ullage_engine.model_loader.source import ADAPTER_CONFIG, resolve_adapter
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.protocol.messages import AddAdapter
from ullage_engine.server.health import AdapterState, EngineStatus
from ullage_engine.server.threads import in_daemon

log = logging.getLogger("ullage.engine.adapters")

FIRST_RETRY_S = 30.0
MAX_RETRY_S = 300.0
"""Maximum delay between retries, in seconds.

The first delay is `FIRST_RETRY_S`. It doubles with each retry.
"""
FIRST_ADAPTERS_S = 30.0
"""Maximum time that missing adapters may delay readiness after a worker is loaded, in seconds.

A slow download must not delay requests that need no adapter.
"""
_MAX_WORKERS_LOST = 2
"""Maximum number of workers that may exit while loading the same adapter.

After that, the adapter is not retried until its configuration is edited.
"""
_FILES = (".json", ".safetensors", ".bin")


class WorkerEndedError(Exception):
    """Raised if the worker exits before it replies to a command."""


class AdapterWorker(Protocol):
    """Interface for loading and unloading adapters in the worker."""

    async def add_adapter(self, message: AddAdapter) -> str:
        """Load an adapter into the ready worker. Return the error message, or "" on success.

        Raises:
            WorkerEndedError: the worker exited before it replied.
        """

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter from the worker. Do nothing if no worker is running."""


@dataclass(eq=False, slots=True)
class AdapterVersion:
    """One version of an adapter, identified by the content of its files."""

    section: AdapterSection
    folder: str
    digest: str
    """Digest of the files' contents. File names are not included."""
    num_requests: int = 0
    """Number of requests in progress that use this version."""

    @property
    def key(self) -> str:
        """The name by which the worker identifies this version."""
        return adapter_key(self.section.name, self.digest)


@dataclass(slots=True)
class _Attempt:
    """An attempt to fetch and load an adapter, which is in progress or has failed permanently."""

    section: AdapterSection
    task: asyncio.Task[None]


def find_adapter(section: AdapterSection, max_rank: int, digests: Digests) -> AdapterVersion:
    """Find or download an adapter's files, and run the checks that do not need the model.

    Raises:
        WeightsError: the files are missing or corrupt, or are too large for the adapter slots.
    """
    folder = resolve_adapter(section.source)
    rank = _rank_of(folder / ADAPTER_CONFIG)
    if rank > max_rank:
        raise WeightsError(
            f"{ADAPTER_CONFIG} has r {rank}, but slots have room for memory.max_lora_rank "
            f"{max_rank} (spec.memory.maxLoraRank); raise it"
        )
    if (folder / ADAPTER).exists():
        read_safetensors_header(folder / ADAPTER)
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _FILES]
    return AdapterVersion(section, str(folder), digests.of_all(files))


def _rank_of(path: Path) -> int:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return int(config["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{path} has no rank r of the adapter's matrices; download the adapter again"
        ) from error


class AdapterSet:
    """An engine's configured adapters, and those that are available to requests."""

    def __init__(
        self,
        config: EngineConfig,
        engine_status: EngineStatus,
        worker: AdapterWorker,
        find: Callable[[AdapterSection, int, Digests], AdapterVersion] = find_adapter,
    ) -> None:
        self._config = config
        self._engine_status = engine_status
        self._worker = worker
        self._find = find
        self._digests = Digests(Path(config.server.weights_dir))
        self._wanted: dict[str, AdapterSection] = {}
        self._attempts: dict[str, _Attempt] = {}
        """Adapters that are being fetched and loaded, or that have failed permanently, by name."""
        self._offered: dict[str, AdapterVersion] = {}
        """Current version of each available adapter, by adapter name. New requests use it."""
        self._retired: list[AdapterVersion] = []
        """Replaced or removed versions that are still used by requests in progress."""
        self._errors: dict[str, str] = {}
        self._loading = asyncio.Lock()
        """Lock that makes the worker load one adapter at a time.

        If the worker dies during a load, the adapter that was being loaded is blamed.
        """

    # requests ------------------------------------------------------------------------------------

    @property
    def keys(self) -> dict[str, str]:
        """The worker's key for each available adapter, by adapter name."""
        return {name: version.key for name, version in self._offered.items()}

    @property
    def sections(self) -> list[AdapterSection]:
        """Each available adapter's configuration."""
        return [version.section for version in self._offered.values()]

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Keep an adapter's current version loaded for the duration of a `with` block.

        Do nothing if no adapter has this name.
        """
        version = self._offered.get(name)
        if version is None:
            yield
            return
        version.num_requests += 1
        try:
            yield
        finally:
            version.num_requests -= 1
            self._remove_unused()

    # workers -------------------------------------------------------------------------------------

    def additions(self) -> list[AddAdapter]:
        """Return the commands that load all adapter versions still in use into a new worker."""
        versions = [*self._offered.values(), *self._retired]
        return [AddAdapter(name=each.key, folder=each.folder, is_checked=True) for each in versions]

    # configuration -------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Mark the engine as not ready until its adapters have loaded, failed or taken too long.

        If no adapters are configured, nothing is delayed.
        """
        try:
            is_preparing = bool(self._read())
        except ConfigError:  # `run` logs it and reads the file again, which may never help
            is_preparing = False
        self._engine_status.set_preparing(is_preparing)

    async def run(self) -> None:
        """Load the configured adapters now and after each configuration change, until cancelled."""
        path = self._config.adapters_file
        tasks = [asyncio.create_task(self._end_preparing(), name="first adapters")]
        try:
            if path:
                folders = [Path(path).parent]
                await follow(folders, None, self._reload, "adapters stay as they are")
            else:
                self.set_wanted(self._config.adapters)
                await asyncio.Event().wait()
        finally:
            tasks += [attempt.task for attempt in self._attempts.values()]
            self._attempts.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _read(self) -> tuple[AdapterSection, ...]:
        """Return the configured adapters.

        Raises:
            ConfigError: their file cannot be used.
        """
        path = self._config.adapters_file
        if path is None:
            return self._config.adapters
        wanted = read_file(Path(path), AdaptersFile).adapters
        if problem := name_taken_twice(self._config.model.name, wanted):
            raise ConfigError(f"{path}: {problem}")
        return wanted

    async def _reload(self) -> None:
        self.set_wanted(self._read())

    def set_wanted(self, sections: Iterable[AdapterSection]) -> None:
        """Load the adapters in `sections`, and retire all others."""
        self._wanted = {section.name: section for section in sections}

        for name, attempt in list(self._attempts.items()):
            if self._wanted.get(name) != attempt.section:
                attempt.task.cancel()
                del self._attempts[name]
        for name in [name for name in self._offered if name not in self._wanted]:
            log.info("adapter %s is no longer configured", name)
            self._retired.append(self._offered.pop(name))
        self._errors = {name: e for name, e in self._errors.items() if name in self._attempts}

        for name, section in self._wanted.items():
            offered = self._offered.get(name)
            if name in self._attempts or (offered and offered.section == section):
                continue
            task = asyncio.create_task(self._bring(section), name=f"adapter {name}")
            self._attempts[name] = _Attempt(section, task)
        self._remove_unused()
        self._publish()

    async def _bring(self, section: AdapterSection) -> None:
        """Find and load an adapter, and retry as long as the error may be temporary."""
        retry_s = FIRST_RETRY_S
        while True:
            error, may_retry = await self._try(section)
            if not error:
                return
            log.error("adapter %s cannot be served: %s", section.name, error)
            self._errors[section.name] = error
            self._publish()
            if not may_retry:
                return
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _try(self, section: AdapterSection) -> tuple[str, bool]:
        """Try to make an adapter available. Return the error and whether retrying may help.

        The error is empty on success.
        """
        try:
            version = await in_daemon(
                lambda: self._find(section, self._config.memory.max_lora_rank, self._digests),
                f"adapter {section.name}",
            )
        except WeightsError as error:
            return str(error), True
        except Exception as error:
            log.exception("adapter %s cannot be read", section.name)
            return f"its files cannot be read: {error!r}", True

        loaded = next((each for each in self._known() if each.key == version.key), None)
        if loaded is None:
            error_text, may_retry = await self._load(version)
            if error_text:
                return error_text, may_retry
        elif loaded in self._retired:
            self._retired.remove(loaded)

        self._offer(section, loaded or version)
        return "", False

    async def _load(self, version: AdapterVersion) -> tuple[str, bool]:
        """Load an adapter version into a worker. Return the error and whether retrying may help."""
        message = AddAdapter(name=version.key, folder=version.folder)
        async with self._loading:
            for _ in range(_MAX_WORKERS_LOST):
                while not self._engine_status.serving:
                    await self._engine_status.changed(within_s=60.0)
                with contextlib.suppress(WorkerEndedError):
                    return await self._add(message), True
        lost = f"{_MAX_WORKERS_LOST} workers ended while they loaded it; edit it to try again"
        return lost, False

    async def _add(self, message: AddAdapter) -> str:
        try:
            return await self._worker.add_adapter(message)
        except asyncio.CancelledError:  # the adapter was removed from the configuration
            self._worker.remove_adapter(message.name)
            raise

    def _offer(self, section: AdapterSection, version: AdapterVersion) -> None:
        name = section.name
        version.section = section
        before = self._offered.get(name)
        if before is not None and before is not version:
            self._retired.append(before)
        self._offered[name] = version
        self._attempts.pop(name, None)
        self._errors.pop(name, None)
        log.info("adapter %s is served", name, extra={"source": section.source})
        self._remove_unused()
        self._publish()

    def _known(self) -> list[AdapterVersion]:
        return [*self._offered.values(), *self._retired]

    def _remove_unused(self) -> None:
        for version in [each for each in self._retired if not each.num_requests]:
            self._retired.remove(version)
            self._worker.remove_adapter(version.key)

    # status --------------------------------------------------------------------------------------

    def _publish(self) -> None:
        states = []
        for name, section in self._wanted.items():
            version = self._offered.get(name)
            states.append(
                AdapterState(
                    name=name,
                    rank=(version.section if version else section).rank,
                    is_served=version is not None,
                    digest=version.digest if version else "",
                    error=self._errors.get(name, ""),
                )
            )
        self._engine_status.set_adapters(tuple(states))
        if all(each.is_served or each.error for each in states):
            self._engine_status.set_preparing(False)

    async def _end_preparing(self) -> None:
        """Stop waiting for adapters `FIRST_ADAPTERS_S` seconds after a worker has begun to serve.

        From then on, adapters that are still loading no longer delay readiness.
        """
        while not self._engine_status.serving:
            await self._engine_status.changed(within_s=60.0)
        await asyncio.sleep(FIRST_ADAPTERS_S)
        self._engine_status.set_preparing(False)
