"""Train states: how they are made, and put where each part is used."""

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
# A stage, and a sharding there.
Locations = list[tuple[int, Sharding]]


def place_train_state(
    owner: PipelinedModel, state: TrainState, x: PyTree
) -> TrainState:
    """Puts a train state in place: see `Pipeline.place`."""
    pipe = owner.pipe
    of_params, of_model_state = _locations(owner, state.variables, x)
    step, rng = _put_on_first(pipe, [state.step, state.rng])
    step, rng = _replicate(pipe, [step, rng])
    return TrainState(
        step=step,
        params=_transfer.put_tree(state.params, pipe.devices, of_params),
        opt_state=place_opt_state(state.opt_state, state.params, pipe, of_params),
        model_state=_transfer.put_tree(state.model_state, pipe.devices, of_model_state),
        rng=rng,
    )


def train_state(
    owner: PipelinedModel,
    key: chex.PRNGKey,
    variables: PyTree,
    x: PyTree,
    tx: Any,
    trainable: Trainable,
) -> TrainState:
    """The state at step 0.

    Args:
      owner: the model.
      key: a JAX random key.
      variables: the variables, in place; a step may overwrite them.
      x: an input, or specs of one.
      tx: the optax optimizer.
      trainable: which parameters are trained.
    """
    _rng.check_key(key)
    pipe = owner.pipe
    params = _variables.params(variables)
    marks = _variables.params(owner.model.marks(variables, trainable))
    if not jax.tree.leaves(params):
        warn(
            "nothing here has parameters, so steps with this state train nothing; a "
            "function holds arrays, or calls a module, as constants: list the module "
            "itself, or jpipe.Layer(init, apply)"
        )
    if pipe.copies is not None:
        agree_on_key(key)

    first_key, step = _put_on_first(pipe, [key, np.int32(0)])
    step, rng = _replicate(pipe, [step, _rng.training_key(first_key)])

    locations, _ = _locations(owner, variables, x)
    optimizer = Optimizer(
        tx,
        _microbatch.array_specs(params, "params"),
        trained=jax.tree.leaves(marks),
        pipe=pipe,
        locations=locations,
    )
    with jax.disable_jit(False):  # zeros made by hand are on the default device
        opt_state = optimizer.init(params)
    return TrainState(
        step=step,
        params=params,
        opt_state=opt_state,
        model_state=_variables.model_state(variables),
        rng=rng,
    )


def _locations(
    owner: PipelinedModel, variables: PyTree, x: PyTree
) -> tuple[Locations, Locations]:
    """The locations of the parameters, and of the other leaves of the variables."""
    layout = owner.layout(variables, x)
    of_params = [layout.locations[index] for index in layout.params]
    of_model_state = [layout.locations[index] for index in layout.state]
    return of_params, of_model_state


def _put_on_first(pipe: StagePlacement, leaves: list[Any]) -> list[Any]:
    """Puts leaves on the first device of the pipeline that this process has."""
    return _transfer.put(leaves, pipe.own_places[0])


def _replicate(pipe: StagePlacement, leaves: list[Any]) -> list[Any]:
    """Arrays with a copy in each process; the leaves, where there is one process."""
    if pipe.copies is None:
        return leaves
    return [replicated_array(leaf, pipe.copies) for leaf in leaves]
