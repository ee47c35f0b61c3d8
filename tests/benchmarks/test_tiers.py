"""Verdicts of the benchmark of KV tiers: origin of answers, limits, equal texts."""

import importlib
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tiers() -> Any:
    return importlib.import_module("benchmarks.tiers.engine")


def answer(tiers: Any, **cached: int) -> Any:
    return tiers.Answer([1, 2], [0.1, 0.2], 1000, sum(cached.values()), cached)


@pytest.mark.parametrize(
    ("where", "cached"),
    [
        ("recomputed", {}),
        ("recomputed", {"device": 96}),
        ("cold", {}),
        ("device", {"device": 976}),
        ("host", {"device": 96, "host": 880}),
        ("file", {"file": 976}),
    ],
)
def test_answers_that_came_from_where_their_row_claims(
    tiers: Any, where: str, cached: dict[str, int]
) -> None:
    tiers._check(answer(tiers, **cached), where, 1000)


@pytest.mark.parametrize(
    ("where", "cached"),
    [
        ("recomputed", {"device": 976}),
        ("cold", {"host": 16}),
        ("device", {"device": 96, "host": 880}),
        ("host", {"file": 976}),
        ("host", {}),
        ("file", {"host": 976}),
    ],
)
def test_answers_from_elsewhere_end_the_benchmark(
    tiers: Any, where: str, cached: dict[str, int]
) -> None:
    with pytest.raises(SystemExit, match=f"an answer of the row `{where}` has"):
        tiers._check(answer(tiers, **cached), where, 1000)


def test_one_token_that_differs_is_a_text_that_differs(tiers: Any) -> None:
    result = tiers.Pass()
    for where in ("recomputed", "host", "file"):
        result.add(where, 0, answer(tiers))
    assert result.equal_texts() == (2, 2)
    other = answer(tiers)
    other.token_ids = [1, 3]
    result.add("device", 0, other)
    assert result.equal_texts() == (2, 3)


@pytest.mark.parametrize(
    ("changes", "is_well"),
    [
        ({}, True),
        ({"ttft_host_share": 0.21}, False),
        ({"ttft_file_share": 0.34}, False),
        ({"inter_token_share": 1.04}, False),
        ({"equal_texts": [7, 8]}, False),
    ],
)
def test_limits(tiers: Any, changes: dict[str, Any], is_well: bool) -> None:
    result = {
        "prompt_tokens": 4096,
        "rows": {"host": tiers.Row([answer(tiers, host=976)]).figures()},
        "tiers": {"host": {"host/read": 2.0**20, "host/hits": 1.0}},
        "ttft_host_share": 0.2,
        "ttft_file_share": 0.33,
        "inter_token_share": 1.03,
        "equal_texts": [8, 8],
        "equal_texts_fast": [7, 8],
    }
    assert tiers.print_engine(result | changes) is is_well


def test_vllm_refuses_in_its_own_words(tmp_path: Path) -> None:
    from benchmarks.tiers.offloading import measure_vllm

    refusal = "CPU Offloading is only supported on GPUs"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '(EngineCore pid=1) Exception: {refusal}'\nexit 1\n")
    python.chmod(0o755)
    assert measure_vllm(python) == {"outcome": "refused", "detail": f"Exception: {refusal}"}
    assert measure_vllm(tmp_path / "none")["outcome"] == "not installed"


def test_bars_are_drawn(tmp_path: Path) -> None:
    from benchmarks.support.plots import draw_bars

    path = tmp_path / "bars.svg"
    draw_bars(path, [("first token", {"host": 1.0, "recomputed": 9.0}), ("nothing", {"x": 0.0})])
    assert len(list(ET.parse(path).iter("{http://www.w3.org/2000/svg}rect"))) == 3
