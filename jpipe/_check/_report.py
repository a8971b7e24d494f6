"""What `Pipeline.check` found."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from ..schedules._units import columns
from ._compare import Difference

_COMPARED = ("outputs", "state", "gradients")


@dataclass(frozen=True)
class CheckResult:
    """What was found of a layer, or of the loss.

    Attributes:
      name: what to call it.
      differences: where it gives something else in micro-batches than at once.
      compared: which were, of ``"outputs"``, ``"state"`` and ``"gradients"``.
      notes: further remarks on it.
      advice: what to type where it differs.
    """

    name: str
    differences: tuple[Difference, ...] = ()
    compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    advice: str = ""

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def row(self) -> list[str]:
        """As a row of a table."""
        differ = {one.what.split()[0].split("[")[0] for one in self.differences}
        marks = [
            "DIFFER" if what in differ else "same" if what in self.compared else "-"
            for what in _COMPARED
        ]
        return [
            self.name,
            *marks,
            "; ".join([*map(str, self.differences), *self.notes]),
        ]


@dataclass(frozen=True)
class CheckReport:
    """What `Pipeline.check` found; prints as a table, and is true if nothing differs.

    Attributes:
      microbatch_sizes: how many examples each micro-batch had.
      layers: one entry for each layer.
      loss: that of the loss; ``None`` if none was given.
    """

    microbatch_sizes: tuple[int, ...]
    layers: tuple[CheckResult, ...]
    loss: CheckResult | None = None

    @property
    def is_same(self) -> bool:
        """Whether micro-batches give what all examples give at once."""
        return all(one.is_same for one in (*self.layers, self.loss) if one is not None)

    def __bool__(self) -> bool:
        return self.is_same

    def __str__(self) -> str:
        found = [one for one in (*self.layers, self.loss) if one is not None]
        rows = [["", *_COMPARED, ""], *(one.row() for one in found)]
        return f"{self._title()}:\n{columns(rows, left=range(5))}"

    def raise_if_different(self, accept: Container[int] = ()) -> None:
        """Raises where micro-batches give something else.

        Args:
          accept: the numbers of layers of which that is meant.

        Raises:
          ValueError: with the first difference, and what to type.
        """
        numbered = [*enumerate(self.layers), (-1, self.loss)]
        for number, one in numbered:
            if one is not None and one.differences and number not in accept:
                raise ValueError(
                    f"{one.name}: {one.differences[0]} ({self._title()}); {one.advice}"
                )

    def _title(self) -> str:
        sizes = " and ".join(map(str, self.microbatch_sizes))
        count = sum(self.microbatch_sizes)
        return f"{count} examples at once, and in micro-batches of {sizes}"


def check_microbatch_sizes(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Checks how many examples each micro-batch is to have.

    Raises:
      ValueError: if there are not two of them, or other examples in all.
    """
    if len(sizes) < 2 or min(sizes) < 1 or sum(sizes) != count:
        raise ValueError(
            f"microbatch_sizes={tuple(sizes)}: needs the numbers of examples in two "
            f"micro-batches or more, together the {count} of the batch"
        )
    return tuple(sizes)
