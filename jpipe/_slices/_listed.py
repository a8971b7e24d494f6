"""A list of layers as one program: a mark stands between two stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._functions._batch import Batch, explained
from .._functions._objective import Objective
from .._jaxprs import _jaxpr
from .._layers import _batchnorm, _skip
from .._layers._layer import Layer
from .._layers._sequence import Sequential
from .._run import _resting
from .._run._pipe import Pipe
from . import _folds, _left, _marks, _meshes, _order, _state
from ._built import TreeLayout
from ._program import Traced
from ._stages import Stages
from ._state import State, Written

PyTree = Any
# What Flax's own TrainState overwrites with its gradient.
_BY_GRADIENT = "_overwrite_with_gradient"


@dataclass(frozen=True)
class Listed:
    """A list of layers on a mini-batch: traced, not yet compiled.

    Attributes:
      pipe: the stages.
      layout: where the variables are.
      batch: the mini-batch, its input, targets and keys as one tree.
      stages: what each computes.
      state: what they write.
      y: specs of the output of the last layer for the first micro-batch.
      aux: by the sizes of micro-batches, specs of what the loss function returns beside
        the loss.
      routes: where skip connections between stages go.
    """

    pipe: Pipe
    layout: TreeLayout
    batch: Batch
    stages: Stages
    state: State
    y: PyTree
    aux: dict[int, PyTree]
    routes: Sequence[_skip.Route]

    @property
    def skips(self) -> dict[Any, str]:
        """By each value that a skip connection brings to a stage, its name."""
        marked = _marks.marked(self.stages.first.closed)
        return {
            var: _skip.label(self.routes[number - 1].key)
            for var, (_, number) in marked.items()
            if number
        }


def listed(
    pipe: Pipe,
    layers: Sequential,
    layout: TreeLayout,
    variables: PyTree,
    batch: Batch,
    *,
    train: bool,
    objective: Objective | None,
) -> Listed:
    """Traces a list of layers on micro-batches of each size.

    Args:
      pipe: the stages.
      layers: the layers.
      layout: where the variables are.
      variables: the variables, or specs of them.
      batch: the mini-batch.
      train: whether this is training; evaluation keeps nothing that a call writes.
      objective: the loss; ``None`` for a forward pass.

    Raises:
      ValueError: if a layer writes what a step does not take from it.
    """
    axes = [*batch.x_axes, *batch.target_axes]
    axes += [None] * len(jax.tree.leaves(batch.rngs))
    given = batch.x, batch.targets, batch.rngs
    whole = Batch(given, axes, (), [], None, batch.sizes, batch.num_shards)
    programs, ends, aux = {}, {}, {}
    traces = list[_Trace]()
    with explained(batch), _batchnorm.merging(batch.num_parts > 1):
        for size in dict.fromkeys(batch.sizes):
            one = _Trace(pipe, layers, variables, whole, train, objective, size)
            _meshes.check(one.program.closed, pipe.places)
            programs[size], ends[size] = one.program, one.cuts
            aux[size], _ = one.program.aux
            traces.append(one)
        first = traces[0]
        given = first.program, len(jax.tree.leaves(aux[batch.sizes[0]])), first.written
        state = _state.written_by(*given) if train else State()
        if not train:
            _left.in_evaluation(_state.changes(*given))
    for size, one in zip(programs, traces, strict=True):
        given = one.program, len(jax.tree.leaves(aux[size])), one.written
        programs[size] = _state.without_the_rest(*given, state)
    programs = _order.late(programs, moves=False)
    known = layout.marks, layout.owner_stages, state
    stages = Stages(programs, ends, batch.sizes, pipe.remat, *known)
    return Listed(pipe, layout, whole, stages, state, first.y, aux, first.routes)


def layout_of(pipe: Pipe, variables: Sequence[PyTree], marks: PyTree) -> TreeLayout:
    """Where the variables of layers are: each with its layer.

    Args:
      pipe: the stages.
      variables: one entry per layer, or specs.
      marks: whether each leaf is trained.
    """
    variables = tuple(variables)
    specs = jax.tree.map(_jaxpr.spec, variables)
    owner_stages = [
        stage
        for stage, entry in zip(pipe.stage_of_layer, variables, strict=True)
        for _ in jax.tree.leaves(entry)
    ]
    shardings = _resting.shardings(pipe, variables)
    own = jax.tree.leaves(marks)
    return TreeLayout(
        pipe,
        specs,
        owner_stages,
        shardings,
        own,
        True,
        "variables = pipe.place(variables)",
    )


class _Trace:
    """The layers on micro-batches of one size.

    Attributes:
      program: the trace.
      cuts: where its stages but the first begin.
      written: the leaves that the layers may write.
      y: specs of the output of the last layer.
      routes: the skip connections between stages.
    """

    def __init__(
        self,
        pipe: Pipe,
        layers: Sequential,
        variables: PyTree,
        batch: Batch,
        train: bool,
        objective: Objective | None,
        size: int,
    ) -> None:
        self._pipe, self._layers = pipe, layers
        self._train, self._objective = train, objective
        part = size / sum(batch.sizes) / batch.num_shards
        self._share = np.asarray(part, jnp.result_type(float))
        self.written: list[Written] = []
        self.y: PyTree = None
        self.routes: Sequence[_skip.Route] = ()
        # Of what was stashed in an earlier stage, its number in the marks.
        self._stashed: dict[_skip.Key, int] = {}
        number = jax.ShapeDtypeStruct((), jnp.int32)
        specs = jax.tree.map(lambda x: _jaxpr.spec(jax.typeof(x)), tuple(variables))
        with _batchnorm.recording():
            given = specs, batch.part(size), number
            closed, (_, _, aux) = _jaxpr.trace(self._whole, *given)
        closed, numbers = _folds.lifted(closed)
        ends = _marks.ends(closed)
        self.cuts = [ends[stage.index] for stage in pipe.stages[:-1]]
        has_loss = objective is not None
        self.program = Traced(
            closed,
            len(jax.tree.leaves(specs)),
            aux,
            has_loss=has_loss,
            is_weighted=has_loss and objective.reduction == "weighted",
            numbers=numbers,
            num_inputs=len(jax.tree.leaves(batch.x[0])),
            num_local=len(jax.tree.leaves(batch.x[:2])),
        )

    def _whole(self, variables: PyTree, given: PyTree, number: jax.Array) -> Any:
        """``(loss, weight, (aux, written))``; without a loss the output is the aux."""
        x, targets, rngs = given
        if self._train:
            _check_collections(self._pipe.layers, variables)
        made = self._layers(variables, x, rngs, number, self._train, self._ending)
        self.routes, y = made.routes, jax.tree.map(jnp.asarray, made.y)
        new = self._changes(variables, made.entries)
        self.y = jax.tree.map(lambda leaf: _jaxpr.spec(jax.typeof(leaf)), y)
        if self._objective is None:
            return (), (), (y, new)
        share = jnp.asarray(self._share)
        loss, weight, aux = self._objective(y, targets, share)
        return loss, weight, (jax.tree.map(jnp.asarray, aux), new)

    def _ending(self, layer: int, x: PyTree, skips: dict[_skip.Key, PyTree]) -> PyTree:
        """Marks what leaves a stage: its output, and what it stashed for later ones."""
        stage = self._pipe.stages[self._pipe.stage_of_layer[layer]]
        if layer + 1 < stage.span.stop or stage is self._pipe.stages[-1]:
            return x
        new = [key for key in skips if key not in self._stashed]
        self._stashed |= {key: len(self._stashed) + i for i, key in enumerate(new, 1)}
        own = {self._stashed[key]: key for key in new}
        x = jax.tree.map(jnp.asarray, x)
        trees = {0: x} | {i: skips[key] for i, key in own.items()}
        marked = _marks.numbered(stage.index, trees)
        skips |= {key: marked[i] for i, key in own.items()}
        return marked[0]

    def _changes(self, variables: PyTree, changed: Sequence[PyTree]) -> list[Any]:
        """What the layers changed of their variables."""
        flat = jax.tree_util.tree_leaves_with_path(variables)
        position = {path: i for i, (path, _) in enumerate(flat)}
        self.written, found = [], []
        for path, leaf in jax.tree_util.tree_leaves_with_path(tuple(changed)):
            if path not in position:
                continue
            layer, collection, *names = path
            tail = jax.tree_util.keystr(
                (collection, *names), simple=True, separator="/"
            )
            name = self._pipe.layers[layer.idx].name
            text = f"layer {layer.idx} ({name}) writes {tail}"
            own = position[path], path, text, collection.key
            self.written.append(Written(*own))
            found.append(leaf)
        return found


def _check_collections(layers: Sequence[Layer], entries: PyTree) -> None:
    """Refuses what Flax changes in a way that a pipeline does not know."""
    for layer, entry in zip(layers, entries, strict=True):
        if _BY_GRADIENT in entry:
            raise ValueError(
                f"layer {layer.name} holds the collection {_BY_GRADIENT}, as the fp8 "
                f"operations of flax.linen do, whose values a step replaces by their "
                f"gradients; a pipeline does not, and would leave them as they are: "
                f"train without dot_general_cls; evaluation works"
            )
