"""A tenant's session, which checks permissions for requests and charges them to the quota.

One session may cover several identical requests.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import TenantRules
from ullage_common.tickets.tickets import cache_salt
from ullage_common.wire.errors import ServiceError
from ullage_router import errors
from ullage_router.policy.quota import MINUTE_S, Quota, Shortage
from ullage_router.telemetry.metrics import TenantMetrics
from ullage_router.telemetry.record import RequestRecord
from ullage_router.tenants.account import Account
from ullage_router.tenants.billing import AdvanceBilling, Billing, DeferredBilling


class TenantSession:
    """Tracks a tenant's request, or several identical requests, from authentication to the end.

    Call `open_request`, `charge` and `close_request` once each. A session without an open request
    does not have to be closed.

    Attributes:
        limit_headers: the `x-ratelimit-*` headers that state the tenant's remaining quota.
    """

    def __init__(self, account: Account, metrics: TenantMetrics | None = None) -> None:
        self._account = account
        self._metrics = metrics
        self._billing: Billing = AdvanceBilling(account)
        self.limit_headers: Mapping[str, str] = {}

    def new_session(self) -> "TenantSession":
        """Return a new session for the same tenant."""
        return TenantSession(self._account, self._metrics)

    def prepay(self, was_paid: Callable[[], bool]) -> None:
        """Charge the requests only when they end, and only if no earlier ticket paid for them.

        By default, requests are charged in advance.

        Args:
            was_paid: returns whether a ticket has paid. It is called when the requests end.
        """
        self._billing = DeferredBilling(self._account, was_paid)

    @property
    def name(self) -> str:
        """Return the tenant's name (empty if no tenants are configured)."""
        return self._account.name

    @property
    def rules(self) -> TenantRules:
        return self._account.rules

    def scoped_session(self, name: str) -> str:
        """Return the session id to send to engines, made unique to the tenant."""
        if not (name and self.name):
            return name
        return hashlib.blake2b(f"{self.name}\0{name}".encode(), digest_size=16).hexdigest()

    def cache_salt(self, salt: str = "") -> str:
        """Return the cache salt to send to engines, made unique to the tenant.

        Tenants must not share cached KV, so two tenants get different salts even if their `salt`
        values are equal.
        """
        if not self.name:
            return salt
        return cache_salt(self.name, salt).hex()

    @property
    def is_limited(self) -> bool:
        """Return whether the tenant has a limit on requests, tokens or concurrency."""
        rules = self.rules
        return bool(rules.requests_per_minute or rules.tokens_per_minute or rules.concurrency)

    @property
    def max_concurrency(self) -> int | None:
        """Return the tenant's maximum number of concurrent requests, or None for no limit."""
        return self._account.quota.concurrency

    def check_many(self, count: int, tokens: int) -> None:
        """Check whether the quota allows `count` requests at once, without charging them.

        Args:
            count: number of requests.
            tokens: a lower bound on the requests' total number of tokens.

        Raises:
            ServiceError: INVALID_ARGUMENT if even an unused quota would be too small, or
                RESOURCE_EXHAUSTED if the remaining quota allows fewer requests now.
        """
        quota = self._account.quota
        if quota.requests and count > quota.requests.capacity:
            allowed = quota.requests.capacity
            raise errors.inputs_above_quota(count, count, "requests_per_minute", allowed)
        if quota.tokens and tokens > quota.tokens.capacity:
            allowed = quota.tokens.capacity
            raise errors.inputs_above_quota(count, tokens, "tokens_per_minute", allowed)

        requests = quota.requests
        if requests and (wait_s := requests.wait_s(count, time.monotonic())):
            shortage = Shortage("requests_per_minute", requests.capacity, wait_s)
            raise self._shortage_error(shortage)

    def num_allowed(self, count: int, tokens: int) -> int:
        """Return how many of `count` identical requests the tenant's quota allows now.

        Args:
            tokens: number of tokens per request.
        """
        return self._account.quota.room(count, tokens, time.monotonic())

    def open_request(
        self,
        request: inference_pb2.GenerateRequest,
        served: str,
        count: int = 1,
        *,
        is_handed_on: bool = False,
    ) -> None:
        """Check the tenant's permissions, count the request against the quota and set its priority.

        Args:
            request: the request, whose priority is set.
            served: the model to assume if the request does not name a model.
            count: number of identical requests, either 1 or at most `num_allowed`.
            is_handed_on: whether another service's cascade sent the request. That service does not
                know the tenant's maximum priority in this service, so a higher priority is lowered
                rather than refused.

        Raises:
            ServiceError: PERMISSION_DENIED, or RESOURCE_EXHAUSTED with the limit that was reached.
        """
        if self._billing.num_active:
            return
        self.check_model(request.model or served)
        request.priority = self._priority(request.priority, is_lowered=is_handed_on)
        if shortage := self._billing.enter(count):
            raise self._shortage_error(shortage)
        self.limit_headers = _limit_headers(self._account.quota)

    def charge(self, prompt_tokens: int, output_tokens: int) -> None:
        """Charge the expected tokens of each open request in advance.

        Args:
            prompt_tokens: prompt tokens per request.
            output_tokens: expected output tokens per request, summed over all its answers.

        Raises:
            ServiceError: INVALID_ARGUMENT if the prompt alone exceeds the limit on tokens per
                minute, or RESOURCE_EXHAUSTED if too few tokens remain.
        """
        bucket = self._account.quota.tokens
        if bucket is None or not self._billing.needs_charge:
            return
        if prompt_tokens > bucket.capacity:
            raise errors.above_quota(prompt_tokens, bucket.capacity)
        if shortage := self._billing.charge(float(prompt_tokens + output_tokens)):
            raise self._shortage_error(shortage)
        self.limit_headers = _limit_headers(self._account.quota)

    def close_request(self, record: RequestRecord) -> None:
        """End the request, and replace its advance charge with the tokens that it actually used."""
        if _was_served(record):
            self.settle(record.decision.prompt_tokens, record.output_tokens, record.status)
        else:
            self.settle(0, 0, record.status)

    def settle(self, prompt_tokens: int, output_tokens: int, status: int, count: int = 1) -> None:
        """End requests, and charge the tokens that they actually used.

        Args:
            prompt_tokens: prompt tokens of each request.
            output_tokens: output tokens of each request.
            status: HTTP status of the responses.
            count: number of requests that end.
        """
        is_paid_here = self._billing.settle(prompt_tokens, output_tokens, count)
        if self._metrics and is_paid_here:
            prompt = prompt_tokens * count
            output = output_tokens * count
            self._metrics.on_end(self.name, status, prompt, output, count)

    def give_back(self, count: int) -> None:
        """Credit `count` open requests (0 for all) back to the requests-per-minute quota.

        Use this when `Pick` refuses requests. The client then resends them through `Generate`,
        which counts them again.
        """
        self._billing.give_back(count)

    def count_refusals(self, status: int, count: int) -> None:
        """Record in the tenant's metrics that requests were refused before they started."""
        if self._metrics:
            self._metrics.on_end(self.name, status, 0, 0, count)

    def may_use(self, model: str) -> bool:
        return not self.rules.models or model in self.rules.models

    def check_model(self, name: str) -> None:
        """Check that the tenant may use a model.

        Raises:
            ServiceError: PERMISSION_DENIED if the tenant may not use the model.
        """
        allowed = self.rules.models
        if not self.may_use(name):
            raise errors.forbidden(
                "MODEL_NOT_ALLOWED",
                f"tenant {self.name} may not use model {name!r}; allowed: {', '.join(allowed)}",
                "model",
            )

    def _priority(self, asked: int, *, is_lowered: bool) -> int:
        """Return the request's priority, or the tenant's default priority if 0 is requested.

        Args:
            asked: the requested priority, or 0 for the tenant's default.
            is_lowered: whether to lower a priority that is too high instead of refusing the
                request.
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
        self.limit_headers = _limit_headers(self._account.quota)
        if self._metrics:
            self._metrics.on_limit(self.name, shortage.limit)
        return errors.over_quota(self.name, shortage)


def _was_served(record: RequestRecord) -> bool:
    """Return whether the request got tokens, or was cancelled after an engine was chosen."""
    is_cancelled = record.is_cancelled or record.status == errors.CLIENT_CLOSED
    return record.ttft_s is not None or (is_cancelled and bool(record.decision.engine))


def _limit_headers(quota: Quota) -> Mapping[str, str]:
    """Return OpenAI's rate limit headers for the remaining quota.

    See https://platform.openai.com/docs/guides/rate-limits#rate-limits-in-headers.
    """
    headers = dict[str, str]()
    if quota.requests is None and quota.tokens is None:
        return headers

    now = time.monotonic()
    for name, bucket in (("requests", quota.requests), ("tokens", quota.tokens)):
        if bucket is not None:
            remaining = max(0, math.floor(bucket.refilled(now).level))
            reset_s = bucket.wait_s(bucket.capacity, now)
            headers[f"x-ratelimit-limit-{name}"] = f"{bucket.capacity:.0f}"
            headers[f"x-ratelimit-remaining-{name}"] = str(remaining)
            headers[f"x-ratelimit-reset-{name}"] = duration(reset_s)
    return headers


def duration(seconds: float) -> str:
    """Format a duration the way OpenAI's headers do, for example 20ms, 7s or 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    minutes, rest = divmod(whole, int(MINUTE_S))
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
