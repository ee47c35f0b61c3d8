"""What must be known of a model before any tensor of it is touched."""

import msgspec


class ModelGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and constants of a Llama-family model.

    Made by the readers in `ullage_engine.weights`, stored in the prepared weights' header, and read
    by everything that sizes or computes.
    """

    architecture: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Explicit in the model's configuration, or hidden / num_heads."""
    intermediate: int
    vocab: int
    max_position: int
    """Longest sequence the model was made for, tokens."""
    rope_theta: float
    rope_factors: list[float] | None = None
    """Divisors of the rotary frequencies, head_dim / 2 of them, where positions are rescaled."""
    rms_eps: float
    tied: bool
    """The output projection is the embedding."""
    eos_token_ids: list[int]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * itemsize
