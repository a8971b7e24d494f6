"""Train states: the one at step 0, and the devices of their parts."""

from typing import Any

import chex
import jax
import numpy as np

from .._arguments import _microbatch, _variables
from .._arguments._stacked import repeat_for_pieces
from .._arguments._trainable import Trainable
from .._instructions import _transfer
from .._layers import _rng
from .._messages import warn
from .._partition._stage_placement import StagePlacement
from .._processes._arrays import replicated_array
from .._processes._group import agree_on_keys
from .._train._optimizer import Optimizer, place_opt_state
from .._train._train_state import TrainState
from ._pipelined_model import PipelinedModel

PyTree = Any


def place_train_state(
    pipelined: PipelinedModel, state: TrainState, x: PyTree
) -> TrainState:
    """Puts a train state in place: see `Pipeline.place`."""
    layout = pipelined.layout(state.variables, x)
    placement = pipelined.placement
    variables = layout.place(state.variables)
    scalars, structure = jax.tree.flatten((state.step, state.rng))
    scalars = _replicate(placement, _put_on_first(placement, scalars))
    step, rng = structure.unflatten(scalars)
    return TrainState(
        step=step,
        params=_variables.params(variables),
        opt_state=place_opt_state(
            state.opt_state,
            _variables.params(layout.split_params(state.variables)),
            placement,
            layout.param_locations,
        ),
        model_state=_variables.model_state(variables),
        rng=rng,
    )


def initial_train_state(
    pipelined: PipelinedModel,
    key: chex.PRNGKey,
    *,
    rngs: _rng.Rngs,
    variables: PyTree,
    x: PyTree,
    tx: Any,
    trainable: Trainable,
) -> TrainState:
    """The state at step 0.

    Args:
      pipelined: the model.
      key: a JAX random key.
      rngs: the keys of training; ``None``: one that follows from ``key``.
      variables: the variables, in place; a step may overwrite them.
      x: an input, or specs of one.
      tx: the optax optimizer.
      trainable: the selection of parameters that are trained.
    """
    _rng.check_key(key)
    if rngs is not None:
        _rng.check_rngs(rngs)
    layout = pipelined.layout(variables, x)
    placement = pipelined.placement
    is_trained = repeat_for_pieces(
        jax.tree.leaves(pipelined.model.is_trained(variables, trainable)),
        layout.pieces,
    )
    inner_params = _variables.params(layout.split_params(variables))
    if not jax.tree.leaves(inner_params):
        warn(
            "nothing here has parameters, so steps with this state train nothing; a "
            "function holds arrays, or calls a module, as constants: list the module "
            "itself, or jpipe.Layer(init, apply)"
        )
    if not placement.is_one_process:
        agree_on_keys((key, rngs))

    first_key, step = _put_on_first(placement, [key, np.int32(0)])
    rng_leaves = [_rng.training_key(first_key)]
    rng_structure = jax.tree.structure(key)
    if rngs is not None:
        rng_leaves, rng_structure = jax.tree.flatten(rngs)
        rng_leaves = _put_on_first(placement, rng_leaves)
    step, *rng_leaves = _replicate(placement, [step, *rng_leaves])

    optimizer = Optimizer(
        tx,
        _microbatch.array_specs(inner_params, "params"),
        trained=[is_trained[i] for i in layout.params],
        placement=placement,
        locations=layout.param_locations,
    )
    # Without jit, zeros would be on the default device.
    with jax.disable_jit(disable=False):
        opt_state = optimizer.init(inner_params)
    return TrainState(
        step=step,
        params=_variables.params(variables),
        opt_state=opt_state,
        model_state=_variables.model_state(variables),
        rng=rng_structure.unflatten(rng_leaves),
    )


def _put_on_first(placement: StagePlacement, leaves: list[Any]) -> list[Any]:
    """Puts leaves on the first device of the pipeline that this process has."""
    return _transfer.put(leaves, placement.local_devices[0])


def _replicate(placement: StagePlacement, leaves: list[Any]) -> list[Any]:
    """Arrays with a copy in each process; the leaves, where there is one process."""
    if placement.is_one_process:
        return leaves
    return [replicated_array(leaf, placement.copies_sharding) for leaf in leaves]
