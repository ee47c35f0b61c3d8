"""A tenant's account: its rules, its remaining quota, and its usage since the router started."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ullage_common.config.router import TenantRules
from ullage_common.wire.limits import MAX_PRIORITY
from ullage_router.policy.quota import ROUNDING, Quota, Shortage, TokenBucket

ANONYMOUS = "anonymous"
"""Name of the tenant to which requests without an API key belong."""
UNLIMITED = TenantRules(max_priority=MAX_PRIORITY)


@dataclass(slots=True)
class Account:
    """A tenant's permissions and limits, remaining quota, and usage since the router started."""

    name: str
    rules: TenantRules
    quota: Quota
    """The tenant's remaining quota."""
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    limited: Counter[str] = field(default_factory=Counter)
    """Number of requests refused by each limit."""

    def apply(self, step: Callable[[Quota], Quota | Shortage]) -> Shortage | None:
        """Apply a change to the quota, unless too little quota is left for it.

        Args:
            step: returns the changed quota, or the shortage that prevents the change.

        Returns:
            The shortage if too little quota is left, or None if the quota was changed.
        """
        result = step(self.quota)
        if isinstance(result, Shortage):
            return result
        self.quota = result
        return None

    def as_json(self, now: float) -> dict[str, object]:
        """Return the account for /stats.

        Args:
            now: current time on the monotonic clock, in seconds.
        """
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
    """Create a tenant's account with an unused quota.

    Args:
        name: the tenant's name.
        rules: the tenant's permissions and limits.
        share: this router's fraction of the tenant's limits, from 0 to 1.
        now: current time on the monotonic clock, in seconds.
    """
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
    """Create the account that all requests share if no tenants are configured."""
    return Account("", UNLIMITED, Quota())
