"""A request passes the stages of the features that are on, in their order, and no others."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from msgspec import convert
from msgspec.structs import asdict

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import RouterConfig
from ullage_router.call import Call, Handler, deadline_of
from ullage_router.pipeline.pipeline import OptionalStages, RequestStages
from ullage_router.policy.facts import Side
from ullage_router.server.service import RouterService
from ullage_router.telemetry.record import RequestRecord

OFF: dict[str, Any] = {
    "model": "tiny",
    "pools": [{"name": "single", "targets": ["127.0.0.1:1"]}],
    "routing": {"coalesce": {"enabled": False}, "replace": {"enabled": False}},
    "prompts": {"compress": {"method": "off"}},
}
CASCADE = {"name": "c", "steps": [{"name": "own"}, {"name": "big", "target": "127.0.0.1:2"}]}
ANSWER = cast(Any, object())


def service(**sections: Any) -> tuple[RouterService, set[str]]:
    """Return a service and the names of its optional stages."""

    async def build() -> RouterService:
        return RouterService(convert({**OFF, **sections}, RouterConfig))

    made = asyncio.run(build())
    stages = asdict(made.optional_stages)
    return made, {name for name, stage in stages.items() if stage is not None}


def routing(**sections: Any) -> dict[str, Any]:
    return {"routing": {**OFF["routing"], **sections}}


def test_a_plain_service_has_no_feature_on_its_path() -> None:
    plain, stages = service()
    assert stages == set()
    assert plain.summarizer is None


def test_each_feature_adds_its_own_stages_alone(tmp_path: Path) -> None:
    sleeping = [{**OFF["pools"][0], "sleeps": True}]
    features: dict[str, tuple[dict[str, Any], set[str]]] = {
        "replacement": (routing(replace={"enabled": True}), {"replacer"}),
        "idempotency": (routing(idempotency={"enabled": True}), {"idempotency"}),
        "coalescing": (routing(coalesce={"enabled": True}), {"coalescer"}),
        "cascade": ({"cascade": CASCADE}, {"cascade"}),
        "scale to zero": ({"pools": sleeping}, {"scale_to_zero"}),
        "canary": ({"rollout_file": str(tmp_path / "rollout.yaml")}, {"rollout"}),
        # Summaries are part of the stage that makes prompts.
        "summaries": ({"prompts": {"compress": {"method": "extractive"}}}, set()),
    }
    for name, (sections, expected) in features.items():
        made, stages = service(**sections)
        assert stages == expected, name
        assert (made.summarizer is not None) == (name == "summaries"), name


class Way:
    """Stages that only note that they were passed, of every feature and of every request."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.generated: list[Call] = []
        model = SimpleNamespace(description=SimpleNamespace(task=""))
        self.prompt: Any = SimpleNamespace(token_ids=[1, 2], degraded=())
        self.engines = SimpleNamespace(
            adapter_of=lambda *_: "adapter", served_model=lambda *_: model, expected_output=9
        )
        self.prompts = SimpleNamespace(build=self._build)
        self.tenant = SimpleNamespace(
            name="",
            rules=SimpleNamespace(models=(), max_tokens=0),
            check_model=lambda _: None,
            open_request=lambda *_, **__: self.passed.append("open"),
            charge=lambda prompt, output: self.passed.append(f"charge {prompt} {output}"),
        )
        self.sender = SimpleNamespace(generate=self._generate, try_once=None)

    def optional(self) -> OptionalStages:
        stages = {
            "replacer": {"replace_earlier": self._handing_on("replace_earlier")},
            "idempotency": {"repeat": self._handing_on("repeat")},
            "cascade": {"run": self._handing_on("run")},
            "rollout": {
                "refuse_when_stopped": lambda: self.passed.append("refuse_when_stopped"),
                "draw_side": self._draw_side,
                "try_canary": self._handing_on("try_canary"),
            },
            "scale_to_zero": {
                "wait_for_model": self._wait_for_model,
                "wait_for_pool": self._handing_on("wait_for_pool"),
            },
            "coalescer": {"share": self._handing_on("share")},
        }
        fakes: dict[str, Any] = {n: SimpleNamespace(**methods) for n, methods in stages.items()}
        return OptionalStages(**fakes)

    def run(self, optional: OptionalStages) -> list[str]:
        """Return the names of the stages that a request passed."""
        config = convert(OFF, RouterConfig)
        parts: Any = (self.engines, self.prompts, self.sender)
        engines, prompts, sender = parts
        stages = RequestStages(config, engines, prompts, sender, optional)
        request = inference_pb2.GenerateRequest(text="Hello")
        record = RequestRecord("r")
        deadline = deadline_of(request, record, 30.0, 30.0)
        call = Call(request, record, cast(Any, self.tenant), deadline)
        assert asyncio.run(cast(Any, stages.begin(call))) is ANSWER
        return self.passed

    def _handing_on(self, name: str) -> Any:
        async def stage(call: Call, proceed: Handler, **_: Any) -> Any:
            self.passed.append(name)
            return await proceed(call)

        return stage

    async def _wait_for_model(self, call: Call) -> None:
        assert call.adapter == "adapter"
        self.passed.append("wait_for_model")

    def _draw_side(self, call: Call) -> Side:
        self.passed.append("draw_side")
        return Side.CANARY

    async def _build(self, *_: Any) -> Any:
        self.passed.append("render")
        return self.prompt

    async def _generate(self, call: Call) -> Any:
        self.passed.append("generate")
        self.generated.append(call)
        return ANSWER


def test_a_plain_request_passes_the_common_stages_alone() -> None:
    way = Way()
    assert way.run(OptionalStages()) == ["open", "render", "charge 2 9", "generate"]
    (call,) = way.generated
    assert (call.side, call.prompt) == (Side.STABLE, way.prompt)


def test_all_features_stand_in_their_order() -> None:
    way = Way()
    assert way.run(way.optional()) == [
        "replace_earlier",
        "open",
        "refuse_when_stopped",
        "repeat",
        "charge 2 9",
        "run",
        "wait_for_model",
        "draw_side",
        "render",
        "wait_for_pool",
        "charge 2 9",
        "share",
        "try_canary",
        "generate",
    ]
    (call,) = way.generated
    assert (call.side, call.prompt, call.adapter) == (Side.CANARY, way.prompt, "adapter")
