"""How a tenant's requests are paid: in advance, or at their end unless a ticket has paid.

A request uses its tenant's quota in steps. When it enters, it takes a place among the concurrent
requests. Then it is charged its expected tokens. When it is settled at its end, the tokens that it
used replace the charge.
"""

import time
from collections.abc import Callable
from typing import Protocol

from ullage_router.policy.quota import Shortage
from ullage_router.tenants.account import Account


class Billing(Protocol):
    """The bill of the equal requests of one session, from their beginning to their end."""

    @property
    def num_active(self) -> int:
        """Return the number of requests that have begun but not ended."""

    @property
    def needs_charge(self) -> bool:
        """Return whether active requests still have to be charged in advance."""

    def enter(self, count: int) -> Shortage | None:
        """Begin requests. On a shortage, begin none and return it."""

    def charge(self, tokens: float) -> Shortage | None:
        """Charge tokens to each active request. On a shortage, charge none and return it."""

    def give_back(self, count: int) -> None:
        """Take active requests, or all of them for 0, out of the requests of this minute."""

    def settle(self, prompt_tokens: int, output_tokens: int, count: int) -> bool:
        """End requests.

        Args:
            prompt_tokens: used by each request.
            output_tokens: used by each request.
            count: number of requests that end.

        Returns:
            Whether the tenant pays for them here.
        """


class AdvanceBilling:
    """The usual bill: requests count when they begin, and their tokens are charged in advance."""

    def __init__(self, account: Account) -> None:
        self.num_active = 0
        self._account = account
        self._charged = 0.0
        """Number of tokens charged for each request."""

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
    """The bill of a request that continues the answer of an earlier ticket.

    The earlier ticket pays for the request if the ticket's engine was lost, which is known only at
    the request's end. Until then the request only takes a place among the concurrent requests.

    Args:
        was_paid: returns at the end whether the first ticket paid.
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
