"""Variables and states: made, taken over, and put where each part is used."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import numpy as np
import optax

from ._cache import ProgramCache
from ._functions import _microbatch
from ._functions._trainable import Trainable
from ._instructions import _transfer
from ._layers import _rng
from ._layers._initialize import strong
from ._run import _variables
from ._run._initialize import Initializers
from ._run._pipe import Pipe
from ._train._optimizer import Optimizer, place_state
from ._train._state import TrainState

PyTree = Any


def make(
    pipe: Pipe, programs: ProgramCache, key: chex.PRNGKey, x: PyTree
) -> tuple[PyTree, ...]:
    """Makes the variables of all layers: see `Pipeline.init`."""
    _variables.check_concrete(jax.tree.leaves((key, x)))
    _rng.check_key(key)
    spec = programs.sample(x)
    programs.look_again()
    visits, _ = programs.expected(spec)
    programs.note([visit.variables for visit in visits], spec)

    # Made on the first device, where equal layers share a compiled program.
    local = _transfer.put_tree(key, pipe.devices[0])
    numbers = _transfer.put([*map(np.uint32, range(len(visits)))], pipe.devices[0])
    initialize = Initializers(pipe.devices[0])
    variables = []
    for number, visit in enumerate(visits):
        made = visit.variables
        if jax.tree.leaves(made):
            own = _rng.layer_key(local, numbers[number])
            made = initialize(visit, own)
        variables.append(_transfer.put_tree(made, pipe.devices[visit.stage]))
    return tuple(variables)


def take(
    pipe: Pipe, programs: ProgramCache, variables: Sequence[PyTree], x: PyTree
) -> tuple[PyTree, ...]:
    """Copies of variables, in place, each in the entry that `make` gives it to.

    Raises:
      ValueError: if they are not those of the model, or overwritten.
    """
    spec = programs.sample(x)
    programs.look_again()
    variables = programs.by_owner(variables, spec)
    _variables.check_alive(jax.tree.leaves(variables))
    programs.note(variables, spec)
    copies = tuple(
        _transfer.copy_tree(entry, pipe.devices[s])
        for entry, s in zip(variables, pipe.stage_of_layer, strict=True)
    )
    return jax.tree.map(strong, copies)


def place(pipe: Pipe, tree: Any) -> Any:
    """Puts variables, or a train state, in place: see `Pipeline.place`."""
    if isinstance(tree, TrainState):
        first = pipe.devices[0]
        _variables.check_alive(jax.tree.leaves(tree))
        step, rng = _transfer.put([tree.step, tree.rng], first)
        return TrainState(
            step=step,
            params=place(pipe, tree.params),
            opt_state=place_state(
                tree.opt_state, tree.params, pipe.stage_of_layer, pipe.devices
            ),
            model_state=place(pipe, tree.model_state),
            rng=rng,
        )
    _variables.check_length(tree, len(pipe.stage_of_layer))
    _variables.check_alive(jax.tree.leaves(tree))
    return tuple(
        _transfer.put_tree(entry, pipe.devices[s])
        for entry, s in zip(tree, pipe.stage_of_layer, strict=True)
    )


def optimizer(
    pipe: Pipe,
    tx: optax.GradientTransformation,
    params: PyTree,
    trained: Sequence[bool],
) -> Optimizer:
    """The optimizer of such parameters, applied where they are."""
    specs = _microbatch.specs(params, "params")
    return Optimizer(tx, specs, trained, pipe)


def train_state(
    pipe: Pipe,
    programs: ProgramCache,
    key: chex.PRNGKey,
    variables: Sequence[PyTree],
    tx: optax.GradientTransformation,
    trainable: Trainable,
) -> TrainState:
    """The state at step 0, of variables that it may overwrite."""
    _rng.check_key(key)
    params = _variables.params(variables)
    trained = jax.tree.leaves(_variables.params(programs.marks(variables, trainable)))
    rng, step = _transfer.put([key, np.int32(0)], pipe.devices[0])
    init = optimizer(pipe, tx, params, trained).init
    with jax.disable_jit(False):  # zeros made by hand are on the default device
        opt_state = init(params)
    return TrainState(
        step=step,
        params=params,
        opt_state=opt_state,
        model_state=_variables.model_state(variables),
        rng=_rng.training_key(rng),
    )
