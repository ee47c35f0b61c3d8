"""The sizes and constants of a model, which are known before any tensor is read."""

from typing import Literal

import msgspec


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The types of mixer and feed-forward in one layer."""

    mixer: Literal["attention", "conv"] = "attention"
    """Kind of the mixer: attention, or LFM2's gated short convolution."""
    window: int = 0
    """Length of the sliding window in tokens, including the token itself, or 0 for all tokens."""
    feed_forward: Literal["dense", "experts"] = "dense"


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a mixture-of-experts layer and how a token chooses among them."""

    num_experts: int
    experts_per_token: int
    intermediate: int
    """Width of one expert."""
    scoring: Literal["sigmoid", "softmax"]
    """Function that turns router logits into expert scores.

    LFM2 chooses experts by sigmoid + bias, and weights them by the sigmoids alone. gpt-oss chooses
    experts by the logits, and weights them by a softmax over the chosen experts.
    """
    is_normalised: bool = True
    """Whether the sigmoids of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor by which every expert weight is multiplied."""
    is_biased: bool = False
    """Whether experts have biases."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and constants of a model, or of the part of it that one rank computes.

    `ullage_engine.model_config.registry` creates this object, and the header of prepared weights
    stores it.
    """

    architecture: str
    """Name of the architecture, one of `ullage_engine.model_config.registry`."""
    layers: tuple[LayerSpec, ...]
    first_layer: int = 0
    """Index of the first of `layers` in the whole model."""
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a head, from the model's configuration or as hidden / num_heads."""
    intermediate: int
    """Width of a dense feed-forward layer."""
    vocab: int
    max_position: int
    """Maximum sequence length that the model supports, in tokens."""
    rope_theta: float
    rope_factors: list[float] | None = None
    """The head_dim / 2 divisors of the rotary frequencies, if positions are rescaled."""
    rope_scale: float = 1.0
    """Factor by which cosine and sine are multiplied, such as YaRN's attention factor."""
    rms_eps: float
    tied: bool
    """Whether the output projection shares the embedding's weights."""
    has_qk_norm: bool = False
    """Whether the heads of queries and keys are normalised before the rotary embedding."""
    has_attention_bias: bool = False
    """Whether all four projections of attention add a bias."""
    has_sinks: bool = False
    """Whether each query head has a learned logit that takes a share of the softmax."""
    conv_kernel: int = 0
    """Number of taps of the short convolutions, including the token's own, or 0 without them."""
    conv_channels: int = 0
    """Number of convolution channels on this rank: `hidden`, or this rank's share of `hidden`."""
    experts: ExpertsSpec | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_attention_layers(self) -> int:
        return sum(layer.mixer == "attention" for layer in self.layers)

    @property
    def num_conv_layers(self) -> int:
        return sum(layer.mixer == "conv" for layer in self.layers)

    @property
    def group_size(self) -> int:
        """Number of query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_shape(self) -> tuple[int, int, int]:
        """Number of KV heads, number of query heads per KV head, and width of a head."""
        return self.num_kv_heads, self.group_size, self.head_dim

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the size in bytes of one token's keys and values in all attention layers."""
        return self.num_attention_layers * 2 * self.num_kv_heads * self.head_dim * itemsize

    @property
    def window(self) -> int:
        """Longest sliding window in tokens, if only some layers have a sliding window.

        The result is 0 if no layer has a window, or every layer has one.
        """
        windows = [layer.window for layer in self.layers if layer.mixer == "attention"]
        return max(windows, default=0) if 0 in windows else 0

    @property
    def num_window_layers(self) -> int:
        return sum(layer.mixer == "attention" and layer.window > 0 for layer in self.layers)

    def page_bytes_per_token(self, itemsize: int, *, windowed: bool) -> int:
        """Return the number of bytes per token in a block.

        With `windowed`, layers with sliding windows have separate blocks. A block then has as many
        layers as the larger of the two groups. Otherwise a block has all attention layers.
        """
        whole = self.kv_bytes_per_token(itemsize)
        if not windowed:
            return whole
        layers = max(self.num_window_layers, self.num_attention_layers - self.num_window_layers)
        return whole // max(1, self.num_attention_layers) * layers

    def state_bytes(self, itemsize: int) -> int:
        """Return the size in bytes of one convolution state: kernel - 1 columns of every layer."""
        columns = max(0, self.conv_kernel - 1)
        return self.num_conv_layers * columns * self.conv_channels * itemsize

    @property
    def replay_tokens(self) -> int:
        """Number of tokens to recompute from the zero state to restore a convolution state.

        Each layer's columns depend on kernel - 1 more tokens of the layer below.
        """
        return self.num_conv_layers * max(0, self.conv_kernel - 1)


def contradiction(model_config: ModelConfig) -> str | None:
    """Return a message that explains how these sizes contradict each other, or None."""
    experts = model_config.experts
    sizes = {
        "number of layers": model_config.num_layers,
        "hidden size": model_config.hidden,
        "number of heads": model_config.num_heads,
        "number of KV heads": model_config.num_kv_heads,
        "head size": model_config.head_dim,
        "feed-forward width": model_config.intermediate,
        "vocabulary": model_config.vocab,
        "longest sequence": model_config.max_position,
        "taps of a convolution": model_config.conv_kernel if model_config.num_conv_layers else 1,
        "number of experts": experts.num_experts if experts else 1,
        "width of an expert": experts.intermediate if experts else 1,
        "experts of a token": experts.experts_per_token if experts else 1,
    }
    for name, size in sizes.items():
        if size < 1:
            return f"the {name} is {size}, not at least 1"

    if model_config.num_heads % model_config.num_kv_heads:
        heads = model_config.num_heads
        kv_heads = model_config.num_kv_heads
        return f"{heads} heads cannot share {kv_heads} KV heads evenly"
    if model_config.head_dim % 2:
        return f"the head size is {model_config.head_dim}, whose halves cannot be rotated"
    if experts and experts.experts_per_token > experts.num_experts:
        return f"a token takes {experts.experts_per_token} experts of {experts.num_experts}"
    return None
