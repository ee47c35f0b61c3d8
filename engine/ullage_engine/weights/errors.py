"""The one error of loading weights."""


class WeightsError(Exception):
    """The weights cannot be used; one line naming the file or tensor, what is wrong, what to do."""
