"""The model for the programme's services: a Llama model with random weights, drawn on the device.

Each word is one token: the prompt "w7 w8" has two tokens. So the length of a prompt is known
without tokenizing, and an answer's text tokenizes to the same tokens again.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.gpu.figures import Job
from benchmarks.gpu.programme import ROOT
from ullage_engine.model_config.hf_config import read_config
from ullage_engine.model_config.registry import read_model_config
from ullage_engine.model_loader.tensor_plan import plan_tensors

SEED = 20_261_128
NAME = "random-llama"
"""Name by which clients request the model."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Llama model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    max_position: int

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * itemsize

    def config(self) -> dict[str, Any]:
        """Return the content of config.json. There is no end token, so answers have full length."""
        return {
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_position,
            "rope_theta": 5e5,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }


EIGHT_LAYERS = Shape(
    layers=8,
    hidden=4096,
    heads=32,
    kv_heads=8,
    intermediate=14_336,
    vocab=32_768,
    max_position=16_384,
)
"""Llama-3-8B with a quarter of its layers and vocabulary: 4 GB in bfloat16, 32 KiB KV per token."""

TINY = Shape(
    layers=2, hidden=64, heads=4, kv_heads=2, intermediate=128, vocab=512, max_position=4096
)


def service_shape(job: Job) -> Shape:
    """Return the shape of the model that the services of this run serve."""
    return TINY if job.tiny else EIGHT_LAYERS


def service_checkpoint(job: Job, layers: int | None = None) -> Path:
    """Return the folder of the services' model, and write the model unless it exists.

    Args:
        layers: number of layers, or None for the model's usual number.
    """
    shape = service_shape(job)
    shape = replace(shape, layers=layers or shape.layers)
    folder = job.scratch / f"checkpoint-{shape.layers}"
    if not (folder / "model.safetensors").exists():
        # In a child: a GPU context of this process would count in the measured memory.
        shape_json = json.dumps(asdict(shape))
        command = (sys.executable, "-m", __name__, str(folder), job.device, shape_json)
        subprocess.run(command, cwd=ROOT, check=True)
    return folder


def write_checkpoint(folder: Path, shape: Shape, device: torch.device) -> None:
    """Write config.json, tokenizer.json and bfloat16 weights, which are drawn on the device."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
    word_tokenizer(shape.vocab).save(str(folder / "tokenizer.json"))

    generator = torch.Generator(device).manual_seed(SEED)
    tensors = {}
    for plan in plan_tensors(read_model_config(read_config(folder))):
        for part in plan.parts:
            tensors[part.source] = _draw(part.source, part.shape, generator, device)
    partial = folder / "model.partial"
    save_file(tensors, partial)
    partial.rename(folder / "model.safetensors")


def _draw(
    name: str, shape: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Draw a random tensor. Norm weights are ones, and rows of matrices have a norm of about 1."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    numbers = torch.randn(shape, generator=generator, device=device)
    scale = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
    return numbers.mul_(scale).to(torch.bfloat16).cpu()


def word_tokenizer(vocab: int) -> Tokenizer:
    """Return a byte-level tokenizer whose tokens are " w0", " w1" and so on."""
    # In byte-level vocabularies a space is written as this letter.
    words = {f"\u0120w{number}": number for number in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="\u0120w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "merged_with_next"),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def words(token_ids: list[int]) -> str:
    """Return the text for token ids."""
    return " ".join(f"w{token}" for token in token_ids)


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]), Shape(**json.loads(sys.argv[3])), torch.device(sys.argv[2]))
