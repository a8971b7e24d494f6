"""The variables that a user holds: one entry per layer, each on its layer's device."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax import core

from .._faults import refuse
from .._functions._weights import is_inexact
from .._layers._linen import is_box
from .._layers._parent import Parent
from .._layers._tree import Names, dotted, flat, nested

PyTree = Any
_OF_NNX = "; of a module of nnx give its values: variables = pipe.init(None, x)"


# What to type where parameters are given in place of variables.
WRAPPED = "wrap parameters as {'params': params}, or give state.variables"


def check_layers(
    parent: Parent, expected: Sequence[PyTree], given: Any, message: str
) -> None:
    """Checks that variables are those of a list of layers.

    Args:
      parent: the modules of the layers.
      expected: what is needed, as specs, by layer.
      given: what the caller passed.
      message: how the error begins.

    Raises:
      ValueError: with every leaf that is missing, surplus, given twice or of another
        shape.
    """
    check_length(given, len(expected))
    not_mappings = [
        f"variables[{i}] is a {type(entry).__name__}"
        for i, entry in enumerate(given)
        if not isinstance(entry, Mapping)
    ]
    has_modules = any(isinstance(entry, nnx.Module) for entry in given)
    refuse(
        "variables must have a mapping such as {'params': ...} for each layer"
        + (_OF_NNX if has_modules else ""),
        not_mappings,
    )
    # What belongs to a module may be given in the entry of any layer of it.
    places: dict[Names, list[tuple[int, Names]]] = {}
    for i, entry in enumerate(given):
        for names in flat(entry):
            places.setdefault(parent.same(i, names), []).append((i, names))
    wanted: list[dict[Names, PyTree]] = [{} for _ in expected]
    twice = {}
    for i, entry in enumerate(expected):
        for names, spec in flat(entry).items():
            (at, there), *others = places.get(parent.same(i, names), [(i, names)])
            wanted[at][there] = spec
            twice |= dict.fromkeys(others, (at, there))
    found = [
        {names: x for names, x in flat(entry).items() if (i, names) not in twice}
        for i, entry in enumerate(given)
    ]
    called = [f"variables[{i}]" for i in range(len(expected))]
    faults = [
        f"tied: {dotted(called[i], names)} is {dotted(called[k], own)}; give {{}} in "
        f"its place"
        for (i, names), (k, own) in twice.items()
    ]
    pairs = [
        dict(zip(called, map(nested, trees), strict=True)) for trees in (wanted, found)
    ]
    check(
        pairs[0],
        pairs[1] if twice else dict(zip(called, given, strict=True)),
        message,
        faults,
    )


def check(
    expected: Mapping[str, PyTree],
    given: Mapping[str, PyTree],
    message: str,
    faults: Sequence[str] = (),
) -> None:
    """Checks that variables are those of this model.

    Args:
      expected: what is needed, as specs: entries by what errors call them.
      given: what the caller passed, likewise: mappings.
      message: how the error begins.
      faults: what was found before.

    Raises:
      ValueError: with these, and every leaf that is missing, surplus or of another
        shape.
    """
    not_arrays = [
        f"{path} is a {type(leaf).__name__}"
        for path, leaf in _leaves(given)
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype")
    ]
    refuse(
        "every leaf must be an array; type variables = pipe.place(variables)",
        not_arrays,
    )
    expected, given = unboxed(expected), unboxed(given)
    wanted, found = _shapes(expected), _shapes(given)
    other = "{path} has shape {found}, the model needs {wanted}"
    faults = [*faults, *differences(wanted, found, other)]
    if not faults:
        faults = _other_containers(expected, given)
    bare = [
        f"{name} has no entry 'params'; {WRAPPED}"
        for name, specs in expected.items()
        if "params" in specs and lacks_params(given[name])
    ]
    faults = [*bare[:1], *faults]
    if any(map(_is_of_nnx, jax.tree.leaves(given, is_leaf=_is_of_nnx))):
        faults = ["they are Variables of nnx: give nnx.to_pure_dict(state)", *faults]
    refuse(message, faults)


def differences(
    wanted: Mapping[str, Any], found: Mapping[str, Any], other: str
) -> list[str]:
    """What is missing, what is surplus, and what is of another kind.

    Args:
      wanted: what each leaf should be, by its path.
      found: what each is.
      other: the sentence for one that is of another kind.
    """
    return [
        *(f"missing: {path} {wanted[path]}" for path in wanted if path not in found),
        *(f"surplus: {path} {found[path]}" for path in found if path not in wanted),
        *(
            other.format(path=path, found=found[path], wanted=wanted[path])
            for path in wanted
            if path in found and found[path] != wanted[path]
        ),
    ]


def unboxed(entries: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Variables without the boxes that name how Flax would partition them.

    Flax takes boxed values for plain ones and plain ones for boxed, and so do we: what
    is compared is what is in the boxes. Results have those that were given.
    """

    def inner(node: Any) -> Any:
        leaves = jax.tree.leaves(node) if is_box(node) else ()
        return leaves[0] if len(leaves) == 1 else node

    return {k: jax.tree.map(inner, v, is_leaf=is_box) for k, v in entries.items()}


def check_length(given: Any, num_layers: int) -> None:
    """Checks that there is one entry per layer.

    Raises:
      ValueError: if there is not.
    """
    if not isinstance(given, Sequence) or len(given) != num_layers:
        sequence = isinstance(given, Sequence)
        problem = (
            f"has {len(given)} entries" if sequence else f"is a {type(given).__name__}"
        )
        raise ValueError(
            f"variables {problem}, the model has {num_layers} layers; give a "
            f"tuple with one entry per layer, as Pipeline.init returns "
            f"it{_instead(given)}"
        )


def check_model(given: Any) -> None:
    """Checks that something has the form of the variables of a model.

    Raises:
      ValueError: if it is no mapping.
    """
    if not isinstance(given, Mapping):
        raise ValueError(
            f"variables is a {type(given).__name__}; a model takes a mapping such as "
            f"{{'params': ...}}, as Pipeline.init returns it{_instead(given)}"
        )


def check_params(given: Any) -> None:
    """Checks that the parameters of a loss function are no whole train state.

    Raises:
      ValueError: if they are.
    """
    if _is_state(given):
        raise ValueError(
            f"params is a {type(given).__name__}; a loss function is differentiated by "
            f"its parameters alone: give state.params, or what it takes of "
            f"state.variables"
        )


def _instead(given: Any) -> str:
    """Advice on the value to give in place of one that holds variables."""
    if isinstance(given, nnx.Module):
        return _OF_NNX
    if _is_state(given) and not hasattr(given, "variables"):
        return "; of a train state of Flax give {'params': state.params}"
    return "; of a train state give state.variables"


def _is_state(given: Any) -> bool:
    """Whether something is a train state, of jpipe or of Flax."""
    return hasattr(given, "params") and hasattr(given, "opt_state")


def _leaves(entries: Mapping[str, PyTree]) -> list[tuple[str, Any]]:
    """The leaves of entries with what errors call them."""
    return [
        (f"{entry}{jax.tree_util.keystr(path)}", leaf)
        for entry, tree in entries.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _shapes(entries: Mapping[str, PyTree]) -> dict[str, str]:
    """Shapes by path; integers in place of floats would not be trained."""
    return {
        path: f"{tuple(leaf.shape)}" + ("" if is_inexact(leaf) else f" of {leaf.dtype}")
        for path, leaf in _leaves(entries)
    }


def lacks_params(variables: Any) -> bool:
    """Whether what is given as variables may be parameters alone."""
    is_mapping = isinstance(variables, Mapping)
    return is_mapping and bool(variables) and "params" not in variables


def _is_of_nnx(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _other_containers(
    expected: Mapping[str, PyTree], given: Mapping[str, PyTree]
) -> list[str]:
    """Lists in place of mappings by number, as those of nnx.List."""
    return [
        f"{dotted(name, names)} is a {type(value).__name__}, the model needs a mapping"
        for name, entry in given.items()
        for names, value in flat(entry).items()
        if names not in flat(expected[name])
    ]


def check_concrete(leaves: Sequence[Any]) -> None:
    """Checks that no leaf belongs to a trace.

    Raises:
      TypeError: if one does.
    """
    if any(isinstance(leaf, core.Tracer) for leaf in leaves):
        raise TypeError(
            "a pipeline compiles its own stages, each for its device: call it outside "
            "of jax.jit, jax.grad, jax.vmap and jax.eval_shape"
        )


# Cheaper than asking first what a leaf is.
_is_deleted = operator.methodcaller("is_deleted")


def check_alive(leaves: Sequence[Any]) -> None:
    """Checks that no leaf was overwritten.

    Raises:
      ValueError: if one was.
    """
    try:
        overwritten = any(map(_is_deleted, leaves))
    except AttributeError:  # a leaf of NumPy has no such method; bool() is False
        overwritten = any(getattr(leaf, "is_deleted", bool)() for leaf in leaves)
    except jax.errors.ConcretizationTypeError:  # a tracer
        return
    if overwritten:
        raise ValueError(
            "this state was donated: it was given to an earlier step, which has "
            "overwritten its arrays; go on with the state that it returned, or build "
            "the step with pipe.train_step(..., donate=False), or pipe.jit without "
            "donate_argnums"
        )


def twice(flat: Sequence[tuple[str, Any]], overwritten: Sequence[bool]) -> list[str]:
    """Where arrays stand of which a program overwrites one, if they stand twice.

    Args:
      flat: all leaves that it is given, by what to call them.
      overwritten: whether it may overwrite each.
    """
    names: dict[int, list[str]] = {}
    for name, leaf in flat:
        names.setdefault(id(leaf), []).append(name)
    pairs = zip(flat, overwritten, strict=True)
    ids = {id(x) for (_, x), yes in pairs if yes and isinstance(x, jax.Array)}
    return [" and ".join(n) for at, n in names.items() if at in ids and len(n) > 1]


def collections(variables: Any, positions: Sequence[int]) -> str:
    """The collections of some leaves, as a user would type them."""
    flat = jax.tree_util.tree_leaves_with_path(variables)
    depth = 1 if isinstance(variables, Mapping) else 2  # layer and collection
    found = dict.fromkeys(flat[i][0][:depth] for i in positions)
    return ", ".join(f"variables{jax.tree_util.keystr(path)}" for path in found)


def params(variables: Any) -> PyTree:
    """The parameters of a model, or of each layer; ``{}`` where there are none."""
    if isinstance(variables, Mapping):
        return variables.get("params", {})
    return tuple(map(params, variables))


def numbers_of_params(variables: PyTree, has_collections: bool) -> list[int]:
    """The numbers of the leaves that are parameters.

    Args:
      variables: a tree of leaves.
      has_collections: whether it has parameters in ``"params"`` and others, of a model
        or of each layer of a list; else all are parameters.
    """
    tree = jax.tree.structure(variables)
    numbers = tree.unflatten(range(tree.num_leaves))
    return jax.tree.leaves(params(numbers) if has_collections else numbers)


def model_state(variables: Any) -> PyTree:
    """The other collections of a model, or of each layer."""
    if isinstance(variables, Mapping):
        return {name: own for name, own in variables.items() if name != "params"}
    return tuple(map(model_state, variables))


def merge(params: PyTree, model_state: PyTree) -> PyTree:
    """The inverse of `params` and `model_state`."""
    if isinstance(model_state, Mapping):
        return {"params": params, **model_state}
    return tuple(
        {**state, "params": own} if jax.tree.leaves(own) else dict(state)
        for own, state in zip(params, model_state, strict=True)
    )
