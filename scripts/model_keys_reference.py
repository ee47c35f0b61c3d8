"""Write docs/reference/model-keys.md, which lists all model configuration keys.

usage: python scripts/model_keys_reference.py [--check]

The keys come from the engine's own tables. With --check, only compare the page with these tables.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ullage_engine.model_config.family_keys import FAMILY_KEYS
from ullage_engine.model_config.gguf_keys import GGUF_KEYS
from ullage_engine.model_config.keys import Key
from ullage_engine.model_config.quantization_keys import (
    COMPRESSED_GROUP,
    COMPRESSED_NUMBERS,
    QUANTIZATION_KEYS,
)
from ullage_engine.model_config.rope import ROPE_KEYS, ROPE_TYPES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "model-keys.md"

HEAD = """# Keys of a model's configuration

Use this page to check whether the native engine honours the configuration of your model. A key of
`config.json` or of a GGUF file's metadata can change every number of an answer. The native engine
therefore knows each key of the families that it serves:

* **honoured**: the engine computes by the value, as transformers does.
* **harmless**: the value changes no number, for the reason given.
* **only** a value, or **as** another key: the engine computes with this value. If the file has
  another value, the engine refuses the model and names the key.
* **refused**: every value changes numbers, and the engine computes with none.

A null key counts as absent. A key that is in no table ends the start with an error that names key
and value, within seconds and before any worker is started. With `engine: Auto` and vLLM in the
image, vLLM serves your model.

If you know that your model does not depend on an unknown key, allow it. The engine then logs a
warning and computes without the key:

```yaml
spec:
  model:
    allowUnknownConfig: true   # in an engine's file: model.allow_unknown_config
```

The same holds for tensors of a layer that no model of the family has, such as biases. The engine
refuses unknown tensors, and with `allowUnknownConfig` leaves them out. Biases of zeros, tables of
positions and scales of activations or KV are harmless. Tensors of layers beyond
`num_hidden_layers` are ignored.

Your files may have an `lm_head.weight` that differs from the embedding although
`tie_word_embeddings` is true. The engine then computes with the files' `lm_head.weight`, as
transformers does, and logs a warning.

Known values that are not supported are refused with `allowUnknownConfig`, too. In the index of
several safetensors files the engine reads `weight_map`. Its `metadata` are harmless.

`python scripts/model_keys_reference.py` writes this page from the tables in
`engine/ullage_engine/model_config`, by which the engine checks every file.
"""

ROPE = """## Positions

These are the keys of `rope_parameters` and `rope_scaling`. If your file has both, `rope_scaling`
counts, as in transformers. If `rope_parameters` contradicts it, the model is refused. A section for
each kind of layer is refused. `dynamic` changes frequencies beyond `max_position_embeddings` only,
and no request is that long. `longrope` with factors that differ serves sequences up to its original
context, because longer ones would rotate every token differently.
"""

QUANTISATION = """## Quantisation

These are the keys of `quantization_config` by `quant_method`. A method that is not listed is
refused.
"""

GGUF = """## GGUF metadata

Keys begin with the architecture, such as `llama.block_count`. Other keys do not affect the layers:
`general.*`, `tokenizer.*`, and the notes of programs that made the file. `general.type` must be
`model`.
"""

Rows = Mapping[str, Mapping[str, Key]]
"""Configuration keys by model family."""


def main() -> int:
    page = "\n".join(lines())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is out of date; run python scripts/model_keys_reference.py")
    return 1


def lines() -> Iterator[str]:
    """Yield the page's paragraphs."""
    yield HEAD
    yield "## config.json\n"
    yield from table(FAMILY_KEYS, "family")
    yield ROPE
    yield from table({kind: ROPE_KEYS | keys for kind, keys in ROPE_TYPES.items()}, "type")
    yield QUANTISATION
    yield from table(QUANTIZATION_KEYS, "method")
    yield "Of compressed-tensors, keys of a group in `config_groups`, and of its schemes:\n"
    yield from table({"group": COMPRESSED_GROUP, "scheme": COMPRESSED_NUMBERS}, "section")
    yield GGUF
    yield from table(GGUF_KEYS, "architecture")


def table(rows: Rows, title: str) -> Iterator[str]:
    """Yield the lines of a table of keys, with one line per rule of a key."""
    yield f"| key | {title} | effect | meaning |\n| --- | --- | --- | --- |"
    for name in sorted({name for keys in rows.values() for name in keys}):
        rules: list[tuple[Key, list[str]]] = []
        for family, keys in rows.items():
            if name in keys:
                same = next((names for key, names in rules if key == keys[name]), None)
                if same is None:
                    rules.append((keys[name], [family]))
                else:
                    same.append(family)

        for key, families in rules:
            served = "all" if len(families) == len(rows) else ", ".join(families)
            yield f"| `{name}` | {served} | {effect(key)} | {key.meaning} |"

    yield ""


def effect(key: Key) -> str:
    """Describe a key's effect when the engine loads a model."""
    if key.same_as:
        return f"as `{key.same_as}`"
    if key.values == (None,):
        return "refused"
    if key.values:
        return "only " + " or ".join(map(shown, key.values))
    return "honoured" if key.is_read else "harmless"


def shown(value: object) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.exit(main())
