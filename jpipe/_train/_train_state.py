"""The state of training."""

import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import jax
from flax import serialization

from .._arguments import _variables
from .._instructions._program import Program
from .._messages import raise_all
from .._processes._arrays import as_key, as_numbers

PyTree = Any


class StateOrigin(NamedTuple):
    """The step that returned a state, which need not check its leaves again.

    Attributes:
      train_step: the step, whose programs the state does not keep alive.
      signature_index: the index of the state's signature in the step.
      leaves: the leaves of the state as the step returned it.
      inner_leaves: the same, with the pieces in place of each leaf in pieces.
    """

    train_step: weakref.ref[Any]
    signature_index: int
    leaves: Sequence[Any]
    inner_leaves: Sequence[Any]

    def matches(self, train_step: Any, leaves: Sequence[Any]) -> bool:
        """True if this step returned the state, and nobody changed its leaves since."""
        if self.train_step() is not train_step or len(leaves) != len(self.leaves):
            return False
        return all(map(operator.is_, leaves, self.leaves))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a training step changes; a pytree, keyed by layer.

    For one model, which has no layers, each tree is the model's own.

    Nothing in it depends on the number of stages, the devices or the schedule. Orbax
    and `flax.serialization` save and restore it; `Pipeline.place` puts what they
    restore in place.

    Attributes:
      step: the number of steps taken, an int32 scalar.
      params: the parameters, one entry per layer, ``{}`` where there are none.
      opt_state: the optimizer's state, that of ``tx.init(params)``.
      model_state: the other collections, such as ``batch_stats``, one entry per layer.
      rng: the key from which each step's keys follow, or keys by stream name: those of
        step i are ``jax.random.fold_in(key, i)``.
    """

    step: jax.Array
    params: Any
    opt_state: PyTree
    model_state: Any
    rng: Any
    _origin: ClassVar[StateOrigin | None] = None

    def __getstate__(self) -> dict[str, Any]:
        """The fields, which is all that a copy or a pickle has."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def replace(self, **changes: Any) -> "TrainState":
        """A copy with other values of some attributes; a list becomes a tuple."""
        for name in ("params", "model_state"):
            if isinstance(changes.get(name), list):
                changes[name] = tuple(changes[name])
        return replace(self, **changes)

    @property
    def variables(self) -> Any:
        """The variables as `Pipeline.apply` takes them."""
        return _variables.merge(self.params, self.model_state)


def set_origin(state: TrainState, origin: StateOrigin) -> None:
    """Notes which step returned a state; that is no part of its pytree."""
    vars(state)["_origin"] = origin


def origin_of(state: TrainState) -> StateOrigin | None:
    """The step that returned a state; ``None``: somebody else made it."""
    return state._origin


def become(state: TrainState, other: TrainState) -> None:
    """Overwrites a state with another one, as if its variable had been assigned."""
    vars(state).update(vars(other))


def _to_state_dict(state: TrainState) -> dict[str, Any]:
    """The dict that `flax.serialization` saves, with keys as their raw numbers."""
    with_raw_keys = jax.tree.map(as_numbers, state)
    return serialization.to_state_dict(with_raw_keys.__getstate__())


def _from_state_dict(template: TrainState, saved: Mapping[str, Any]) -> TrainState:
    attributes = template.__getstate__()
    if set(saved) != set(attributes):
        raise ValueError(
            f"no TrainState was saved here: its fields are {', '.join(attributes)}; "
            f"these are {', '.join(saved) or 'none'}"
        )
    restored: dict[str, Any] = serialization.from_state_dict(attributes, dict(saved))
    return jax.tree.map(as_key, TrainState(**restored), template)


serialization.register_serialization_state(TrainState, _to_state_dict, _from_state_dict)


def check_apart(state: TrainState, program: Program) -> None:
    """Checks that no array that a step overwrites stands in a state twice.

    Args:
      state: the state.
      program: the program of the step; its first arguments are the leaves of the state.

    Raises:
      ValueError: with the paths of the array, if one does.
    """
    leaves = jax.tree.leaves(state)
    if len(set(map(id, leaves))) == len(leaves):
        return
    named_leaves = [
        (f"state{jax.tree_util.keystr(path)}", leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]
    donated_slots: set[int] = set()
    for instruction in program.instructions:
        donated_slots |= set(instruction.donates)
    is_donated = [slot in donated_slots for slot in range(len(leaves))]
    raise_all(
        "a step overwrites its state, in which an array stands twice; copy one, as in "
        "pipe.jit(lambda tree: tree)(tree), or build the step with "
        "pipe.train_step(..., donate=False)",
        _variables.overwritten_twice(named_leaves, is_donated),
    )


def _class_text(value: Any) -> str:
    """The class of a value, with its module where that is not Python's."""
    cls = type(value)
    if cls.__module__ == "builtins":
        return cls.__name__
    return f"{cls.__module__}.{cls.__name__}"


def _instead(value: Any) -> str:
    """The advice on a value in place of a state; may be empty."""
    if isinstance(value, tuple) and value and isinstance(value[0], TrainState):
        return "; a step returns two: type state, metrics = step(state, x, targets)"
    if hasattr(value, "params") and hasattr(value, "opt_state"):
        return (
            "; of a train state of Flax type pipe.init_train_state(key, x, tx, "
            "variables={'params': state.params})"
        )
    return ""


def check_state(state: Any, *, by_layer: bool = True) -> None:
    """Checks that a value is a state that a step can change.

    Args:
      state: the value.
      by_layer: True if it must have an entry for each layer.

    Raises:
      TypeError: if it is no `TrainState`.
      ValueError: if it has not one entry per layer.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state is a {_class_text(state)}; needs the jpipe.TrainState that "
            f"pipe.init_train_state or an earlier step returned{_instead(state)}"
        )
    if not by_layer:
        return
    faults: list[str] = []
    for name in ("params", "model_state"):
        entries = getattr(state, name)
        if not isinstance(entries, tuple):
            faults.append(f"state.{name} is a {type(entries).__name__}, not a tuple")
    if not faults and len(state.params) != len(state.model_state):
        faults.append(
            f"state.params has {len(state.params)} entries, state.model_state "
            f"{len(state.model_state)}"
        )
    raise_all(
        "state.params and state.model_state are tuples with one entry per layer, {} "
        "where a layer has none; type state.replace(params=tuple(params))",
        faults,
    )
