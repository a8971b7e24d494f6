"""A model in a partition: its pipelined functions, and where its variables are."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import chex
import jax

from .._arguments import _variables
from .._arguments._objective import Objective
from .._arguments._trainable import Trainable
from .._instructions import _transfer
from .._layers import _rng
from .._layers._adapter import check_unchanged
from .._layers._skip import skip_name
from .._model._initial import Initial, strong
from .._model._model import Model
from .._partition._param_layout import ParamLayout
from .._partition._partition import Partition
from .._partition._stage_placement import StagePlacement
from .._pipelined import _model_functions
from .._pipelined._feed import Feed
from .._pipelined._function_spec import FunctionSpec
from .._pipelined._pipelined_function import PipelinedFunction
from .._pipelined._specialization import Specialization
from .._processes._arrays import is_here
from .._processes._group import agree_on_key
from .._train._gradients import Gradients
from ..planning._describe import PipelineInfo, describe_function
from ._variable_checks import VariableChecks

PyTree = Any
UNKNOWN = (
    "the stages of a model are known once it was initialized or called; jpipe.plan "
    "decides them before"
)


class PipelinedModel:
    """A list of layers, or one model, in the stages of a partition.

    Args:
      model: the model.
      partition: in which stages it runs.

    Attributes:
      model: likewise.
      partition: likewise.
      checks: the checks of its variables.
      places: the devices, each once.
    """

    def __init__(self, model: Model, partition: Partition) -> None:
        self.model = model
        self.partition = partition
        self.checks = VariableChecks(model, partition)
        self.places = partition.places
        # train -> the forward pass
        self._forwards = {
            train: self._pipelined(_model_functions.forward_spec(model, train=train))
            for train in (False, True)
        }

    def __str__(self) -> str:
        return str(self.model)

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a mini-batch."""
        return self.partition.num_microbatches

    @property
    def num_stages(self) -> int | None:
        """The number of stages, once it is known."""
        return self.partition.num_stages

    @cached_property
    def pipe(self) -> StagePlacement:
        """The stages.

        Raises:
          ValueError: before they are known.
        """
        if self.num_stages is None:
            raise ValueError(UNKNOWN)
        return self.partition.placement(self.num_stages)

    def feed(self) -> Feed:
        """Returns what tells this process of mini-batches that others are given."""

        def stages() -> StagePlacement | None:
            return self.pipe if self.num_stages else None

        return Feed(stages, self.model.is_list)

    def describe(self, last: Specialization | None) -> PipelineInfo | None:
        """Returns what is known of the pipeline; ``None`` before it is divided.

        Args:
          last: the last mini-batch with a loss.
        """
        if not self.model.is_list:
            forwards = (forward.last for forward in self._forwards.values())
            last = last or next(filter(None, forwards), None)
            return describe_function(last) if last else None

        names = [[layer.name for layer in stage.layers] for stage in self.pipe.stages]
        skips = [(skip_name(r.key), r.source, r.target) for r in self.model.routes]
        if last is not None:
            return describe_function(last)._replace(names=names, skips=skips)
        if self.checks.specs is None:
            return PipelineInfo(self.pipe, names, skips=skips)
        layout = self.layout(self.checks.specs)
        reads = [
            [i for i, owner in enumerate(layout.owner_stages) if owner == stage]
            for stage in range(len(names))
        ]
        return PipelineInfo(self.pipe, names, layout, reads, skips=skips)

    # ------------------------------------------------------------ pipelined functions

    def look_again(self) -> None:
        """Traces layers anew from now on, as where variables are made of them.

        Layers and losses may read what was changed since: globals, variables of
        functions around them, helpers in other modules. What is built anew has them
        as they are now, as under a new `jax.jit`, and what is evaluated after it too;
        what came to the same is not compiled again: see `_compile`.

        Raises:
          ValueError: if an nnx module was changed.
        """
        self.model.look_again()
        for forward in self._forwards.values():
            forward.clear()

    def forward(
        self, variables: PyTree, x: PyTree, rngs: _rng.Rngs, *, train: bool
    ) -> Specialization:
        """Returns the forward pass for such variables and such an input."""
        return self._forwards[train](variables, x, rngs)

    def gradients(self, objective: Objective, trainable: Trainable) -> Gradients:
        """Returns the gradients of one objective.

        Raises:
          TypeError: if the loss takes what is trained.
        """
        self.look_again()
        outputs: list[PyTree] = []

        def marks(variables: PyTree) -> list[bool]:
            return jax.tree.leaves(self.model.marks(variables, trainable))

        programs = {}
        for train in (False, True):
            spec = _model_functions.loss_spec(
                self.model, objective, outputs, train=train
            )
            programs[train] = self._pipelined(spec, marks)
        return Gradients(
            objective=objective,
            trainable=trainable,
            programs=programs,
            outputs=outputs,
            axis=self.model.axes.out_axes,
        )

    def _pipelined(self, spec: FunctionSpec, *marks: Any) -> PipelinedFunction:
        """Returns a function in stages, which checks its variables first."""
        spec = replace(spec, check=self.checks.check_call, explain=self.checks.explain)
        return PipelinedFunction(spec, self.partition, *marks)

    # ---------------------------------------------------------------------- variables

    def init(
        self,
        key: chex.PRNGKey | None,
        x: PyTree,
        given: Sequence[PyTree] | None = None,
    ) -> PyTree:
        """Makes the variables, or of a list those of layers with ``None`` for them.

        Each leaf is made on one device, where equal draws share a compiled program, and
        moved at once: it has room for one array more, not for all.
        """
        _variables.check_concrete(jax.tree.leaves((key, x)))
        if key is not None:
            _rng.check_key(key)
        self.look_again()
        given_entries = given or [None] * len(self.model.layers)
        initial = self.model.initial(
            self.model.sample(x, self.partition),
            [{} if entry is None else entry for entry in given_entries],
            key,
        )
        if key is None:
            if initial.draws:
                _rng.check_key(key)
            key = jax.random.key(0)  # which nobody reads

        is_missing = [
            entry is None
            for entry, specs in zip(given_entries, initial.specs, strict=True)
            for _ in jax.tree.leaves(specs)
        ]
        variables = self._draw(initial, key, x, is_missing)
        if given:
            pairs = zip(given, self.model.entries(variables), strict=True)
            entries = [new if entry is None else entry for entry, new in pairs]
            variables = self.place(self.model.from_entries(entries))
        self.checks.note(variables, x)
        return variables

    def _draw(
        self,
        initial: Initial,
        key: chex.PRNGKey,
        x: PyTree,
        is_missing: Sequence[bool],
    ) -> PyTree:
        """Makes initial variables, each in place.

        Args:
          initial: the variables.
          key: the key.
          x: an input.
          is_missing: whether each leaf is to be made; a spec stands for others.
        """
        specs, tree = jax.tree.flatten(self.model.from_entries(initial.specs))
        locations = self.layout(tree.unflatten(specs), x).locations
        pipe = self.pipe
        if pipe.copies is not None:
            agree_on_key(key)
        devices = [pipe.devices[stage] for stage, _ in locations]
        is_drawn_here = [
            missing and is_here(device)
            for missing, device in zip(is_missing, devices, strict=True)
        ]
        first = next(filter(is_here, self.places), self.places[0])
        drawn = initial.leaves(key, _transfer.first_device(first), is_drawn_here)

        leaves = []
        for i, leaf in enumerate(drawn):
            if is_missing[i]:
                value = specs[i] if leaf is None else leaf
                leaves.append(_transfer.put_leaf(value, devices[i], locations[i][1]))
            else:
                leaves.append(specs[i])
        return tree.unflatten(leaves)

    def take(self, key: chex.PRNGKey, variables: PyTree, x: PyTree) -> PyTree:
        """Returns copies of variables, which are checked, in place.

        Those of a list may have ``None`` for layers whose variables are to be made, and
        are returned each in the entry that `init` gives it to.

        Raises:
          ValueError: if they are not those of the model, or overwritten.
        """
        if any(entry is None for entry in self.model.entries(variables)):
            variables = self.init(key, x, variables)
        self.look_again()
        variables = self.checks.by_owner(variables, x)
        _variables.check_alive(jax.tree.leaves(variables))
        locations = self.layout(variables, x).locations
        copies = _transfer.put_tree(
            variables, self.pipe.devices, locations, may_alias=False
        )
        return jax.tree.map(strong, copies)

    def place(self, variables: PyTree, x: PyTree = None) -> PyTree:
        """Returns variables in place."""
        variables = self.model.from_entries(self.model.entries(variables))
        locations = self.layout(variables, x).locations
        return _transfer.put_tree(variables, self.pipe.devices, locations)

    def layout(self, variables: PyTree, x: PyTree = None) -> ParamLayout:
        """Returns where variables are between steps.

        Args:
          variables: the variables, or specs of them.
          x: an input, or specs of one; needed where a model was not cut yet.

        Raises:
          ValueError: if it is not known, and there is no input.
        """
        self.model.entries(variables)
        if x is None and self.partition.owner_stages(variables) is None:
            raise ValueError(
                "where the variables of a model stay is known once it is divided, "
                "which takes an input: type pipe.place(variables, x)"
            )
        # There are models that draw in evaluation.
        return self._forwards[False].layout(variables, (x, _rng.key_spec()))

    def modules(self, variables: PyTree) -> Any:
        """Returns the layers with values: see `Pipeline.modules`."""
        check_unchanged(self.model.layers, self.model.label)
        entries = self.model.entries(variables)
        _variables.check_alive(jax.tree.leaves(variables))
        modules = self.model.parent.modules(entries)
        return modules if self.model.is_list else modules[0]
