"""The chain has the stages of the features that are on, and no others."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import convert

from ullage_common.config.router import RouterConfig
from ullage_router.server.service import RouterService

OFF: dict[str, Any] = {
    "model": "tiny",
    "pools": [{"name": "single", "targets": ["127.0.0.1:1"]}],
    "routing": {"coalesce": {"enabled": False}, "replace": {"enabled": False}},
    "prompts": {"compress": {"method": "off"}},
}
PLAIN = ["CommonStages.open", "CommonStages.render", "CommonStages.charge"]
CASCADE = {"name": "c", "steps": [{"name": "own"}, {"name": "big", "target": "127.0.0.1:2"}]}


def service(**sections: Any) -> tuple[RouterService, list[str]]:
    """A service and the names of its stages in their order."""

    async def build() -> RouterService:
        return RouterService(convert({**OFF, **sections}, RouterConfig))

    made = asyncio.run(build())
    stages = [stage.func if isinstance(stage, partial) else stage for stage in made.stages]
    return made, [stage.__qualname__ for stage in stages]


def routing(**sections: Any) -> dict[str, Any]:
    return {"routing": {**OFF["routing"], **sections}}


def test_a_plain_service_has_no_feature_on_its_path() -> None:
    plain, stages = service()
    assert stages == PLAIN
    assert plain.summarizer is None


def test_each_feature_adds_its_own_stages_alone(tmp_path: Path) -> None:
    sleeping = [{**OFF["pools"][0], "sleeps": True}]
    features: dict[str, tuple[dict[str, Any], list[str]]] = {
        "replacement": (routing(replace={"enabled": True}), ["Replacer.replace_earlier"]),
        "coalescing": (routing(coalesce={"enabled": True}), ["Coalescer.share"]),
        "cascade": ({"cascade": CASCADE}, ["CommonStages.charge_estimate", "Cascade.run"]),
        "scale to zero": (
            {"pools": sleeping},
            ["ScaleToZero.wait_for_model", "ScaleToZero.wait_for_pool"],
        ),
        "canary": (
            {"rollout_file": str(tmp_path / "rollout.yaml")},
            ["Rollout.refuse_when_stopped", "Rollout.draw_side", "Rollout.try_canary"],
        ),
        "summaries": (
            {"prompts": {"compress": {"method": "extractive"}}},
            [],
        ),  # part of the stage that makes prompts
    }
    for name, (sections, expected) in features.items():
        made, stages = service(**sections)
        assert [stage for stage in stages if stage not in PLAIN] == expected, name
        assert [stage for stage in stages if stage in PLAIN] == PLAIN, name
        assert (made.summarizer is not None) == (name == "summaries"), name


def test_all_features_stand_in_their_order(tmp_path: Path) -> None:
    _, stages = service(
        rollout_file=str(tmp_path / "rollout.yaml"),
        cascade=CASCADE,
        pools=[{**OFF["pools"][0], "sleeps": True}],
        routing={"replace": {"enabled": True}},
    )
    assert stages == [
        "Replacer.replace_earlier",
        "CommonStages.open",
        "Rollout.refuse_when_stopped",
        "CommonStages.charge_estimate",
        "Cascade.run",
        "ScaleToZero.wait_for_model",
        "Rollout.draw_side",
        "CommonStages.render",
        "ScaleToZero.wait_for_pool",
        "CommonStages.charge",
        "Coalescer.share",
        "Rollout.try_canary",
    ]
