"""Caches models (tokenizer and chat template), so that engines with the same model share them."""

import asyncio
from collections.abc import Callable

from ullage.inference.v1 import inference_pb2
from ullage_router.tokenizer.model import Model, fingerprint, load_model

MAX_IDLE_MODELS = 2
"""Maximum number of models kept while no engine uses them.

An unused model, such as a former canary's, may be needed again later.
"""


class ModelCache:
    """Caches loaded models by fingerprint, including a few that no engine uses any more.

    Args:
        trusts_special_tokens: whether special tokens that are spelled out in client text are
            encoded as such.
        reasoning: name of the models' format of reasoning, "auto" or "off" (`load_model`).
        in_use: returns the fingerprints of the models that engines use.
    """

    def __init__(
        self, trusts_special_tokens: bool, reasoning: str, in_use: Callable[[], set[str]]
    ) -> None:
        self._trusts_special_tokens = trusts_special_tokens
        self._reasoning = reasoning
        self._in_use = in_use
        self._models: dict[str, Model] = {}
        """Models by fingerprint, least recently used first."""
        self._loading = asyncio.Lock()

    async def load(self, described: inference_pb2.GetModelResponse) -> Model:
        """Return the model that an engine described, building it if it is not cached.

        Raises:
            ValueError: the model cannot be used.
        """
        key = fingerprint(described)
        async with self._loading:  # engines with one model start at the same time
            model = self._models.pop(key, None)
            if model is None:
                model = await asyncio.to_thread(
                    load_model, described, self._trusts_special_tokens, self._reasoning
                )
            self._models[key] = model
            self._remove_idle()
        return model

    def _remove_idle(self) -> None:
        in_use = self._in_use()
        idle = [key for key in self._models if key not in in_use]
        for key in idle[:-MAX_IDLE_MODELS]:
            del self._models[key]
