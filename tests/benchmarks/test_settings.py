"""The sweep of settings compares goodput and counts what must not happen."""

from benchmarks.settings import Run, summary, table

from ullage_verify.client import ChatAnswer


def run(seconds: float, *statuses: int, num_preemptions: int = 0) -> Run:
    answers = [ChatAnswer(0.0, status=status) for status in statuses]
    return Run(seconds, answers, (1.0, seconds - 2.0, 1.0), num_preemptions)


def test_the_default_is_compared_with_the_best() -> None:
    result = summary(
        {
            "default": [run(10.0, 200, 200, 429), run(20.0, 200, 200)],
            "chunk-64": [run(8.0, 200, 200)],
        }
    )
    assert result["best"] == "chunk-64"
    assert result["settings"]["default"]["goodput"] == 0.15
    assert result["settings"]["default"]["refused"] == 1
    assert result["share_of_best"] == 0.6


def test_failures_and_preemptions_are_counted_apart_from_refusals() -> None:
    answers = run(10.0, 200, 429, 503, 500, num_preemptions=3)
    assert sorted(answers.failures) == ["500: ", "503: "]
    rows = summary({"default": [answers]})["settings"]
    assert rows["default"]["failed"] == 2
    assert rows["default"]["refused"] == 1
    assert rows["default"]["preemptions"] == 3
    assert "| default | 0.100 | 1, 8, 1 | 1 | 2 | 3 |" in table({"settings": rows})
