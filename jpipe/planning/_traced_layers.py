"""Layers, or sections of a model, on abstract values.

Each is traced as a stage; nothing is compiled. A profile is made of what they read and
write, and belongs to the models of the same *fingerprint*: that says nothing of
devices, versions or settings, which are the origin of the profile.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._arguments import _variables
from .._arguments._batch import Batch
from .._jaxprs import _jaxpr
from .._jaxprs._jaxpr import specs
from .._layers._text import shape_text
from .._partition._remat_mode import NONE, RematMode
from .._pipelined._specialization import Specialization
from .._stage._stage_functions import StageFunctions
from .._stage._stages import Stages
from .._trace import _boundaries
from ._profile_record import Profile

PyTree = Any


@dataclass(frozen=True)
class TracedLayers:
    """Layers, or sections of a model, each a stage; nothing is compiled.

    Attributes:
      names: the name of each layer.
      specialization: the model in stages, one per layer.
      variable_specs: the variables of the model, as specs, with a node of pieces for
        each in pieces.
    """

    names: tuple[str, ...]
    specialization: Specialization
    variable_specs: PyTree

    @property
    def stages(self) -> Stages:
        """The stages, one per layer."""
        return self.specialization.stages

    @property
    def batch(self) -> Batch:
        """The mini-batch, all arguments but the variables."""
        return self.specialization.batch

    @cached_property
    def paths(self) -> list[str]:
        """The path of each leaf of the variables."""
        leaves = jax.tree_util.tree_leaves_with_path(self.variable_specs)
        return [jax.tree_util.keystr(path) for path, _ in leaves]

    @cached_property
    def params(self) -> PyTree:
        """The indices of the parameters among these leaves, as `tx.init` takes them."""
        tree = jax.tree.structure(self.variable_specs)
        return _variables.params(tree.unflatten(range(tree.num_leaves)))

    @property
    def results(self) -> list[Any]:
        """Specs of the results of the last layer, besides the loss if it makes one."""
        return jax.tree.leaves(self.stages.traced().aux[0])

    def functions(self, layer: int, *, mode: RematMode = NONE) -> StageFunctions:
        """The functions of a layer in a remat mode; equal layers have the same."""
        return self.stages.functions(self._first_equal_layer[layer], 0, mode)

    @cached_property
    def _first_equal_layer(self) -> list[int]:
        """For each layer, the first one whose operations are the same."""
        first_layer: dict[Any, int] = {}  # key of equal layers -> the first of them
        return [
            first_layer.setdefault(self.stages.structural_key(layer), layer)
            for layer in range(len(self.names))
        ]

    def group_equal_layers(self) -> Mapping[StageFunctions, list[int]]:
        """The functions that differ -> the indices of the layers that have them."""
        groups: dict[StageFunctions, list[int]] = {}
        for layer in range(len(self.names)):
            groups.setdefault(self.functions(layer), []).append(layer)
        return groups

    def owned_variables(self, layer: int, *, are_params: bool) -> list[int]:
        """The indices of the parameters that a layer owns, or of its other state."""
        params = set(self.specialization.layout.param_indices)
        return [
            index
            for index, owner in enumerate(self.specialization.layout.owner_stages)
            if owner == layer and (index in params) == are_params
        ]

    def specs(self, variables: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        """Specs of variables, by their indices."""
        return [self.stages.spec_of(index) for index in variables]

    def ties(self) -> Iterator[tuple[int, ...]]:
        """The layers that use parameters of the same layer, that one first."""
        weights = [set(self.stages.weight_indices(i)) for i in range(len(self.names))]
        groups: dict[int, set[int]] = {}  # owner -> the layers that use its parameters
        for param in self.specialization.layout.param_indices:
            readers = [layer for layer, read in enumerate(weights) if param in read]
            if len(readers) > 1:  # the first of them owns it
                groups.setdefault(readers[0], set()).update(readers)
        for owner in sorted(groups):
            yield tuple(sorted(groups[owner]))

    def inputs(self, layer: int) -> list[Any]:
        """The variables that a layer reads of the output of the one before it.

        The first layer reads the input of the model.
        """
        if layer == 0:
            return self.stages.slice_of(0).model_inputs
        previous_outputs = self._layer_outputs[layer - 1]
        return [
            var
            for var in self.stages.slice_of(layer).input_activations
            if var in previous_outputs
        ]

    def outputs(self, layer: int) -> list[Any]:
        """The outputs of a layer that the next layer that reads any of them reads.

        Layers between them hand them on.
        """
        outputs = self._layer_outputs[layer]
        for reader in range(layer + 1, len(self.names)):
            inputs = self.stages.slice_of(reader).input_activations
            if any(var in outputs for var in inputs):
                return [var for var in inputs if var in outputs]
        return []

    def skip_inputs(self, layer: int) -> dict[tuple[int, str], list[Any]]:
        """The variables that it reads of earlier layers, by these and by name."""
        inputs = set(self.inputs(layer))
        names = _boundaries.entry_names(self.stages.traced().closed)
        skip_inputs: dict[tuple[int, str], list[Any]] = {}
        for var in self.stages.slice_of(layer).input_activations:
            if var in inputs:
                continue
            source = next(
                i for i, outputs in enumerate(self._layer_outputs) if var in outputs
            )
            index = list(self._layer_outputs[source]).index(var)
            # No shape: a skip has one name in micro-batches of all sizes.
            name = names.get(var) or f"output {index}"
            skip_inputs.setdefault((source, name), []).append(var)
        return skip_inputs

    def select_differentiated(self, variables: Sequence[Any]) -> list[Any]:
        """The variables that have a cotangent."""
        return [var for var in variables if self.stages.has_gradient(var, 0)]

    def is_output(self, source: int, variables: Sequence[Any]) -> bool:
        """True if the next layer that reads of the source reads these variables too."""
        outputs = self._layer_outputs[source]
        read_next = {outputs[var] for var in self.outputs(source)}
        return all(outputs[var] in read_next for var in variables)

    @cached_property
    def _layer_outputs(self) -> list[dict[Any, int]]:
        """For each layer: output -> an id, the same for outputs that are one value."""
        layer_outputs: list[dict[Any, int]] = []
        for layer in range(len(self.names)):
            stage_slice = self.stages.slice_of(layer)
            ids = map(id, stage_slice.closed.jaxpr.outvars)
            layer_outputs.append(dict(zip(stage_slice.outputs, ids, strict=True)))
        return layer_outputs


def fingerprint(model: TracedLayers, *, train: bool) -> dict[str, str]:
    """The fingerprint of layers, by name.

    A layer is known by its name, the shapes and dtypes of its inputs, and a digest of
    its variables and of the operations that it traces to; not by the values of its
    variables.

    Args:
      model: the layers.
      train: True if this is training.
    """
    default_precision = _find_default_precision()
    return {
        "input": _shapes(model.inputs(0)),
        "train": str(train),
        **{
            f"layer {layer}": _describe_layer(model, layer, default_precision)
            for layer in range(len(model.names))
        },
    }


def check_fingerprint(profile: Profile, fingerprint: Mapping[str, str]) -> None:
    """Refuses a profile of another model.

    Args:
      profile: the profile.
      fingerprint: the fingerprint of the model that it is used for.

    Raises:
      ValueError: if anything differs; the message names all of it.

    Example:
      >>> profile = Profile((), fingerprint={"layer 0": "a"})
      >>> check_fingerprint(profile, {"layer 0": "b"})
      Traceback (most recent call last):
      ValueError: the profile is of another model:
        * layer 0: 'a' in the profile, 'b' here
      Make a profile of this one; ...
    """
    differences = [
        f"{name}: {profile.fingerprint.get(name)!r} in the profile, "
        f"{fingerprint.get(name)!r} here"
        for name in dict.fromkeys([*profile.fingerprint, *fingerprint])
        if profile.fingerprint.get(name) != fingerprint.get(name)
    ]
    if differences:
        listed = "".join(f"\n  * {line}" for line in differences)
        raise ValueError(
            f"the profile is of another model:{listed}\nMake a profile of this "
            f"one; give jpipe.profile the same loss_fn=, targets=, trainable= and "
            f"train= as jpipe.plan"
        )


def _find_default_precision() -> str:
    """The precision of products for which nobody names one, as jaxprs have it."""
    vector = np.ones(1, np.float32)
    (product,) = jax.make_jaxpr(jnp.vdot)(vector, vector).jaxpr.eqns
    return str(product.params["precision"])


def _describe_layer(model: TracedLayers, layer: int, default_precision: str) -> str:
    """The name, the inputs and the digest of a layer."""
    stages = model.stages
    stage_slice = stages.slice_of(layer)
    weights = stages.weight_indices(layer)
    digested = [
        str(model.specs(weights)),
        str([model.paths[i] for i in weights if i < len(model.paths)]),
        str([stages.trained[i] for i in weights]),
        str(
            [
                var.aval
                for var in model.select_differentiated(stage_slice.input_activations)
            ]
        ),
        str([str(var.aval) for var in stage_slice.batch_inputs]),
        *_operations(stage_slice.closed, default_precision),
    ]
    digest = hashlib.sha256("\n".join(digested).encode()).hexdigest()
    return f"{model.names[layer]}: {_shapes(model.inputs(layer))}, {digest[:12]}"


def _shapes(variables: Sequence[core.Var]) -> str:
    leaves = specs(variables)
    return shape_text(leaves[0] if len(leaves) == 1 else tuple(leaves))


def _operations(closed: core.ClosedJaxpr, default_precision: str) -> Iterator[str]:
    """The operations of a jaxpr, as far as their texts are the same in any process.

    Args:
      closed: the jaxpr.
      default_precision: the precision that a setting gives to products; it is no part
        of the model.
    """
    for eqn in closed.jaxpr.eqns:
        results = ", ".join(str(var.aval) for var in eqn.outvars)
        precision = str(eqn.params.get("precision", ""))
        if precision == default_precision:
            precision = "default"
        yield f"{eqn.primitive.name} {precision} {results}"
        for inner in _jaxpr.inner_jaxprs(eqn):
            yield from _operations(inner, default_precision)
