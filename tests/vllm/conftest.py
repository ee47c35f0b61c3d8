"""What tests with vLLM itself share. `make test-vllm` runs them, in the environment that has it;
where vLLM is not installed, none is collected."""

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from ullage_testing.small_models import (
    SOURCE,
    foreign_warnings_allowed,
    random_model_of,
    smollm2_path,
)

from ullage_common.config.engine import EngineConfig
from ullage_engine.tokenizer.tokenizer import load_tokenizer

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

if HAS_VLLM:
    # Read when vLLM or what it needs is imported.
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }

CONTRACT = "test_contract.py"

WriteCheckpoint = Callable[..., Path]


def pytest_configure(config: pytest.Config) -> None:
    """Allows the warnings of vLLM's own modules; those of Ullage stay errors."""
    for message in (r".torch\.jit\.script_method. is deprecated",):
        config.addinivalue_line("filterwarnings", f"ignore:{message}:DeprecationWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs what says which part of vLLM has changed before what fails because of it."""
    items.sort(key=lambda item: item.path.name != CONTRACT)


@pytest.fixture
def smollm2() -> str:
    """URI of SmolLM2-135M-Instruct, a GGUF file."""
    return SOURCE


@pytest.fixture(scope="session", autouse=True)
def vllm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what vLLM compiles, of no other session."""
    folder = tmp_path_factory.mktemp("vllm")
    os.environ["VLLM_CACHE_ROOT"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def write_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> WriteCheckpoint:
    """Writes a model with random weights and SmolLM2's tokenizer; returns its folder.

    Args:
        config: a transformers configuration. Its vocabulary becomes the tokenizer's, and its end of
            a sequence, too.
        seed: the seed of the weights.
        encoder: whether it is a model without a head for the next token.
    """
    tokenizer = load_tokenizer(smollm2_path())
    special = {"eos_token": tokenizer.eos_token, "bos_token": tokenizer.bos_token}
    template = {"chat_template": tokenizer.chat_template}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **special, **template}
    numbers = count()

    def write(config: Any, seed: int = 0, encoder: bool = False) -> Path:
        text = config.get_text_config()
        text.vocab_size = tokenizer.tokenizer.get_vocab_size()
        text.eos_token_id = config.eos_token_id = tokenizer.eos_token_ids[0]
        text.bos_token_id = config.bos_token_id = text.pad_token_id = None
        folder = tmp_path_factory.mktemp(f"{config.model_type}-{next(numbers)}")
        random_model_of(config, seed, encoder=encoder).save_pretrained(folder)
        (folder / "tokenizer.json").write_bytes(tokenizer.json_bytes)
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        return folder

    return write


def vllm_config(source: str, **sections: Any) -> dict[str, Any]:
    """Returns the configuration of a small engine on two cores; sections given by keyword replace
    fields of the default one."""
    config: dict[str, Any] = {
        "engine": "vllm",
        "model": {
            "source": source,
            "name": "served",
            "dtype": "float32",
            "max_model_len": 1024,
        },
        "device": "cpu",
        "memory": {
            "threshold_percent": 100,
            "safety_reserve": 0,
            "device_bytes": 4 << 30,
            "max_kv": 64 << 20,
        },
        "batching": {"max_sequences": 8, "prefill_chunk_tokens": 256},
        "server": {"threads": 2},
        # The smallest block that vLLM's attention on CPUs takes.
        "vllm": {"args": {"block_size": 32}},
    }
    for name, value in sections.items():
        config[name] = config.get(name, {}) | value if isinstance(value, dict) else value
    return config


StartHere = Callable[..., Any]


@pytest.fixture(scope="module")
def start_here(weights_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartHere]:
    """Starts engines with vLLM in this process, one after the other; sections given by keyword
    replace fields of `vllm_config`. What is returned is a `vllm_worker.startup.StartedVllm`."""
    from ullage_engine.vllm_worker.startup import start

    running: list[Any] = []
    # Of its own, where nobody knows of memory that ran out in other tests.
    run_dir = str(tmp_path_factory.mktemp("run"))

    def start_one(source: str | Path, *, host_tier: Any = None, **sections: Any) -> Any:
        stop_running(running)
        uri = f"file://{source}" if isinstance(source, Path) else source
        config = vllm_config(uri, **sections)
        config["server"] |= {"weights_dir": str(weights_dir), "run_dir": run_dir}
        with foreign_warnings_allowed():
            checked = msgspec.convert(config, EngineConfig)
            running.append(start(checked, lambda _: None, host_tier))
        return running[-1]

    # A start sets what vLLM reads; workers of later tests are to find what this process was given.
    with patch.dict(os.environ):
        yield start_one
        stop_running(running)


def stop_running(running: list[Any]) -> None:
    while running:
        with foreign_warnings_allowed():
            running.pop().stop()
