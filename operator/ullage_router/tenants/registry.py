"""The router's tenants, with their accounts and API keys. Changed keys are reloaded."""

import asyncio
import logging
import time
from pathlib import Path

from ullage_common.config.router import TenantsSection
from ullage_common.process.config_file import ConfigError
from ullage_common.process.file_watch import Fingerprint, fingerprint, follow
from ullage_common.wire.errors import ServiceError
from ullage_router import errors
from ullage_router.telemetry.metrics import TenantMetrics
from ullage_router.tenants.account import ANONYMOUS, Account, open_account, shared_account
from ullage_router.tenants.keys import KeyRing, TenantKeys, load_keys
from ullage_router.tenants.session import TenantSession

log = logging.getLogger(__name__)


class Tenants:
    """Finds tenants by their API keys, and keeps their accounts.

    Args:
        section: the configured tenants, or None if all clients have all permissions.
        metrics: the metrics, labelled by tenant. Tenants without a label of their own share one.
    """

    def __init__(self, section: TenantsSection | None, metrics: TenantMetrics | None) -> None:
        self._section = section
        self._metrics = metrics
        self._rules = {t.name: t for t in section.tenants} if section else {}
        self._accounts: dict[str, Account] = {}
        self._shared = shared_account()
        """The account that all requests share if no tenants are configured."""
        self._keys = TenantKeys()
        self._ring = KeyRing({})
        self._loaded_unix = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the API keys, and start watching them for changes.

        Raises:
            ConfigError: the keys cannot be read.
        """
        if self._section is None:
            return
        folder = Path(self._section.keys_dir)
        seen: Fingerprint = await asyncio.to_thread(fingerprint, (folder,))
        try:
            await self._reload()
        except ConfigError as error:
            raise ConfigError(f"tenants.keys_dir: {error}") from None
        failure = "keys not read; those before stay valid"
        following = follow((folder,), seen, self._reload, failure)
        self._task = asyncio.create_task(following, name="keys")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def problems(self) -> tuple[str, ...]:
        """Return the problems that keep the latest keys from being used."""
        return self._keys.problems

    def open_session(self, authorization: str | None) -> TenantSession:
        """Authenticate a request, and open a session for its tenant.

        Args:
            authorization: the request's `authorization` header or gRPC metadata.

        Raises:
            ServiceError: UNAUTHENTICATED without a known key, or PERMISSION_DENIED if the tenant is
                disabled.
        """
        if self._section is None:
            return TenantSession(self._shared)
        return self._enabled_session(self._authenticate(authorization))

    def _enabled_session(self, name: str) -> TenantSession:
        account = self._account(name)
        if not account.rules.enabled:
            raise self._refused(
                "disabled",
                errors.forbidden("TENANT_DISABLED", f"tenant {account.name} is disabled"),
            )
        return TenantSession(account, self._metrics)

    def open_session_of(self, name: str) -> TenantSession:
        """Open a session for a tenant whose request this router sends itself.

        Raises:
            ServiceError: The tenant has no key any more, or is disabled.
        """
        if self._section is None:
            return TenantSession(self._shared)
        is_anonymous = name == ANONYMOUS and self._section.anonymous == "allow"
        if not (name in self._keys.digests or is_anonymous):
            raise errors.tenant_without_key(name)
        return self._enabled_session(name)

    def check_stats(self, authorization: str | None) -> None:
        """Check that the key may read /stats. If /stats is not protected, allow every client.

        Raises:
            ServiceError: UNAUTHENTICATED without a known key.
        """
        if self._section and self._section.protect_stats:
            name = self._authenticate(authorization)
            if name == ANONYMOUS:
                raise errors.unauthenticated("/stats needs a key: Authorization: Bearer KEY")

    def snapshot(self) -> dict[str, object]:
        """Return all tenants' accounts for /stats, or an empty dict without tenants."""
        if self._section is None:
            return {}
        now = time.monotonic()
        accounts = sorted(self._accounts.values(), key=lambda account: account.name)
        keys = {
            "tenants": len(self._keys.digests),
            "loaded": self._loaded_unix,
            "problems": list(self.problems),
        }
        usage = [account.as_json(now) for account in accounts]
        return {"tenants": {"anonymous": self._section.anonymous, "keys": keys, "usage": usage}}

    def _authenticate(self, authorization: str | None) -> str:
        """Return the name of the tenant that sent a request.

        Raises:
            ServiceError: UNAUTHENTICATED if the key is missing or unknown.
        """
        assert self._section
        if not authorization:
            if self._section.anonymous == "allow":
                return ANONYMOUS
            raise self._refused(
                "no_key",
                errors.unauthenticated("no API key was sent; send Authorization: Bearer KEY"),
            )

        scheme, _, key = authorization.partition(" ")
        owner = self._ring.owner(key.strip()) if scheme.lower() == "bearer" else None
        if owner is None:
            raise self._refused(
                "wrong_key",
                errors.unauthenticated("the API key is not known here; check it, or get a new one"),
            )
        return owner

    def _refused(self, why: str, error: ServiceError) -> ServiceError:
        if self._metrics:
            self._metrics.on_auth_failure(why)
        return error

    def _account(self, name: str) -> Account:
        if name not in self._accounts:
            assert self._section
            rules = self._rules.get(name, self._section.defaults)
            self._accounts[name] = open_account(name, rules, self._section.share, time.monotonic())
        return self._accounts[name]

    async def _reload(self) -> None:
        """Read the keys, and keep the former keys of each tenant whose file is invalid.

        Raises:
            ConfigError: a file is invalid.
        """
        assert self._section
        folder = Path(self._section.keys_dir)
        keys = await asyncio.to_thread(load_keys, folder, self._keys.digests)
        self._ring = KeyRing(keys.digests)
        self._keys = keys
        self._remove_stale_accounts()

        if keys.problems:
            raise ConfigError("; ".join(keys.problems))
        self._loaded_unix = time.time()
        log.info("keys read", extra={"tenants": len(keys.digests)})

    def _remove_stale_accounts(self) -> None:
        """Remove accounts of tenants that no longer have a key, to limit the number of accounts."""
        for name, account in list(self._accounts.items()):
            is_known = name in self._keys.digests or name == ANONYMOUS or name in self._rules
            if not is_known and not account.quota.active:
                del self._accounts[name]
