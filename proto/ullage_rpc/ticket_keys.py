"""The tickets' keys in use: read at the start, and again whenever the folder changes."""

import asyncio
import logging
from pathlib import Path

from ullage_rpc.config import ConfigError
from ullage_rpc.tickets import Signer, load_keys
from ullage_rpc.watch import fingerprint, follow

log = logging.getLogger(__name__)


class TicketKeys:
    """Follows a folder of keys.

    Args:
        folder: one key a file.

    Raises:
        ConfigError: the folder has no usable key.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = fingerprint((folder,))
        self.all = load_keys(folder)
        """Every one verifies."""
        self.signer = Signer(self.all[-1])
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(
            follow((self._folder,), self._seen, self._reload), name="ticket keys"
        )

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _reload(self) -> None:
        try:
            self.all = await asyncio.to_thread(load_keys, self._folder)
        except ConfigError as error:
            log.error("keys not read; those before stay valid", extra={"reason": str(error)})
        else:
            self.signer = Signer(self.all[-1])
