"""Which parameters are trained: what users give as ``trainable=``."""

import difflib
import fnmatch
import reprlib
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax import nnx

from .._jaxprs._jaxpr import is_inexact
from .._layers import _nnx_values
from .._layers._layer import LayerAdapter
from .._messages import raise_all
from ._weights import is_params

PyTree = Any
Path = tuple[Any, ...]

_NEEDS = (
    "trainable= takes paths such as '*/lora_*', a function (path, leaf) -> bool, an "
    "nnx filter such as nnx.LoRAParam, or a list of these"
)


class _Leaf(NamedTuple):
    """A floating leaf of the parameters: what a rule receives.

    Attributes:
      path: from the layer's number on, within "params".
      value: its spec; of an nnx layer as a Variable of its type and metadata.
    """

    path: Path
    value: Any

    @property
    def names(self) -> list[str]:
        """The path as text, and those of the subtrees that it is in."""
        parts = list(map(str, self.path))
        return ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]


class Trainable:
    """A selection of parameters.

    Args:
      given: see `Pipeline.value_and_grad`; ``None``: all floating leaves.
      by_layer: True if a path starts with the number of a layer.

    Raises:
      TypeError: if it is not a selection.
    """

    def __init__(self, given: Any = None, by_layer: bool = True) -> None:
        self.selects_all = given is None
        self._first = 0 if by_layer else 1
        several = (
            given if isinstance(given, list | tuple | set | frozenset) else [given]
        )
        if not several:
            raise TypeError(f"trainable={given!r} names nothing; {_NEEDS}")
        self._rules = [] if given is None else [(r, _rule(r)) for r in several]

    def marks(
        self, layers: Sequence[LayerAdapter], variables: Sequence[PyTree]
    ) -> tuple[PyTree, ...]:
        """True if each leaf is trained.

        Args:
          layers: all of them.
          variables: one entry per layer, or their specs.

        Returns:
          A boolean in place of each leaf: those of other collections than "params"
          and of other dtypes than floating ones are not trained.

        Raises:
          ValueError: with every part of the selection that selects nothing.
        """
        flat, tree = jax.tree_util.tree_flatten_with_path(tuple(variables))
        floating = {
            i: _names(path)
            for i, (path, leaf) in enumerate(flat)
            if is_params(path) and is_inexact(leaf)
        }
        chosen = set(floating)
        if not self.selects_all:
            _check_types(self._rules, layers)
            kinds = {
                n: _nnx_values.parameters(layer.owner) for n, layer in enumerate(layers)
            }
            leaves = {}
            for i, at in floating.items():
                path = (at[0], *at[2:])[self._first :]
                leaves[i] = _Leaf(path, _as_given(at, flat[i][1], kinds.get(at[0], {})))
            chosen = self._chosen(leaves)
        return jax.tree.unflatten(tree, [i in chosen for i in range(len(flat))])

    def _chosen(self, leaves: dict[int, _Leaf]) -> set[int]:
        """Which of the floating leaves the rules select, by their numbers."""
        chosen, idle = set[int](), []
        for given, rule in self._rules:
            found = {i for i, leaf in leaves.items() if rule(leaf)}
            chosen |= found
            if not found:
                idle.append(f"{_text(given)}: {_instead(given, list(leaves.values()))}")
        raise_all(
            "trainable= selects none of the floating parameters by",
            idle,
            advice=("" if self._first else "\nA path starts with the layer's number;")
            + f"\nthe types of Variables that are trained are derived from nnx.Param. "
            f"{_NEEDS}",
        )
        return chosen


def _check_types(
    rules: Sequence[tuple[Any, Any]], layers: Sequence[LayerAdapter]
) -> None:
    """Refuses filters of nnx that mean a Variable which a pipeline does not train."""
    filters = [(given, rule) for given, rule in rules if _is_filter(given)]
    raise_all(
        "a pipeline trains what is an nnx.Param; derive the type from it, or name what "
        "is trained, such as trainable=nnx.Param",
        (
            f"trainable={_text(given)} selects {(n, *path)}, a {type(leaf).__name__}"
            for n, layer in enumerate(layers if filters else ())
            for path, leaf in _nnx_values.untrained(layer.owner).items()
            for given, rule in filters
            if rule(_Leaf((n, *path), _as_given((n, "", *path), leaf, {path: leaf})))
        ),
    )


def _is_filter(given: Any) -> bool:
    """True if a rule is one of nnx, which selects by the types of Variables."""
    if isinstance(given, bool | EllipsisType):
        return bool(given)
    return isinstance(given, type) or type(given).__module__.startswith("flax.nnx")


def _rule(given: Any) -> Callable[[_Leaf], bool]:
    if isinstance(given, str):
        return lambda leaf: any(fnmatch.fnmatchcase(n, given) for n in leaf.names)
    if not (callable(given) or isinstance(given, bool | EllipsisType)):
        kind = type(given).__name__
        raise TypeError(f"trainable={reprlib.repr(given)} is a {kind}; {_NEEDS}")
    predicate = nnx.filterlib.to_predicate(cast(Any, given))
    of_types = _is_filter(given) and callable(given)

    def selects(leaf: _Leaf) -> bool:
        value = leaf.value
        if of_types and not isinstance(value, nnx.Variable):
            value = nnx.Param(value)  # as nnx would hold it
        try:
            answer = predicate(leaf.path, value)
        except Exception as error:
            error.add_note(f"raised by trainable={_text(given)} on {tuple(leaf)}")
            raise
        if not isinstance(answer, bool | np.bool_):
            raise TypeError(
                f"trainable={_text(given)} answers {answer!r} for {leaf.path}; needs "
                f"True or False"
            )
        return bool(answer)

    return selects


def _names(path: Any) -> Path:
    """The keys of a path of JAX, as they are written in the tree."""
    names = "key", "idx", "name"
    return tuple(next(getattr(k, n) for n in names if hasattr(k, n)) for k in path)


def _as_given(at: Path, leaf: Any, kinds: dict[Path, nnx.Variable]) -> Any:
    """What a rule receives of a leaf; a Variable may hold a pytree."""
    spec = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    parts = (at[2:end] for end in range(len(at), 2, -1))
    variable = next((kinds[part] for part in parts if part in kinds), None)
    if variable is None:
        return spec
    copy = variable.replace(spec)
    # Hooks compute with values.
    metadata = copy.get_metadata().items()
    copy.set_metadata({k: v for k, v in metadata if not k.startswith("on_")})
    return copy


def _text(given: Any) -> str:
    return getattr(given, "__name__", None) or reprlib.repr(given)


def _instead(given: Any, leaves: Sequence[_Leaf]) -> str:
    """What there is, where a rule selects nothing."""
    if not leaves:
        return "there are none"
    if isinstance(given, str):
        names = list(dict.fromkeys(leaf.names[0] for leaf in leaves))
        close = difflib.get_close_matches(given, names, n=3, cutoff=0)
        return f"the nearest are {', '.join(map(repr, close))}"
    kinds = {type(x.value) for x in leaves if isinstance(x.value, nnx.Variable)}
    listed = ", ".join(sorted(kind.__name__ for kind in kinds))
    return (
        f"there are {len(leaves)}, such as {leaves[0].path} and {leaves[-1].path}; "
        f"Variable types: {listed or 'none, as no layer is of nnx'}"
    )
