"""The environment of `make install-vllm` has the pinned vLLM, built for CPUs, beside Ullage."""

import os
from importlib.metadata import requires, version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from vllm.platforms import current_platform


def test_vllm_is_the_pinned_version_for_cpus() -> None:
    pinned = [each for each in requires("ullage") or [] if each.startswith("vllm==")]
    installed, _, build = version("vllm").partition("+")
    assert pinned == [f"vllm=={installed}; extra == 'vllm'"]
    assert build == "cpu"
    assert current_platform.is_cpu()
    assert torch.version.cuda is None


def test_its_kernels_find_their_libraries() -> None:
    current_platform.import_kernels()
    assert hasattr(torch.ops._C, "cpu_attention_with_kv_cache")


def test_a_written_checkpoint_is_one_of_transformers(write_checkpoint) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    folder: Path = write_checkpoint(config, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer) == 49152
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert "user" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False
    )
    assert os.environ["HF_HUB_OFFLINE"] == "1"
