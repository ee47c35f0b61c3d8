"""Tenants: who sends a request, what they may do, and what they have used since the start.

A folder of keys has one file a tenant. Each line of a file is one key or one entry
(`ullage_common.process.config_file`), so that a new key works before the old one is removed. Only
the digests of keys are kept. Without `tenants` in the configuration all requests belong to one
unlimited tenant, which has no name.
"""

import asyncio
import hashlib
import hmac
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import TenantRules, TenantsSection
from ullage_common.process.api_keys import MAX_KEY, TENANT_NAME, digest, read_entry
from ullage_common.process.config_file import ConfigError
from ullage_common.process.file_watch import Fingerprint, fingerprint, follow
from ullage_common.tickets.tickets import cache_salt
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.limits import MAX_PRIORITY
from ullage_router import errors
from ullage_router.policy.quota import MINUTE_S, ROUNDING, Quota, Shortage, TokenBucket
from ullage_router.shared_quota import QuotaFolder, SharedQuota
from ullage_router.telemetry.metrics import TenantMetrics
from ullage_router.telemetry.record import RequestRecord

MAX_FILE_BYTES = 1 << 20
"""A Secret is no larger."""

Digests = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The tenants and keys that a folder holds."""

    keys: Mapping[str, Digests] = field(default_factory=lambda: MappingProxyType({}))
    """Digests by tenant."""
    problems: tuple[str, ...] = ()
    """Files that could not be read, with the reason; their tenants keep what they had."""


def load(folder: Path, last: Mapping[str, Digests]) -> Loaded:
    """Read the folder; a file that is broken leaves its tenant the keys of `last`."""
    try:
        paths = sorted(p for p in folder.iterdir() if p.name[0] != "." and p.is_file())
    except OSError as error:
        return Loaded(last, (f"{folder}: {error.strerror}; mount the Secret with the keys",))
    keys: dict[str, Digests] = {}
    problems: list[str] = []
    for path in paths:
        try:
            keys[path.name] = _read(path)
        except ValueError as error:
            problems.append(f"{path}: {error}")
            if path.name in last:
                keys[path.name] = last[path.name]
    return Loaded(keys, (*problems, *_shared(keys)))


def _read(path: Path) -> Digests:
    """Raise ValueError with the line and no key."""
    if not TENANT_NAME.fullmatch(path.name):
        raise ValueError("not a tenant's name; use lower-case letters, digits, '-', '_' and '.'")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"longer than {MAX_FILE_BYTES} bytes")
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None  # the error would show the bytes
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from error
    digests: list[bytes] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        try:
            digests.append(read_entry(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return tuple(digests)


def _shared(keys: Mapping[str, Digests]) -> list[str]:
    """Keys that two tenants have; they belong to the first by name."""
    owners: dict[bytes, str] = {}
    problems = []
    for tenant in sorted(keys):
        for key in keys[tenant]:
            owner = owners.setdefault(key, tenant)
            if owner != tenant:
                problems.append(f"{tenant} has a key that {owner} has; it counts as {owner}'s")
    return problems


class KeyRing:
    """Finds a key's tenant in a time that says nothing about other keys.

    Digests are indexed by a keyed hash whose secret is this object's own, so what the index
    compares cannot be steered from outside; the digest found is then compared in constant time.
    """

    def __init__(self, keys: Mapping[str, Digests]) -> None:
        self._pepper = secrets.token_bytes(32)
        self._nobody = secrets.token_bytes(32)
        self._owners: dict[bytes, tuple[bytes, str]] = {}
        for tenant in sorted(keys):
            for entry in keys[tenant]:
                self._owners.setdefault(self._place(entry), (entry, tenant))

    def owner(self, key: str) -> str | None:
        """The tenant of a key; None when nobody has it."""
        given = digest(key[: MAX_KEY + 1])
        entry, tenant = self._owners.get(self._place(given), (self._nobody, ""))
        return tenant if hmac.compare_digest(entry, given) else None

    def _place(self, key: bytes) -> bytes:
        return hmac.digest(self._pepper, key, "sha256")


UNLIMITED = TenantRules(max_priority=MAX_PRIORITY)


@dataclass(slots=True)
class Account:
    """One tenant's rules, quota and sums since the start."""

    name: str
    rules: TenantRules
    own_quota: Quota
    """The quota where no other process shares it, otherwise as it was at the beginning."""
    shared: SharedQuota | None = None
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    limited: Counter[str] = field(default_factory=Counter)
    """Refusals by the limit that was reached."""

    @property
    def quota(self) -> Quota:
        """What is left, with the requests of all processes that share it."""
        return self.shared.state if self.shared else self.own_quota

    def apply(self, step: Callable[[Quota], Quota | Shortage]) -> Shortage | None:
        """Make one step of the quota; return what it is short of, and change nothing then."""
        if self.shared:
            result = self.shared.apply(step)
            return result if isinstance(result, Shortage) else None
        result = step(self.own_quota)
        if isinstance(result, Shortage):
            return result
        self.own_quota = result
        return None

    def as_json(self, now: float) -> dict[str, object]:
        quota = self.quota
        remaining = {
            name: bucket and math.floor(bucket.refilled(now).level)
            for name, bucket in (("requests", quota.requests), ("tokens", quota.tokens))
        }
        return {
            "name": self.name,
            "enabled": self.rules.enabled,
            "active": quota.active,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "limited": dict(self.limited),
            "requests_left": remaining["requests"],
            "tokens_left": remaining["tokens"],
        }


def open_account(name: str, rules: TenantRules, share: float, now: float) -> Account:
    """A tenant with full buckets, of which this router has its share."""
    requests = rules.requests_per_minute
    tokens = rules.tokens_per_minute
    most = rules.concurrency
    quota = Quota(
        requests=TokenBucket.full(max(1.0, requests * share), now) if requests else None,
        tokens=TokenBucket.full(max(1.0, tokens * share), now) if tokens else None,
        concurrency=max(1, math.floor(most * share + ROUNDING)) if most else None,
    )
    return Account(name, rules, quota)


def shared_account() -> Account:
    """Return the account of all requests where there are no tenants."""
    return Account("", UNLIMITED, Quota())


ANONYMOUS = "anonymous"

log = logging.getLogger(__name__)


class TenantSession:
    """One request of a tenant, or several like ones, from the check of its key to their end.

    open_request, charge and close_request each do their part once; a session without an open
    request needs no close. What goes on with an answer that was paid for counts while it runs, and
    costs nothing.

    limit_headers
        x-ratelimit-* headers: the rest of the tenant's quota
    """

    def __init__(self, account: Account, metrics: TenantMetrics | None = None) -> None:
        self._account = account
        self._metrics = metrics
        self._active = 0
        """Requests that began and have not ended."""
        self._charged = 0.0
        """Tokens of each."""
        self._was_paid: Callable[[], bool] | None = None
        self._is_given_back = False
        self.limit_headers: Mapping[str, str] = {}

    def new_session(self) -> "TenantSession":
        """Another session of the same tenant."""
        return TenantSession(self._account, self._metrics)

    def prepay(self, was_paid: Callable[[], bool]) -> None:
        """Charge the session's requests at their end only, and not if they were paid for then."""
        self._was_paid = was_paid

    @property
    def name(self) -> str:
        """The tenant's name; empty where no tenants are configured."""
        return self._account.name

    @property
    def rules(self) -> TenantRules:
        return self._account.rules

    def scoped_session(self, name: str) -> str:
        """Return the session id for engines, different for equal ids of different tenants."""
        if not (name and self.name):
            return name
        return hashlib.blake2b(f"{self.name}\0{name}".encode(), digest_size=16).hexdigest()

    def cache_salt(self, salt: str = "") -> str:
        """Return the cache salt for engines: tenants share no cached KV, whatever salt their
        requests name."""
        if not self.name:
            return salt
        return cache_salt(self.name, salt).hex()

    @property
    def is_limited(self) -> bool:
        """Whether the tenant may send so many requests or tokens only."""
        rules = self.rules
        return bool(rules.requests_per_minute or rules.tokens_per_minute or rules.concurrency)

    @property
    def max_concurrency(self) -> int | None:
        """How many requests the tenant may have at a time; None: any number."""
        return self._account.own_quota.concurrency

    def check_many(self, count: int, tokens: int) -> None:
        """Checks that so many requests may be sent at once; nothing is taken.

        Args:
            tokens: fewest that they have together.

        Raises:
            ServiceError: INVALID_ARGUMENT when a limit is lower than that, or RESOURCE_EXHAUSTED
                when fewer requests are left now.
        """
        own = self._account.own_quota
        if own.requests and count > own.requests.capacity:
            allowed = own.requests.capacity
            raise errors.inputs_above_quota(count, count, "requests_per_minute", allowed)
        if own.tokens and tokens > own.tokens.capacity:
            allowed = own.tokens.capacity
            raise errors.inputs_above_quota(count, tokens, "tokens_per_minute", allowed)
        requests = self._account.quota.requests
        if requests and (wait_s := requests.wait_s(count, time.monotonic())):
            short = Shortage("requests_per_minute", requests.capacity, wait_s)
            raise self._shortage_error(short)

    def num_allowed(self, count: int, tokens: int) -> int:
        """Return how many of that many equal requests, of that many tokens each, the tenant may
        send now."""
        return self._account.quota.room(count, tokens, time.monotonic())

    def open_request(
        self,
        request: inference_pb2.GenerateRequest,
        served: str,
        count: int = 1,
        *,
        is_handed_on: bool = False,
    ) -> None:
        """Check what the tenant may do, count the request and give it its priority.

        Args:
            served: model that a request without a name means.
            count: like requests; more than one only where `num_allowed` says so.
            is_handed_on: another service's cascade sent it, which does not know what priority the
                tenant may ask for here: a higher one is lowered.

        Raises:
            ServiceError: PERMISSION_DENIED, or RESOURCE_EXHAUSTED that names the limit.
        """
        if self._active:
            return
        self.check_model(request.model or served)
        request.priority = self._priority(request.priority, is_lowered=is_handed_on)
        now = time.monotonic()
        is_later = self._was_paid is not None
        if shortage := self._account.apply(
            lambda quota: quota.enter_paid(count) if is_later else quota.enter(now, count)
        ):
            raise self._shortage_error(shortage)
        self._account.requests += 0 if is_later else count
        self._active = count
        self.limit_headers = self._headers()

    def charge(self, prompt_tokens: int, output_tokens: int) -> None:
        """Take a request's tokens in advance; of several like ones each one's.

        Args:
            output_tokens: expected, of all its answers together.

        Raises:
            ServiceError: INVALID_ARGUMENT when the prompt exceeds the limit itself, or
                RESOURCE_EXHAUSTED.
        """
        bucket = self._account.own_quota.tokens
        if not self._active or bucket is None or self._charged or self._was_paid:
            return
        if prompt_tokens > bucket.capacity:
            raise errors.above_quota(prompt_tokens, bucket.capacity)
        tokens = float(prompt_tokens + output_tokens)
        now = time.monotonic()
        if shortage := self._account.apply(lambda quota: quota.charge(self._active * tokens, now)):
            raise self._shortage_error(shortage)
        self._charged = tokens
        self.limit_headers = self._headers()

    def close_request(self, record: RequestRecord) -> None:
        """Put what was used in the place of what was charged."""
        if _was_served(record):
            self.settle(record.decision.prompt_tokens, record.output_tokens, record.status)
        else:
            self.settle(0, 0, record.status)

    def settle(self, prompt_tokens: int, output_tokens: int, status: int, count: int = 1) -> None:
        """End so many of its requests, each of which used so much."""
        is_paid = self._was_paid is not None and self._was_paid()
        if is_paid:
            prompt_tokens = output_tokens = 0
        prompt = prompt_tokens * count
        output = output_tokens * count
        active = self._active
        if active:
            ended = min(count, active)
            account = self._account
            self._active -= ended
            charged = ended * self._charged
            now = time.monotonic()
            account.apply(lambda quota: quota.leave(charged, prompt + output, now, ended))
            if self._was_paid and not is_paid:
                if not self._is_given_back:
                    account.apply(lambda quota: quota.count(ended, now))
                account.requests += ended
            account.prompt_tokens += prompt
            account.output_tokens += output
        if self._metrics and not is_paid:
            self._metrics.on_end(self.name, status, prompt, output, count)

    def give_back(self, count: int) -> None:
        """Take so many of its open requests, or all for 0, out of the requests of this minute:
        they are refused, and sent again in another way."""
        self._is_given_back = True
        if self._was_paid:
            return  # not counted yet
        count = min(count or self._active, self._active)
        now = time.monotonic()
        self._account.apply(lambda quota: quota.give_back(count, now))

    def count_refusals(self, status: int, count: int) -> None:
        """Count requests that are refused before they begin."""
        if self._metrics:
            self._metrics.on_end(self.name, status, 0, 0, count)

    def may_use(self, model: str) -> bool:
        return not self.rules.models or model in self.rules.models

    def check_model(self, name: str) -> None:
        """Raise ServiceError (PERMISSION_DENIED) where the tenant may not use a model."""
        allowed = self.rules.models
        if not self.may_use(name):
            raise errors.forbidden(
                "MODEL_NOT_ALLOWED",
                f"tenant {self.name} may not use model {name!r}; allowed: {', '.join(allowed)}",
                "model",
            )

    def _priority(self, asked: int, *, is_lowered: bool) -> int:
        """Return the request's priority; 0 asks for the tenant's own.

        Args:
            is_lowered: whether a priority that is too high is lowered rather than refused.
        """
        rules = self.rules
        most = rules.priority if rules.max_priority is None else rules.max_priority
        if asked and asked > most:
            if is_lowered:
                return most
            raise errors.forbidden(
                "PRIORITY_NOT_ALLOWED",
                f"tenant {self.name} may not ask for priority {asked}; at most {most}",
                "priority",
            )
        return asked or rules.priority

    def _shortage_error(self, shortage: Shortage) -> ServiceError:
        self._account.limited[shortage.limit] += 1
        self.limit_headers = self._headers()
        if self._metrics:
            self._metrics.on_limit(self.name, shortage.limit)
        return errors.over_quota(self.name, shortage)

    def _headers(self) -> Mapping[str, str]:
        """OpenAI's: https://platform.openai.com/docs/guides/rate-limits#rate-limits-in-headers."""
        quota = self._account.quota
        headers = dict[str, str]()
        if quota.requests is None and quota.tokens is None:
            return headers
        now = time.monotonic()
        for name, bucket in (("requests", quota.requests), ("tokens", quota.tokens)):
            if bucket is not None:
                remaining = max(0, math.floor(bucket.refilled(now).level))
                headers[f"x-ratelimit-limit-{name}"] = f"{bucket.capacity:.0f}"
                headers[f"x-ratelimit-remaining-{name}"] = str(remaining)
                reset_s = bucket.wait_s(bucket.capacity, now)
                headers[f"x-ratelimit-reset-{name}"] = duration(reset_s)
        return headers


def _was_served(record: RequestRecord) -> bool:
    """Tokens came, or an engine was working for it when it was cancelled."""
    is_cancelled = record.is_cancelled or record.status == errors.CLIENT_CLOSED
    return record.ttft_s is not None or (is_cancelled and bool(record.decision.engine))


def duration(seconds: float) -> str:
    """Format seconds as OpenAI does: 20ms, 7s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    minutes, rest = divmod(whole, int(MINUTE_S))
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def anonymous_session() -> TenantSession:
    """The session of a request where there are no tenants."""
    return TenantSession(shared_account())


class Tenants:
    """Knows tenants by their keys and keeps their accounts.

    Args:
        section: None where all clients may do everything.
        metrics: counts by tenant; those not listed are one.
        shared: where quotas are that other processes share; None: there are none.
    """

    def __init__(
        self,
        section: TenantsSection | None,
        metrics: TenantMetrics | None,
        shared: QuotaFolder | None = None,
    ) -> None:
        self._section = section
        self._shared_quotas = shared
        self._metrics = metrics
        self._rules = {t.name: t for t in section.tenants} if section else {}
        self._accounts: dict[str, Account] = {}
        self._shared = shared_account()
        """Account of all requests where there are no tenants."""
        self._loaded = Loaded()
        self._ring = KeyRing({})
        self._loaded_unix = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the keys and follows their changes.

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
        """Problems that keep the newest keys from being used."""
        return self._loaded.problems

    def open_session(self, authorization: str | None) -> TenantSession:
        """The tenant of a request, by its header or metadata `authorization`.

        Raises:
            ServiceError: UNAUTHENTICATED without a key that somebody has, PERMISSION_DENIED when
                the tenant is disabled.
        """
        if self._section is None:
            return TenantSession(self._shared)
        account = self._account(self._authenticate(authorization))
        if not account.rules.enabled:
            raise self._refused(
                "disabled",
                errors.forbidden("TENANT_DISABLED", f"tenant {account.name} is disabled"),
            )
        return TenantSession(account, self._metrics)

    def check_stats(self, authorization: str | None) -> None:
        """Raise ServiceError when /stats is not for everybody and the key is nobody's."""
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
            self._metrics.on_auth_failure(why)
        return error

    def _account(self, name: str) -> Account:
        if name not in self._accounts:
            assert self._section
            rules = self._rules.get(name, self._section.defaults)
            account = open_account(name, rules, self._section.share, time.monotonic())
            if self._shared_quotas and account.own_quota != Quota():
                account.shared = self._shared_quotas.open(name, account.own_quota)
            self._accounts[name] = account
        return self._accounts[name]

    async def _reload(self) -> None:
        assert self._section
        folder = Path(self._section.keys_dir)
        loaded = await asyncio.to_thread(load, folder, self._loaded.keys)
        self._ring = KeyRing(loaded.keys)
        self._loaded = loaded
        self._forget()
        if not loaded.problems:
            self._loaded_unix = time.time()
            log.info("keys read", extra={"tenants": len(loaded.keys)})
        for problem in loaded.problems:
            log.error("keys not read; those before stay valid", extra={"reason": problem})

    def _forget(self) -> None:
        """Drop accounts of tenants without a key: their number is that of the keys' files."""
        for name, account in list(self._accounts.items()):
            is_known = name in self._loaded.keys or name == ANONYMOUS or name in self._rules
            if not is_known and not account.quota.active:
                if account.shared:
                    account.shared.close()
                del self._accounts[name]
