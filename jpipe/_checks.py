"""What is checked of a program before it is compiled.

A program of micro-batches is another than that of the mini-batch where examples come
together, and where it reads what it is given by another door.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ._functions import _reduction
from ._functions._batch import Batch
from ._functions._objective import Objective
from ._layers import _examples
from ._layers._examples import Examples
from ._run._layout import Layout
from ._run._work import Works

PyTree = Any
# By the number of a layer the paths of what training writes: see `Task.written`.
Written = Mapping[int, Mapping[tuple[Any, ...], bool]]


def constants(works: Works, layout: Layout, variables: Sequence[PyTree]) -> None:
    """Checks that what is trained is not closed over by a layer or the loss too.

    Raises:
      TypeError: with the variables that are.
    """
    tasks = map(works.task, range(len(layout.order)))
    constants = {id(array) for task in tasks for array in task.closed.consts}
    found = [
        f"variables{jax.tree_util.keystr(path)}"
        for (path, leaf), trained in zip(
            jax.tree_util.tree_leaves_with_path(tuple(variables)),
            layout.marks,
            strict=True,
        )
        if trained and id(leaf) in constants
    ]
    if found:
        raise TypeError(
            "the loss or a layer takes variables from outside, which would be "
            "constants without a gradient and stay as they are now; add their "
            "gradient to that of the loss: pipe.jit(jax.value_and_grad(penalty))"
            "(params), where penalty is a function of them, or let the optimizer "
            "decay them (optax.add_decayed_weights); for constants give copies:\n"
            + "\n".join(f"  * {name}" for name in found)
        )


def loss(
    objective: Objective, works: Works, examples: Examples, batch: Batch, axes: Any
) -> list[str]:
    """Checks that the loss of a mini-batch is what its micro-batches make of it.

    Args:
      objective: the loss.
      works: what the stages do.
      examples: what the layers do with examples.
      batch: the mini-batch.
      axes: where the examples are in the outputs, as the user gave it.

    Returns:
      What is said of it, where it may be another.

    Raises:
      ValueError: if it certainly is.
    """
    outputs = works.task(works.num_stages - 1).outputs
    given = _reduction.Given(outputs, axes, examples.outputs)
    return _reduction.check(objective, given, batch)


def written(works: Works, examples: Examples, batch: Batch) -> Written:
    """What training writes, checked: of it a pipeline keeps the mean.

    Args:
      works: what the stages do.
      examples: what the layers do with examples.
      batch: the mini-batch.

    Raises:
      ValueError: if it holds single examples, say, or is what numbers are drawn by.
    """
    tasks = [works.task(stage) for stage in range(works.num_stages)]
    found = {
        task.stage.first + layer: paths
        for task in tasks
        for layer, paths in task.written().items()
    }
    if any(axis is not None for axis in batch.x_axes):
        for number, paths in found.items():
            _examples.check(examples, number, paths)
    for task in tasks:
        for layer, paths in task.drawn_by().items():
            number = task.stage.first + layer
            _examples.check_draws(examples.visits[number], number, paths)
    return found


def warn_of(found: Sequence[str]) -> None:
    """Says which layers make something of several examples, or that the loss does."""
    listed = "\n".join(f"  * {one}" for one in found)
    warnings.warn(
        f"each micro-batch by itself: layers and loss see the examples of one, and "
        f"here more than one of them come together:\n{listed}\nas one device computes "
        f"it, take num_microbatches=1; where that of micro-batches is meant, as it is "
        f"of a batch norm, say so: warnings.filterwarnings('ignore', 'each micro-batch "
        f"by itself')",
        stacklevel=9,
    )
