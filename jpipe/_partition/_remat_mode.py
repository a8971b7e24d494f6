"""Remat modes: the residuals that a stage stores between forward and backward.

No JAX is imported here: planning partitions profiles without it.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

# One of `jax.checkpoint_policies`, or a user's.
Policy = Callable[..., Any]


class Stored(enum.Enum):
    """The part of what a backward reads that its forward stores."""

    ALL = enum.auto()
    # A minimum cut: the fewest bytes from which all of them follow cheaply.
    FEWEST_BYTES = enum.auto()
    # Nothing but the inputs of the stage: a forward by itself makes only its outputs,
    # and the backward computes it again.
    INPUTS = enum.auto()


@dataclass(frozen=True)
class RematMode:
    """The residuals of one stage on one micro-batch.

    Attributes:
      name: the name that users write and that plans print.
      policy: the policy of `jax.checkpoint` that says what the backward reads: a
        function, or a name in `jax.checkpoint_policies`; ``None``: no `jax.checkpoint`,
        so that it reads what `jax.vjp` stores.
      stores: the part of this that is stored.
      is_tried_by_plan: True if `jpipe.plan` tries it where users name no modes.
    """

    name: str
    policy: Policy | str | None = None
    stores: Stored = Stored.ALL
    is_tried_by_plan: bool = False

    @property
    def recomputes(self) -> bool:
        """True if the backward computes anything of a micro-batch again.

        So does every mode but `NONE`, and one that says the same by another name. What
        follows from weights alone is computed again in all modes.
        """
        same_name = replace(self, name=NONE.name, is_tried_by_plan=False)
        return same_name != NONE

    @property
    def between_halves(self) -> "RematMode":
        """The mode of what I, the first half of a backward, stores for W."""
        return MIN_CUT if self.recomputes else NONE

    def when_fused(self, *, is_whole_backward: bool) -> "RematMode":
        """The mode of a forward that is one program with its backward, or with I of it.

        Nothing is stored between the two, so recomputation would save no bytes and XLA
        would undo it: hence `NONE`. W comes later, and reads what I stores for it.
        """
        return NONE if is_whole_backward else self.between_halves


FULL = RematMode(
    "full",
    "nothing_saveable",
    stores=Stored.INPUTS,
    is_tried_by_plan=True,
)
NONE = RematMode("none")
DOTS = RematMode("dots", "dots_saveable")
MIN_CUT = RematMode("min_cut", stores=Stored.FEWEST_BYTES, is_tried_by_plan=True)
# All modes that have a name; those that store the fewest bytes first.
MODES = (FULL, MIN_CUT, DOTS, NONE)
