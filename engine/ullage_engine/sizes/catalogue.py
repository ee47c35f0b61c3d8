"""The catalogue of well-known models: their published configurations, without their weights."""

import json
from pathlib import Path

import msgspec

_FILE = Path(__file__).with_name("catalogue.json")


class CatalogueModel(msgspec.Struct, frozen=True):
    """A published model."""

    source: str
    """URI of the model, for example hf://Qwen/Qwen3-0.6B."""
    published_parameters: int
    """Number of parameters that the publisher states, with a tied embedding counted once."""
    config: dict[str, object]
    """Keys of the model's config.json that determine its sizes."""

    @property
    def name(self) -> str:
        return self.source.removeprefix("hf://")


def catalogue() -> list[CatalogueModel]:
    """Return the well-known models, ordered by family and size."""
    models: list[CatalogueModel] = msgspec.convert(
        json.loads(_FILE.read_text(encoding="utf-8")), list[CatalogueModel]
    )
    return models
