"""Ready when it serves, never while a pod crash-loops; times that change with the status."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from ullage_operator.api.schema import load_schema
from ullage_operator.conditions.conditions import Condition, Workload, render, service_conditions
from ullage_operator.conditions.pod_problem import PodProblem

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ROUTER = Workload("router", 2, 2, 2, settled=True)
SINGLE = Workload("single", 2, 2, 2, settled=True)
LARGE = Workload("large", 1, 1, 1, settled=True)
LOOP = PodProblem("s-single-0", "CrashLoopBackOff", "engine ended", blocks=True)
UNPLACED = PodProblem("s-single-1", "Unschedulable", "no GPU", blocks=False)

workloads = st.builds(
    lambda desired, exist, ready, settled: Workload(
        "w", desired, exist, min(ready, exist), settled
    ),
    *(st.integers(0, 3),) * 3,
    st.booleans(),
)
troubles = st.lists(st.sampled_from([LOOP, UNPLACED]), max_size=3)


def by_type(
    router: Workload, pools: list[Workload], wrong: list[PodProblem]
) -> dict[str, tuple[bool, str]]:
    ordered = sorted(wrong, key=lambda trouble: not trouble.blocks)
    return {f.type: (f.holds, f.reason) for f in service_conditions(router, pools, ordered)}


@given(workloads, st.lists(workloads, max_size=3), troubles)
def test_ready_is_what_it_says(
    router: Workload, pools: list[Workload], wrong: list[PodProblem]
) -> None:
    found = by_type(router, pools, wrong)
    wanted = [pool for pool in pools if pool.desired]
    serves = bool(wanted) and router.ready > 0 and all(pool.ready for pool in wanted)
    assert found["Ready"][0] == (serves and LOOP not in wrong)
    assert found["Degraded"][0] == bool(wrong)
    if found["Ready"][0]:
        assert found["Available"][0]


def test_a_service_that_serves_stays_ready_while_it_rolls() -> None:
    rolling = Workload("single", 2, 2, 1, settled=False)
    found = by_type(ROUTER, [rolling, LARGE], [])
    assert found["Ready"] == (True, "Serving")
    assert found["Progressing"] == (True, "RollingOut")


def test_a_new_service_progresses_until_it_was_ready_once() -> None:
    unready = Workload("single", 2, 2, 0, settled=True)
    progressing = service_conditions(ROUTER, [unready], [])[2]
    assert (progressing.holds, progressing.reason) == (True, "Starting")
    assert progressing.message == "waiting until single 0/2 ready"
    ready = service_conditions(ROUTER, [SINGLE], [])[2]
    assert (ready.holds, ready.reason) == (False, "Settled")
    fallen = service_conditions(ROUTER, [unready], [], was_progressing=False)[2]
    assert (fallen.holds, fallen.reason) == (False, "Settled")


def test_a_service_is_never_ready_while_a_pod_crash_loops() -> None:
    assert by_type(ROUTER, [SINGLE, LARGE], [LOOP])["Ready"] == (False, "CrashLoopBackOff")


def test_a_replica_without_a_node_degrades_a_service_that_serves() -> None:
    found = by_type(ROUTER, [Workload("single", 2, 2, 1, settled=True)], [UNPLACED])
    assert found["Ready"] == (True, "Serving")
    assert found["Degraded"] == (True, "Unschedulable")


def test_a_pool_that_does_not_serve_tells_the_trouble_of_its_pod() -> None:
    lost = Workload("single", 1, 1, 0, settled=True)
    assert by_type(ROUTER, [lost], [UNPLACED])["Ready"] == (False, "Unschedulable")


def test_further_pods_in_trouble_are_counted() -> None:
    degraded = service_conditions(ROUTER, [SINGLE], [LOOP, UNPLACED, UNPLACED])[-1]
    assert degraded.message == "pod s-single-0: engine ended (and 2 more)"


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["A", "B"])), min_size=1, max_size=12))
def test_a_time_changes_exactly_when_the_status_flips(course: list[tuple[bool, str]]) -> None:
    previous: list[dict[str, object]] = []
    before: bool | None = None
    for minute, (holds, reason) in enumerate(course):
        now = NOW + timedelta(minutes=minute)
        [made] = render([Condition("Ready", holds, reason, reason)], previous, minute, now)
        flipped = before is not None and holds != before
        if previous and not flipped:
            assert made["lastTransitionTime"] == previous[0]["lastTransitionTime"]
        else:
            assert made["lastTransitionTime"] == now.strftime("%Y-%m-%dT%H:%M:%SZ")
        assert (made["reason"], made["observedGeneration"]) == (reason, minute)
        previous = [made]
        before = holds


def test_a_message_fits_into_the_status_however_long_it_is() -> None:
    status = load_schema()["properties"]["status"]["properties"]
    longest = status["conditions"]["items"]["properties"]["message"]["maxLength"]
    told = [Condition("AdaptersReady", False, "AdapterFailed", "é" * length) for length in
            (longest, longest + 1)]  # fmt: skip
    whole, cut = render(told, [], 1, NOW)
    assert whole["message"] == "é" * longest
    assert len(cut["message"]) == longest
    assert cut["message"].endswith("…")
