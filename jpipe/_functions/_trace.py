"""From the layers of a stage to its task: traced here, once.

Everything after works on the jaxpr.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .._faults import refuse
from .._jaxprs import _flow, _jaxpr
from .._layers import _batchnorm, _skip
from .._layers._skip import NO_PORTS, Ports
from .._layers._stage import StageFunction
from .._warn import warn
from ._objective import Objective
from ._task import EXTRA, Task
from ._vjp import Differentiable, Leaves
from ._weights import Weights, is_inexact, is_params

PyTree = Any
_SINGLE = jnp.dtype(jnp.float32).itemsize
# What Flax's own TrainState overwrites with its gradient.
_BY_GRADIENT = "_overwrite_with_gradient"


def trace(
    stage: StageFunction,
    weights: Weights,
    x: PyTree,
    extra: Mapping[str, PyTree],
    *,
    train: bool,
    objective: Objective | None = None,
    differentiate: Sequence[bool] = (),
    ports: Ports = NO_PORTS,
) -> Task:
    """Traces a stage on abstract values.

    Args:
      stage: its layers.
      weights: its variables.
      x: specs of its input; of ``(skips, input)`` if skip connections enter it.
      extra: specs of what a micro-batch brings beside its input, by name.
      train: whether this is training.
      objective: the loss, on the last stage in training.
      differentiate: for each leaf of ``x``, whether an earlier stage wants its
        gradient.
      ports: the skip connections of the stage.

    Returns:
      The task; of ``extra`` it asks only for what it reads.
    """
    x_leaves, x_tree = jax.tree.flatten(x)
    names = [name for name in EXTRA if name in extra]
    changed_at: list[int] = []
    outputs: list[PyTree] = []

    def whole(weight_leaves: Leaves, x_leaves: Leaves, values: Sequence[PyTree]):
        given = dict(zip(names, values, strict=True))
        variables = jax.tree.unflatten(weights.tree, weight_leaves)
        if train:
            _check_collections(stage, variables)
        x = jax.tree.unflatten(x_tree, x_leaves)
        y, changed = _applied(stage, ports, variables, x, given, train)
        changes = _changes(weights, changed)
        changed_at[:] = changes
        loss = []
        if objective is not None:
            outputs.append(jax.tree.map(lambda leaf: _jaxpr.spec(jax.typeof(leaf)), y))
            scalar, sums, y = objective(y, given["targets"], given["share"])
            loss = [scalar, *sums]
        return loss, jax.tree.map(jnp.asarray, y), list(changes.values())

    values = [extra[name] for name in names]
    pairs = zip(differentiate, x_leaves, strict=True)
    wanted = [asked and is_inexact(leaf) for asked, leaf in pairs]
    with _batchnorm.recording():
        closed, (loss, y, _) = _jaxpr.trace(whole, weights.specs, x_leaves, values)
    task = Task(
        stage=stage,
        weights=weights,
        x=tuple(x_leaves),
        x_tree=x_tree,
        extra={name: tuple(jax.tree.leaves(extra[name])) for name in names},
        y=y,
        wanted=Differentiable(weights.trainable, tuple(wanted)),
        changed=tuple(changed_at),
        has_loss=objective is not None,
        num_passed=0,
        num_loss_aux=0,
        closed=closed,
        ports=ports,
        outputs=outputs[-1] if outputs else (),
    )
    return _checked(task, len(loss), train)


def _checked(task: Task, num_losses: int, train: bool) -> Task:
    """The task with what is read of it alone, once what it changes is checked.

    Args:
      task: with all that its function gives.
      num_losses: how many results make the loss.
      train: whether this is training; evaluation keeps nothing that a call writes.
    """
    first = len(task.closed.jaxpr.outvars) - len(task.changed)
    avals = dict(zip(task.changed, task.closed.out_avals[first:], strict=True))
    # A transformation such as nn.remat returns all it was given as if it had made it.
    origins = _flow.origins(task.closed, _batchnorm.MARK)[first:]
    of = dict(zip(task.changed, origins, strict=True))
    same = {at for at, origin in of.items() if origin == at}
    written = [at for at in task.changed if at not in same]
    if train:
        _check_lasting(task, written)
    else:
        _say_what_is_left(task, written)
        same = set(task.changed)
    task = _prune(task, num_losses, same)
    task = replace(task, norms=_norms(task, of))
    _check_written(task, avals)
    return task


def _applied(
    stage: StageFunction,
    ports: Ports,
    variables: PyTree,
    x: PyTree,
    extra: Mapping[str, PyTree],
    train: bool,
) -> tuple[PyTree, PyTree]:
    """The output of a stage, with the skips that leave it, and what it changed."""
    skips = {}
    if ports.incoming:
        arrived, x = x
        keys = [route.key for route in ports.incoming]
        skips = dict(zip(keys, arrived, strict=True))
    y, changed = stage(
        variables, x, extra.get("rngs"), extra.get("numbers"), train, skips
    )
    _skip.check_left(skips, ports)
    if ports.outgoing:
        y = tuple(skips[route.key] for route in ports.outgoing), y
    return y, changed


def _changes(weights: Weights, changed: PyTree) -> dict[int, Any]:
    """The changed leaves, by their positions among those of the variables."""
    position = {path: i for i, path in enumerate(weights.paths)}
    return {
        position[path]: leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(changed)
        if path in position
    }


def _check_collections(stage: StageFunction, variables: PyTree) -> None:
    """Refuses what Flax changes in a way that a pipeline does not know."""
    for layer, entry in zip(stage.layers, variables, strict=True):
        if _BY_GRADIENT in entry:
            raise ValueError(
                f"layer {layer.name} holds the collection {_BY_GRADIENT}, as the fp8 "
                f"operations of flax.linen do, whose values a step replaces by their "
                f"gradients; a pipeline does not, and would leave them as they are: "
                f"train without dot_general_cls; evaluation works"
            )


def _say_what_is_left(task: Task, written: Sequence[int]) -> None:
    """Says what a call writes in evaluation, as no call of linen may.

    Parameters that a call normalizes are written anew by each.
    """
    paths = [task.weights.paths[at] for at in written]
    if where := [_at(task, path) for path in paths if not is_params(path)]:
        warn(
            "evaluation gives outputs alone, and leaves the variables as they were "
            "given, where a call of nnx goes on from what it wrote. To go on, as from "
            "a cache of attention, call pipe.modules(variables); where this is what "
            "training writes, evaluation should not: let __call__ take train\n"
            + "\n".join(f"  * {text}" for text in where)
        )


def _at(task: Task, path: Any) -> str:
    """Where a layer writes a variable."""
    layer, *names = path
    return (
        f"layer {task.stage.first + layer.idx} "
        f"({task.stage.layers[layer.idx].name}) writes "
        f"{jax.tree_util.keystr(tuple(names), simple=True, separator='/')}"
    )


def _check_lasting(task: Task, written: Sequence[int]) -> None:
    """Refuses a call that writes what the step does not take from it."""

    def where(chosen: Callable[[Any, Any], bool]) -> list[str]:
        paths = [(task.weights.paths[at], task.weights.specs[at]) for at in written]
        return [_at(task, path) for path, spec in paths if chosen(path, spec)]

    refuse(
        "parameters are changed by the optimizer alone; what a call writes to them "
        "would be lost when it ends. Keep what it changes in an nnx.BatchStat, or in a "
        "subclass of nnx.Variable of your own; where a weight is normalized, compute "
        "it in the call and do not write it back",
        where(lambda path, spec: is_params(path)),
    )
    refuse(
        "a call changes a random key that is no random stream, from which all "
        "micro-batches would draw the same; draw from streams: rngs() of an "
        "nnx.Rngs(0) that the module holds in its place; self.make_rng in flax.linen",
        where(lambda path, spec: jnp.issubdtype(spec.dtype, jax.dtypes.prng_key)),
    )
    if _batchnorm.are_merged():
        refuse(
            "a call updates a metric, of which a pipeline would keep the mean over "
            "micro-batches; return what it counts with has_aux=True, and update the "
            "metric after the step",
            where(lambda path, spec: path[1].key == "metric_state"),
        )


def _check_written(task: Task, avals: Mapping[int, Any]) -> None:
    """A leaf keeps its dtype, in which all that is written to it must have a place.

    A mean over micro-batches has none in integers. Running statistics of batch norms
    may stay in single precision, in which Flax makes them.
    """
    norms = {place for mean, var, _ in task.norms for place in (mean, var)}
    for place, at in enumerate(task.changed):
        spec, new = task.weights.specs[at], _jaxpr.spec(avals[at])
        is_real = not jnp.issubdtype(new.dtype, jnp.complexfloating)
        fits = place in norms and is_real and spec.dtype.itemsize >= _SINGLE
        if not is_inexact(new) or fits:
            continue
        if jnp.result_type(new, spec.dtype) != spec.dtype:
            raise ValueError(
                f"{_at(task, task.weights.paths[at])} of {new.dtype}, which is "
                f"{spec.dtype}, and a pipeline keeps dtypes: where you cast variables, "
                f"cast the parameters alone; else let the layer make it of "
                f"{new.dtype}, or write what is cast to {spec.dtype}"
            )


def _norms(
    task: Task, origins: Mapping[int, Any]
) -> tuple[tuple[int, int, float], ...]:
    """Where the statistics of batch norms stand among the changed leaves.

    Args:
      task: what they are in.
      origins: what each changed leaf is: see `_flow.origins`.

    Raises:
      ValueError: if the statistics of a norm are none of the changed leaves.
    """
    paths = [task.weights.paths[at] for at in task.changed]
    found = _batchnorm.norms(paths, [origins[at] for at in task.changed])
    if lost := _flow.names(task.closed, _batchnorm.MARK) - {mark for *_, mark in found}:
        listed = ", ".join(mark.split()[-1] for mark in sorted(lost))
        raise ValueError(
            f"{task.stage}: what batch norm {listed} leaves as its running statistics "
            f"is copied or changed in the same step by code that is not Flax's, or is "
            f"no variable of its layer; here it is that of one micro-batch. For a rule "
            f"of your own write a norm of your own, or take num_microbatches=1"
        )
    return tuple((mean, var, _batchnorm.momentum_of(mark)) for mean, var, mark in found)


def _prune(task: Task, num_losses: int, same: set[int]) -> Task:
    """Puts the results in order and drops what is not read.

    Args:
      task: with all that its function gives.
      num_losses: how many results make the loss.
      same: the positions of leaves of the weights that are given back as they were.
    """
    jaxpr = task.closed.jaxpr
    num_y = len(jax.tree.leaves(task.y))
    losses = jaxpr.outvars[:num_losses]
    y = jaxpr.outvars[num_losses : num_losses + num_y]
    changes = [
        (at, var)
        for at, var in zip(
            task.changed, jaxpr.outvars[num_losses + num_y :], strict=True
        )
        if at not in same
    ]
    if task.has_loss:
        outputs, passed, loss_aux = losses[:1], losses[1:], y
    else:
        outputs = [var for var in y if is_inexact(var.aval)]
        passed = [var for var in y if not is_inexact(var.aval)]
        loss_aux = []
    results = [*outputs, *passed, *loss_aux, *(var for _, var in changes)]
    closed = _jaxpr.prune(task.closed, results)

    # The share of the examples is needed by the mean, and by what training changes.
    always = {"share"} if changes else set()
    first = len(task.weights.specs) + len(task.x)
    live = _jaxpr.live_inputs(closed)
    keep_vars = list(closed.jaxpr.invars[:first])
    extra = {}
    for name, leaves in task.extra.items():
        end = first + len(leaves)
        if any(live[first:end]) or name in always:
            extra[name] = leaves
            keep_vars += closed.jaxpr.invars[first:end]
        first = end
    closed = core.ClosedJaxpr(closed.jaxpr.replace(invars=keep_vars), closed.consts)
    return replace(
        task,
        extra=extra,
        changed=tuple(at for at, _ in changes),
        num_passed=len(passed),
        num_loss_aux=len(loss_aux),
        closed=closed,
    )
