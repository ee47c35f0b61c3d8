"""Model sizes and constants, which are all known before any tensor is read."""

from typing import Literal

import msgspec


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The types of the mixer (attention or convolution) and the feed-forward part of one layer."""

    mixer: Literal["attention", "conv"] = "attention"
    """Type of the mixer: attention, or LFM2's gated short convolution."""
    window: int = 0
    """Length of the sliding window in tokens, including the token itself, or 0 if unlimited."""
    feed_forward: Literal["dense", "experts"] = "dense"


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a mixture-of-experts layer, and how tokens are routed to them."""

    num_experts: int
    experts_per_token: int
    intermediate: int
    """Width of one expert's hidden layer."""
    scoring: Literal["sigmoid", "softmax"]
    """Function that turns router logits into expert scores.

    LFM2 selects experts by sigmoid + bias, and weights them by the sigmoids alone. gpt-oss selects
    experts by their logits, and weights them by a softmax over the selected experts.
    """
    is_normalised: bool = True
    """Whether the sigmoids of the selected experts are divided by their sum."""
    scale: float = 1.0
    """Factor by which every expert's routing weight is multiplied."""
    is_biased: bool = False
    """Whether the experts' projections have biases."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and constants of a model, or of the part that one rank computes.

    `ullage_engine.model_config.registry` creates this object, and it is stored in the header of
    prepared weights.
    """

    architecture: str
    """Name of the architecture, one of those in `ullage_engine.model_config.registry`."""
    layers: tuple[LayerSpec, ...]
    first_layer: int = 0
    """Index within the whole model of the first layer in `layers`."""
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of an attention head. The default is hidden / num_heads."""
    intermediate: int
    """Width of a dense feed-forward layer."""
    vocab: int
    max_position: int
    """Maximum sequence length that the model supports, in tokens."""
    rope_theta: float
    rope_factors: list[float] | None = None
    """Divisors of the head_dim / 2 rotary frequencies, or None without position scaling."""
    rope_scale: float = 1.0
    """Factor by which cosine and sine are multiplied, such as YaRN's attention factor."""
    rms_eps: float
    tied: bool
    """Whether the output projection shares the embedding's weights."""
    has_qk_norm: bool = False
    """Whether query and key heads are normalised before the rotary embedding."""
    has_attention_bias: bool = False
    """Whether all four attention projections have a bias."""
    has_sinks: bool = False
    """Whether each query head has an attention sink, a learned extra logit in the softmax."""
    conv_kernel: int = 0
    """Kernel size of the short convolutions in tokens, including the current one, or 0 if none."""
    conv_channels: int = 0
    """Number of convolution channels on this rank: all `hidden` channels, or this rank's slice."""
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
        """Return the size in bytes of one token's keys and values over all attention layers."""
        return self.num_attention_layers * 2 * self.num_kv_heads * self.head_dim * itemsize

    @property
    def window(self) -> int:
        """Longest sliding window in tokens if only some attention layers have one, otherwise 0.

        Attention layers without a sliding window attend to all tokens.
        """
        windows = [layer.window for layer in self.layers if layer.mixer == "attention"]
        return max(windows, default=0) if 0 in windows else 0

    @property
    def num_window_layers(self) -> int:
        return sum(layer.mixer == "attention" and layer.window > 0 for layer in self.layers)

    def page_bytes_per_token(self, itemsize: int, *, windowed: bool) -> int:
        """Return how many bytes one token takes up in a KV block.

        With `windowed`, layers with and without sliding windows use separate blocks of equal size,
        each with room for the larger of the two groups. Otherwise a block covers all attention
        layers.
        """
        whole = self.kv_bytes_per_token(itemsize)
        if not windowed:
            return whole
        layers = max(self.num_window_layers, self.num_attention_layers - self.num_window_layers)
        return whole // max(1, self.num_attention_layers) * layers

    def state_bytes(self, itemsize: int) -> int:
        """Return the size in bytes of one convolution state, which covers all convolution layers.

        Each of these layers stores kernel - 1 columns.
        """
        columns = max(0, self.conv_kernel - 1)
        return self.num_conv_layers * columns * self.conv_channels * itemsize

    @property
    def replay_tokens(self) -> int:
        """Number of tokens to recompute from a zero state in order to restore a convolution state.

        Each layer's state depends on kernel - 1 additional tokens of the layer below.
        """
        return self.num_conv_layers * max(0, self.conv_kernel - 1)


def contradiction(model_config: ModelConfig) -> str | None:
    """Return an error message if model sizes are invalid or contradictory, otherwise None."""
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
