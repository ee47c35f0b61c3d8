"""Two operators that watch the same services: one serves each, and neither fights."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from ullage_kubeapi.trial import converged, until

from ullage_operator.planning.contest import (
    ANSWER_S,
    ASK_AGAIN_S,
    Question,
    ServingTurn,
    asked,
    held,
    holder_of,
    turn_of,
)

OURS = "a/ullage"
THEIRS = "b/ullage"
LONG_S = 60


class Played:
    """An operator that reconciles one service when it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.question: Question | None = None

    def reconcile(self, status: dict[str, Any], now_s: float) -> tuple[dict[str, Any], bool]:
        """Return the status afterwards, and whether it served."""
        turn = turn_of(self.name, status, self.question, now_s)
        if turn is ServingTurn.ASK:
            self.question = Question(holder_of(status), now_s)
            return asked(self.name, status), False
        if turn is not ServingTurn.SERVE:
            return status, False
        self.question = None
        return held(self.name, status), True


def test_what_nobody_serves_is_served_at_once() -> None:
    assert Played(OURS).reconcile({}, 0.0) == ({"operator": {"name": OURS}}, True)


def test_an_operator_that_answers_is_left_its_service_and_asked_again() -> None:
    ours = Played(OURS)
    theirs = Played(THEIRS)
    status, _ = theirs.reconcile({"engines": "1/1"}, 0.0)
    status, serves = ours.reconcile(status, 1.0)
    assert not serves
    assert status["operator"] == {"name": THEIRS, "challenger": OURS}
    status, serves = theirs.reconcile(status, 2.0)
    assert serves
    assert status == {"engines": "1/1", "operator": {"name": THEIRS}}
    for now_s in (3.0, ANSWER_S + 2, ASK_AGAIN_S):
        assert ours.reconcile(status, now_s) == (status, False)
    assert ours.reconcile(status, ASK_AGAIN_S + 2)[0]["operator"]["challenger"] == OURS


def test_who_does_not_answer_is_followed() -> None:
    """Such as a release that was uninstalled."""
    ours = Played(OURS)
    status = {"operator": {"name": THEIRS}}
    status, _ = ours.reconcile(status, 0.0)
    assert ours.reconcile(status, ANSWER_S - 1) == (status, False)
    assert ours.reconcile(status, ANSWER_S + 1) == ({"operator": {"name": OURS}}, True)


STEPS = st.lists(st.tuples(st.integers(0, 1), st.floats(0.5, 50.0)), min_size=20, max_size=60)


@given(steps=STEPS)
def test_a_service_never_changes_hands_while_its_operator_lives(
    steps: list[tuple[int, float]],
) -> None:
    """Each looks whenever the status changes, so who serves answers at once."""
    operators = [Played(OURS), Played(THEIRS)]
    status = {}
    now_s = 0.0
    holders = set()
    for index, wait_s in steps:
        now_s += wait_s
        status, _ = operators[index].reconcile(status, now_s)
        for operator in operators:
            if operator.name == holder_of(status):
                status, _ = operator.reconcile(status, now_s)
        holders.add(holder_of(status))
    assert len(holders) == 1


def test_the_second_of_two_releases_leaves_services_alone(world, start) -> None:
    start("--lease-name=first")
    world.create()
    converged(world)
    second = start("--lease-name=second")
    until(lambda: world.condition("Contested").get("status") == "True", "the status says", LONG_S)
    message = world.condition("Contested")["message"]
    assert "/second also watches this service" in message
    assert "watch.namespaces" in message
    until(lambda: second.reconciled("yielded") > 1, "the second has its answer", LONG_S)
    assert second.reconciled("ok") == 0
    world.patch(f"{world.services}/s", {"spec": {"router": {"replicas": 3}}})
    router = f"{world.path('deployments')}/s-router"
    until(lambda: world.get(router)["spec"]["replicas"] == 3, "the first goes on", LONG_S)
    assert second.reconciled("ok") == 0
    assert world.service()["status"]["operator"]["name"].endswith("/first")
