"""Train states: the one at step 0, and the devices of their parts."""

from typing import Any

import chex
import jax
import numpy as np

from .._arguments import _microbatch, _variables
from .._arguments._trainable import Trainable
from .._instructions import _transfer
from .._instructions._sharding import Sharding
from .._layers import _rng
from .._messages import warn
from .._partition._stage_placement import StagePlacement
from .._processes._arrays import replicated_array
from .._processes._group import agree_on_key
from .._train._optimizer import Optimizer, place_opt_state
from .._train._train_state import TrainState
from ._pipelined_model import PipelinedModel

PyTree = Any
# The stage of each leaf, and its sharding there.
Locations = list[tuple[int, Sharding]]


def place_train_state(
    pipelined: PipelinedModel, state: TrainState, x: PyTree
) -> TrainState:
    """Puts a train state in place: see `Pipeline.place`."""
    placement = pipelined.placement
    devices = placement.devices
    param_locations, state_locations = _locations(pipelined, state.variables, x)
    step, rng = _put_on_first(placement, [state.step, state.rng])
    step, rng = _replicate(placement, [step, rng])
    return TrainState(
        step=step,
        params=_transfer.put_tree(state.params, devices, param_locations),
        opt_state=place_opt_state(
            state.opt_state, state.params, placement, param_locations
        ),
        model_state=_transfer.put_tree(state.model_state, devices, state_locations),
        rng=rng,
    )


def initial_train_state(
    pipelined: PipelinedModel,
    key: chex.PRNGKey,
    *,
    variables: PyTree,
    x: PyTree,
    tx: Any,
    trainable: Trainable,
) -> TrainState:
    """The state at step 0.

    Args:
      pipelined: the model.
      key: a JAX random key.
      variables: the variables, in place; a step may overwrite them.
      x: an input, or specs of one.
      tx: the optax optimizer.
      trainable: the selection of parameters that are trained.
    """
    _rng.check_key(key)
    placement = pipelined.placement
    params = _variables.params(variables)
    is_trained = _variables.params(pipelined.model.is_trained(variables, trainable))
    if not jax.tree.leaves(params):
        warn(
            "nothing here has parameters, so steps with this state train nothing; a "
            "function holds arrays, or calls a module, as constants: list the module "
            "itself, or jpipe.Layer(init, apply)"
        )
    if not placement.is_one_process:
        agree_on_key(key)

    first_key, step = _put_on_first(placement, [key, np.int32(0)])
    step, rng = _replicate(placement, [step, _rng.training_key(first_key)])

    locations, _ = _locations(pipelined, variables, x)
    optimizer = Optimizer(
        tx,
        _microbatch.array_specs(params, "params"),
        trained=jax.tree.leaves(is_trained),
        placement=placement,
        locations=locations,
    )
    # Without jit, zeros would be on the default device.
    with jax.disable_jit(disable=False):
        opt_state = optimizer.init(params)
    return TrainState(
        step=step,
        params=params,
        opt_state=opt_state,
        model_state=_variables.model_state(variables),
        rng=rng,
    )


def _locations(
    pipelined: PipelinedModel, variables: PyTree, x: PyTree
) -> tuple[Locations, Locations]:
    """The locations of the parameters, and of the other leaves of the variables."""
    layout = pipelined.layout(variables, x)
    param_locations = [layout.locations[index] for index in layout.params]
    state_locations = [layout.locations[index] for index in layout.state]
    return param_locations, state_locations


def _put_on_first(placement: StagePlacement, leaves: list[Any]) -> list[Any]:
    """Puts leaves on the first device of the pipeline that this process has."""
    return _transfer.put(leaves, placement.local_devices[0])


def _replicate(placement: StagePlacement, leaves: list[Any]) -> list[Any]:
    """Arrays with a copy in each process; the leaves, where there is one process."""
    if placement.is_one_process:
        return leaves
    return [replicated_array(leaf, placement.copies_sharding) for leaf in leaves]
