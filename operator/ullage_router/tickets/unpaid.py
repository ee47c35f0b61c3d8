"""Limits the unused tickets held by callers that do not pay for them.

Tickets are free if there are no tenants, or if the tenant has no limits. A caller could then
request tickets endlessly without using them. Each caller's unused tickets may therefore take up
only a fraction of an engine, so that the rest is left for `Generate` and for other callers. The
fraction applies to memory and to the number of sequences per step. It also applies to prompt
tokens, so that other requests have enough prefill time to meet the TTFT objective.
"""

import ipaddress
from dataclasses import dataclass

from ullage_router.policy.credit import Held
from ullage_router.policy.facts import EngineView
from ullage_router.policy.forecast import SHARE

CALLER_SHARE = 0.5
"""Maximum fraction of an engine that one caller's unused free tickets may take up."""
ALL_SHARE = 0.75
"""Maximum fraction of an engine that all callers' unused free tickets may take up together."""
_V6_NETWORK = 64
"""IPv6 prefix length that identifies a caller, because a site usually has one such network."""


@dataclass(frozen=True, slots=True)
class Unpaid:
    """The limits on the unused tickets of one caller that does not pay.

    Args:
        holder: The caller's name.
        ttft_s: Objective for the time to first token, in seconds.
    """

    holder: str
    ttft_s: float

    def room(self, view: EngineView, held: tuple[Held, Held], size: int, tokens: int) -> int:
        """Return how many more requests the caller may place on an engine.

        Args:
            view: The engine's view.
            held: How much of the engine the caller has reserved, and how much all non-paying
                callers have reserved together.
            size: Bytes per request.
            tokens: Prompt tokens per request.
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
    """Return a name for a caller without an API key: its IPv4 address or its IPv6 network.

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
