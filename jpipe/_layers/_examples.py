"""What layers do with several examples, which micro-batches do with fewer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._mixing._made import MOVED, SAME, WHOLE, Made
from .._mixing._pairs import Numbers
from . import _nnx_kinds
from ._followed import Following, Outcome, two, whole
from ._walk import Visit

Path = tuple[Any, ...]


class Examples:
    """The layers, and what they do with the examples of a micro-batch.

    Args:
      visits: the layers, as they were met.
      sizes: how many each micro-batch has; none has more than the first.
      follow: follows the layers with such numbers of examples.

    Attributes:
      fixed: the number of the first layer that takes no other number of examples, or
        is another with it; ``None`` if none is.
      outputs: what the last layer returns; ``None`` where one is.
    """

    def __init__(
        self,
        visits: Sequence[Visit],
        sizes: Sequence[int],
        follow: Callable[[Numbers], Following],
    ) -> None:
        self.visits = visits
        self.size = sizes[0]
        both, numbers = follow(two(sizes)), whole(sizes)
        self._outcomes = both.outcomes
        if numbers and not all(outcome.followed for outcome in self._outcomes):
            other = follow(numbers)
            outcomes = other.outcomes
            if other.failed < both.failed:
                both, self._outcomes = other, outcomes
            else:  # what a table as long as the mini-batch does, say
                pairs = zip(self._outcomes, outcomes, strict=True)
                self._outcomes = [_either(*pair) for pair in pairs]
        known = [outcome.followed for outcome in self._outcomes]
        self.fixed = None if all(known) else known.index(False)
        self.outputs = None if both.failed else both.outputs
        # Of one number alone only what holds single examples is known.
        self._alone = follow(Numbers(1, self.size))

    def holding(self, number: int) -> set[Path]:
        """The paths of what holds values of single examples, where a layer writes it.

        Args:
          number: that of the layer.
        """
        outcome = self._outcomes[number]
        if not outcome.followed:
            outcome = self._alone.layer(number)
        return {path for path, made in outcome.written.items() if made.single}

    @property
    def moved(self) -> bool:
        """Whether the model returns examples in the places of others.

        A loss is followed through it, and is given targets in their own.
        """
        return any(outcome.moved for outcome in self._outcomes)

    def mixed(self, written: Mapping[int, Mapping[Path, bool]] | None) -> list[str]:
        """What layers do that micro-batches make another number of.

        Args:
          written: of each layer the paths of what training writes; ``None`` where
            there is no loss, and what the model returns is put together.
        """
        found = []
        for number, outcome in enumerate(self._outcomes):
            moved = MOVED if outcome.moved and written is None else ""
            told = [why] if (why := outcome.mixes or moved) else []
            for path in (written or {}).get(number, ()):
                if path in outcome.written and (why := _amiss(outcome.written[path])):
                    told.append(f"writes {_called(path)}, which {why}")
            if told:
                name = self.visits[number].layer.name
                found.append(f"layer {number} ({name}) {'; '.join(told)}")
        return found


def _either(one: Outcome, other: Outcome) -> Outcome:
    """What a layer does; where nobody knows, what it does with other numbers."""
    is_known = one.followed or one.mixes
    return one if is_known else one._replace(mixes=other.mixes)


def _amiss(made: Made) -> str:
    """Why what a layer writes is not the mean of what micro-batches make of it."""
    if made.kind == WHOLE and made.degree not in (0, None):
        return "is a sum over the examples"
    if made.kind == SAME and made.drawn:
        return "is drawn anew for each micro-batch, and kept is the mean of all"
    return made.why


def _called(path: Path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check(many: Examples, number: int, written: Mapping[Path, bool]) -> None:
    """Checks what training writes of a layer: a pipeline keeps the mean of it.

    Args:
      many: all layers.
      number: the number of the layer.
      written: the paths in its variables of what training writes, and whether it
        writes only some places.

    Raises:
      ValueError: with what holds single examples, or is such as a queue.
    """
    visit, size = many.visits[number], many.size
    _check_metrics(visit, number, written)
    holding = many.holding(number) if written else set()
    faults = [
        f"{_called(path)}, "
        + (
            f"which holds single ones of the {size} examples"
            if path in holding
            else "of which it replaces places that it chooses, as of a table"
        )
        for path, partly in written.items()
        if partly or path in holding
    ]
    if faults:
        fixed = many.fixed
        told = "" if fixed is None or number < fixed else _told(many, fixed)
        raise ValueError(
            f"layer {number} ({visit.layer.name}) writes what no mean of micro-batches "
            f"is, and a pipeline keeps the mean of what they write, of integers what "
            f"the last did: {'; '.join(faults)}; take it in as a part of the input and "
            f"return what it needs beside the loss (has_aux=True, aux_axes=0), or take "
            f"num_microbatches=1{told}"
        )


def _told(many: Examples, number: int) -> str:
    """What to do where all that is as long as a micro-batch counts as examples."""
    return (
        f"; or is it none of single ones? Layer {number} "
        f"({many.visits[number].layer.name}) takes no other number of examples than "
        f"{many.size}, so each axis that is as long, or a multiple of it, counts as "
        f"one of examples: let it take any number, as by a reshape to -1"
    )


def check_draws(visit: Visit, number: int, paths: Sequence[Path]) -> None:
    """Refuses counters by which a layer draws random numbers.

    Raises:
      ValueError: with them: each micro-batch finds them as they were before the step.
    """
    raise ValueError(
        f"layer {number} ({visit.layer.name}) draws random numbers by what it counts, "
        f"{', '.join(map(_called, paths))}: all micro-batches of a step would draw the "
        f"same; draw from a stream (nnx.Rngs, or make_rng of linen), which a pipeline "
        f"gives each micro-batch of its own, or take num_microbatches=1"
    )


def _check_metrics(visit: Visit, number: int, written: Mapping[Path, bool]) -> None:
    """Checks that no state of a metric is among what training writes.

    Raises:
      ValueError: if one is: it is a sum and a count, of which there is no mean.
    """
    metrics = _nnx_kinds.metrics(visit.layer.owner)
    if found := sorted(metrics.intersection(map(_called, written))):
        raise ValueError(
            f"layer {number} ({visit.layer.name}) updates a metric of nnx: "
            f"{', '.join(found)}; a pipeline keeps the mean of what micro-batches "
            f"write, and sums and counts have none: return what is measured beside the "
            f"loss (has_aux=True) and update the metric with it, or take "
            f"num_microbatches=1"
        )
