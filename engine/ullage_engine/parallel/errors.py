"""What goes wrong between ranks.

LayoutError       the model cannot be shared out as asked (in `ullage_engine.parallel.layout`)
RankFailedError   another rank has said why it cannot serve
GroupLostError    another rank is gone
"""


class RankFailedError(Exception):
    """Another rank cannot serve; one line with its rank and its reason."""


class GroupLostError(RuntimeError):
    """Another rank is gone, or out of step with this one; only a new group helps."""
