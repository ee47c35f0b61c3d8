"""Groups of samples of one prompt, in which one sample computes the shared tokens for all."""

from ullage_engine.scheduler.sequence import Sequence


class ForkGroups:
    """Groups of samples of one prompt. Children fork from a parent that computes shared tokens.

    A child waits until its parent has computed the shared tokens. If the parent is removed earlier,
    the most important child replaces it.
    """

    def __init__(self) -> None:
        self._children: dict[Sequence, list[Sequence]] = {}

    def __bool__(self) -> bool:
        return bool(self._children)

    def form(self, parent: Sequence, children: list[Sequence], num_shared_tokens: int) -> None:
        """Make `children` wait until the parent has computed its first `num_shared_tokens`."""
        parent.fork.has_children = bool(children)
        for child in children:
            child.fork.parent = parent
            child.fork.num_shared_tokens = num_shared_tokens
        if children:
            self._children[parent] = children

    def children(self, parent: Sequence) -> list[Sequence]:
        """Return the sequences that wait for this parent, the most important first."""
        return list(self._children.get(parent, ()))

    def take_ready(self, parent: Sequence) -> list[Sequence]:
        """Release and return the children that can fork from the parent now.

        Released children no longer depend on the parent.
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
            The children that lose this sequence as their parent. The first child becomes the new
            parent of the others.
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
