"""A list of layers, or one model, as a function of variables and a micro-batch.

    variables, x, rngs -> y, changed variables by leaf index

The variables of a list are a tuple with one entry per layer, and a mark stands in the
trace between two of its stages. One model is a sequence of one layer whose variables
are a tree of its own; where it is cut follows from its trace.
"""

from collections.abc import Collection, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from .._arguments import _call, _signature, _variables
from .._arguments._batch import Axes, Batch
from .._arguments._cache import RecentCache
from .._arguments._trainable import Trainable
from .._instructions._sharding import Sharding
from .._layers import _batch_norm, _rng
from .._layers._adapter import LayerAdapter, check_unchanged
from .._layers._sequence import Sequential
from .._layers._skip import Passed
from .._partition import _param_sharding
from .._partition._partition import Partition
from .._partition._stage_placement import StagePlacement
from .._trace import _boundaries
from ._initial import Initial

PyTree = Any
# What Flax's own TrainState overwrites with its gradient.
_BY_GRADIENT = "_overwrite_with_gradient"


class Model:
    """A list of layers, or one model.

    Args:
      layers: the layers; of a model the only one.
      axes: the axes of the examples.
      stage_of_layer: the stage of each layer of a list; ``None`` for one model.

    Attributes:
      layers: the layers.
      axes: the axes of the examples.
      is_list: True if it is a list.
      stage_of_layer: the stage of each layer; for a model 0, whatever its cuts.
      parent: the modules in it.
    """

    def __init__(
        self,
        layers: Sequence[LayerAdapter],
        axes: Axes,
        stage_of_layer: Sequence[int] | None = None,
    ) -> None:
        self.layers = layers
        self.axes = axes
        self.is_list = stage_of_layer is not None
        self.stage_of_layer = [0] if stage_of_layer is None else stage_of_layer
        self._sequence = Sequential(layers, self.stage_of_layer, is_list=self.is_list)
        self.parent = self._sequence.parent
        # (settings, signature of key, input and fixed variables) -> initial variables
        self._initial = RecentCache[Any, Initial]()

    # ------------------------------------------------------------------------- words

    def __str__(self) -> str:
        return f"{len(self.layers)} layers" if self.is_list else self.layers[0].name

    @property
    def label(self) -> str:
        """The words for a layer in errors, to be formatted with its index."""
        return "layer {}" if self.is_list else "the model"

    @property
    def advice(self) -> str:
        """The call to type where variables are not in place."""
        args = "variables" if self.is_list else "variables, x"
        return f"variables = pipe.place({args})"

    def name_written(self, path: Any) -> str:
        """The words for a write to a variable, in errors."""
        if not self.is_list:
            return keystr(path, simple=True, separator="/")
        layer, *names = path
        variable = keystr(tuple(names), simple=True, separator="/")
        layer_name = self.layers[layer.idx].name
        return f"layer {layer.idx} ({layer_name}) writes {variable}"

    # --------------------------------------------------------------------- variables

    def entries(self, variables: PyTree) -> Sequence[PyTree]:
        """Returns the variables of each layer; a model is its only layer.

        Raises:
          ValueError: if there is not one entry per layer, or they are no mapping.
        """
        if self.is_list:
            _variables.check_length(variables, len(self.layers))
            return variables
        _variables.check_model(variables)
        return (variables,)

    def from_entries(self, entries: Sequence[PyTree]) -> PyTree:
        """Returns variables from the variables of each layer: undoes `entries`."""
        return tuple(entries) if self.is_list else entries[0]

    def collection(self, path: Any) -> str:
        """The collection of a variable, from its path among all."""
        return path[int(self.is_list)].key

    def collections(self, variables: PyTree, names: Collection[str]) -> PyTree:
        """The collections of some names, in the structure of the variables."""
        return self.from_entries(
            [
                {name: entry[name] for name in entry if name in names}
                for entry in self.entries(variables)
            ]
        )

    def is_trained(self, variables: PyTree, trainable: Trainable) -> PyTree:
        """Returns a bool for each leaf of the variables; True if it is trained."""
        entries = self.entries(variables)
        return self.from_entries(trainable.is_trained(self.layers, entries))

    def shardings(
        self, placement: StagePlacement, variables: PyTree, owner_stages: Sequence[int]
    ) -> list[Sharding]:
        """Returns the sharding of each leaf of the variables in its stage.

        Args:
          placement: the stages and their devices.
          variables: the variables, or specs of them.
          owner_stages: the stage of each leaf.

        Raises:
          ValueError: with every parameter of a layer that its axes do not divide.
          TypeError: if the rule returns something else than axes.
        """
        devices = [placement.devices[stage] for stage in owner_stages]
        shardings: list[Sharding] = []
        for i, entry in enumerate(self.entries(variables)):
            begin = len(shardings)
            shardings += _param_sharding.tree_shardings(
                placement,
                entry,
                devices[begin : begin + len(jax.tree.leaves(entry))],
                owner=self.layers[i].owner,
                layer=(i,) if self.is_list else (),
            )
        return shardings

    def sample_batch(self, x: PyTree, partition: Partition) -> Batch:
        """Describes the input from which variables are made, as a mini-batch.

        Args:
          x: the input; it may have few examples.
          partition: the partition, which has the number of micro-batches and shards.
        """
        return _call.batch(
            [x],
            (self.axes.in_axes,),
            ["x"],
            num_microbatches=partition.num_microbatches,
            num_shards=partition.num_shards,
            allows_unsplit=True,
        )

    def initial(
        self,
        batch: Batch,
        fixed_entries: Sequence[PyTree] | None = None,
        key: chex.PRNGKey | None = None,
    ) -> Initial:
        """Returns the variables before any step, for a whole mini-batch.

        Args:
          batch: the input: see `sample_batch`.
          fixed_entries: variables of each layer that are taken as they are: see
            `Initial`.
          key: a key like the one that draws them, typed or raw; default: typed.
        """
        key_like: Any = _rng.key_spec() if key is None else key
        (x,) = batch.args
        signature = (
            _signature.settings(),
            _signature.tree_signature(key_like, x, fixed_entries),
        )
        if signature not in self._initial:
            self._initial[signature] = Initial(
                self._sequence, key_like, x, fixed_entries
            )
        return self._initial[signature]

    def make_variables(self, key: chex.PRNGKey, x: PyTree) -> PyTree:
        """Makes the variables that are not held by modules of nnx."""
        entries = self._sequence.init(key, x, [{} for _ in self.layers]).entries
        return self.from_entries(entries)

    # ------------------------------------------------------------------------- calls

    def look_again(self) -> None:
        """Traces layers anew from now on.

        Raises:
          ValueError: if an nnx module was changed.
        """
        check_unchanged(self.layers, self.label)
        self._initial.clear()

    def forward(
        self,
        variables: PyTree,
        x: PyTree,
        rngs: _rng.Rngs,
        *,
        train: bool,
        mutable: Collection[str] = (),
        created: Collection[str] = (),
    ) -> tuple[PyTree, dict[int, Any]]:
        """Applies the layers to a micro-batch.

        Args:
          variables: the variables.
          x: the input.
          rngs: the keys.
          train: True in training.
          mutable: the collections of linen that may change in evaluation.
          created: the collections that modules of linen make anew.

        Returns:
          The output, and ``leaf index -> new value`` of the variables that change.
        """
        if train:
            _check_collections(self.entries(variables))
        # A raw key is folded where it is wrapped, which is here and not in a loop.
        rngs = jax.tree.map(_rng.normalize_key, rngs)
        with _batch_norm.record_batch_norms():
            y, changed = self.apply_mutable(
                variables, x, rngs, train=train, mutable=mutable, created=created
            )
        leaf_index = {
            path: i for i, (path, _) in enumerate(tree_leaves_with_path(variables))
        }
        return y, {
            leaf_index[path]: leaf
            for path, leaf in tree_leaves_with_path(changed)
            if path in leaf_index
        }

    def apply_mutable(
        self,
        variables: PyTree,
        x: PyTree,
        rngs: _rng.Rngs,
        *,
        train: bool,
        mutable: Collection[str] = (),
        created: Collection[str] = (),
    ) -> tuple[PyTree, PyTree]:
        """Returns the output and the collections that may have changed, as Flax.

        The arguments are those of `forward`.
        """
        entries = variables
        if not self.is_list:
            check_unchanged(self.layers, self.label)
            entries = (variables,)
        outputs = self._sequence(
            entries,
            x,
            rngs,
            train=train,
            mutable=mutable,
            created=created,
            after_layer=self._mark_stage_end,
        )
        return outputs.y, self.from_entries(outputs.entries)

    def _mark_stage_end(self, layer: int, passed: Passed) -> Passed:
        """Marks what a layer passes to later ones, if it is the last of its stage."""
        stage, *next_stages = self.stage_of_layer[layer : layer + 2]
        if next_stages in ([], [stage]):
            return passed
        passed = jax.tree.map(jnp.asarray, passed)
        return Passed(*_boundaries.mark_stage_end(stage, passed))


def _check_collections(entries: Sequence[PyTree]) -> None:
    """Refuses a collection that Flax's own train state overwrites by its gradient."""
    if any(_BY_GRADIENT in entry for entry in entries):
        raise ValueError(
            f"the variables hold the collection {_BY_GRADIENT}, as the fp8 operations "
            f"of flax.linen do, whose values a step replaces by their gradients; a "
            f"pipeline does not, and would leave them as they are: train without "
            f"dot_general_cls; evaluation works"
        )
