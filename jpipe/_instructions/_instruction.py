"""One instruction: a call of a function, or a move to another place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._jaxprs._function import Function
from ._compile import Compiled

# A place by its number; what is nowhere yet, such as an uncommitted array, is taken by
# JAX wherever it is read.
Place = int
NOWHERE: Place = -1
# Where a batch comes from: the host, or any device. Whoever reads it gets a copy.
OUTSIDE: Place = -2


@dataclass(slots=True)
class Instruction:
    """A call of a function, or a move to another place.

    A graph lists instructions over values. In a program they are over slots, and know
    what they run.

    Attributes:
      place: where it runs; of a move, where it goes.
      source: of a move, where it comes from; of a call ``None``.
      function: what a call computes; of a move ``None``.
      reads: its arguments.
      writes: its results; in a program those that are read, in neighbouring slots.
      label: what it is: an action of the schedule, or words.
      layers: what runs, for messages.
      mapped: whether each shard of the place calls it by itself.
      donates: the slots that it reads and whose memory its results take over.
      frees: the slots that nobody reads after it.
      compiled: what is compiled of a call; of a move ``None``.
      run: ``(*leaves) -> leaves``.
      take: ``(slots) -> leaves``, what it reads.
      into: the slice of the slots that it fills.
    """

    place: Place
    source: Place | None
    function: Function | None
    reads: Sequence[int]
    writes: Sequence[int]
    label: Any = ""
    layers: str = ""
    mapped: bool = False
    donates: Sequence[int] = ()
    frees: Sequence[int] = ()
    compiled: Compiled | None = None
    run: Any = None
    take: Any = None
    into: Any = None

    @property
    def is_move(self) -> bool:
        """Whether it is a move; else it is a call."""
        return self.source is not None


def called(label: Any) -> str:
    """How messages call a label."""
    return label if isinstance(label, str) else f"action {label}"
