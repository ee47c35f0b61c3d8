"""A configuration that cannot be used says so in one line."""

from pathlib import Path

import pytest

from ullage_common.config.router import RouterConfig
from ullage_common.process.config_file import ConfigError, read_file, warn_unknown

GOOD = """
model: smollm2-135m
http: {port: 8000}
grpc: {port: 9000}
metrics: {port: 9090}
pools:
  - {name: single, targets: ["smollm2-single:9000"]}
  - {name: large, role: large, targets: ["smollm2-large:9000"]}
routing:
  large_request_tokens: 8000
  large_request_kv: 6291456000
  ladder: [shrinkOutput, queue, route, reject]
  rungs: {}
  queue: {max_requests: 256, timeout: 10.0}
limits: {max_output_tokens: 4096, request_timeout: 30.0}
memory: {threshold_percent: 85, safety_reserve: 2147483648}
log_level: info
"""


def read(tmp_path: Path, text: str) -> RouterConfig:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    return read_file(path, RouterConfig)


def test_a_good_one(tmp_path: Path) -> None:
    config = read(tmp_path, GOOD)
    assert [pool.name for pool in config.pools] == ["single", "large"]
    assert config == read(tmp_path, "model: smollm2-135m\n" + GOOD[GOOD.index("pools") :])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("model: smollm2-135m", "model: ''", ["$.model"]),
        ("port: 8000", "port: 80000", ["$.http.port", "65535"]),
        ("timeout: 10.0", "timeout: 0", ["$.routing.queue.timeout"]),
        ("threshold_percent: 85", "threshold_percent: 8500", ["$.memory.threshold_percent"]),
        ("queue, route", "queue, rout", ["rout", "$.routing.ladder"]),
        ("queue, route", "queue, queue", ["twice"]),
        ("queue, route, reject", "queue, reject, route", ["put reject last"]),
        ("rungs: {}", "rungs: {route: {pools: [huge]}}", ["huge", "not among the pools"]),
        ("rungs: {}", "rungs: {reject: {min_retry_delay: 9, max_retry_delay: 2}}", ["9", "2"]),
        ("rungs: {}", "rungs: {shrink_output: {min_percent: 150}}", ["shrink_output.min_percent"]),
        ("name: large", "name: single", ["share a name"]),
        ("name: single", "name: single, role: large", ["'single', 'large'", "have role large"]),
        ("smollm2-large:9000", "smollm2-single:9000", ["'single'", "'large'", "given twice"]),
        ("smollm2-large:9000", "smollm2-large", ["'smollm2-large'", "host:port"]),
        ("smollm2-large:9000", "'fd00::7:9000'", ["'fd00::7:9000'", "[fd00::7]:9000"]),
        ("pools:", "pools: [", ["not YAML"]),
    ],
)
def test_a_bad_one(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_fields_of_a_newer_operator_are_passed_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newer = GOOD.replace("{threshold", "{levitation: {height: 3}, threshold", 1)
    newer = newer.replace("{name: large", "{shape: round, name: large", 1)
    config = read(tmp_path, newer)
    assert config == read(tmp_path, GOOD)
    warn_unknown(tmp_path / "router.yaml", config)
    assert not caplog.records
    read(tmp_path, newer)
    warn_unknown(tmp_path / "router.yaml", config)
    [record] = caplog.records
    assert vars(record)["fields"] == ["$.pools[1].shape", "$.memory.levitation"]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config"):
        read_file(tmp_path / "none.yaml", RouterConfig)
