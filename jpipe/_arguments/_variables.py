"""The variables that a user holds: one entry per layer, each on its layer's device."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx.traversals import flatten_mapping, unflatten_mapping
from jax import core

from .._jaxprs._jaxpr import is_inexact
from .._layers._linen import is_boxed
from .._layers._parent import Parent
from .._layers._variable_paths import (
    Names,
    variable_text,
)
from .._messages import raise_all
from ..schedules._formats import format_type

PyTree = Any
_OF_NNX = "; of a module of nnx give its values: variables = pipe.init(None, x)"


def check_layers(
    parent: Parent, expected: Sequence[PyTree], variables: Any, message: str
) -> None:
    """Checks that variables are those of a list of layers.

    Args:
      parent: the modules of the layers.
      expected: the specs of the variables, one entry per layer.
      variables: the variables that the caller passed.
      message: the beginning of the error.

    Raises:
      ValueError: with every leaf that is missing, surplus, there twice or of another
        shape.
    """
    check_length(variables, len(expected))
    not_mappings = [
        f"variables[{i}] is {format_type(entry)}"
        for i, entry in enumerate(variables)
        if not isinstance(entry, Mapping)
    ]
    title = "variables must have a mapping such as {'params': ...} for each layer"
    if any(isinstance(entry, nnx.Module) for entry in variables):
        title += _OF_NNX
    raise_all(title, not_mappings)

    specs, duplicates = _align_shared(parent, expected, variables)
    entry_names = [f"variables[{i}]" for i in range(len(expected))]
    faults: list[str] = []
    for (layer, names), (first_layer, first_names) in duplicates.items():
        duplicate = variable_text(entry_names[layer], names)
        first = variable_text(entry_names[first_layer], first_names)
        faults.append(f"tied: {duplicate} is {first}; give {{}} in its place")

    entries = list(variables)
    if duplicates:
        for i, entry in enumerate(variables):
            leaves = flatten_mapping(entry).items()
            unique = {n: leaf for n, leaf in leaves if (i, n) not in duplicates}
            entries[i] = unflatten_mapping(unique)
    check_model_variables(
        dict(zip(entry_names, specs, strict=True)),
        dict(zip(entry_names, entries, strict=True)),
        message,
        faults,
    )


# A variable of a list of layers: the index of the layer, and the path in its entry.
_Location = tuple[int, Names]


def _align_shared(
    parent: Parent, expected: Sequence[PyTree], variables: Sequence[PyTree]
) -> tuple[list[PyTree], dict[_Location, _Location]]:
    """Moves the specs of shared modules to the layer in whose entry the user has them.

    The variables of a module that several layers share may stand in the entry of any
    of these layers.

    Returns:
      The specs, one entry per layer; and for each variable that stands in a second
      entry, the first one.
    """
    # variable of the parent -> its locations in the user's variables
    locations: dict[Names, list[_Location]] = {}
    for i, entry in enumerate(variables):
        for names in flatten_mapping(entry):
            locations.setdefault(parent.parent_path(i, names), []).append((i, names))

    specs: list[dict[Names, PyTree]] = [{} for _ in expected]
    duplicates: dict[_Location, _Location] = {}
    for i, entry in enumerate(expected):
        for names, spec in flatten_mapping(entry).items():
            first, *more = locations.get(parent.parent_path(i, names), [(i, names)])
            layer, path = first
            specs[layer][path] = spec
            duplicates |= dict.fromkeys(more, first)
    return [unflatten_mapping(entry) for entry in specs], duplicates


def check_model_variables(
    expected: Mapping[str, PyTree],
    variables: Mapping[str, PyTree],
    message: str,
    faults: Sequence[str] = (),
) -> None:
    """Checks that variables are those of this model.

    Args:
      expected: name of an entry in messages -> the specs of its variables.
      variables: name of an entry -> the variables that the caller passed, a mapping.
      message: the beginning of the error.
      faults: faults that are known before.

    Raises:
      ValueError: with these, and every leaf that is missing, surplus or of another
        shape.
    """
    not_arrays = [
        f"{name} is {format_type(leaf)}"
        for name, leaf in _named_leaves(variables)
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype")
    ]
    raise_all(
        "every leaf must be an array; type variables = pipe.place(variables)",
        not_arrays,
    )

    expected = unboxed(expected)
    variables = unboxed(variables)
    template = "{path} has shape {actual}, the model needs {expected}"
    lacking = [
        name
        for name, specs in expected.items()
        if "params" in specs and lacks_params(variables[name])
    ]
    # What else is wrong once parameters are wrapped.
    wrapped = {
        name: {"params": entry} if name in lacking else entry
        for name, entry in variables.items()
    }
    faults = [
        *faults,
        *differences(_descriptions(expected), _descriptions(wrapped), template),
    ]
    if lacking:
        advice = "wrap parameters as {'params': params}, or give state.variables"
        faults = [f"{lacking[0]} has no entry 'params'; {advice}", *faults]
    if not faults:
        faults = _other_containers(expected, variables)
    if any(map(_is_of_nnx, jax.tree.leaves(variables, is_leaf=_is_of_nnx))):
        faults = ["they are Variables of nnx: give nnx.to_pure_dict(state)", *faults]
    raise_all(message, faults)


def differences(
    expected: Mapping[str, Any], actual: Mapping[str, Any], template: str
) -> list[str]:
    """One sentence for each leaf that is missing, surplus or different.

    Args:
      expected: path -> a description of the leaf that is needed.
      actual: path -> a description of the leaf that is there.
      template: the sentence for a leaf that is different, with ``{path}``,
        ``{expected}`` and ``{actual}``.
    """
    faults: list[str] = []
    for path, description in expected.items():
        if path not in actual:
            faults.append(f"missing: {path} {description}")
    for path, description in actual.items():
        if path not in expected:
            faults.append(f"surplus: {path} {description}")
    for path, description in expected.items():
        if path in actual and actual[path] != description:
            faults.append(
                template.format(path=path, expected=description, actual=actual[path])
            )
    return faults


def unboxed(entries: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Variables without the boxes in which Flax notes how to partition them.

    Flax takes boxed values for plain ones and plain ones for boxed, so their contents
    are compared. Results have the boxes of the user's variables.
    """

    def unbox(node: Any) -> Any:
        leaves = jax.tree.leaves(node) if is_boxed(node) else ()
        return leaves[0] if len(leaves) == 1 else node

    return {
        name: jax.tree.map(unbox, entry, is_leaf=is_boxed)
        for name, entry in entries.items()
    }


def check_length(variables: Any, num_layers: int) -> None:
    """Checks that there is one entry per layer.

    Raises:
      ValueError: if there is not.
    """
    if not isinstance(variables, Sequence):
        problem = f"is {format_type(variables)}"
    elif len(variables) != num_layers:
        problem = f"has {len(variables)} entries"
    else:
        return
    raise ValueError(
        f"variables {problem}, the model has {num_layers} layers; give a "
        f"tuple with one entry per layer, as Pipeline.init returns "
        f"it{_instead(variables)}"
    )


def check_model(variables: Any) -> None:
    """Checks that a value has the form of the variables of a model.

    Raises:
      ValueError: if it is no mapping.
    """
    if not isinstance(variables, Mapping):
        raise ValueError(
            f"variables is {format_type(variables)}; a model takes a mapping such "
            f"as {{'params': ...}}, as Pipeline.init returns it{_instead(variables)}"
        )


def check_params(params: Any) -> None:
    """Checks that the parameters of a loss function are no whole train state.

    Raises:
      ValueError: if they are.
    """
    if _is_state(params):
        raise ValueError(
            f"params is {format_type(params)}; a loss function is differentiated "
            f"by its parameters alone: give state.params, or what it takes of "
            f"state.variables"
        )


def _instead(value: Any) -> str:
    """Advice on the variables to pass in place of a value that holds them."""
    if isinstance(value, nnx.Module):
        return _OF_NNX
    if _is_state(value) and not hasattr(value, "variables"):
        return "; of a train state of Flax give {'params': state.params}"
    return "; of a train state give state.variables"


def _is_state(value: Any) -> bool:
    """True if a value is a train state, of jpipe or of Flax."""
    return hasattr(value, "params") and hasattr(value, "opt_state")


def _named_leaves(entries: Mapping[str, PyTree]) -> list[tuple[str, Any]]:
    """The leaves of entries with their names in messages."""
    named_leaves: list[tuple[str, Any]] = []
    for name, entry in entries.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(entry):
            named_leaves.append((f"{name}{jax.tree_util.keystr(path)}", leaf))
    return named_leaves


def _descriptions(entries: Mapping[str, PyTree]) -> dict[str, str]:
    """The shape of each leaf by its name; and its dtype, if it cannot be trained."""
    descriptions: dict[str, str] = {}
    for name, leaf in _named_leaves(entries):
        dtype = "" if is_inexact(leaf) else f" of {leaf.dtype}"
        descriptions[name] = f"{tuple(leaf.shape)}{dtype}"
    return descriptions


def lacks_params(variables: Any) -> bool:
    """True if variables may be parameters alone."""
    is_mapping = isinstance(variables, Mapping)
    return is_mapping and bool(variables) and "params" not in variables


def _is_of_nnx(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _other_containers(
    expected: Mapping[str, PyTree], variables: Mapping[str, PyTree]
) -> list[str]:
    """One sentence for each list in place of a mapping, as those of nnx.List."""
    faults: list[str] = []
    for name, entry in variables.items():
        expected_names = flatten_mapping(expected[name])
        for names, value in flatten_mapping(entry).items():
            if names not in expected_names:
                faults.append(
                    f"{variable_text(name, names)} is {format_type(value)}, the "
                    f"model needs a mapping"
                )
    return faults


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


def overwritten_twice(
    named_leaves: Sequence[tuple[str, Any]], is_overwritten: Sequence[bool]
) -> list[str]:
    """The names of each array that stands twice and may be overwritten.

    Args:
      named_leaves: all arguments of a program, with their names in messages.
      is_overwritten: one bool per leaf; True if the program may overwrite it.
    """
    # id of a leaf -> its names
    names_of: dict[int, list[str]] = {}
    overwritten_ids: set[int] = set()
    for (name, leaf), overwrites in zip(named_leaves, is_overwritten, strict=True):
        names_of.setdefault(id(leaf), []).append(name)
        if overwrites and isinstance(leaf, jax.Array):
            overwritten_ids.add(id(leaf))
    return [
        " and ".join(names)
        for leaf_id, names in names_of.items()
        if leaf_id in overwritten_ids and len(names) > 1
    ]


def collections(variables: Any, indices: Sequence[int]) -> str:
    """The collections of some leaves, as a user would type them."""
    flat = jax.tree_util.tree_leaves_with_path(variables)
    depth = 1 if isinstance(variables, Mapping) else 2  # layer and collection
    paths = dict.fromkeys(flat[i][0][:depth] for i in indices)
    return ", ".join(f"variables{jax.tree_util.keystr(path)}" for path in paths)


def params(variables: Any) -> PyTree:
    """The parameters of a model, or of each layer; ``{}`` where there are none."""
    if isinstance(variables, Mapping):
        return variables.get("params", {})
    return tuple(map(params, variables))


def param_indices(variables: PyTree, *, has_collections: bool) -> list[int]:
    """The indices of the leaves that are parameters.

    Args:
      variables: a tree of leaves.
      has_collections: True if parameters are in ``"params"`` beside other collections,
        of a model or of each layer of a list; else all leaves are parameters.
    """
    structure = jax.tree.structure(variables)
    indices = structure.unflatten(range(structure.num_leaves))
    return jax.tree.leaves(params(indices) if has_collections else indices)


def model_state(variables: Any) -> PyTree:
    """The other collections of a model, or of each layer."""
    if isinstance(variables, Mapping):
        return {name: entry for name, entry in variables.items() if name != "params"}
    return tuple(map(model_state, variables))


def merge(params: PyTree, model_state: PyTree) -> PyTree:
    """Merges parameters and other collections: the inverse of the two above."""
    if isinstance(model_state, Mapping):
        return {"params": params, **model_state}
    variables: list[Any] = []
    for layer_params, layer_state in zip(params, model_state, strict=True):
        entry = dict(layer_state)
        if jax.tree.leaves(layer_params):
            entry["params"] = layer_params
        variables.append(entry)
    return tuple(variables)
