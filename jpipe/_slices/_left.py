"""Warnings of what a forward pass writes, which its caller does not receive."""

from collections.abc import Sequence

from .._warn import warn
from . import _state
from ._program import Traced
from ._state import Written


def check(program: Traced, first: int, written: Sequence[Written], train: bool) -> None:
    """Warns of what the forward pass of a model writes.

    Args:
      program: its trace.
      first: the number of the first leaf that may be written in what it returns.
      written: of each such leaf what it is.
      train: whether it is as in training.

    Raises:
      ValueError: if it writes, in training, what no step would take from it.
    """
    if not train:
        whole = "pipe.modules(jax.device_put(variables, device))"
        in_evaluation(_state.changes(program, first, written), whole)
        return
    state = _state.written_by(program, first, written)
    names = dict.fromkeys(written[leaf - first].collection for leaf in state.leaves)
    if names:
        in_training(", ".join(f"variables[{name!r}]" for name in names))


def in_evaluation(
    changed: Sequence[Written], modules: str = "pipe.modules(variables)"
) -> None:
    """Warns of what a call writes in evaluation, as no call of linen may.

    Parameters that a call normalizes are written anew by each.

    Args:
      changed: what it writes.
      modules: what to type for modules that go on from it.
    """
    if where := [leaf.text for leaf in changed if leaf.collection != "params"]:
        warn(
            "evaluation gives outputs alone, and leaves the variables as they were "
            "given, where a call of nnx goes on from what it wrote. To go on, as from "
            f"a cache of attention, call {modules}; where this is what "
            "training writes, evaluation should not: let __call__ take train\n"
            + "\n".join(f"  * {text}" for text in where)
        )


def in_training(collections: str) -> None:
    """Warns that a forward pass gives outputs alone, where linen needs `mutable`."""
    warn(
        f"apply leaves {collections} as given, which training changes; to go on from "
        f"what it makes of them take value_and_grad(..., has_state=True), or a "
        f"train_step"
    )
