"""The router's TLS certificates for its own servers and for connections to engines."""

from collections.abc import Callable, Mapping
from pathlib import Path

import grpc

from ullage_common.config.router import TLSSection
from ullage_common.wire.channels import open_channel
from ullage_common.wire.tls import Certificates


class RouterTLS:
    """Loads the configured certificates, and reports the status of all certificates in use.

    Args:
        on_engines_change: called when the engines' certificates have changed, so that channels must
            be reopened.
    """

    def __init__(self, section: TLSSection, on_engines_change: Callable[[], None]) -> None:
        self._server_name = section.engines.server_name if section.engines else ""
        self.accepts_plaintext = bool(section.engines and section.engines.accept_plaintext)
        """Whether the router may fall back to plaintext for engines that do not use TLS."""
        self.server: Certificates | None = None
        self.engines: Certificates | None = None
        self._others: dict[str, Certificates] = {}
        if router := section.router:
            ca = Path(router.client_ca_dir) if router.client_ca_dir else None
            self.server = Certificates(Path(router.dir), ca)
        if engines := section.engines:
            folder = Path(engines.dir)
            self.engines = Certificates(folder, folder, on_engines_change)

    def add(self, certificates: Mapping[str, Certificates]) -> None:
        """Add another component's certificates, keyed by name, to the status report."""
        self._others.update(certificates)

    async def start(self) -> None:
        """Load the configured certificates, and start watching them for changes.

        Raises:
            ConfigError: a certificate cannot be used.
        """
        for certificates in self._own().values():
            await certificates.start()

    async def close(self) -> None:
        for certificates in self._own().values():
            await certificates.close()

    @property
    def dialer(self) -> Callable[[str], grpc.aio.Channel] | None:
        """Return a function that opens TLS channels to engines, or None if TLS is not used."""
        return self._dial if self.engines else None

    def _dial(self, address: str) -> grpc.aio.Channel:
        assert self.engines
        return open_channel(address, self.engines.channel_credentials(), self._server_name)

    @property
    def num_problems(self) -> int:
        """Return the number of certificates that have a problem, such as having expired."""
        return sum(bool(c.state()["problem"]) for c in self._all().values())

    @property
    def expiry(self) -> float:
        """Return the Unix time when the first certificate expires, or 0 without certificates."""
        ends = [c.material.expires.timestamp() for c in self._all().values()]
        return min(ends, default=0.0)

    def snapshot(self) -> dict[str, object]:
        """Return the status of all certificates for /stats, or an empty dict without TLS."""
        states = {name: certificates.state() for name, certificates in self._all().items()}
        return {"tls": states} if states else {}

    def _all(self) -> dict[str, Certificates]:
        return self._own() | self._others

    def _own(self) -> dict[str, Certificates]:
        named = {"router": self.server, "engines": self.engines}
        return {name: certificates for name, certificates in named.items() if certificates}
