"""Train states: made, and put where each part is used."""

from typing import Any

import chex
import jax
import numpy as np

from ._functions import _microbatch
from ._functions._trainable import Trainable
from ._instructions import _transfer
from ._instructions._sharding import Sharding
from ._layers import _rng
from ._messages import warn
from ._pipelined_model import PipelinedModel
from ._processes._arrays import replicated_array
from ._processes._group import agree_on_key
from ._run import _variables
from ._run._pipe import Pipe
from ._train._optimizer import Optimizer, place_state
from ._train._state import TrainState

PyTree = Any
Locations = list[tuple[int, Sharding]]


def place_train_state(
    owner: PipelinedModel, state: TrainState, x: PyTree
) -> TrainState:
    """A train state in place: see `Pipeline.place`."""
    pipe, variables = owner.pipe, state.variables
    locations, (of_params, of_rest) = _parts(owner, variables, x)
    step, rng = _everywhere(pipe, *_first(pipe, state.step, state.rng))
    at, rest = [locations[i] for i in of_params], [locations[i] for i in of_rest]
    return TrainState(
        step=step,
        params=_transfer.put_each(state.params, pipe.devices, at),
        opt_state=place_state(state.opt_state, state.params, pipe, at),
        model_state=_transfer.put_each(state.model_state, pipe.devices, rest),
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
    """The state at step 0, of variables in place that it may overwrite."""
    _rng.check_key(key)
    pipe, params = owner.pipe, _variables.params(variables)
    trained = jax.tree.leaves(
        _variables.params(owner.model.marks(variables, trainable))
    )
    if not jax.tree.leaves(params):
        warn(
            "nothing here has parameters, so steps with this state train nothing; a "
            "function holds arrays, or calls a module, as constants: list the module "
            "itself, or jpipe.Layer(init, apply)"
        )
    if pipe.copies is not None:
        agree_on_key(key)
    rng, step = _first(pipe, key, np.int32(0))
    step, rng = _everywhere(pipe, step, _rng.training_key(rng))
    locations, (of_params, _) = _parts(owner, variables, x)
    specs = _microbatch.specs(params, "params")
    at = [locations[i] for i in of_params]
    init = Optimizer(tx, specs, trained, pipe, at).init
    with jax.disable_jit(False):  # zeros made by hand are on the default device
        opt_state = init(params)
    rest = _variables.model_state(variables)
    return TrainState(step, params, opt_state, rest, rng)


def _parts(
    owner: PipelinedModel, variables: PyTree, x: PyTree
) -> tuple[Locations, tuple[list[int], list[int]]]:
    """Where variables are; the numbers of the parameters, and of the other leaves."""
    locations, tree = owner.locations(variables, x), jax.tree.structure(variables)
    numbers = tree.unflatten(range(len(locations)))
    parts = _variables.params(numbers), _variables.model_state(numbers)
    return locations, (jax.tree.leaves(parts[0]), jax.tree.leaves(parts[1]))


def _first(pipe: Pipe, *leaves: Any) -> list[Any]:
    """Leaves on the first device of the pipeline that this process has."""
    return _transfer.put(leaves, pipe.own_places[0])


def _everywhere(pipe: Pipe, *leaves: Any) -> Any:
    """What each process has, as arrays of all copies; as it is where there is one."""
    if pipe.copies is None:
        return leaves
    return [replicated_array(leaf, pipe.copies) for leaf in leaves]
