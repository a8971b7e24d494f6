"""Initial variables, leaf by leaf: each needs room for itself alone.

A variable in pieces, each in another stage, is drawn piece by piece: no device ever
holds all of it. See `_jaxprs/_piecewise`.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._instructions import _transfer
from .._instructions._compiler import (
    Executable,
    compile_side_by_side,
    drawing_options,
    may_compile_ahead,
)
from .._instructions._sharding import WHOLE
from .._jaxprs import (
    _dataflow,
    _inlining,
    _jaxpr,
    _scans,
    _sharding_constraints,
    _structural_key,
)
from .._jaxprs._explicit_dtypes import make_jaxpr
from .._jaxprs._jaxpr import zeros
from .._jaxprs._pieces import Pieces
from .._jaxprs._piecewise import run_in_pieces
from .._layers._linen import DATA_DEPENDENT_ADVICE
from .._layers._sequence import Sequential
from .._trace._folded_numbers import lift_folded_numbers

PyTree = Any


class _Draw(NamedTuple):
    """The draw of a leaf.

    Attributes:
      executable: the program ``(key, *numbers) -> leaf``.
      numbers: the numbers that are folded into the key.
    """

    executable: Executable
    numbers: Sequence[Any]


class Initial:
    """The variables of layers before any step.

    The layers' init is traced once, ``key -> (leaf, leaf, ...)``. Each leaf is then the
    result of a small jaxpr of its own, the equations that it follows from; equal ones,
    such as the kernels of equal blocks, share a compiled program.

    Args:
      layers: the layers.
      key: a key, or specs of one.
      spec: the input of a micro-batch.
      fixed_entries: for each layer, variables that it takes as they are, in place of
        new ones.

    Attributes:
      specs: specs of the variables, for each layer.
      draws: True if any of them follows from the key.

    Raises:
      ValueError: with the variables that would follow from values of the input.
    """

    def __init__(
        self,
        layers: Sequential,
        key: chex.PRNGKey,
        spec: PyTree,
        fixed_entries: Sequence[PyTree] | None = None,
    ) -> None:
        def init(key: chex.PRNGKey, x: PyTree, fixed_entries: PyTree) -> Any:
            initialized = layers.init(key, x, fixed_entries)
            return tuple(jax.tree.map(strong, tuple(initialized.entries)))

        if fixed_entries is None:
            fixed_entries = [{}] * len(layers.parent)
        fixed_specs = _specs(fixed_entries)
        key_spec = _jaxpr.spec(jax.typeof(key))
        trace = make_jaxpr(init, return_shape=True)
        closed, specs = trace(key_spec, spec, fixed_specs)
        closed = _sharding_constraints.remove_constraints(closed)
        _check_follows_from_shapes(
            closed, specs, fixed_specs, is_list=layers.parent.is_list
        )
        self._function = _function_of_key(closed, key_spec)
        self.draws = bool(_jaxpr.used_inputs(self._function.closed)[0])

        # A module of nnx holds values already: these are its initial variables.
        held_entries = layers.parent.held_entries(fixed_specs)
        held_specs = jax.eval_shape(
            lambda trees: jax.tree.map(strong, trees), held_entries
        )
        entries = list[PyTree]()
        for held_entry, fixed_entry, drawn_entry in zip(
            held_specs, fixed_specs, specs, strict=True
        ):
            held_collections = {
                name: _fixed_if_equal(collection, fixed_entry.get(name))
                for name, collection in held_entry.items()
            }
            entries.append(held_collections if held_collections else drawn_entry)
        self.specs: tuple[PyTree, ...] = tuple(entries)
        # The source of each leaf: its value, or the variable of the jaxpr that it is.
        self._sources: list[Any] = []
        outvars = iter(self._function.closed.jaxpr.outvars)
        for held_entry, drawn_entry in zip(held_entries, specs, strict=True):
            drawn_vars = [next(outvars) for _ in jax.tree.leaves(drawn_entry)]
            self._sources += jax.tree.leaves(held_entry) or drawn_vars

    def leaves(
        self,
        key: chex.PRNGKey,
        device: Any,
        is_drawn: Sequence[bool],
        pieces: Mapping[int, Pieces],
    ) -> Iterator[jax.Array | None]:
        """Yields the leaves one after the other, on a device.

        Args:
          key: the key.
          device: the device.
          is_drawn: one bool per leaf or piece; False yields ``None`` in its place.
          pieces: index of a leaf -> its pieces, which are yielded in its place.
        """
        key = _transfer.put_tree(key, [device], [(0, WHOLE)])
        sources = list[Any]()
        for index, source in enumerate(self._sources):
            sources += self._sources_of_pieces(source, pieces.get(index))
        # For each leaf or piece its draw, or its value, or None.
        draws = list[Any]()
        executables: dict[Any, Executable] = {}  # structural key of a jaxpr -> it
        with compile_side_by_side() as compile_ahead:
            for source, is_leaf_drawn in zip(sources, is_drawn, strict=True):
                if not is_leaf_drawn:
                    draws.append(None)
                    continue
                if not isinstance(source, _KeyFunction):
                    draws.append(source)
                    continue
                numbers = source.numbers
                structural_key = _structural_key.structural_key(source.closed)
                if structural_key not in executables:
                    draw = jax.jit(_named_draw(core.jaxpr_as_fun(source.closed)))
                    if may_compile_ahead():
                        executables[structural_key] = compile_ahead(
                            functools.partial(draw.trace, key, *numbers),
                            device,
                            drawing_options(device),
                        )
                    else:
                        executables[structural_key] = Executable(draw)
                draws.append(_Draw(executables[structural_key], numbers))

        for draw in draws:
            if isinstance(draw, _Draw):
                yield draw.executable.run(key, *_transfer.put(draw.numbers, device))[0]
            else:  # a copy: a step overwrites its arguments
                yield None if draw is None else jnp.copy(strong(draw))

    def _sources_of_pieces(self, source: Any, pieces: Pieces | None) -> list[Any]:
        """The sources of the pieces of a leaf; of itself, if it is whole.

        Args:
          source: the variable of the jaxpr that it is, or its value.
          pieces: its pieces; ``None`` if it is whole.

        Returns:
          For each piece its function of the key, or its value.
        """
        if isinstance(source, core.Var | core.Literal):
            function = self._function.of_result(source)
            return [function] if pieces is None else function.in_pieces(pieces)
        if pieces is None:
            return [source]
        return [
            jax.lax.slice_in_dim(source, begin, end, axis=pieces.axis)
            for begin, end in zip(pieces.starts, pieces.ends, strict=True)
        ]


class _KeyFunction:
    """A jaxpr ``(key, *numbers) -> arrays``, and the numbers.

    Args:
      closed: the jaxpr.
      numbers: the numbers, such as those that are folded into the key.

    Attributes:
      closed: likewise.
      numbers: likewise.
    """

    def __init__(self, closed: core.ClosedJaxpr, numbers: Sequence[Any]) -> None:
        self.closed = closed
        self.numbers = numbers

    @cached_property
    def _producer(self) -> dict[core.Var, int]:
        """The index of the equation that makes each variable."""
        return _jaxpr.producers(self.closed.jaxpr)

    def of_result(self, var: Any) -> "_KeyFunction":
        """The function that computes one variable, and only what it needs."""
        jaxpr = self.closed.jaxpr
        needed = _jaxpr.variables([var])
        eqn_indices = set[int]()
        todo = [*needed]
        while todo:
            index = self._producer.get(todo.pop())
            if index is None or index in eqn_indices:
                continue
            eqn_indices.add(index)
            operands = _jaxpr.variables(jaxpr.eqns[index].invars)
            todo += operands
            needed |= operands

        key, *folded = jaxpr.invars
        number_indices = [i for i, invar in enumerate(folded) if invar in needed]
        constants = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        constvars = [constvar for constvar in jaxpr.constvars if constvar in needed]
        result_jaxpr = jaxpr.replace(
            constvars=constvars,
            invars=[key, *(folded[i] for i in number_indices)],
            outvars=[var],
            eqns=[jaxpr.eqns[index] for index in sorted(eqn_indices)],
            effects=set(),
        )
        closed = core.ClosedJaxpr(result_jaxpr, [constants[var] for var in constvars])
        return _KeyFunction(closed, [self.numbers[i] for i in number_indices])

    def in_pieces(self, pieces: Pieces) -> "list[_KeyFunction]":
        """The functions of the pieces of the only result.

        The numbers of a function tell where its piece begins: equal pieces have equal
        functions.
        """
        piecewise = run_in_pieces(
            _scans.prune_scans(self.closed),
            {},
            output_pieces={0: pieces},
            num_fixed=0,
        )
        numbers = [*self.numbers, *map(np.int32, piecewise.starts)]
        function = _KeyFunction(piecewise.closed, numbers)
        return [function.of_result(var) for var in piecewise.closed.jaxpr.outvars]


def _function_of_key(closed: core.ClosedJaxpr, key_spec: Any) -> _KeyFunction:
    """The function ``(key, *numbers) -> leaves``; numbers are folded into keys.

    No leaf follows from values of the other inputs. Some equations have them among
    their operands all the same, as a jax.checkpoint has: they are zeros.
    """
    other_specs = [*map(_jaxpr.spec, closed.in_avals[1:])]
    run = core.jaxpr_as_fun(_jaxpr.recomputation(closed, closed.jaxpr.outvars, []))
    on_zeros, _ = _inlining.trace(lambda key: run(key, *zeros(other_specs)), key_spec)
    return _KeyFunction(*lift_folded_numbers(on_zeros))


def _fixed_if_equal(specs: PyTree, fixed_specs: PyTree) -> PyTree:
    """Specs of a collection that is taken as it is, if it has the same structure."""
    is_equal = jax.tree.structure(fixed_specs) == jax.tree.structure(specs)
    return fixed_specs if is_equal else specs


def _specs(trees: PyTree) -> PyTree:
    return jax.tree.map(lambda x: _jaxpr.spec(jax.typeof(x)), tuple(trees))


def _check_follows_from_shapes(
    closed: core.ClosedJaxpr,
    specs: Sequence[PyTree],
    fixed_specs: Sequence[PyTree],
    *,
    is_list: bool,
) -> None:
    """Checks that variables follow from the shapes of the input, not from its values.

    Args:
      closed: the jaxpr ``(key, *input, *fixed variables) -> variables``.
      specs: specs of the variables.
      fixed_specs: specs of the variables that are taken as they are.
      is_list: True if the layers are a list: then the message names them.
    """
    is_input = [index > 0 for index in range(len(closed.jaxpr.invars))]
    fixed_leaves = jax.tree_util.tree_leaves_with_path(fixed_specs)
    fixed_paths = {path for path, _ in fixed_leaves}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(specs)]
    follows = _dataflow.dependent_results(closed, is_input)
    faults = []
    for path, follows_from_input in zip(paths, follows, strict=True):
        if follows_from_input and path not in fixed_paths:
            name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
            faults.append(f"{name} of layer {path[0].idx}" if is_list else name)
    if faults:
        raise ValueError(
            f"what a layer holds at the start follows from the shapes of its input "
            f"alone, and not from its values, as {', '.join(faults)} would; "
            f"{DATA_DEPENDENT_ADVICE}"
        )


def strong(leaf: Any) -> Any:
    """An array that is not weakly typed, as after a step, so that programs fit both."""
    dtype = jnp.result_type(leaf)
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return leaf if is_key else jnp.asarray(leaf, dtype)


def _named_draw(function: Any) -> Any:
    """The same function with a name, which profiles show."""

    def draw(*args: Any) -> Any:
        return function(*args)

    return draw
