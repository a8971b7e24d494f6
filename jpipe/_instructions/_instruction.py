"""One instruction: a call of a function, or a move to another place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._jaxprs._computation import Computation
from ._compiler import PlacedExecutable

# The index of a device among those of a graph.
Place = int
# In no place yet, such as an uncommitted array: JAX takes it wherever it is read.
NOWHERE: Place = -1
# On the host or any device, as a batch is: whoever reads it gets a copy.
OUTSIDE: Place = -2
# The name of the call that reads results of all micro-batches, between forwards and
# backwards: see `_lower/_tail`.
WHOLE_BATCH = "whole_batch"


@dataclass(slots=True)
class Instruction:
    """A call of a function, or a move to another place.

    It has three states:

    1. `Graph` lists it over values: ``donates`` and all that follows is empty;
    2. `assign_executables` sets the ``executable`` of a call. XLA has not compiled it
       yet: a `PlacedExecutable` is compiled by `compile_all`, before it is called;
    3. `Program` writes another one over slots, with all attributes, which the loop
       runs. Its ``run`` is the executable's: that of `jax.jit`, and from
       `Program.compile` on what XLA returned. Of a move it is a transfer, or a
       `Crossing` between processes.

    Attributes:
      place: the place of a call; the target of a move.
      source: the place from which a move comes; ``None``: a call.
      function: the function of a call; ``None``: a move.
      reads: the arguments: values, or slots.
      writes: the results, likewise; in a program those that are read, in neighbouring
        slots.
      label: an action of the schedule, or words.
      layers: the layers that run, for messages.
      mapped: True if each shard of the place calls it by itself.
      donates: the slots that it reads and whose memory its results take over.
      frees: the slots that nobody reads after it.
      executable: the executable of a call; ``None``: a move.
      run: ``(*leaves) -> leaves``; of a move between processes a `Crossing`, until
        `agree` has opened it.
      take: ``(slots) -> leaves``, the arguments.
      result_slots: the slice of the slots that the results fill.
    """

    place: Place
    source: Place | None
    function: Computation | None
    reads: Sequence[int]
    writes: Sequence[int]
    label: Any = ""
    layers: str = ""
    mapped: bool = False
    donates: Sequence[int] = ()
    frees: Sequence[int] = ()
    executable: PlacedExecutable | None = None
    run: Any = None
    take: Any = None
    result_slots: Any = None

    @property
    def is_move(self) -> bool:
        """True if it is a move; else it is a call."""
        return self.source is not None

    @property
    def joins_batch(self) -> bool:
        """True if it is the call that reads results of all micro-batches."""
        return not self.is_move and self.label == WHOLE_BATCH


def label_text(label: Any) -> str:
    """A label in messages."""
    return label if isinstance(label, str) else f"action {label}"
