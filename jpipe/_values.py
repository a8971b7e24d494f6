"""Variables and states: made, taken over, and put where each part is used."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._cache import ProgramCache
from ._functions import _microbatch
from ._functions._trainable import Trainable
from ._instructions import _transfer
from ._instructions._sharding import Sharding
from ._layers import _rng
from ._layers._initialize import strong
from ._processes._elsewhere import is_here, of_copies, own_copy
from ._processes._group import group
from ._run import _resting, _variables
from ._run._initialize import draws, initializers
from ._run._pipe import Pipe
from ._train._optimizer import Optimizer, place_state
from ._train._state import TrainState, note_chosen

PyTree = Any


def make(
    pipe: Pipe,
    programs: ProgramCache,
    key: chex.PRNGKey | None,
    x: PyTree,
    given: Sequence[PyTree] | None = None,
) -> tuple[PyTree, ...]:
    """Makes the variables of all layers, or of those where ``None`` is given."""
    _variables.check_concrete(jax.tree.leaves((key, x)))
    if key is not None:
        _rng.check_key(key)
    batch = programs.sample(x)
    programs.look_again()
    visits, _ = programs.expected(batch, given)
    if key is None:
        if any(map(draws, visits)):
            _rng.check_key(key)
        key = jax.random.key(0)  # which nobody reads
    programs.note([visit.variables for visit in visits], visits, batch.x)
    _resting.shardings(pipe, [visit.variables for visit in visits])  # or refused
    agree_on_key(pipe, key)
    # Made on the first device of this process, where equal layers share a compiled
    # program; what is in another process is made there.
    first = _transfer.one_of(pipe.own_places[0])
    local = _transfer.put_tree(key, first)
    numbers = _transfer.put([*map(np.uint32, range(len(visits)))], first)
    own = {
        number: visit
        for number, visit in enumerate(visits)
        if (given is None or given[number] is None)
        and jax.tree.leaves(visit.variables)
        and is_here(pipe.devices[pipe.stage_of_layer[number]])
    }
    made_by = dict(zip(own, initializers([*own.values()], local, first), strict=True))
    variables = []
    for number, visit in enumerate(visits):
        made = visit.variables
        if given is not None and given[number] is not None:
            made = given[number]
        elif number in own:
            made = made_by[number](_rng.layer_key(local, numbers[number]))
        # Moved at once: the first device has room for one layer more, not for all.
        variables.append(_placed(pipe, number, made))
    return tuple(variables)


def take(
    pipe: Pipe,
    programs: ProgramCache,
    key: chex.PRNGKey,
    variables: Sequence[PyTree],
    x: PyTree,
) -> tuple[PyTree, ...]:
    """Copies of variables, in place, each in the entry that `make` gives it to.

    Raises:
      ValueError: if they are not those of the model, or overwritten.
    """
    _variables.check_length(variables, len(pipe.layers))
    if any(entry is None for entry in variables):
        variables = make(pipe, programs, key, x, variables)
    batch = programs.sample(x)
    programs.look_again()
    variables = programs.by_owner(variables, batch)
    _variables.check_alive(jax.tree.leaves(variables))
    copies = tuple(
        _placed(pipe, i, entry, may_alias=False) for i, entry in enumerate(variables)
    )
    return jax.tree.map(strong, copies)


def place(pipe: Pipe, tree: Any) -> Any:
    """Puts variables, or a train state, in place: see `Pipeline.place`."""
    if isinstance(tree, TrainState):
        params = _entries(pipe, tree.params, inside=("params",))
        _variables.check_alive(jax.tree.leaves(tree))
        step, rng = _everywhere(pipe, *_first(pipe, tree.step, tree.rng))
        placed = TrainState(
            step=step,
            params=params,
            opt_state=place_state(
                tree.opt_state, tree.params, pipe, *_resting_of(pipe, tree.params)
            ),
            model_state=_entries(pipe, tree.model_state),
            rng=rng,
        )
        note_chosen(placed, tree.chosen)
        return placed
    return _entries(pipe, tree)


def _entries(pipe: Pipe, tree: Any, inside: tuple[str, ...] = ()) -> tuple[PyTree, ...]:
    """One entry per layer, each in its place."""
    _variables.check_length(tree, len(pipe.stage_of_layer))
    _variables.check_alive(jax.tree.leaves(tree))
    return tuple(_placed(pipe, i, entry, inside) for i, entry in enumerate(tree))


def agree_on_key(pipe: Pipe, key: chex.PRNGKey) -> None:
    """Checks that all processes have the same key: each makes layers of its own."""
    if pipe.copies is not None:
        is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        numbers = jax.random.key_data(key) if is_typed else key
        words = str(np.asarray(own_copy(numbers)).tolist())
        group().agree(f"init/{group().next_number()}", {"key": words}, "init")


def _first(pipe: Pipe, *leaves: Any) -> list[Any]:
    """Leaves on the first device of the pipeline that this process has."""
    return _transfer.put(leaves, pipe.own_places[0])


def _everywhere(pipe: Pipe, *leaves: Any) -> Sequence[Any]:
    """What each process has, as arrays of all copies; as it is where there is one."""
    if pipe.copies is None:
        return leaves
    return [of_copies(leaf, pipe.copies) for leaf in leaves]


def _placed(
    pipe: Pipe,
    layer: int,
    entry: PyTree,
    inside: tuple[str, ...] = (),
    may_alias: bool | None = None,
) -> PyTree:
    """What a layer has, in its place."""
    how = _resting.of_layer(pipe, layer, entry, inside)
    device = pipe.devices[pipe.stage_of_layer[layer]]
    return _transfer.put_tree(entry, device, how, may_alias)


def optimizer(
    pipe: Pipe,
    tx: optax.GradientTransformation,
    params: PyTree,
    trained: Sequence[bool],
) -> Optimizer:
    """The optimizer of such parameters, applied where they are."""
    specs = _microbatch.specs(params, "params")
    return Optimizer(tx, specs, trained, pipe, *_resting_of(pipe, params))


def _resting_of(pipe: Pipe, params: PyTree) -> tuple[list[int], list[Sharding]]:
    """The stage of each leaf of the parameters, and how it lies there."""
    flat = jax.tree_util.tree_leaves_with_path(params)
    homes = [pipe.stage_of_layer[path[0].idx] for path, _ in flat]
    return homes, _resting.shardings(pipe, params, inside=("params",))


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
    agree_on_key(pipe, key)
    rng, step = _first(pipe, key, np.int32(0))
    step, rng = _everywhere(pipe, step, _rng.training_key(rng))
    init = optimizer(pipe, tx, params, trained).init
    with jax.disable_jit(False):  # zeros made by hand are on the default device
        opt_state = init(params)
    state = TrainState(
        step=step,
        params=params,
        opt_state=opt_state,
        model_state=_variables.model_state(variables),
        rng=rng,
    )
    if not trainable.selects_all:
        note_chosen(state, trained)
    return state
