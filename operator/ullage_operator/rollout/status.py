"""Reports a rollout in the status and conditions of its service."""

from typing import Any

from ullage_operator.api.spec import Service
from ullage_operator.conditions.conditions import Condition, timestamp
from ullage_operator.rollout.plan import RolloutPlan
from ullage_operator.rollout.stages import PAUSED, RENEWALS, ROLLING_OUT, RolloutStage

Manifest = dict[str, Any]

ROLLOUT_HEALTHY = "RolloutHealthy"


def rollout_condition(plan: RolloutPlan) -> Condition:
    progress = plan.progress
    is_well = progress.stage is not RolloutStage.ROLLED_BACK and not progress.is_held
    return Condition(ROLLOUT_HEALTHY, is_well, progress.reason, progress.message)


def rollout_status(service: Service, plan: RolloutPlan) -> Manifest:
    """Return a service's `status.rollout` section."""
    progress = plan.progress
    is_paused = progress.is_held or progress.reason == PAUSED
    is_renewing = progress.renewal == ROLLING_OUT
    stage = RolloutStage.PROMOTING.value if is_renewing else progress.stage.value
    stage = "Paused" if is_paused and not is_renewing else stage
    step = stage
    if progress.stage is RolloutStage.CANARY:
        count = len(service.spec.rollout.weight_steps)
        step = f"{stage} {plan.weight}% ({progress.step + 1}/{count})"
    return {
        "stage": stage,
        "step": step,
        "weight": plan.weight,
        "stableRevision": progress.stable,
        **({"since": timestamp(progress.since)} if plan.is_known else {}),
        # The kept message is that of the rollback before the renewal.
        "message": RENEWALS[progress.renewal] if is_renewing else progress.message,
        **({"revision": progress.canary} if progress.canary else {}),
        **({"failedRevision": progress.failed} if progress.failed else {}),
    }
