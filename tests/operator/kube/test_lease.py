"""The lead: taken when it is free, kept by renewal, never held by two at once."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_operator.kube.lease import Candidacy, Times, claim, release

NOW = datetime(2026, 1, 2, 3, 4, 5, 678_900, tzinfo=UTC)
WHERE = ("system", "ullage-operator")


def lease(holder="other", version=1, **spec):
    fields = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": "t1", **spec}
    return {"metadata": {"name": WHERE[1], "resourceVersion": str(version)}, "spec": fields}


@pytest.mark.parametrize(
    ("found", "seen_for_s", "may"),
    [
        (None, 0, True),
        (lease(""), 0, True),
        (lease("me"), 0, True),
        (lease(), 0, False),
        (lease(), 14.9, False),
        (lease(), 15, True),
        (lease(leaseDurationSeconds=60), 30, False),
        (lease(leaseDurationSeconds=None), 15, True),
        ({"metadata": {"resourceVersion": "1"}}, 0, True),
    ],
)
def test_who_may_take_the_lead(found, seen_for_s, may):
    candidacy = Candidacy("me").saw(found, 100.0)
    assert candidacy.saw(found, 100.0 + seen_for_s).may_take(100.0 + seen_for_s) is may


def test_a_renewal_by_its_holder_begins_the_wait_anew_whatever_its_clock_says():
    candidacy = Candidacy("me").saw(lease(renewTime="1999-01-01T00:00:00Z"), 100.0)
    candidacy = candidacy.saw(lease(renewTime="1999-01-01T00:00:01Z"), 114.0)
    assert not candidacy.may_take(120.0)
    assert candidacy.may_take(129.0)


def test_a_leader_may_write_until_the_deadline_after_its_request_began():
    candidacy = Candidacy("me").took(claim(Candidacy("me"), None, WHERE, NOW), 100.0, 103.0)
    assert candidacy.leads_for_s(103.0) == pytest.approx(7.0)
    assert candidacy.leads_for_s(110.0) == 0.0
    assert candidacy.resigned().leads_for_s(103.0) == 0.0


def test_a_leader_that_finds_another_stops_at_once():
    candidacy = Candidacy("me").took(claim(Candidacy("me"), None, WHERE, NOW), 100.0, 100.1)
    assert candidacy.saw(lease("other"), 101.0).leads_for_s(101.0) == 0.0


def test_what_is_written():
    first = claim(Candidacy("me"), None, WHERE, NOW)
    assert first["spec"] == {
        "holderIdentity": "me",
        "leaseDurationSeconds": 15,
        "acquireTime": "2026-01-02T03:04:05.678900Z",
        "renewTime": "2026-01-02T03:04:05.678900Z",
        "leaseTransitions": 0,
    }
    assert "resourceVersion" not in first["metadata"]
    renewed = claim(Candidacy("me"), lease("me", 4, acquireTime="t0"), WHERE, NOW)
    assert renewed["metadata"]["resourceVersion"] == "4"
    assert (renewed["spec"]["acquireTime"], renewed["spec"]["leaseTransitions"]) == ("t0", 0)
    taken = claim(Candidacy("me"), lease("other", 4, leaseTransitions=2), WHERE, NOW)
    assert taken["spec"]["leaseTransitions"] == 3
    freed = release(lease("me", 4), WHERE, NOW)["spec"]
    assert (freed["holderIdentity"], freed["leaseDurationSeconds"]) == ("", 1)


class Server:
    """One Lease with optimistic concurrency."""

    def __init__(self):
        self.lease = None
        self.version = 0

    def write(self, wanted):
        asked = wanted["metadata"].get("resourceVersion")
        present = self.lease and self.lease["metadata"]["resourceVersion"]
        if asked != present:
            return None
        self.version += 1
        meta = {**wanted["metadata"], "resourceVersion": str(self.version)}
        self.lease = {**wanted, "metadata": meta}
        return self.lease


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which operator acts
        st.floats(0.0, 9.0),  # after how long
        st.floats(0.0, 4.0),  # how long its request takes
        st.sampled_from(["ok", "ok", "ok", "lost answer", "unreachable", "restart", "release"]),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(STEPS, st.tuples(*[st.floats(0.85, 1.15)] * 3), st.tuples(*[st.floats(-1e6, 1e6)] * 3))
def test_no_two_lead_at_once_with_any_clocks_delays_and_failures(steps, rates, offsets):
    server = Server()
    true_s = 0.0
    count = 0
    everyone = [Candidacy(f"o{number}") for number in range(3)]

    def clock(who):
        return offsets[who] + true_s * rates[who]

    for who, wait_s, takes_s, what in steps:
        true_s += wait_s
        mine = everyone[who]
        if what == "restart":
            count += 1
            everyone[who] = Candidacy(f"o{who}-{count}")
        elif what == "release" and mine.leads_for_s(clock(who)):
            everyone[who] = mine.resigned()
            server.write(release(server.lease, WHERE, NOW))
        elif what != "unreachable":
            begun_s = clock(who)
            read = server.lease
            mine = mine.saw(read, begun_s)
            if mine.may_take(begun_s):
                fresh = replace(mine, times=Times())
                wanted = claim(fresh, read, WHERE, datetime.fromtimestamp(true_s, UTC))
                written = server.write(wanted)
                true_s += takes_s
                if written and what == "ok":
                    mine = mine.took(written, begun_s, clock(who))
            everyone[who] = mine
        leading = [each for n, each in enumerate(everyone) if each.leads_for_s(clock(n)) > 0]
        assert len(leading) <= 1
