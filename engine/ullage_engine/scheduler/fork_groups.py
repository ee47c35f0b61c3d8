"""Groups the samples of a prompt, so that only one of them computes their common prefix."""

from ullage_engine.scheduler.sequence import Sequence


class ForkGroups:
    """Groups samples of the same prompt. One of them, the parent, computes the common prefix.

    The other samples are its children. They wait until the parent has computed the common prefix,
    and then fork from it. If the parent is removed before that, the most important child takes its
    place.
    """

    def __init__(self) -> None:
        self._children: dict[Sequence, list[Sequence]] = {}

    def __bool__(self) -> bool:
        return bool(self._children)

    def form(self, parent: Sequence, children: list[Sequence], num_shared_tokens: int) -> None:
        """Make `children` wait for the parent to compute its first `num_shared_tokens` tokens."""
        parent.fork.has_children = bool(children)
        for child in children:
            child.fork.parent = parent
            child.fork.num_shared_tokens = num_shared_tokens
        if children:
            self._children[parent] = children

    def children(self, parent: Sequence) -> list[Sequence]:
        """Return the sequences that are waiting for this parent, most important first."""
        return list(self._children.get(parent, ()))

    def take_ready(self, parent: Sequence) -> list[Sequence]:
        """Remove and return the children that can fork from the parent now.

        From then on, these children no longer depend on the parent.
        """
        ready = self._children.get(parent)
        if not ready or parent.num_computed < ready[0].fork.num_shared_tokens:
            return []

        del self._children[parent]
        parent.fork.has_children = False
        for child in ready:
            child.fork.parent = None
        return ready

    def remove(self, sequence: Sequence) -> list[Sequence]:
        """Remove a sequence from its group.

        Returns:
            The children that were waiting for this sequence. The first one becomes the parent of
            the others.
        """
        if sequence.fork.parent:
            self._detach(sequence, sequence.fork.parent)

        orphans = self._children.pop(sequence, [])
        if orphans:
            new_parent, *others = orphans
            new_parent.fork.parent = None
            self.form(new_parent, others, new_parent.fork.num_shared_tokens)
        return orphans

    def _detach(self, child: Sequence, parent: Sequence) -> None:
        remaining = [each for each in self._children[parent] if each is not child]
        child.fork.parent = None
        parent.fork.has_children = bool(remaining)
        if remaining:
            self._children[parent] = remaining
        else:
            del self._children[parent]
