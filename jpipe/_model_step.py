"""Gradients of one model."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from ._cache import Axes
from ._functions import _probe
from ._functions._batch import Batch
from ._functions._objective import Objective
from ._functions._trainable import Trainable
from ._instructions._program import Program
from ._jaxprs import _jaxpr
from ._layers import _rng
from ._layers._layer import Layer
from ._profile import Profiled
from ._run._context import outside_of_meshes
from ._slices import _join
from ._slices._built import Built
from ._slices._division import Division
from ._slices._program import Traced
from ._slices._sliced import Sliced, Work
from ._slices._state import Written
from ._train._value_and_grad import say_what_is_left

PyTree = Any
ADVICE = "variables = pipe.place(variables, x)"
Apply = Callable[[PyTree, PyTree, _rng.Rngs, bool], tuple[PyTree, PyTree]]


class ModelGradient:
    """``f(variables, x, targets)``: see `ModelPipeline.value_and_grad`.

    Args:
      layer: the model.
      division: in which stages it is divided.
      axes: where the examples are.
      apply: ``(variables, x, rngs, train) -> (y, changed)``.
      objective: the loss.
      trainable: what has a gradient.
      has_state: whether what training changes is returned.
    """

    def __init__(
        self,
        layer: Layer,
        division: Division,
        axes: Axes,
        apply: Apply,
        objective: Objective,
        trainable: Trainable,
        *,
        has_state: bool,
    ) -> None:
        self._layer, self._division, self._axes = layer, division, axes
        self._apply, self._objective, self._trainable = apply, objective, trainable
        self._has_state = has_state
        self._was_told = False
        self._by_mode = {train: self._sliced(train) for train in (False, True)}
        # Specs of what the loss was given in traces whose loss was not checked yet.
        self._outputs: list[PyTree] = []
        # By the structures of variables and what a call writes, which leaves these are.
        self._written: dict[Any, list[int]] = {}
        self.unchecked = ""

    @property
    def last(self) -> Any:
        """What was divided last: see `Sliced`."""
        return self._by_mode[True].last or self._by_mode[False].last

    def _sliced(self, train: bool) -> Sliced:
        objective = self._objective

        def loss(variables: PyTree, x: PyTree, targets: PyTree, rngs: Any) -> Any:
            y, changed = self._apply(variables, x, rngs, train)
            self._outputs.append(
                jax.tree.map(lambda leaf: _jaxpr.spec(jax.typeof(leaf)), y)
            )
            value, aux = objective.of_part(y, targets)
            return value, (aux, changed)

        def joins(traced: Traced, sizes: Sequence[int]) -> list[_join.Join]:
            shares, (aux, _) = [size / sum(sizes) for size in sizes], traced.aux
            return _join.by_axes(objective.aux_axes, aux, shares)

        def writes(traced: Traced, specs: PyTree) -> tuple[int, list[Written]]:
            aux, changed = traced.aux
            return len(jax.tree.leaves(aux)), written(specs, changed)

        work = Work(
            loss,
            joins,
            (self._axes.in_axes, self._axes.target_axes, None),
            has_aux=True,
            reduction=objective.reduction,
            owner=self._layer.owner,
            names=("x", "targets", "rngs"),
            advice=ADVICE,
            writes=writes if train else None,
        )
        return Sliced(work, self._division, lambda v: jax.tree.leaves(self._marks(v)))

    def _marks(self, variables: PyTree) -> PyTree:
        """Whether each leaf of the variables has a gradient."""
        return self._trainable.marks([self._layer], (variables,))[0]

    def trained(self, variables: PyTree) -> list[bool]:
        """Whether each leaf of the parameters has a gradient."""
        return jax.tree.leaves(self._marks(variables).get("params", {}))

    @outside_of_meshes
    def __call__(
        self,
        variables: PyTree,
        x: PyTree,
        targets: PyTree,
        *,
        rngs: _rng.Rngs = None,
        train: bool = True,
    ) -> Any:
        """Returns as soon as the work is dispatched: see `Pipeline.value_and_grad`."""
        self.built(variables, x, targets, rngs, train)
        found = self._by_mode[train](variables, x, targets, rngs)
        aux, changed = found.aux
        leaves, tree = jax.tree.flatten(variables)
        if self._trainable.selects_all:  # integers have that of `jax.grad`
            found_grads = [
                np.zeros(leaf.shape, jax.dtypes.float0) if grad is None else grad
                for leaf, grad in zip(leaves, found.grads, strict=True)
            ]
        else:
            found_grads = found.grads
        grads = jax.tree.unflatten(tree, found_grads).get("params", {})
        beside = [aux] if self._objective.has_aux else []
        if not self._has_state and not self._was_told and jax.tree.leaves(changed):
            self._was_told = True
            names = [name for name in changed if jax.tree.leaves(changed[name])]
            say_what_is_left(", ".join(f"variables[{name!r}]" for name in names))
        if self._has_state:
            new = jax.tree.leaves(changed, is_leaf=lambda leaf: leaf is None)
            own = self._leaves_of(variables, changed)
            for at, leaf in zip(own, new, strict=True):
                leaves[at] = leaves[at] if leaf is None else leaf
            state = jax.tree.unflatten(tree, leaves)
            beside.append({k: v for k, v in state.items() if k != "params"})
        return ((found.loss, *beside) if beside else found.loss), grads

    def program(
        self,
        variables: PyTree,
        x: PyTree,
        targets: PyTree,
        *,
        rngs: _rng.Rngs = None,
        train: bool = True,
    ) -> Program:
        """What a call with such arguments runs."""
        return self.built(variables, x, targets, rngs, train).program

    def built(
        self, variables: PyTree, x: PyTree, targets: PyTree, rngs: Any, train: bool
    ) -> Built:
        """What such arguments are for; of a new kind the loss is checked."""
        built = self._by_mode[train].build(variables, (x, targets, rngs))
        if self._outputs:
            self._check_loss(built.batch, self._outputs[0], targets)
            self._outputs.clear()
        return built

    def profiled(
        self, variables: PyTree, x: PyTree, targets: PyTree, rngs: _rng.Rngs
    ) -> tuple[Profiled, list[Any]]:
        """A mini-batch to be timed, and what its program is given."""
        sliced, args = self._by_mode[True], (x, targets, rngs)
        built = self.built(variables, *args, True)
        own = Profiled(built.pipe, built.stages, built.batch, built.program)
        return own, sliced.arguments(built, variables, args)

    def _leaves_of(self, variables: PyTree, changed: PyTree) -> list[int]:
        """Of what a call writes which leaves of the variables these are."""
        structures = jax.tree.structure(variables), jax.tree.structure(changed)
        if structures not in self._written:
            self._written[structures] = [
                leaf.at for leaf in written(variables, changed)
            ]
        return self._written[structures]

    def _check_loss(self, batch: Batch, outputs: PyTree, targets: PyTree) -> None:
        """Runs the loss alone, at once and in parts: see `_probe`."""
        if batch.num_parts == 1:
            return
        x, specs, _ = batch.x
        first = len(jax.tree.leaves(x))
        end = first + len(jax.tree.leaves(specs))
        x_axes, axes = batch.x_axes[:first], batch.x_axes[first:end]
        own = Batch(x, x_axes, specs, axes, None, batch.sizes, batch.num_shards)
        axis = self._axes.out_axes
        axis = axis if isinstance(axis, int) else 0
        self.unchecked = _probe.check(self._objective, outputs, targets, own, axis)


def written(variables: PyTree, changed: PyTree) -> list[Written]:
    """What a call writes, by what it returns beside its output."""
    flat = jax.tree_util.tree_leaves_with_path(variables)
    number = {path: i for i, (path, _) in enumerate(flat)}
    own = jax.tree_util.tree_leaves_with_path(changed, is_leaf=lambda x: x is None)
    return [
        Written(
            number[path], path, keystr(path, simple=True, separator="/"), path[0].key
        )
        for path, _ in own
    ]
