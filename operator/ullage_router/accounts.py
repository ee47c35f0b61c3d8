"""What is kept of a tenant: its rules, its quota and what it has used since start."""

import math
from collections import Counter
from dataclasses import dataclass, field

from ullage_router.config import TenantRules
from ullage_router.quota import ROUNDING, Bucket, Quota
from ullage_rpc.limits import MAX_PRIORITY

UNLIMITED = TenantRules(max_priority=MAX_PRIORITY)


@dataclass(slots=True)
class Account:
    """One tenant: its rules, its quota and its sums since start."""

    name: str
    rules: TenantRules
    quota: Quota
    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    limited: Counter[str] = field(default_factory=Counter)
    """Refusals by the limit that was reached."""

    def as_json(self, now: float) -> dict[str, object]:
        left = {
            name: bucket and math.floor(bucket.refilled(now).level)
            for name, bucket in (("requests", self.quota.requests), ("tokens", self.quota.tokens))
        }
        return {
            "name": self.name,
            "enabled": self.rules.enabled,
            "active": self.quota.active,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "limited": dict(self.limited),
            "requests_left": left["requests"],
            "tokens_left": left["tokens"],
        }


def open_account(name: str, rules: TenantRules, share: float, now: float) -> Account:
    """A tenant with full buckets, of which this router has its share."""
    requests, tokens, most = rules.requests_per_minute, rules.tokens_per_minute, rules.concurrency
    quota = Quota(
        requests=Bucket.full(max(1.0, requests * share), now) if requests else None,
        tokens=Bucket.full(max(1.0, tokens * share), now) if tokens else None,
        concurrency=max(1, math.floor(most * share + ROUNDING)) if most else None,
    )
    return Account(name, rules, quota)


def nobodys_account() -> Account:
    """Of all requests where there are no tenants."""
    return Account("", UNLIMITED, Quota())
