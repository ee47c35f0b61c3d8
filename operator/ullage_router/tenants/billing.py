"""Charges requests to their tenant's quota, either in advance or when they end.

Normally, a request uses its tenant's quota in three steps. When it starts, it counts as one of the
tenant's concurrent requests. Next, its expected tokens are charged in advance. When it ends, this
charge is replaced by the number of tokens that it actually used.
"""

import time
from collections.abc import Callable
from typing import Protocol

from ullage_router.policy.quota import Shortage
from ullage_router.tenants.account import Account


class Billing(Protocol):
    """Interface for charging the requests of one session, which are identical, to a tenant's quota.

    `AdvanceBilling` charges requests when they start, and `DeferredBilling` when they end.
    """

    @property
    def num_active(self) -> int:
        """Return the number of requests that have started but not ended yet."""

    @property
    def needs_charge(self) -> bool:
        """Return whether the active requests have yet to be charged in advance."""

    def enter(self, count: int) -> Shortage | None:
        """Start `count` requests.

        Returns:
            The shortage if the quota does not allow the requests, or None if they have started.
        """

    def charge(self, tokens: float) -> Shortage | None:
        """Charge `tokens` tokens for each active request.

        Returns:
            The shortage if too few tokens are left, or None otherwise.
        """

    def give_back(self, count: int) -> None:
        """Credit `count` active requests (0 for all) back to the requests-per-minute quota."""

    def settle(self, prompt_tokens: int, output_tokens: int, count: int) -> bool:
        """End requests, and charge the tenant for the tokens that they actually used.

        Args:
            prompt_tokens: prompt tokens of each request.
            output_tokens: output tokens of each request.
            count: number of requests that end.

        Returns:
            Whether the tenant pays for these requests. False if an earlier ticket paid for them.
        """


class AdvanceBilling:
    """The default billing, which counts requests when they start and charges tokens in advance."""

    def __init__(self, account: Account) -> None:
        self.num_active = 0
        self._account = account
        self._charged = 0.0
        """Number of tokens that were charged in advance for each request."""

    @property
    def needs_charge(self) -> bool:
        return self.num_active > 0 and not self._charged

    def enter(self, count: int) -> Shortage | None:
        now = time.monotonic()
        if shortage := self._account.apply(lambda quota: quota.enter(now, count)):
            return shortage
        self._account.requests += count
        self.num_active = count
        return None

    def charge(self, tokens: float) -> Shortage | None:
        now = time.monotonic()
        total = self.num_active * tokens
        if shortage := self._account.apply(lambda quota: quota.charge(total, now)):
            return shortage
        self._charged = tokens
        return None

    def give_back(self, count: int) -> None:
        now = time.monotonic()
        given = min(count or self.num_active, self.num_active)
        self._account.apply(lambda quota: quota.give_back(given, now))

    def settle(self, prompt_tokens: int, output_tokens: int, count: int) -> bool:
        if not self.num_active:
            return True

        ended = min(count, self.num_active)
        charged = ended * self._charged
        self.num_active -= ended

        now = time.monotonic()
        prompt = prompt_tokens * count
        output = output_tokens * count
        self._account.apply(lambda quota: quota.leave(charged, prompt + output, now, ended))
        self._account.prompt_tokens += prompt
        self._account.output_tokens += output
        return True


class DeferredBilling:
    """Billing for a request that continues an answer for which a ticket may have paid.

    With a ticket, a client sends a request directly to an engine. If it loses that engine in the
    middle of the answer, it sends another request to continue, which is billed by this class. If
    the engine was really lost, this request is free, because the earlier ticket has paid for it.
    Whether that is so is known only when the request ends, so it is charged only then. Until then,
    it counts only against the limit on concurrent requests.

    Args:
        was_paid: returns whether the first ticket paid. It is called when the request ends.
    """

    needs_charge = False

    def __init__(self, account: Account, was_paid: Callable[[], bool]) -> None:
        self.num_active = 0
        self._account = account
        self._was_paid = was_paid
        self._is_given_back = False

    def enter(self, count: int) -> Shortage | None:
        if shortage := self._account.apply(lambda quota: quota.enter_paid(count)):
            return shortage
        self.num_active = count
        return None

    def charge(self, tokens: float) -> Shortage | None:
        return None

    def give_back(self, count: int) -> None:
        self._is_given_back = True  # the requests have not been counted yet

    def settle(self, prompt_tokens: int, output_tokens: int, count: int) -> bool:
        is_paid = self._was_paid()
        if not self.num_active:
            return not is_paid

        ended = min(count, self.num_active)
        self.num_active -= ended
        now = time.monotonic()
        if is_paid:
            self._account.apply(lambda quota: quota.leave(0, 0, now, ended))
            return False

        prompt = prompt_tokens * count
        output = output_tokens * count
        self._account.apply(lambda quota: quota.leave(0, prompt + output, now, ended))
        if not self._is_given_back:
            self._account.apply(lambda quota: quota.count(ended, now))
        self._account.requests += ended
        self._account.prompt_tokens += prompt
        self._account.output_tokens += output
        return True
