"""Tenants: who sends a request, what they may do, and what they have used.

Without `tenants` in the configuration everybody is the same unlimited tenant without a name.
"""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import replace

from ullage.inference.v1 import inference_pb2
from ullage_router import errors
from ullage_router.accounts import Account, nobodys_account, open_account
from ullage_router.config import TenantRules, TenantsSection
from ullage_router.keys import KeyRing, Loaded, load
from ullage_router.metrics import TenantMetrics
from ullage_router.quota import MINUTE_S, Shortage
from ullage_router.stats import Record
from ullage_rpc.config import ConfigError
from ullage_rpc.errors import ServiceError
from ullage_rpc.watch import Fingerprint, fingerprint, follow

ANONYMOUS = "anonymous"

log = logging.getLogger(__name__)


class Visit:
    """One request of a tenant, or several like ones, from the check of its key to their end.

    begin, charge and end each do their part once; a visit that never began needs no end.
    """

    def __init__(self, account: Account, metrics: TenantMetrics | None = None) -> None:
        self._account = account
        self._metrics = metrics
        self._active = 0
        """Requests that began and have not ended."""
        self._charged = 0.0
        """Tokens of each."""

    def another(self) -> "Visit":
        """A visit of the same tenant."""
        return Visit(self._account, self._metrics)

    @property
    def tenant(self) -> str:
        """Empty where no tenants are configured."""
        return self._account.name

    @property
    def rules(self) -> TenantRules:
        return self._account.rules

    def session(self, name: str) -> str:
        """What engines call a session, so that tenants' sessions of one name are several."""
        if not (name and self.tenant):
            return name
        return hashlib.blake2b(f"{self.tenant}\0{name}".encode(), digest_size=16).hexdigest()

    def room(self, wanted: int, tokens: int) -> int:
        """How many of so many like requests, of so many tokens each, the tenant may send now."""
        return self._account.quota.room(wanted, tokens, time.monotonic())

    def begin(
        self, request: inference_pb2.GenerateRequest, served: str, record: Record, count: int = 1
    ) -> None:
        """Checks what the tenant may do, counts the request and gives it its priority.

        Args:
            served: model that a request without a name means.
            count: like requests; more than one only where there is `room`.

        Raises:
            ServiceError: PERMISSION_DENIED, or RESOURCE_EXHAUSTED that names the limit.
        """
        if self._active:
            return
        self._check_model(request.model or served)
        request.priority = self._priority(request.priority)
        quota = self._account.quota.enter(time.monotonic(), count)
        if isinstance(quota, Shortage):
            raise self._short(quota, record)
        self._account.quota = quota
        self._account.requests += count
        self._active = count
        record.limits = self._headers()

    def charge(self, prompt_tokens: int, output_tokens: int, record: Record) -> None:
        """Takes a request's tokens in advance; of several like ones each one's.

        Args:
            output_tokens: expected, of all its answers together.

        Raises:
            ServiceError: INVALID_ARGUMENT when the prompt exceeds the limit itself, or
                RESOURCE_EXHAUSTED.
        """
        bucket = self._account.quota.tokens
        if not self._active or bucket is None or self._charged:
            return
        if prompt_tokens > bucket.capacity:
            raise errors.above_quota(prompt_tokens, bucket.capacity)
        tokens = float(prompt_tokens + output_tokens)
        quota = self._account.quota.charge(self._active * tokens, time.monotonic())
        if isinstance(quota, Shortage):
            raise self._short(quota, record)
        self._account.quota, self._charged = quota, tokens
        record.limits = self._headers()

    def end(self, record: Record) -> None:
        """Puts what was used in the place of what was charged."""
        if _was_served(record):
            self.settle(record.prompt_tokens, record.output_tokens, record.status)
        else:
            self.settle(0, 0, record.status)

    def settle(self, prompt_tokens: int, output_tokens: int, status: int, count: int = 1) -> None:
        """Ends so many of its requests, each of which used so much."""
        prompt, output, active = prompt_tokens * count, output_tokens * count, self._active
        if active:
            gone, account = min(count, active), self._account
            self._active -= gone
            charged, now = gone * self._charged, time.monotonic()
            account.quota = account.quota.leave(charged, prompt + output, now, gone)
            account.prompt_tokens += prompt
            account.output_tokens += output
        if self._metrics:
            self._metrics.ended(self.tenant, status, prompt, output, count)

    def turn_away(self, status: int, count: int) -> None:
        """Counts requests that are refused before they begin."""
        if self._metrics:
            self._metrics.ended(self.tenant, status, 0, 0, count)

    def errand(self, output_tokens: int, prompt_tokens: int) -> "Errand":
        """Work for this request that takes tokens, too.

        Args:
            output_tokens, prompt_tokens: that the request itself is charged, if it is not yet.
        """
        spare = 0 if self._charged else prompt_tokens + output_tokens
        return Errand(self._account, self._metrics, spare)

    def _check_model(self, name: str) -> None:
        allowed = self.rules.models
        if allowed and name not in allowed:
            raise errors.forbidden(
                "MODEL_NOT_ALLOWED",
                f"tenant {self.tenant} may not use model {name!r}; allowed: {', '.join(allowed)}",
                "model",
            )

    def _priority(self, asked: int) -> int:
        """0 asks for nothing: the tenant's own."""
        rules = self.rules
        most = rules.priority if rules.max_priority is None else rules.max_priority
        if asked > most:
            raise errors.forbidden(
                "PRIORITY_NOT_ALLOWED",
                f"tenant {self.tenant} may not ask for priority {asked}; at most {most}",
                "priority",
            )
        return asked or rules.priority

    def _short(self, shortage: Shortage, record: Record) -> ServiceError:
        self._account.limited[shortage.limit] += 1
        record.limits = self._headers()
        if self._metrics:
            self._metrics.limited(self.tenant, shortage.limit)
        return errors.over_quota(self.tenant, shortage)

    def _headers(self) -> Mapping[str, str]:
        """OpenAI's: https://platform.openai.com/docs/guides/rate-limits#rate-limits-in-headers."""
        quota, headers = self._account.quota, dict[str, str]()
        if quota.requests is None and quota.tokens is None:
            return headers
        now = time.monotonic()
        for name, bucket in (("requests", quota.requests), ("tokens", quota.tokens)):
            if bucket is not None:
                left = max(0, math.floor(bucket.refilled(now).level))
                headers[f"x-ratelimit-limit-{name}"] = f"{bucket.capacity:.0f}"
                headers[f"x-ratelimit-remaining-{name}"] = str(left)
                reset_s = bucket.wait_s(bucket.capacity, now)
                headers[f"x-ratelimit-reset-{name}"] = duration(reset_s)
        return headers


class Errand(Visit):
    """Work for a request, such as a summary of its conversation: the tenant's tokens pay for it,
    and it is no request of the tenant's.

    is_unpaid
        the tokens do not suffice
    """

    def __init__(self, account: Account, metrics: TenantMetrics | None, spare: int) -> None:
        super().__init__(account, metrics)
        self._spare = spare
        self.is_unpaid = False

    @property
    def rules(self) -> TenantRules:
        """Length and pace of answers are those of what the client reads."""
        return replace(self._account.rules, max_tokens=None, tokens_per_second=None)

    def begin(
        self, request: inference_pb2.GenerateRequest, served: str, record: Record, count: int = 1
    ) -> None:
        self._active = count
        request.priority = self._account.rules.priority

    def charge(self, prompt_tokens: int, output_tokens: int, record: Record) -> None:
        """Raises ServiceError RESOURCE_EXHAUSTED when the request itself could not pay then."""
        bucket, now = self._account.quota.tokens, time.monotonic()
        tokens = prompt_tokens + output_tokens + self._spare
        if bucket and not self._charged and bucket.refilled(now).level < tokens:
            self.is_unpaid = True
            shortage = Shortage("tokens_per_minute", bucket.capacity, bucket.wait_s(tokens, now))
            raise errors.over_quota(self.tenant, shortage)
        super().charge(prompt_tokens, output_tokens, record)

    def settle(self, prompt_tokens: int, output_tokens: int, status: int, count: int = 1) -> None:
        """Only tokens: what ends was no request."""
        used, account, now = prompt_tokens + output_tokens, self._account, time.monotonic()
        self._active = 0
        account.quota = account.quota.leave(self._charged, used, now, count=0)
        account.prompt_tokens += prompt_tokens
        account.output_tokens += output_tokens
        if self._metrics:
            self._metrics.ended(self.tenant, status, prompt_tokens, output_tokens, count=0)


Errands = Callable[[int], Errand]
"""Makes one for a request with a prompt of so many tokens."""


def _was_served(record: Record) -> bool:
    """Tokens came, or the client left an engine that was working for it."""
    has_left = record.status == errors.CLIENT_CLOSED and bool(record.engine)
    return record.ttft_s is not None or has_left


def duration(seconds: float) -> str:
    """As OpenAI writes them: 20ms, 7s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    minutes, rest = divmod(whole, int(MINUTE_S))
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def everybody() -> Visit:
    """A request where there are no tenants."""
    return Visit(nobodys_account())


class Tenants:
    """Knows tenants by their keys and keeps their accounts.

    Args:
        section: None where everybody may do everything.
        metrics: counts by tenant; those not listed are one.
    """

    def __init__(self, section: TenantsSection | None, metrics: TenantMetrics | None) -> None:
        self._section = section
        self._metrics = metrics
        self._rules = {t.name: t for t in section.tenants} if section else {}
        self._accounts: dict[str, Account] = {}
        self._shared = nobodys_account()
        """Of all requests where there are no tenants."""
        self._loaded = Loaded()
        self._ring = KeyRing({})
        self._loaded_unix = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Reads the keys and follows their changes.

        Raises:
            ConfigError: they cannot be read.
        """
        if self._section is None:
            return
        folder = Path(self._section.keys_dir)
        seen: Fingerprint = await asyncio.to_thread(fingerprint, (folder,))
        await self._reload()
        if self._loaded.problems:
            raise ConfigError(f"tenants.keys_dir: {'; '.join(self._loaded.problems)}")
        self._task = asyncio.create_task(follow((folder,), seen, self._reload), name="keys")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def problems(self) -> tuple[str, ...]:
        """What keeps the newest keys from being used."""
        return self._loaded.problems

    def visit(self, authorization: str | None) -> Visit:
        """The tenant of a request, by its header or metadata `authorization`.

        Raises:
            ServiceError: UNAUTHENTICATED without a key that somebody has, PERMISSION_DENIED when
                the tenant is disabled.
        """
        if self._section is None:
            return Visit(self._shared)
        account = self._account(self._authenticate(authorization))
        if not account.rules.enabled:
            raise self._refused(
                "disabled",
                errors.forbidden("TENANT_DISABLED", f"tenant {account.name} is disabled"),
            )
        return Visit(account, self._metrics)

    def check_stats(self, authorization: str | None) -> None:
        """Raises ServiceError when /stats is not for everybody and the key is nobody's."""
        if self._section and self._section.protect_stats:
            name = self._authenticate(authorization)
            if name == ANONYMOUS:
                raise errors.unauthenticated("/stats needs a key: Authorization: Bearer KEY")

    def snapshot(self) -> dict[str, object]:
        """The part of /stats."""
        if self._section is None:
            return {}
        now = time.monotonic()
        accounts = sorted(self._accounts.values(), key=lambda account: account.name)
        keys = {
            "tenants": len(self._loaded.keys),
            "loaded": self._loaded_unix,
            "problems": list(self.problems),
        }
        usage = [account.as_json(now) for account in accounts]
        return {"tenants": {"anonymous": self._section.anonymous, "keys": keys, "usage": usage}}

    def _authenticate(self, authorization: str | None) -> str:
        """The tenant's name."""
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
            self._metrics.refused(why)
        return error

    def _account(self, name: str) -> Account:
        if name not in self._accounts:
            assert self._section
            rules = self._rules.get(name, self._section.defaults)
            account = open_account(name, rules, self._section.share, time.monotonic())
            self._accounts[name] = account
        return self._accounts[name]

    async def _reload(self) -> None:
        assert self._section
        folder = Path(self._section.keys_dir)
        loaded = await asyncio.to_thread(load, folder, self._loaded.keys)
        self._ring, self._loaded = KeyRing(loaded.keys), loaded
        self._forget()
        if not loaded.problems:
            self._loaded_unix = time.time()
            log.info("keys read", extra={"tenants": len(loaded.keys)})
        for problem in loaded.problems:
            log.error("keys not read; those before stay valid", extra={"reason": problem})

    def _forget(self) -> None:
        """Drops accounts of tenants without a key: their number is that of the keys' files."""
        for name, account in list(self._accounts.items()):
            is_known = name in self._loaded.keys or name == ANONYMOUS or name in self._rules
            if not is_known and not account.quota.active:
                del self._accounts[name]
