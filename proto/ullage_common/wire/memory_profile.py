"""Converts a model's memory profile to and from its protobuf message."""

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.request_cost import CacheGroup, MemoryProfile


def to_wire(profile: MemoryProfile) -> pb.MemoryProfile:
    """Convert a memory profile to the message that an engine sends."""
    return pb.MemoryProfile(
        block_tokens=profile.block_tokens,
        groups=[
            pb.CacheGroup(
                bytes_per_token=group.bytes_per_token,
                window_tokens=group.window_tokens,
                state_blocks=group.state_blocks,
            )
            for group in profile.groups
        ],
        state_bytes_per_sequence=profile.state_bytes_per_sequence,
        activation_bytes_per_token=profile.activation_bytes_per_token,
        sampler_bytes_per_sequence=profile.sampler_bytes_per_sequence,
        prefill_chunk_tokens=profile.prefill_chunk_tokens,
        kv_pool_bytes=profile.kv_pool_bytes,
        session_kv_bytes=profile.session_kv_bytes,
        computes_shared_block=not profile.copies_shared_block,
        decode_tokens=profile.decode_tokens,
    )


def from_wire(wire: pb.MemoryProfile) -> MemoryProfile:
    """Convert a message from an engine to a memory profile."""
    return MemoryProfile(
        block_tokens=max(1, wire.block_tokens),
        groups=tuple(
            CacheGroup(each.bytes_per_token, each.window_tokens, each.state_blocks)
            for each in wire.groups
        ),
        state_bytes_per_sequence=wire.state_bytes_per_sequence,
        activation_bytes_per_token=wire.activation_bytes_per_token,
        sampler_bytes_per_sequence=wire.sampler_bytes_per_sequence,
        prefill_chunk_tokens=wire.prefill_chunk_tokens,
        kv_pool_bytes=wire.kv_pool_bytes,
        session_kv_bytes=wire.session_kv_bytes,
        copies_shared_block=not wire.computes_shared_block,
        decode_tokens=wire.decode_tokens,
    )
