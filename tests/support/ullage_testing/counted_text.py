"""A text that counts the characters that are copied to put it behind others."""


class CountedText(str):
    """A text.

    Attributes:
        num_copied: Number of characters before texts of this class, copied to join both.
    """

    num_copied = 0

    def __radd__(self, before: str) -> str:
        CountedText.num_copied += len(before)
        return "".join((before, self))
