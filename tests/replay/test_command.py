"""`ullage plan --trace`: the operator's plan for a manifest, replayed in a process of its own."""

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from ullage_cli.main import main
from ullage_replay.hardware import Hardware, HardwareError, read_hardware, write_hardware
from ullage_replay.timeline import TimelineError, pauses_between, read_timeline

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2.yaml"


@pytest.fixture
def files(tmp_path: Path, hardware: Hardware) -> tuple[str, str]:
    """Return the paths of a trace and of a hardware file."""
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"at": 0.2 * number, "prompt_tokens": 100 + 2100 * (number == 7), "output_tokens": 20}
        for number in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "hardware.json"
    engine = msgspec.structs.replace(hardware.engines["single"], max_model_len=8192)
    own = msgspec.structs.replace(hardware, model="smollm2-135m", engines={"single": engine})
    write_hardware(path, own)
    return str(trace), str(path)


def test_the_plan_of_a_manifest_is_replayed(
    files: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    trace, hardware = files
    command = ["plan", "-f", str(EXAMPLE), "--trace", trace, "--hardware", hardware]
    assert main([*command, "--json"]) == 0
    summary = json.loads(capfd.readouterr().out)
    assert summary["requests"] == 20
    assert summary["actions"]["route4"] == {"LARGE_REQUEST": 1}
    assert [engine["name"] for engine in summary["engines"]] == ["single-0", "large-0"]
    # As in the manifest, in whole blocks.
    assert [engine["kv_pool_bytes"] >> 20 for engine in summary["engines"]] == [130, 190]

    assert main([*command, "--ttft", "5"]) == 0
    table = capfd.readouterr().out
    assert "engines for ttft p95 of 5000 ms without a refusal: single 1, large 1" in table


def test_wrong_options_name_the_remedy(
    files: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trace, hardware = files
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"at": 0, "prompt_tokens": "many", "output_tokens": 1}')
    plan = ["plan", "-f", str(EXAMPLE)]
    cases = {
        ("plan",): "-f: give the manifest",
        (*plan, "--trace", trace): "--hardware: give the file of measured engines",
        (*plan, "--ttft", "1"): "--ttft is for predictions; give --trace",
        (*plan, "--measure", "x"): "--measure measures a running service; leave out -f",
        (*plan, "--trace", str(wrong), "--hardware", hardware): (
            "wrong.jsonl:1: prompt_tokens: 'many' is no number of tokens"
        ),
        (*plan, "--trace", trace, "--hardware", "nowhere"): (
            "nowhere: No such file or directory; measure one with --measure"
        ),
        (*plan, "--trace", trace, "--hardware", str(wrong)): "measure it again with --measure",
    }
    for arguments, message in cases.items():
        assert main(arguments) == 2, arguments
        assert message in capfd.readouterr().err


def test_the_help_offers_no_names_of_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    assert "--hardware FILE" in text
    assert "NAME" not in text


def test_a_hardware_file_of_another_model_is_refused(
    files: tuple[str, str], hardware: Hardware, capfd: pytest.CaptureFixture[str]
) -> None:
    trace, path = files
    write_hardware(Path(path), hardware)
    assert main(["plan", "-f", str(EXAMPLE), "--trace", trace, "--hardware", path]) == 2
    assert "pool single: model.name: 'smollm2-135m' was not measured, but 'm' was; measure" in (
        capfd.readouterr().err
    )


def test_a_hardware_file_is_read_as_it_was_written(tmp_path: Path, hardware: Hardware) -> None:
    path = tmp_path / "hardware.json"
    write_hardware(path, hardware)
    assert read_hardware(path) == hardware
    assert "Infinity" not in path.read_text()

    write_hardware(path, msgspec.structs.replace(hardware, version=9))
    with pytest.raises(HardwareError, match="version: 9 is not the 1 that this program reads"):
        read_hardware(path)


def step(at_us: int, seconds_us: int, sequences: int) -> dict[str, object]:
    return {
        "name": "step",
        "ts": at_us,
        "dur": seconds_us,
        "args": {
            "sequences": sequences,
            "prompt_tokens": 0,
            "decodes": sequences,
            "decode_context": 10 * sequences,
            "prompt_context": 0.0,
            "request_ids": [f"r{number}" for number in range(sequences)],
        },
    }


def test_a_timeline_is_read_as_steps_and_pauses() -> None:
    limits = {
        "max_model_len": 64,
        "max_sequences": 4,
        "prompt_tokens": 16,
        "is_chunked": True,
        "decode_tokens": 99,
        "prompt_cost": {"step_budget": 20.0},
    }
    ones = [step(12_000 * number, 10_000, 1) for number in range(10)]
    fours = [step(200_000 + 13_000 * number, 10_000, 4) for number in range(10)]
    document: dict[str, object] = {"traceEvents": [{"name": "other"}, *fours, *ones]}
    document["otherData"] = {"began_unix_s": 5.0, "limits": limits, "longest_step_s": 0.5}
    timeline = read_timeline(gzip.compress(json.dumps(document).encode()))
    assert len(timeline.steps) == 20
    assert timeline.steps[0].began_unix == 5.0
    assert timeline.limits.prompt_cost.step_budget == 20.0
    # The long wait between both loads is no pause between steps.
    points = pauses_between(timeline.steps).points
    assert [number for number, _ in points] == [1, 4]
    assert [seconds for _, seconds in points] == pytest.approx([0.002, 0.003], abs=1e-6)

    with pytest.raises(TimelineError, match="does not state its limits"):
        read_timeline(gzip.compress(b'{"traceEvents": []}'))
    with pytest.raises(TimelineError, match="no step follows another one"):
        pauses_between(timeline.steps[:3])
