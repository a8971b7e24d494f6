"""Warns of variables that a forward pass writes, which its caller does not receive."""

from collections.abc import Sequence
from typing import Any

from .._arguments import _variables
from .._messages import warn
from . import _state_updates
from ._state_updates import StateLeaf
from ._traced_function import TracedFunction

PyTree = Any


def check_discarded_state(
    traced: TracedFunction,
    first_index: int,
    written: Sequence[StateLeaf],
    *,
    variables: PyTree,
    train: bool,
) -> None:
    """Warns of variables that the forward pass of modules writes.

    Args:
      traced: its trace.
      first_index: the index of the first leaf, among its results, that may be written
        to a variable.
      written: the variables that these leaves may be written to.
      variables: specs of the variables.
      train: True if it runs as in training.

    Raises:
      ValueError: if it writes, in training, what no step would take from it.
    """
    if not train:
        changed = _state_updates.find_changes(traced, first_index, written)
        _warn_in_evaluation(changed, variables)
        return
    state = _state_updates.find_updates(traced, first_index, written)
    if state.param_indices:
        collections = _variables.collections(variables, state.param_indices)
        warn(
            f"apply leaves {collections} as given, "
            f"which training changes; to go on from what it makes of them take "
            f"value_and_grad(..., has_state=True), or a train_step"
        )


def _warn_in_evaluation(changed: Sequence[StateLeaf], variables: PyTree) -> None:
    """Warns of variables that a call writes in evaluation, as no call of linen may.

    Parameters that a call normalizes are written anew by each call.
    """
    lines = [leaf.text for leaf in changed if leaf.collection != "params"]
    if lines:
        names = sorted({leaf.collection for leaf in changed} - {"params"})
        warn(
            f"evaluation gives outputs alone, and leaves the variables as they were "
            f"given, where a call of nnx goes on from what it wrote. To go on, as from "
            f"a cache of attention, type y, state = pipe.apply(variables, x, "
            f"mutable={names}); where this is what training writes, evaluation should "
            f"not: let __call__ take train\n"
            + "\n".join(f"  * {line}" for line in lines)
        )
