"""Bounds on tickets that are free for the caller.

Tickets are free if there are no tenants, or if the tenant has no limit. A caller could then pick
endlessly without using the tickets. The unused tickets of a caller may therefore hold at most a
share of an engine: of its memory, of the sequences in a step, and of the prefill time within which
other requests meet their TTFT objective. The rest is left for `Generate` and for other callers.
"""

import ipaddress
from dataclasses import dataclass

from ullage_router.policy.credit import Held
from ullage_router.policy.facts import EngineView
from ullage_router.policy.forecast import SHARE

CALLER_SHARE = 0.5
"""Maximum share of an engine that the unused tickets of one caller may hold."""
ALL_SHARE = 0.75
"""Maximum share of an engine that the unused tickets of all non-paying callers may hold."""
_V6_NETWORK = 64
"""Prefix length of one site's IPv6 network."""


@dataclass(frozen=True, slots=True)
class Unpaid:
    """The bounds on the unused tickets of one caller.

    Args:
        holder: The caller's name.
        ttft_s: Objective for the time to first token, in seconds.
    """

    holder: str
    ttft_s: float

    def room(self, view: EngineView, held: tuple[Held, Held], size: int, tokens: int) -> int:
        """Return how many more requests may be reserved on an engine.

        Args:
            view: The engine.
            held: Reservations on the engine: those of the caller, and those of all non-paying
                callers.
            size: Bytes of each request.
            tokens: Number of prompt tokens of each request.
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
    """Return the name of a caller without a key: its address, or its IPv6 network.

    Args:
        peer: The address in gRPC's notation, such as `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`.
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
