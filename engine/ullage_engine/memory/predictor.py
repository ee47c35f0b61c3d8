"""What a request's memory costs: arithmetic on the model's published profile.

Admission, promises and allocation count blocks with `expected_length` and `sample_blocks`, so a
price and a bill cannot differ. The router computes the same from the profile it gets over the wire
(`ullage_router.predict`; a test compares them).

Cache groups. All groups share one block table today, so a block holds the KV of its tokens in every
group and is held until the sequence ends: each group is priced as growing, window or not, because
that is what is allocated. `group_blocks` is what a group needs with a table of its own, and
`Demand.unread_bytes` the difference. For gpt-oss-20b (half of its 48 KiB a token in layers with a
window of 128) a sequence of 8,192 tokens in chunks of 512 is priced 384 MiB and needs 207 MiB.

Convolution states are of a fixed size and there are never more than `state_slots` of them, so the
ledger reserves them all before serving starts. A request is told their bytes and not charged them.
"""

from dataclasses import dataclass

from ullage_engine.core.request import EngineRequest
from ullage_engine.messages import CacheGroupSpec, Profile


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Of a request, all that its memory depends on; tokens."""

    prompt_tokens: int
    output_tokens: int = 0
    """Of each sample."""
    prefix_tokens: int = 0
    """First tokens of the prompt whose KV is there already."""
    samples: int = 1
    """Answers to the prompt."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes of one request at its longest."""

    num_blocks: int
    """Blocks it takes from the pool."""
    kv_bytes: int
    """Of these blocks, on all ranks together."""
    rank_kv_bytes: int
    """The same on the rank that holds most."""
    state_bytes: int
    """Of its samples' convolution states, in the state pool."""
    rank_state_bytes: int
    """The same on the rank that holds most."""
    activation_bytes: int
    """Of its largest chunk, in the step arena."""
    sampler_bytes: int
    """Of its samples' rows, in the sampler arena."""
    unread_bytes: int
    """At least so much of `kv_bytes` has slid out of its group's window when the request ends."""

    @property
    def total(self) -> int:
        """What admission charges: blocks. The arenas are reserved for the largest step and the
        state pool for the fullest batch before serving starts, so activations, sampler rows and
        states cost a request nothing more."""
        return self.kv_bytes


def demand(profile: Profile, shape: RequestShape) -> Demand:
    """Prices a request, as admission does sample by sample with the same `sample_blocks`.

    Whole blocks are shared, with the prefix cache and among samples. The prompt's last token is
    not: every sample computes it, for what follows it.
    """
    length = shape.prompt_tokens + shape.output_tokens
    sharable = max(0, shape.prompt_tokens - 1)
    hit = min(shape.prefix_tokens, sharable) // profile.block_tokens
    leads = shape.samples > 1 and sharable > 0
    first = sample_blocks(profile.block_tokens, length, leads=leads)
    others = sample_blocks(profile.block_tokens, length, shared_tokens=sharable)
    blocks = first + (shape.samples - 1) * others - hit
    computed = shape.prompt_tokens - hit * profile.block_tokens
    chunk = min(profile.prefill_chunk_tokens, computed)
    return Demand(
        num_blocks=blocks,
        kv_bytes=blocks * block_bytes(profile),
        rank_kv_bytes=blocks * rank_block_bytes(profile),
        state_bytes=shape.samples * profile.state_bytes_per_sequence,
        rank_state_bytes=shape.samples * rank_state_bytes(profile),
        activation_bytes=max(chunk, shape.samples) * profile.activation_bytes_per_token,
        sampler_bytes=shape.samples * profile.sampler_bytes_per_sequence,
        unread_bytes=sum(
            max(0, blocks - shape.samples * group_blocks(profile, group, length, chunk))
            * (profile.block_tokens * group.bytes_per_token)
            for group in profile.groups
        ),
    )


def sample_blocks(
    block_tokens: int, num_tokens: int, *, shared_tokens: int = 0, leads: bool = False
) -> int:
    """Blocks that one sample of `num_tokens` tokens takes.

    The whole blocks of the `shared_tokens` that it begins with are its leader's. Samples write to
    copies of the block in which they part, and until the last has its own the original is one block
    more, which the leader is charged.
    """
    return -(-num_tokens // block_tokens) - shared_tokens // block_tokens + leads


def longest_sequence(profile: Profile, max_model_len: int) -> int:
    """Tokens of the longest sequence that the model and the pool hold."""
    return min(max_model_len, profile.kv_pool_bytes // block_bytes(profile) * profile.block_tokens)


def num_blocks(profile: Profile, num_tokens: int) -> int:
    """Blocks that hold the KV of `num_tokens` tokens."""
    return -(-num_tokens // profile.block_tokens)


def block_bytes(profile: Profile) -> int:
    """Bytes of one block over all cache groups and ranks."""
    return profile.block_tokens * sum(group.bytes_per_token for group in profile.groups)


def rank_block_bytes(profile: Profile) -> int:
    """Bytes of one block on the rank that holds most of it."""
    shares = (-(-group.bytes_per_token // group.num_ranks) for group in profile.groups)
    return profile.block_tokens * sum(shares)


def rank_state_bytes(profile: Profile) -> int:
    """Bytes of one sequence's state on the rank that holds most of it."""
    return -(-profile.state_bytes_per_sequence // profile.state_ranks)


def group_blocks(
    profile: Profile, group: CacheGroupSpec, num_tokens: int, chunk_tokens: int
) -> int:
    """Blocks that a group needs of a sequence that is computed in chunks of `chunk_tokens`.

    A window of w tokens counts the token itself, so w - 1 earlier ones are read, and a chunk's own
    tokens are all stored before the first of them slides out; one block more, because both ends of
    a window may lie inside a block.
    """
    if not group.window_tokens:
        return num_blocks(profile, num_tokens)
    reach = group.window_tokens - 1 + chunk_tokens
    capped = num_blocks(profile, min(reach, num_tokens)) + 1
    return min(capped, num_blocks(profile, num_tokens))


def state_slots(max_sequences: int) -> int:
    """Slots of convolution states: the one that a sequence's step reads and the one it writes."""
    return 2 * max_sequences


def state_pool_bytes(state_bytes: int, max_sequences: int) -> int:
    """What a device reserves for states; `state_bytes`: of one sequence on that device."""
    return state_slots(max_sequences) * state_bytes


def expected_length(request: EngineRequest, expected_output: int, limit: int) -> int:
    """Tokens a request is charged for: its prompt and the output it is expected to produce.

    Output it already has counts, and one token more that it is going to produce. Never above
    `limit`, the longest sequence this engine can hold.
    """
    produced = len(request.token_ids) - request.num_prompt_tokens
    output = min(request.max_tokens, max(expected_output, produced + 1))
    return min(limit, request.num_prompt_tokens + output)
