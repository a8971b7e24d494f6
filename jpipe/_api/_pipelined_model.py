"""A model in a partition: its pipelined functions, and where its variables are."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import chex
import jax
from flax import errors

from .._arguments import _variables
from .._arguments._microbatch import check_axes
from .._arguments._mutable import NOTHING_MUTABLE, Mutable
from .._arguments._objective import Objective
from .._arguments._stacked import gather_tree, repeat_for_pieces
from .._arguments._trainable import Trainable
from .._instructions import _transfer
from .._layers import _rng
from .._layers._adapter import check_unchanged
from .._layers._advice import argument_names
from .._lower._join import REDUCTIONS
from .._model._initial import Initial, strong
from .._model._model import Model
from .._model._state_axes import axes_of_init
from .._partition._param_layout import ParamLayout
from .._partition._partition import Partition
from .._partition._stage_placement import StagePlacement
from .._pipelined import _model_functions
from .._pipelined._feed import Feed
from .._pipelined._pipelined_function import PipelinedFunction
from .._pipelined._specialization import Specialization
from .._pipelined._user_function import UserFunction
from .._processes._arrays import is_here
from .._processes._group import agree_on_keys
from .._train._pipelined_loss import PipelinedLoss
from ..planning._describe import PipelineInfo, describe, describe_function
from ..planning._plan_record import Forecast, Plan
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
      partition: the stages in which it runs.
      forecast: the forecast of the plan that it was built by, if there is one.

    Attributes:
      model: likewise.
      partition: likewise.
      checks: the checks of its variables.
      devices: all different devices.
    """

    def __init__(
        self, model: Model, partition: Partition, forecast: Forecast | None = None
    ) -> None:
        self.model = model
        self._forecast = forecast
        self.partition = partition
        self.checks = VariableChecks(model, partition)
        self.devices = partition.devices
        # (train, key of the collections that change) -> the forward pass in stages
        self._forwards: dict[Any, PipelinedFunction] = {}
        for train in (False, True):
            self._forward_function(NOTHING_MUTABLE, train=train)

    def __str__(self) -> str:
        return str(self.model)

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a mini-batch."""
        return self.partition.num_microbatches

    @property
    def num_stages(self) -> int | None:
        """The number of stages; ``None`` before a model is divided."""
        return self.partition.num_stages

    @property
    def input_names(self) -> Collection[str]:
        """The names of the arguments of a model; none of a list, which takes one."""
        return [] if self.model.is_list else argument_names(self.model.layers[0])

    @property
    def is_divided(self) -> bool:
        """True if it is known where each stage begins."""
        return self.model.is_list or self.partition.cuts is not None

    @cached_property
    def placement(self) -> StagePlacement:
        """The schedule, and the devices of the stages.

        Raises:
          ValueError: if a model was not divided yet.
        """
        if self.num_stages is None:
            raise ValueError(UNKNOWN)
        return self.partition.placement(self.num_stages)

    def feed(self, function: str) -> Feed:
        """Returns the feed of mini-batches of a function in several processes.

        Args:
          function: the function as users call it, for errors.
        """

        def placement() -> StagePlacement | None:
            return self.placement if self.num_stages else None

        return Feed(placement, function, is_local=self.model.is_list)

    def plan(self, last: Specialization | None = None) -> Plan:
        """Makes the plan of the pipeline, in names and numbers.

        Args:
          last: the specialization for the last mini-batch of a loss; ``None``: the plan
            of the model alone.

        Raises:
          ValueError: if the pipeline is of a model that was not divided yet.
        """
        if not self.is_divided:
            raise ValueError(UNKNOWN)
        return describe(self._info(last), self._forecast)

    def _info(self, last: Specialization | None) -> PipelineInfo:
        """The facts about a pipeline that is divided: see `plan`."""
        forwards = [forward.last_specialization for forward in self._forwards.values()]
        last = last or next(filter(None, forwards), None)
        if not self.model.is_list:
            if last is not None:
                return describe_function(last)
            # A plan has the cuts, or a loss was divided.
            names = [()] * len(self.placement.layer_groups)
            return PipelineInfo(self.placement, names, cuts=self.partition.cuts)

        names = [group.layer_names for group in self.placement.layer_groups]
        if last is not None:
            return describe_function(last)._replace(names=names)
        if self.checks.specs is None:
            return PipelineInfo(self.placement, names)

        layout = self.layout(self.checks.specs)
        params_of_stage: list[list[int]] = [[] for _ in names]
        for index, owner in enumerate(layout.owner_stages):
            params_of_stage[owner].append(index)
        return PipelineInfo(self.placement, names, layout, params_of_stage)

    # ------------------------------------------------------------ pipelined functions

    def clear_traces(self) -> None:
        """Forgets traces, so that layers are traced anew.

        Layers and losses may read objects that were changed since: globals, variables
        of functions around them, helpers in other modules. Functions that are built
        after this call see them as they are now, as under a new `jax.jit`. A program
        of the same text is not compiled again: see `_instructions._compiler`.

        Raises:
          ValueError: if an nnx module was changed.
        """
        self.model.look_again()
        for forward in self._forwards.values():
            forward.clear()

    def forward(
        self,
        variables: PyTree,
        x: PyTree,
        rngs: _rng.Rngs,
        *,
        train: bool,
        mutable: Mutable = NOTHING_MUTABLE,
    ) -> Specialization:
        """Returns the forward pass for variables and an input."""
        function = self._forward_function(mutable, train=train)
        try:
            return function.specialize(variables, x, rngs)
        except (TypeError, ValueError) as error:
            if missing := sorted(self._find_caches(x) - {*mutable.names}):
                error.add_note(
                    f"the model writes state with a row for each example: type "
                    f"mutable={missing!r}, or leave out what makes it, such as decode="
                )
            raise

    def _forward_function(self, mutable: Mutable, *, train: bool) -> PipelinedFunction:
        """The forward pass in stages, built once."""
        key = train, mutable.key
        if key not in self._forwards:
            self._forwards[key] = self._build_function(
                _model_functions.forward_function(
                    self.model, train=train, mutable=mutable
                )
            )
        return self._forwards[key]

    def loss(self, objective: Objective, trainable: Any) -> PipelinedLoss:
        """Makes the loss of one objective and its gradients.

        All functions of the model are traced anew in their next call, so that a new
        loss sees it as it is now.

        Args:
          objective: the loss.
          trainable: a selection of the parameters that have gradients.

        Raises:
          TypeError: if the loss closes over variables that are trained.
          ValueError: if the schedule cannot train.
        """
        check_axes("aux_axes", objective.aux_axes, REDUCTIONS)
        if self.num_stages:
            self.placement.check_trains()
        selection = Trainable(trainable, by_layer=self.model.is_list)
        self.clear_traces()
        outputs: list[PyTree] = []

        def trained(variables: PyTree) -> list[bool]:
            return jax.tree.leaves(self.model.is_trained(variables, selection))

        functions = {}
        losses = {}
        for train in (False, True):
            user_function = _model_functions.loss_function(
                self.model, objective, outputs, train=train
            )
            functions[train] = self._build_function(user_function, trained)
            losses[train] = user_function.call
        return PipelinedLoss(
            objective=objective,
            trainable=selection,
            functions=functions,
            losses=losses,
            outputs=outputs,
        )

    def _build_function(
        self,
        user_function: UserFunction,
        trained: Callable[[PyTree], list[bool]] = lambda specs: [],
    ) -> PipelinedFunction:
        """Returns a function in stages, which checks its variables first."""
        user_function = replace(
            user_function,
            check_signature=self.checks.check_call,
            explain=self.checks.explain,
        )
        return PipelinedFunction(user_function, self.partition, trained)

    # ---------------------------------------------------------------------- variables

    def init(
        self,
        key: chex.PRNGKey | None,
        x: PyTree,
        fixed_entries: Sequence[PyTree] | None = None,
    ) -> PyTree:
        """Makes the variables, each in place.

        Each leaf is made on one device, where equal draws share a compiled program, and
        moved at once: it has room for one array more, not for all.

        Args:
          key: the key.
          x: an input, or specs of one.
          fixed_entries: the variables of each layer that stay as they are, anywhere;
            ``None`` for a layer whose variables are to be made. Default: all are.
        """
        _variables.check_concrete(jax.tree.leaves((key, x)))
        if key is not None:
            _rng.check_key(key)
        self.clear_traces()
        has_fixed_entries = fixed_entries is not None
        if fixed_entries is None:
            fixed_entries = [None] * len(self.model.layers)
        initial = self.model.initial(
            self.model.sample_batch(x, self.partition),
            [{} if entry is None else entry for entry in fixed_entries],
            key,
        )
        if key is None:
            if initial.draws:
                _rng.check_key(key)
            key = jax.random.key(0)  # which nobody reads

        is_missing: list[bool] = []
        for entry, specs in zip(fixed_entries, initial.specs, strict=True):
            is_missing += [entry is None] * len(jax.tree.leaves(specs))
        variables = self._draw(initial, key, x, is_missing)
        if has_fixed_entries:
            pairs = zip(fixed_entries, self.model.entries(variables), strict=True)
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
          is_missing: one bool per leaf; False leaves its spec in its place.
        """
        layout = self.layout(self.model.from_entries(initial.specs), x)
        if not self.placement.is_one_process:
            agree_on_keys(key)
        devices = [self.placement.devices[stage] for stage in layout.owner_stages]
        is_missing = repeat_for_pieces(is_missing, layout.pieces)
        is_drawn_here = [
            missing and is_here(device)
            for missing, device in zip(is_missing, devices, strict=True)
        ]
        first = next(filter(is_here, self.devices), self.devices[0])
        drawn = initial.leaves(
            key, _transfer.first_device(first), is_drawn_here, layout.pieces
        )

        leaves = []
        for i, leaf in enumerate(drawn):
            value = layout.specs[i] if leaf is None else leaf
            if is_missing[i]:
                value = _transfer.put_leaf(value, devices[i], layout.shardings[i])
            leaves.append(value)
        return layout.join_params(leaves)

    def copy_in_place(self, key: chex.PRNGKey, variables: PyTree, x: PyTree) -> PyTree:
        """Checks variables, and returns copies of them in place.

        Variables of a list may have ``None`` for layers whose variables are to be made.
        Each is returned in the entry in which `init` returns it.

        Raises:
          ValueError: if they are not those of the model, or overwritten.
        """
        if any(entry is None for entry in self.model.entries(variables)):
            variables = self.init(key, x, variables)
        self.clear_traces()
        variables = self.checks.move_to_owners(variables, x)
        _variables.check_alive(jax.tree.leaves(variables))
        layout = self.layout(variables, x)
        copies = _transfer.put_tree(
            layout.split_params(variables),
            self.placement.devices,
            layout.stage_shardings,
            may_alias=False,
        )
        return layout.join_params(jax.tree.leaves(jax.tree.map(strong, copies)))

    def place(self, variables: PyTree, x: PyTree = None) -> PyTree:
        """Returns variables in place."""
        variables = self.model.from_entries(self.model.entries(variables))
        return self.layout(variables, x).place(variables)

    def layout(self, variables: PyTree, x: PyTree = None) -> ParamLayout:
        """Returns the layout of variables between steps.

        Args:
          variables: the variables, or specs of them.
          x: an input, or specs of one; needed where a model was not divided yet.

        Raises:
          ValueError: if a model was not divided yet, and there is no input.
        """
        self.model.entries(variables)
        if x is None and self.partition.owner_stages(variables) is None:
            raise ValueError(
                "where the variables of a model stay is known once it is divided, "
                "which takes an input: type pipe.place(variables, x)"
            )
        # There are models that draw in evaluation.
        args = x, _rng.key_spec()
        evaluation = self._forward_function(NOTHING_MUTABLE, train=False)
        try:
            return evaluation.layout(variables, args)
        except errors.ModifyScopeVariableError:  # a module of linen has a cache
            return self._state_division(variables, x).layout(variables, args)
        except Exception:
            if self._find_caches(x):  # the error is that of a cache of other examples
                return self._state_division(variables, x).layout(variables, args)
            # A module of nnx may have a cache, for all examples; if that is not it, the
            # first error says what is wrong.
            with suppress(Exception):
                return self._state_division(variables, x).layout(variables, args)
            raise

    def _find_caches(self, x: PyTree) -> set[str]:
        """The collections that an initialization makes with rows for the examples."""
        with suppress(Exception):  # which the call explains
            axes = axes_of_init(self.model, self.model.sample_batch(x, self.partition))
            return {
                self.model.collection(path)
                for path, axis in axes.items()
                if axis is not None
            }
        return set()

    def _state_division(self, variables: PyTree, x: PyTree) -> PipelinedFunction:
        """A forward pass that divides a model which writes state in evaluation.

        It is traced on all examples at once, as modules of nnx hold a cache for so
        many. Modules of linen make their caches anew, as in an initialization, where
        attention takes more than one token. Of an input that is none of an
        initialization, such as a prompt and the mask of a whole text, all write to
        the caches that are there.
        """
        model = self.model
        created = self._find_caches(x)
        names = set[str]()
        for entry in model.entries(variables):
            names |= entry.keys() - {"params"}
        user_function = _model_functions.forward_function(
            model, train=False, mutable=Mutable(tuple(sorted(names))), created=created
        )
        function = self._build_function(replace(user_function, is_whole=True))
        self._forwards[False, "division"] = function
        return function

    def modules(self, variables: PyTree) -> Any:
        """Returns the layers with values: see `Pipeline.modules`."""
        check_unchanged(self.model.layers, self.model.label)
        entries = self.model.entries(variables)
        _variables.check_alive(jax.tree.leaves(variables))
        entries = tuple(map(_on_one_device, gather_tree(tuple(entries))))
        modules = self.model.parent.modules(entries)
        return modules if self.model.is_list else modules[0]


def _on_one_device(entry: PyTree) -> PyTree:
    """The variables of a module, which JAX runs on the devices of one array.

    Those of a list are there: each layer is on its device. Those of one model are
    copied to its first device, where they are on several and all of them are here.
    """
    arrays = [leaf for leaf in jax.tree.leaves(entry) if isinstance(leaf, jax.Array)]
    device_sets = dict.fromkeys(frozenset(array.devices()) for array in arrays)
    are_here = all(array.is_fully_addressable for array in arrays)
    if len(device_sets) < 2 or not are_here:
        return entry
    first = min(next(iter(device_sets)), key=lambda device: device.id)
    leaves, structure = jax.tree.flatten(entry)
    return structure.unflatten(_transfer.put(leaves, first, may_alias=False))
