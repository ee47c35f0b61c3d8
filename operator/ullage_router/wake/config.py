"""How requests for a pool that sleeps are held."""

from typing import Annotated

import msgspec

from ullage_rpc.config import Strict


class WakeSection(Strict, frozen=True, kw_only=True):
    max_requests: Annotated[int, msgspec.Meta(ge=0)] = 256
    """Most that are held at once."""
    max_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 << 20
    """Most memory of this process that they hold."""
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    """Longest that one is held, beside its own time limit."""
