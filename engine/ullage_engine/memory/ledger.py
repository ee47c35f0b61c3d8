"""A device's memory ledger. All memory is reserved under a name before it is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass

from ullage_engine.protocol.worker_state import ReservationState

PRICE_TOLERANCE = 0.05
"""Fraction by which an allocation may differ from its predicted size.

Larger errors would make admission control unreliable, because it relies on the predictions.
"""

_OTHERS = "others"
"""Name of the reservation for memory that other processes hold."""

_MIB = 1 << 20


class LedgerError(Exception):
    """A reservation exceeds the budget. The message names the sizes and the setting to change."""


@dataclass(slots=True)
class _Reservation:
    reserved: int
    allocated: int = 0


class Ledger:
    """Memory reservations on one device, whose sum never exceeds `threshold * total_bytes`.

    The ledger only does the bookkeeping. It neither allocates memory nor measures the device.
    """

    def __init__(self, total_bytes: int, threshold: float, *, configurable: bool) -> None:
        """Create an empty ledger.

        Args:
            total_bytes: the device's total memory.
            threshold: fraction of the device's memory that may be reserved, 0 to 1.
            configurable: whether the total comes from the setting `memory.deviceBytes` rather than
                from a real device.
        """
        self.total_bytes = total_bytes
        self.threshold = threshold
        self._configurable = configurable
        self._reservations: dict[str, _Reservation] = {}
        self._on_host: dict[str, int] = {}
        self._others = ""
        """Names of the other processes that hold memory, for error messages."""

    @property
    def budget_bytes(self) -> int:
        return int(self.total_bytes * self.threshold)

    @property
    def reserved_bytes(self) -> int:
        return sum(entry.reserved for entry in self._reservations.values())

    @property
    def others_bytes(self) -> int:
        """Return how many bytes of the budget other processes hold."""
        return self._reservations[_OTHERS].reserved if self._others else 0

    @property
    def promised_bytes(self) -> int:
        """Return how many bytes are reserved for this process."""
        return self.reserved_bytes - self.others_bytes

    @property
    def allocated_bytes(self) -> int:
        return sum(entry.allocated for entry in self._reservations.values())

    @property
    def available_bytes(self) -> int:
        """Return how many bytes of the budget are not reserved."""
        return self.budget_bytes - self.reserved_bytes

    def reserve(self, name: str, num_bytes: int) -> None:
        """Reserve bytes under a new name.

        Raises:
            LedgerError: if too few bytes are available.
        """
        assert name not in self._reservations, f"{name} is reserved already"
        if num_bytes > self.available_bytes:
            raise self.shortage(name, num_bytes)
        self._reservations[name] = _Reservation(num_bytes)

    def allocated(self, name: str, num_bytes: int) -> None:
        """Record how many of the bytes reserved under a name are now allocated."""
        entry = self._reservations[name]
        assert num_bytes <= entry.reserved, f"{name}: {num_bytes} allocated, {entry.reserved} set"
        entry.allocated = num_bytes

    def record(self, name: str, num_bytes: int) -> None:
        """Record memory that is already allocated, such as memory used by libraries.

        Raises:
            LedgerError: if too few bytes are available.
        """
        self.reserve(name, num_bytes)
        self.allocated(name, num_bytes)

    def reserve_for_others(self, num_bytes: int, names: str) -> None:
        """Reserve the part of the budget that other processes hold.

        `names` lists these processes for error messages.
        """
        self.reserve(_OTHERS, num_bytes)
        self._others = names

    def record_on_host(self, name: str, num_bytes: int) -> None:
        """Record pinned host memory, which does not count against the device's budget."""
        assert name not in self._on_host, f"{name} is recorded already"
        self._on_host[name] = num_bytes

    def shortage(self, name: str, needed: int) -> LedgerError:
        """Return an error that says why a reservation does not fit and which setting to change."""
        available = max(0, self.available_bytes)

        if self.others_bytes and needed <= available + self.others_bytes:
            return LedgerError(
                f"memory: {name} needs {mib(needed)}, but {mib(available)} of the "
                f"{mib(self.budget_bytes)} budget are available, since {self._others} hold "
                f"{mib(self.others_bytes)} of it; end them, or give the engine a GPU of its own"
            )

        total = self.total_bytes + int((needed - self.available_bytes) / self.threshold) + _MIB
        field = "memory.deviceBytes" if self._configurable else "memory.thresholdPercent"
        remedy = f"set it to {mib(total)} or more" if self._configurable else "raise it"
        return LedgerError(
            f"{field}: {name} needs {mib(needed)}, but {mib(available)} of the "
            f"{mib(self.budget_bytes)} budget ({self.threshold:g} of {mib(self.total_bytes)}) are "
            f"available after {self._taken()}; {remedy}, or lower memory.safetyReserve"
        )

    def states(self) -> list[ReservationState]:
        """Return all reservations for a status report, with host memory last."""
        on_device = [
            ReservationState(
                name=name, reserved_bytes=entry.reserved, allocated_bytes=entry.allocated
            )
            for name, entry in self._reservations.items()
        ]
        on_host = [
            ReservationState(
                name=name, reserved_bytes=num_bytes, allocated_bytes=num_bytes, on_host=True
            )
            for name, num_bytes in self._on_host.items()
        ]
        return on_device + on_host

    def table(self) -> list[str]:
        """Format the ledger as a table for the log, one string per line."""
        lines = [f"{'reservation':<15}{'reserved':>12}{'allocated':>12}"]
        lines += [
            f"{name:<15}{mib(entry.reserved):>12}{mib(entry.allocated):>12}"
            for name, entry in self._reservations.items()
        ]

        lines.append(f"{'sum':<15}{mib(self.reserved_bytes):>12}{mib(self.allocated_bytes):>12}")
        lines.append(f"{'budget':<15}{mib(self.budget_bytes):>12}")
        lines += [
            f"{name:<15}{mib(size):>12}{mib(size):>12}" for name, size in self._on_host.items()
        ]
        return lines

    def _taken(self) -> str:
        entries = self._reservations.items()
        return ", ".join(f"{name} {mib(entry.reserved)}" for name, entry in entries) or "nothing"


def mib(num_bytes: int) -> str:
    """Format a number of bytes in MiB, the unit used in settings and messages."""
    return f"{num_bytes / _MIB:.0f} MiB"


def wrong_price(priced: Mapping[str, int], allocated: Mapping[str, int]) -> str | None:
    """Return an error message about the first allocation that differs from its predicted size.

    Admission and the router rely on these predictions (prices), so a wrong one must be reported.

    Args:
        priced: predicted sizes in bytes, by name.
        allocated: allocated sizes in bytes, by name.

    Returns:
        The message, or None if all allocations are within `PRICE_TOLERANCE` of the prediction.
    """
    for name, price in priced.items():
        if abs(allocated[name] - price) > PRICE_TOLERANCE * price:
            excess = f"{allocated[name] / price:.3f} times the {price} bytes" if price else "not 0"
            return (
                f"{name}: allocated {allocated[name]} bytes, {excess} that the memory formula "
                "says; admission would be wrong, please report this model"
            )
    return None
