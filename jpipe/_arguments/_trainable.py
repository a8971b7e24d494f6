"""The selection of parameters that are trained: the argument ``trainable=``."""

import difflib
import fnmatch
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax import nnx

from .._jaxprs._jaxpr import is_inexact
from .._layers import _nnx_values
from .._layers._adapter import LayerAdapter
from .._messages import raise_all
from ..schedules._formats import format_type

PyTree = Any
Path = tuple[Any, ...]

_NEEDS = (
    "trainable= takes paths such as '*/lora_*', a function (path, leaf) -> bool, an "
    "nnx filter such as nnx.LoRAParam, or a list of these"
)


class _SelectableLeaf(NamedTuple):
    """A floating leaf of the parameters, which a rule receives.

    Attributes:
      path: the path from the layer's number on, within "params".
      value: the spec; in an nnx layer as a Variable of its type and metadata.
    """

    path: Path
    value: Any

    @property
    def names(self) -> list[str]:
        """The path as text, and the paths of the subtrees that hold the leaf."""
        parts = list(map(str, self.path))
        return ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]


Rule = Callable[[_SelectableLeaf], bool]


class Trainable:
    """A selection of parameters.

    Args:
      selection: see `Pipeline.value_and_grad`; ``None``: all floating leaves.
      by_layer: True if a path starts with the number of a layer.

    Raises:
      TypeError: if it is not a selection.
    """

    def __init__(self, selection: Any = None, *, by_layer: bool = True) -> None:
        self.selects_all = selection is None
        self._by_layer = by_layer
        selectors = [selection]
        if isinstance(selection, list | tuple | set | frozenset):
            selectors = list(selection)
        if not selectors:
            raise TypeError(f"trainable={selection!r} names nothing; {_NEEDS}")
        # Pairs of a part of the selection, as the user wrote it, and its rule.
        self._rules: list[tuple[Any, Rule]] = []
        if not self.selects_all:
            self._rules = [(selector, _rule(selector)) for selector in selectors]

    def is_trained(
        self, layers: Sequence[LayerAdapter], variables: Sequence[PyTree]
    ) -> tuple[PyTree, ...]:
        """Tells which leaves are trained.

        Args:
          layers: all layers.
          variables: the variables or their specs, one entry per layer.

        Returns:
          A boolean in place of each leaf: those of other collections than "params"
          and of other dtypes than floating ones are not trained.

        Raises:
          ValueError: with every part of the selection that selects nothing.
        """
        flat, structure = jax.tree_util.tree_flatten_with_path(tuple(variables))
        # index of a floating leaf of the parameters -> its path
        floating: dict[int, Path] = {}
        for i, (path, leaf) in enumerate(flat):
            if _is_param_path(path) and is_inexact(leaf):
                floating[i] = _names(path)

        selected = set(floating)
        if not self.selects_all:
            _check_types(self._rules, layers)
            # layer -> its parameters as Variables, by path; nothing for a loss function
            variables_of = {
                i: _nnx_values.parameters(layer.owner) for i, layer in enumerate(layers)
            }
            leaves: dict[int, _SelectableLeaf] = {}
            for i, (layer, _, *inner_path) in floating.items():
                value = _rule_value(
                    tuple(inner_path),
                    flat[i][1],
                    variables=variables_of.get(layer, {}),
                )
                first = (layer,) if self._by_layer else ()
                leaves[i] = _SelectableLeaf((*first, *inner_path), value)
            selected = self._selected(leaves)
        return structure.unflatten([i in selected for i in range(len(flat))])

    def _selected(self, leaves: dict[int, _SelectableLeaf]) -> set[int]:
        """The indices of the floating leaves that the rules select."""
        selected: set[int] = set()
        faults: list[str] = []
        for selector, rule in self._rules:
            matches = {i for i, leaf in leaves.items() if rule(leaf)}
            selected |= matches
            if not matches:
                candidates = _describe(selector, list(leaves.values()))
                faults.append(f"{_text(selector)}: {candidates}")
        advice = f"\n{_NEEDS}"
        if any(_is_filter(selector) for selector, _ in self._rules):
            advice = (
                f"\nthe types of Variables that are trained are derived from "
                f"nnx.Param.{advice}"
            )
        if self._by_layer:
            advice = f"\na path starts with the layer's number{advice}"
        raise_all(
            "trainable= selects none of the floating parameters by",
            faults,
            advice=advice,
        )
        return selected


def _check_types(
    rules: Sequence[tuple[Any, Rule]], layers: Sequence[LayerAdapter]
) -> None:
    """Refuses filters of nnx that mean a Variable which a pipeline does not train."""
    filters = [(selector, rule) for selector, rule in rules if _is_filter(selector)]
    if not filters:
        return
    faults: list[str] = []
    for layer_index, layer in enumerate(layers):
        for path, variable in _nnx_values.untrained_variables(layer.owner).items():
            value = _rule_value(path, variable, variables={path: variable})
            leaf = _SelectableLeaf((layer_index, *path), value)
            for selector, rule in filters:
                if rule(leaf):
                    faults.append(
                        f"trainable={_text(selector)} selects {leaf.path}, a "
                        f"{type(variable).__name__}"
                    )
    raise_all(
        "a pipeline trains what is an nnx.Param; derive the type from it, or name what "
        "is trained, such as trainable=nnx.Param",
        faults,
    )


def _is_filter(selector: Any) -> bool:
    """True for a filter of nnx, which selects by the types of Variables."""
    if isinstance(selector, bool | EllipsisType):
        return bool(selector)
    is_of_nnx = type(selector).__module__.startswith("flax.nnx")
    return isinstance(selector, type) or is_of_nnx


def _rule(selector: Any) -> Rule:
    """The rule for a part of a selection: a path, a predicate or a filter of nnx."""
    if isinstance(selector, str):
        return lambda leaf: any(fnmatch.fnmatchcase(n, selector) for n in leaf.names)
    if not (callable(selector) or isinstance(selector, bool | EllipsisType)):
        raise TypeError(
            f"trainable={reprlib.repr(selector)} is {format_type(selector)}; {_NEEDS}"
        )
    predicate = nnx.filterlib.to_predicate(cast(Any, selector))
    needs_variable = _is_filter(selector) and callable(selector)

    def rule(leaf: _SelectableLeaf) -> bool:
        value = leaf.value
        if needs_variable and not isinstance(value, nnx.Variable):
            value = nnx.Param(value)  # as nnx would hold it
        try:
            is_selected = predicate(leaf.path, value)
        except Exception as error:
            error.add_note(f"raised by trainable={_text(selector)} on {tuple(leaf)}")
            raise
        if not isinstance(is_selected, bool | np.bool_):
            raise TypeError(
                f"trainable={_text(selector)} answers {is_selected!r} for {leaf.path}; "
                f"needs True or False"
            )
        return bool(is_selected)

    return rule


def _names(path: Any) -> Path:
    """The keys of a path of JAX, as they are written in the tree."""
    names: list[Any] = []
    for key in path:
        attributes = [a for a in ("key", "idx", "name") if hasattr(key, a)]
        names.append(getattr(key, attributes[0]))
    return tuple(names)


def _rule_value(path: Path, leaf: Any, variables: Mapping[Path, nnx.Variable]) -> Any:
    """The value of a leaf for a rule: its spec, or a Variable with its spec.

    Args:
      path: the path in the parameters of the layer.
      leaf: the leaf.
      variables: path -> Variable, which may hold a pytree.
    """
    spec = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    prefixes = [path[:end] for end in range(len(path), 0, -1)]
    prefix = next((prefix for prefix in prefixes if prefix in variables), None)
    if prefix is None:
        return spec
    variable = variables[prefix].replace(spec)
    # Hooks would compute with the spec.
    metadata = variable.get_metadata().items()
    variable.set_metadata({k: v for k, v in metadata if not k.startswith("on_")})
    return variable


def _text(selector: Any) -> str:
    return getattr(selector, "__name__", None) or reprlib.repr(selector)


def _describe(selector: Any, leaves: Sequence[_SelectableLeaf]) -> str:
    """Describes the leaves that there are, for a rule that selects none of them."""
    if not leaves:
        return "there are none"
    if isinstance(selector, str):
        names = list(dict.fromkeys(leaf.names[0] for leaf in leaves))
        close = difflib.get_close_matches(selector, names, n=3, cutoff=0)
        return f"the nearest are {', '.join(map(repr, close))}"
    values = [leaf.value for leaf in leaves]
    types = {type(value) for value in values if isinstance(value, nnx.Variable)}
    listed = ", ".join(sorted(type_.__name__ for type_ in types))
    return (
        f"there are {len(leaves)}, such as {leaves[0].path} and {leaves[-1].path}; "
        f"Variable types: {listed or 'none, as no layer is of nnx'}"
    )


def _is_param_path(path: Any) -> bool:
    """True if a leaf is a parameter; its path begins with the index of its layer."""
    return getattr(path[1], "key", None) == "params"
