"""The report of a check: a table, and an error with the first difference."""

import numbers
import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from .._arguments._wrong_call import describe_argument
from ..schedules._formats import format_table
from ._comparison import Difference

_QUANTITIES = ("outputs", "state", "gradients")


@dataclass(frozen=True)
class CheckResult:
    """The result of checking a layer, or the loss.

    Attributes:
      name: its name in the table.
      differences: the differences between micro-batches and all examples at once.
      compared: the quantities that were compared, of ``"outputs"``, ``"state"`` and
        ``"gradients"``.
      notes: further remarks on it.
      advice: the line to type if it differs.
    """

    name: str
    differences: tuple[Difference, ...] = ()
    compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    advice: str = ""

    @property
    def is_same(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    def row(self) -> list[str]:
        """The cells of its row in the table."""
        marks = [self._mark(quantity) for quantity in _QUANTITIES]
        remarks = [*map(str, self.differences), *self.notes]
        return [self.name, *marks, "; ".join(remarks)]

    def _mark(self, quantity: str) -> str:
        """The cell of a quantity in the table."""
        if any(difference.quantity == quantity for difference in self.differences):
            return "DIFFER"
        return "same" if quantity in self.compared else "-"


@dataclass(frozen=True)
class CheckReport:
    """The results of ``check``, such as `TrainStep.check`; true if nothing differs.

    It prints as a table.

    Attributes:
      microbatch_sizes: the number of examples of each micro-batch.
      layers: the result of each layer.
      loss: the result of the loss; ``None`` where the layers alone were checked.
    """

    microbatch_sizes: tuple[int, ...]
    layers: tuple[CheckResult, ...]
    loss: CheckResult | None = None

    @property
    def _results(self) -> list[CheckResult]:
        """All results, in the order of the table."""
        return [*self.layers] if self.loss is None else [*self.layers, self.loss]

    @property
    def is_same(self) -> bool:
        """True if micro-batches give what all examples give at once."""
        return all(result.is_same for result in self._results)

    def __bool__(self) -> bool:
        return self.is_same

    def __str__(self) -> str:
        rows = [["", *_QUANTITIES, ""], *(result.row() for result in self._results)]
        return f"{self._title()}:\n{format_table(rows, left=range(5))}"

    def raise_if_different(self, accept: Container[int] = ()) -> None:
        """Raises where micro-batches give something else.

        Args:
          accept: the indices of layers that are meant to differ.

        Raises:
          ValueError: with the first difference, and what to type.
        """
        for index, result in enumerate(self._results):
            is_accepted = index < len(self.layers) and index in accept
            if result.differences and not is_accepted:
                raise ValueError(
                    f"{result.name}: {result.differences[0]} ({self._title()}); "
                    f"{result.advice}"
                )

    def _title(self) -> str:
        sizes = " and ".join(map(str, self.microbatch_sizes))
        count = sum(self.microbatch_sizes)
        return f"{count} examples at once, and in micro-batches of {sizes}"


def raise_unreachable(subject: str) -> NoReturn:
    """Raises a ValueError: a check in one process needs all that it compares there."""
    raise ValueError(
        f"what several processes have cannot be checked in one of them; check "
        f"{subject}, in one process"
    )


def check_microbatch_sizes(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Checks the sizes of micro-batches, of a batch of ``count`` examples.

    Raises:
      TypeError: if they are no sequence of integers.
      ValueError: if there are fewer than two, or they do not sum to ``count``.
    """
    if count < 2:
        raise ValueError(
            f"a check compares two micro-batches: give at least 2 examples; the batch "
            f"has {count}"
        )
    try:
        sizes = [*map(operator.index, sizes)]
    except TypeError:
        raise TypeError(
            f"microbatch_sizes is {describe_argument(sizes)}; needs the number of "
            f"examples in each micro-batch, such as ({count // 2}, "
            f"{count - count // 2})"
        ) from None
    if len(sizes) < 2 or min(sizes) < 1 or sum(sizes) != count:
        raise ValueError(
            f"microbatch_sizes={tuple(sizes)}: needs the numbers of examples in two "
            f"micro-batches or more, together the {count} of the batch"
        )
    return tuple(sizes)


def check_tolerance(tolerance: Any) -> None:
    """Checks the largest relative difference that passes; ``None``: the default.

    Raises:
      TypeError: if it is no number.
    """
    if tolerance is not None and not isinstance(tolerance, numbers.Real):
        raise TypeError(
            f"tolerance is {describe_argument(tolerance)}; needs a number, such as "
            f"tolerance=1e-3"
        )
