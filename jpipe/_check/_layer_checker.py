"""Runs each layer with all examples at once and in micro-batches, and compares.

    layer:  (params, activations, state, keys) -> (activations, state)

Nothing is proven about a layer: it runs on the user's data, once with all examples and
once in micro-batches. Its output activations are compared, the state that it writes,
and the gradient of one random projection of the activations. The input of the next
layer is the output of this one for all examples at once, so that the first difference
hides no second one.

Each layer runs alone, in the module tree of those layers whose variables it reads.
Slices of a pipeline with one layer per stage would not do: a slice returns only
variables that a later one reads, so that the slice of a layer which returns its input
returns nothing; and it can be traced for a micro-batch only if all layers can.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .._arguments._objective import Objective
from .._jaxprs._jaxpr import is_inexact
from .._layers import _batch_norm, _inactive_parts, _median_prng, _rng
from .._layers._parent import Entries
from .._layers._sequence import Sequential
from .._layers._skip import Passed
from . import _loss_check
from ._comparison import (
    Difference,
    Unlike,
    axis_of,
    comparable_state,
    compare,
    floating_axes,
    join,
    max_magnitude,
)
from ._report import CheckResult
from ._split_function import (
    SplitFunction,
    SplitOutputs,
    first_line,
    split_examples,
    to_host,
    with_values_of,
)

PyTree = Any
# Some gradients are zero but for rounding: the scale of a gradient is at least this
# fraction of the largest number in the gradients of the layer.
_SMALLEST_SCALE = 1e-2
# ``specs of outputs -> reductions of each leaf without examples``: see `compare`.
Reductions = Callable[[PyTree], list[Sequence[str]]]


@dataclass(frozen=True)
class Activations:
    """The arrays that go from one layer to later ones.

    Attributes:
      passed: the values that the last layer passes, for all examples at once.
      axes: the axis of the examples in each of its leaves; ``None`` for a leaf that
        belongs to no example.
      microbatch_values: for each leaf that belongs to no example the values of all
        micro-batches, along a new first axis; ``None`` for leaves of examples.
    """

    passed: Passed
    axes: Sequence[int | None]
    microbatch_values: Sequence[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _LayerInputs:
    """The arguments of a layer by which it is differentiated.

    Attributes:
      params: the parameters of each layer whose variables it reads.
      activations: the values that the layer before it passes.
    """

    params: list[PyTree]
    activations: Passed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _NondiffArgs:
    """The other arguments of a layer.

    Attributes:
      microbatch_values: see `Activations`; only micro-batches read it.
      state: the variables that are no parameters.
      keys: keys of random numbers, or ``None``; the last of all leaves.
    """

    microbatch_values: list[Any]
    state: list[PyTree]
    keys: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Outputs:
    """The results of a layer.

    Attributes:
      activations: the values that it passes.
      state: the variables that it may have changed, by their paths.
    """

    activations: Passed
    state: list[PyTree]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _OutputsAtOnce:
    """The results of a layer for all examples at once.

    Attributes:
      comparable: its results, with batch norms that return their input.
      activations: its output activations, which the next layer reads.
    """

    comparable: _Outputs
    activations: Passed


@dataclass(frozen=True)
class LayerToCheck:
    """A layer, and the layers whose variables it reads.

    Attributes:
      index: its index among all layers.
      sequence: the layers whose variables it reads; it is the last of them.
      entries: the variables of these.
      is_trained: a boolean for each leaf of these: True if its gradient is compared.
    """

    index: int
    sequence: Sequential
    entries: Entries
    is_trained: Entries

    @property
    def name(self) -> str:
        """Its name in the report."""
        return f"layer {self.index} ({self.sequence.layers[-1].name})"


class LayerChecker:
    """Goes through the layers of a model, and then to the loss.

    Args:
      x: the input of a mini-batch.
      axes: the axis of the examples in each of its leaves.
      sizes: the number of examples of each micro-batch.
      rngs: the keys of a step, or ``None``.
      train: True in training.
      tolerance: the largest relative difference that passes; ``None``: that of
        rounding.
    """

    def __init__(
        self,
        x: PyTree,
        axes: Sequence[int | None],
        *,
        sizes: tuple[int, ...],
        rngs: _rng.Rngs,
        train: bool,
        tolerance: float | None,
    ) -> None:
        self._activations = Activations(
            passed=Passed(jax.tree.map(to_host, x), OrderedDict()),
            axes=axes,
            microbatch_values=[None] * len(axes),
        )
        # The reason why no later layer can be compared; empty if they can.
        self._stopped = ""
        self._sizes = sizes
        self._train = train
        self._tolerance = tolerance
        self._keys = _median_prng.median_keys(rngs)
        # fingerprint -> function: equal layers on equal shapes are compiled once
        self._functions: dict[Any, SplitFunction] = {}

    def check(
        self, layer: LayerToCheck, reductions: Reductions | None = None
    ) -> CheckResult:
        """Checks the next layer.

        Args:
          layer: the layer.
          reductions: the reductions by `Pipeline.apply` of the outputs of the last
            layer; default: leaves without examples may be a mean or a sum, as a loss
            takes them.
        """
        if self._stopped:
            return CheckResult(layer.name, notes=(self._stopped,))
        previous = self._activations
        entries = jax.tree.map(to_host, layer.entries)
        inputs = _LayerInputs(
            params=_params_of(entries),
            activations=previous.passed,
        )
        nondiff_args = _NondiffArgs(
            microbatch_values=[*previous.microbatch_values],
            state=_state_of(entries),
            keys=self._keys,
        )

        apply = functools.partial(self._apply, layer.sequence)
        with _inactive_parts.collect_notes(train=self._train) as switch_notes:
            specs = jax.eval_shape(apply, inputs, nondiff_args)
        # Batch norms of Flax normalize each micro-batch by itself, as is intended: for
        # comparisons they return their input.
        bypass = self._train and any("batch_stats" in entry for entry in entries)
        advice = _advice(layer.index, is_last=reductions is not None)
        try:
            function, out_axes = self._function(
                apply, inputs, nondiff_args, specs=specs, bypass=bypass
            )
        except Exception as error:
            self._stopped = f"not compared, since {layer.name} was not"
            if isinstance(error, Unlike):
                return CheckResult(
                    layer.name,
                    differences=error.args,
                    compared=("outputs",),
                    notes=tuple(switch_notes),
                    advice=advice,
                )
            notes = [f"not compared: {first_line(error)}", *switch_notes]
            return CheckResult(layer.name, notes=tuple(notes))

        random = np.random.default_rng(0)
        cotangents = [
            random.normal(size=leaf.shape).astype(leaf.dtype)
            for leaf in function.outputs
        ]
        at_once, in_microbatches = function.run(inputs, nondiff_args, cotangents)

        leaf_reductions: list[Sequence[str]] = [("mean", "sum")] * len(out_axes)
        if reductions is not None:
            # Leaves of the output come before those of skips.
            output_reductions = reductions(specs.activations.x)
            leaf_reductions[: len(output_reductions)] = output_reductions
        compared, differences = self._compare(
            function,
            at_once,
            in_microbatches,
            out_axes=out_axes,
            reductions=leaf_reductions,
            is_trained=_params_of(layer.is_trained),
        )
        notes = [*self._notes(function, at_once, out_axes), *switch_notes]

        microbatch_leaves = jax.tree.leaves(in_microbatches.results.activations)
        self._activations = Activations(
            passed=at_once.results.activations,
            axes=out_axes,
            microbatch_values=[
                leaf if axis is None else None
                for leaf, axis in zip(microbatch_leaves, out_axes, strict=True)
            ],
        )
        return CheckResult(layer.name, differences, compared, tuple(notes), advice)

    def check_loss(
        self, objective: Objective, targets: PyTree, target_axes: Sequence[int | None]
    ) -> CheckResult:
        """Checks the loss of the outputs of the last layer."""
        if self._stopped:
            name = f"loss_fn with reduction={objective.reduction!r}"
            return CheckResult(name, notes=(self._stopped,))
        return _loss_check.check_loss(
            objective,
            self._activations.passed.x,
            targets,
            output_axes=self._activations.axes,
            target_axes=target_axes,
            sizes=self._sizes,
            tolerance=self._tolerance,
            microbatch_values=self._activations.microbatch_values,
        )

    def _apply(
        self,
        sequence: Sequential,
        inputs: _LayerInputs,
        nondiff_args: _NondiffArgs,
        *,
        bypass: bool = False,
    ) -> _Outputs:
        """Applies the last of some layers.

        Args:
          sequence: the layers.
          inputs: its parameters and activations.
          nondiff_args: its other arguments.
          bypass: True if batch norms of Flax return their input.
        """
        with (
            jax.default_matmul_precision("highest"),
            _batch_norm.merge_statistics(are_merged=True),
            _batch_norm.record_batch_norms(),
            _batch_norm.bypass_batch_norms() if bypass else nullcontext(),
        ):
            pairs = zip(inputs.params, nondiff_args.state, strict=True)
            entries = [{**params, **state} for params, state in pairs]
            passed, changed = sequence.call_last(
                entries,
                inputs.activations,
                rngs=nondiff_args.keys,
                train=self._train,
            )
        state = [comparable_state(collections) for collections in changed]
        return _Outputs(passed, state)

    def _function(
        self,
        apply: Callable[..., _Outputs],
        inputs: _LayerInputs,
        nondiff_args: _NondiffArgs,
        *,
        specs: _Outputs,
        bypass: bool,
    ) -> tuple[SplitFunction, list[int | None]]:
        """A layer as a function, and the axis of the examples in its activations.

        Args:
          apply: ``(inputs, nondiff_args, *, bypass) -> outputs``.
          inputs: its parameters and activations.
          nondiff_args: its other arguments.
          specs: specs of its outputs for all examples.
          bypass: True if batch norms of Flax return their input.

        Raises:
          Unlike: if the structure or shapes of its outputs differ in micro-batches.
        """
        in_axes = self._activations.axes

        def apply_to_parts(
            inputs: _LayerInputs, nondiff_args: _NondiffArgs
        ) -> list[_Outputs]:
            parts = split_examples(inputs.activations, in_axes, self._sizes)
            outputs: list[_Outputs] = []
            for i, activations in enumerate(parts):
                values = with_values_of(activations, nondiff_args.microbatch_values, i)
                part_inputs = _LayerInputs(inputs.params, values)
                outputs.append(apply(part_inputs, nondiff_args, bypass=bypass))
            return outputs

        def join_activations(parts: Sequence[_Outputs]) -> PyTree:
            activations = [outputs.activations for outputs in parts]
            return join("outputs", specs.activations, activations)

        part_specs = jax.eval_shape(apply_to_parts, inputs, nondiff_args)
        jax.eval_shape(join_activations, part_specs)
        whole_leaves = jax.tree.leaves(specs.activations)
        part_leaves = jax.tree.leaves(part_specs[0].activations)
        out_axes = list(map(axis_of, whole_leaves, part_leaves))

        def differentiated_leaves(activations: PyTree) -> list[jax.Array]:
            # A leaf of no example may be a mean or a sum: its gradient would differ.
            return [
                leaf
                for leaf, axis in zip(
                    jax.tree.leaves(activations), out_axes, strict=True
                )
                if axis is not None and is_inexact(leaf)
            ]

        def at_once(inputs: _LayerInputs, nondiff_args: _NondiffArgs) -> Any:
            comparable = apply(inputs, nondiff_args, bypass=bypass)
            activations = comparable.activations
            if bypass:
                activations = apply(inputs, nondiff_args).activations
            outputs = differentiated_leaves(comparable.activations)
            return outputs, _OutputsAtOnce(comparable, activations)

        def in_microbatches(inputs: _LayerInputs, nondiff_args: _NondiffArgs) -> Any:
            parts = apply_to_parts(inputs, nondiff_args)
            activations = join_activations(parts)
            state = join("state", specs.state, [outputs.state for outputs in parts])
            return differentiated_leaves(activations), _Outputs(activations, state)

        function = SplitFunction(at_once, in_microbatches, inputs, nondiff_args)
        return self._functions.setdefault(function.fingerprint, function), out_axes

    def _compare(
        self,
        function: SplitFunction,
        at_once: SplitOutputs,
        in_microbatches: SplitOutputs,
        *,
        out_axes: Sequence[int | None],
        reductions: Sequence[Sequence[str]],
        is_trained: list[PyTree],
    ) -> tuple[tuple[str, ...], tuple[Difference, ...]]:
        """The quantities that a layer has, and their differences.

        Args:
          function: the layer.
          at_once: its results for all examples at once.
          in_microbatches: its results in micro-batches.
          out_axes: the axis of the examples in each leaf of its activations.
          reductions: the reductions of each leaf without examples.
          is_trained: a boolean for each leaf of its parameters.
        """
        compared: list[str] = []
        differences: list[Difference] = []
        limit = function.limit if self._tolerance is None else self._tolerance

        def add(
            quantity: str,
            *,
            at_once: PyTree,
            in_microbatches: PyTree,
            axes: Sequence[int | None] | None = None,
            **options: Any,
        ) -> None:
            num_leaves = len(jax.tree.leaves(at_once))
            if num_leaves and quantity not in compared:
                compared.append(quantity)
            difference = compare(
                quantity,
                at_once=at_once,
                in_microbatches=in_microbatches,
                axes=[None] * num_leaves if axes is None else axes,
                sizes=self._sizes,
                limit=limit,
                **options,
            )
            if difference is not None:
                differences.append(difference)

        outputs = at_once.results.comparable
        microbatch_outputs = in_microbatches.results
        add(
            "outputs",
            at_once=_with_names(outputs.activations),
            in_microbatches=microbatch_outputs.activations,
            axes=out_axes,
            reductions=reductions,
        )
        add("state", at_once=outputs.state, in_microbatches=microbatch_outputs.state)
        if at_once.gradient is not None:
            param_grads, microbatch_param_grads = (
                jax.tree.map(
                    lambda is_trained, grad: grad if is_trained else None,
                    is_trained,
                    outputs.gradient.params,
                )
                for outputs in (at_once, in_microbatches)
            )
            add(
                "gradients",
                at_once=param_grads,
                in_microbatches=microbatch_param_grads,
                inputs_name="parameters",
                smallest_scale=_SMALLEST_SCALE * max_magnitude(param_grads),
            )
            inputs = self._activations
            add(
                "gradients",
                at_once=_with_names(at_once.gradient.activations),
                in_microbatches=in_microbatches.gradient.activations,
                axes=floating_axes(inputs.passed, inputs.axes),
                inputs_name="input",
            )
        return tuple(compared), tuple(differences)

    def _notes(
        self,
        function: SplitFunction,
        at_once: SplitOutputs,
        out_axes: Sequence[int | None],
    ) -> list[str]:
        """Remarks on how a layer was compared."""
        notes: list[str] = []
        is_normed = compare(
            "outputs",
            at_once=at_once.results.activations,
            in_microbatches=at_once.results.comparable.activations,
            axes=out_axes,
            sizes=self._sizes,
            limit=0.0,
        )
        if is_normed:
            notes.append("batch norms normalize each micro-batch by itself")
        if function.reads_any_of_last(len(jax.tree.leaves(self._keys))):
            notes.append("compared without dropout and other random numbers")
        if function.error:
            notes.append(f"without gradients: {function.error}")
        return notes


def _with_names(activations: Passed) -> PyTree:
    """Activations, in the same order, as a tree whose paths a user knows."""
    x, stashed = activations
    return {"passed": x, "stashed": stashed} if stashed else x


def _advice(index: int, *, is_last: bool) -> str:
    """The lines to type where a layer differs."""
    advice = (
        f"where all examples should count take num_microbatches=1; where those of each "
        f"micro-batch should, say so: report.raise_if_different(accept=[{index}])"
    )
    if is_last:
        advice += (
            "; out_axes= says what apply makes of outputs: an axis, jpipe.MEAN or "
            "jpipe.SUM"
        )
    return advice


def _params_of(entries: Entries) -> list[PyTree]:
    """The parameters of each entry."""
    return [
        {"params": entry["params"]} if "params" in entry else {} for entry in entries
    ]


def _state_of(entries: Entries) -> list[PyTree]:
    """The variables of each entry that are no parameters."""
    return [_without_params(entry) for entry in entries]


def _without_params(entry: Mapping[str, PyTree]) -> dict[str, PyTree]:
    return {name: tree for name, tree in entry.items() if name != "params"}
