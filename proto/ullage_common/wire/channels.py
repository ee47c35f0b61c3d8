"""gRPC channels to engines, routers and peers, with options that match those of the servers.

Servers use the same size limits and keepalive settings (see `servers.py`), so that both ends agree.
"""

import grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Maximum size in bytes of a message from a server.

A tokenizer.json with a 200k vocabulary is about 30 MB. Prompts and tokens are far smaller.
"""
KEEPALIVE_MS = 20_000
"""Milliseconds between two keepalive pings."""

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # A restarted engine must be found again at once, not after gRPC's default of up to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This is also the timeout of one attempt: a busy machine needs it. It delays no other attempt.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
)


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.aio.Channel:
    """Open an asyncio channel to `host:port`. It connects lazily and reconnects automatically.

    Args:
        credentials: TLS credentials, or None for plaintext.
        server_name: expected name in the server's certificate (empty for the target's host).
    """
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=_named(server_name))


def open_blocking_channel(
    target: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.Channel:
    """Open a synchronous channel with the same options as `open_channel`."""
    if credentials is None:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(target, credentials, options=_named(server_name))


def _named(server_name: str) -> tuple[tuple[str, int | str], ...]:
    named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return (*CHANNEL_OPTIONS, *named)
