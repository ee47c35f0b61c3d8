"""The part of the configuration about tickets."""

from typing import Annotated

import msgspec

from ullage_rpc.config import Strict


class TicketsSection(Strict, frozen=True, kw_only=True):
    """Leave for clients to send requests straight to engines."""

    keys_dir: Annotated[str, msgspec.Meta(min_length=1)]
    """Folder with one key a file; the last by name signs."""
    ttl: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """How long a ticket that is not used holds its memory."""
    required: bool = False
    """Engines take nothing without a ticket, so what this router sends has one too."""
