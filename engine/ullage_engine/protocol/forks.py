"""Messages between the server and its fork server, each one packet on a Unix socket."""

import msgspec

MAX_PACKET_BYTES = 1 << 16
"""Maximum size of a message in bytes. The longest is a command line with its paths."""


class ForkMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base class of all messages."""


class ForkWorker(ForkMessage, frozen=True):
    """Command from the server to fork a worker."""

    program: list[str]
    """Beginning of the command line, which the process shows as its own."""
    options: list[str]
    """The rest of the command line."""


class LoadVocabulary(ForkMessage, frozen=True):
    """Command from the server to build the vocabulary for grammars, which later workers inherit."""

    source: str
    """The model's source, as configured."""
    vocab_size: int


class WorkerForked(ForkMessage, frozen=True):
    """Answer to `ForkWorker`. The worker's pidfd is attached to the packet."""

    pid: int


class WorkerExited(ForkMessage, frozen=True):
    """Report that a worker has exited."""

    pid: int
    status: int
    """The exit status, negative if a signal killed the worker."""


ToForkServer = ForkWorker | LoadVocabulary
FromForkServer = WorkerForked | WorkerExited
