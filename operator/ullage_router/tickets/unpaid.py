"""How much tickets may hold that cost their caller nothing: where there are no tenants, or the
tenant has no limit.

Such a caller could pick without end and use none of its tickets. So what is picked and not yet
accepted takes no more than a share of an engine: of its memory, of the sequences in a step, and of
the time in which prompts must be computed for others to keep their objectives. The rest is there
for `Generate`, and for other callers.
"""

import ipaddress
from dataclasses import dataclass

from ullage_router.policy.credit import Held
from ullage_router.policy.facts import EngineView
from ullage_router.policy.forecast import SHARE

CALLER_SHARE = 0.5
"""Share of an engine that the unused tickets of one caller may hold."""
ALL_SHARE = 0.75
"""Share of an engine that the unused tickets of all such callers may hold."""
_V6_NETWORK = 64
"""Bits of an IPv6 address that one site has been given."""


@dataclass(frozen=True, slots=True)
class Unpaid:
    """The bounds of one caller.

    Args:
        holder: the caller's name.
        ttft_s: objective of the first token.
    """

    holder: str
    ttft_s: float

    def room(self, view: EngineView, held: tuple[Held, Held], size: int, tokens: int) -> int:
        """Return how many more requests may be reserved on an engine.

        Args:
            held: the reservations of the caller, and of all callers, there.
            size: bytes of each request.
            tokens: prompt tokens of each request.
        """
        return min(
            _room(view, part, share, size, tokens, self.ttft_s)
            for part, share in zip(held, (CALLER_SHARE, ALL_SHARE), strict=True)
        )


def _room(view: EngineView, held: Held, share: float, size: int, tokens: int, ttft_s: float) -> int:
    bounds = [(share * view.capacity - held.size) // size] if size else []
    if view.max_sequences:
        bounds.append(max(1, int(share * view.max_sequences)) - held.requests)
    if view.prefill_speed:
        most = share * SHARE * ttft_s * view.prefill_speed
        bounds.append((most - held.tokens) // tokens)
    return max(0, int(min(bounds))) if bounds else 1


def caller_of(peer: str) -> str:
    """Return the name of a caller without a key: the address of its connection.

    Args:
        peer: as gRPC names it, such as `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`.
    """
    kind, _, address = peer.partition(":")
    host = address.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
    if kind == "ipv6":
        try:
            network = ipaddress.ip_network((host.partition("%")[0], _V6_NETWORK), strict=False)
        except ValueError:
            return peer
        return str(network)
    return host or peer
