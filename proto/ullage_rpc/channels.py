"""Options of every gRPC channel and server, in one place so that both ends agree."""

import grpc

from ullage_rpc.guard import RequestGuard

# A tokenizer.json with a 200k vocabulary is about 30 MB; prompts and tokens are far smaller.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# gRPC reads as much before anybody looks at a key. Its own refusal has no details; RequestGuard's
# has, so what is a little too long must reach it.
MAX_RECEIVED_BYTES = 16 * 1024 * 1024
KEEPALIVE_MS = 20_000

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # A restarted engine must be found again at once, not after gRPC's default of up to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time that one attempt has, which a busy machine needs; it delays no other.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
)

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_RECEIVED_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Without this a server answers keepalive pings more frequent than 5 minutes with GOAWAY.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
)


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.aio.Channel:
    """A channel to `host:port`; it connects lazily and reconnects by itself.

    Args:
        credentials: None for plaintext.
        server_name: that the server's certificate must have, whatever the target is called.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return grpc.aio.secure_channel(target, credentials, options=(*CHANNEL_OPTIONS, *named))


def bind(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """The port that a server listens on from its start.

    Raises:
        RuntimeError: it cannot listen there.
    """
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def new_server(is_shared: bool = False) -> grpc.aio.Server:
    """A server with no service and no port yet; it refuses requests that it cannot read.

    Args:
        is_shared: other processes of the same user may listen on its port too.
    """
    options = (*SERVER_OPTIONS, ("grpc.so_reuseport", int(is_shared)))
    return grpc.aio.server(options=options, interceptors=(RequestGuard(),))
