"""Fingerprints of engines: digests of everything that affects the exact bits of their answers.

Engines with the same digest produce bit-identical results from the same tokens. Such engines may
share KV and continue each other's answers. The facts behind a digest show how two engines differ.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping

import msgspec

DIGEST_DIGITS = 24
_KEY_DIGITS = 12
"""Number of digits of the files' digest in an adapter's key (see `adapter_key`)."""
_SHOWN = 3
"""Maximum number of engines that an error text lists for each value of a fact."""
_UNREPORTED = "fingerprint"
"""Key in the result of `differences` that separates engines with a digest from those without."""


class Fingerprint(msgspec.Struct, frozen=True):
    """An engine's digest, and the facts that the digest covers."""

    digest: str = ""
    """The digest in hexadecimal (empty if unknown, as for an engine of an earlier release)."""
    facts: dict[str, str] = {}
    """Facts that affect the exact bits of answers, such as the weights, by name."""


UNKNOWN = Fingerprint()

Differences = dict[str, dict[str, list[str]]]
"""Maps each fact in which engines differ to the engines' names, grouped by the fact's value."""


def fingerprint_of(facts: Mapping[str, str]) -> Fingerprint:
    """Compute the fingerprint of the given facts."""
    text = json.dumps(dict(facts), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST_DIGITS]
    return Fingerprint(digest, dict(sorted(facts.items())))


def differences(engines: Mapping[str, Fingerprint]) -> Differences:
    """Return the facts that differ between engines, with the engines that have each value.

    The result is empty if all digests are equal.

    Args:
        engines: fingerprints by engine name.
    """
    if len({each.digest for each in engines.values()}) < 2:
        return {}
    reported = {name: each.facts for name, each in engines.items() if each.digest}
    by_fact: Differences = {}
    if len(reported) < len(engines):
        silent = sorted(engines.keys() - reported.keys())
        by_fact[_UNREPORTED] = {"none": silent, "reported": sorted(reported)}
    for fact in sorted({fact for facts in reported.values() for fact in facts}):
        by_value: dict[str, list[str]] = {}
        for name in sorted(reported):
            by_value.setdefault(reported[name].get(fact, ""), []).append(name)
        if len(by_value) > 1:
            by_fact[fact] = dict(sorted(by_value.items()))
    return by_fact


def describe(differing: Differences) -> str:
    """Describe differences in words, such as `weights differ: 3f1a (a-0, a-1), 91bc (a-2)`."""
    return "; ".join(
        f"{fact} {'differ' if fact.endswith('s') else 'differs'}: "
        + ", ".join(f"{value or 'none'} ({_listed(names)})" for value, names in by_value.items())
        for fact, by_value in differing.items()
    )


def _listed(names: list[str]) -> str:
    shown = names[:_SHOWN]
    others = len(names) - _SHOWN
    return ", ".join(shown) + (f" and {others} more" if others > 0 else "")


def num_kinds(engines: Iterable[Fingerprint]) -> int:
    """Return the number of distinct digests among the engines."""
    return len({each.digest for each in engines})


def adapter_key(name: str, digest: str) -> str:
    """Return a key for one version of a LoRA adapter, from its name and its files' digest."""
    return f"{name}@{digest[:_KEY_DIGITS]}"


def with_adapter(fingerprint: str, key: str) -> str:
    """Return the fingerprint of an engine's answers with one version of an adapter.

    Args:
        fingerprint: the engine's fingerprint without an adapter (empty if unknown).
        key: the adapter's key from `adapter_key` (empty for no adapter).
    """
    return f"{fingerprint}/{key}" if fingerprint and key else fingerprint
