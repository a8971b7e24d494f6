"""Initial variables, leaf by leaf: each needs room for itself alone."""

import functools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp
from jax.extend import core

from .._instructions import _transfer
from .._instructions._compile import Executable, compiling, drawing_options, is_ahead
from .._instructions._sharding import WHOLE
from .._jaxprs import _alike, _constraints, _flow, _jaxpr
from .._jaxprs._jaxpr import zeros
from .._layers._linen import OF_DATA
from .._layers._parent import Parent
from .._layers._sequence import Made
from ._folds import lifted

PyTree = Any


class Makes(Protocol):
    """What makes variables: a list of layers, or one model."""

    parent: Parent

    def init(self, key: chex.PRNGKey, x: PyTree, given: Sequence[PyTree]) -> Made: ...


class Initial:
    """The variables of layers before any step.

    Args:
      layers: what makes them.
      key: a key, or one like it.
      spec: the input of a micro-batch.
      given: by layer variables that it takes as they are, in place of its own.

    Attributes:
      specs: the variables, by layer, as specs.
      draws: whether any of them follows from the key.
      routes: the skip connections between stages.

    Raises:
      ValueError: with what would follow from the values of the input.
    """

    def __init__(
        self,
        layers: Makes,
        key: chex.PRNGKey,
        spec: PyTree,
        given: Sequence[PyTree] | None = None,
    ) -> None:
        routes: list[Any] = []

        def make(key: chex.PRNGKey, x: PyTree, given: PyTree) -> Any:
            made = layers.init(key, x, given)
            routes[:] = made.routes
            return tuple(jax.tree.map(strong, tuple(made.entries)))

        known = _specs([{}] * len(layers.parent) if given is None else given)
        like = _jaxpr.spec(jax.typeof(key))
        closed, specs = jax.make_jaxpr(make, return_shape=True)(like, spec, known)
        closed = _constraints.leave_out(closed)
        _check_made(closed, specs, known, layers.parent.is_list)
        # Some equations have the input among their operands, as a jax.checkpoint has.
        others = [*map(_jaxpr.spec, closed.in_avals[1:])]
        run = core.jaxpr_as_fun(_jaxpr.rest(closed, closed.jaxpr.outvars, []))
        on_zeros, _ = _jaxpr.trace(lambda key: run(key, *zeros(others)), like)
        self._closed, self._numbers = lifted(on_zeros)
        self.routes = tuple(routes)
        self.draws = bool(_jaxpr.live_inputs(self._closed)[0])
        own_values = layers.parent.nnx_values(known)
        own_specs = jax.eval_shape(
            lambda trees: jax.tree.map(strong, trees), own_values
        )
        self.specs: tuple[PyTree, ...] = tuple(
            {name: _like(x, own.get(name)) for name, x in of_nnx.items()} or made
            for of_nnx, own, made in zip(own_specs, known, specs, strict=True)
        )
        # Of each leaf its value, or the variable of the jaxpr that is its value.
        self._sources: list[Any] = []
        results = iter(self._closed.jaxpr.outvars)
        for own, made in zip(own_values, specs, strict=True):
            drawn = [next(results) for _ in jax.tree.leaves(made)]
            self._sources += jax.tree.leaves(own) or drawn

    @cached_property
    def _producer(self) -> dict[core.Var, int]:
        """The number of the equation that makes each variable."""
        eqns = enumerate(self._closed.jaxpr.eqns)
        return {var: i for i, eqn in eqns for var in eqn.outvars}

    def leaves(
        self, key: chex.PRNGKey, device: Any, wanted: Sequence[bool]
    ) -> Iterator[jax.Array | None]:
        """Makes them one after the other, on a device.

        Args:
          key: the key.
          device: the device.
          wanted: whether each is to be made; ``None`` is given for one that is not.
        """
        known: dict[Any, Executable] = {}
        key, runs = _transfer.put_each(key, [device], [(0, WHOLE)]), list[Any]()
        with compiling() as add:
            for source, is_wanted in zip(self._sources, wanted, strict=True):
                if not is_wanted or not isinstance(source, core.Var | core.Literal):
                    runs.append(source if is_wanted else None)
                    continue
                closed, numbers = self._drawn(source)
                kind = _alike.form(closed)
                if kind not in known:
                    run = jax.jit(_named(core.jaxpr_as_fun(closed)))
                    known[kind] = (
                        add(
                            functools.partial(run.trace, key, *numbers),
                            device,
                            drawing_options(device),
                        )
                        if is_ahead()
                        else Executable(run)
                    )
                runs.append((known[kind], numbers))
        for one in runs:
            if isinstance(one, tuple):
                executable, numbers = one
                yield executable.run(key, *_transfer.put(numbers, device))[0]
            else:  # a copy: a step overwrites what it is given
                yield None if one is None else jnp.copy(strong(one))

    def _drawn(self, var: Any) -> tuple[core.ClosedJaxpr, list[Any]]:
        """``(key, *numbers) -> variable``, and numbers that are folded into the key."""
        jaxpr = self._closed.jaxpr
        consts = dict(zip(jaxpr.constvars, self._closed.consts, strict=True))
        needed, numbers = _jaxpr.variables([var]), set[int]()
        found = [*needed]
        while found:
            number = self._producer.get(found.pop())
            if number is not None and number not in numbers:
                numbers.add(number)
                read = _jaxpr.variables(jaxpr.eqns[number].invars)
                found += read
                needed |= read
        key, *folded = jaxpr.invars
        own = [i for i, v in enumerate(folded) if v in needed]
        read = [v for v in jaxpr.constvars if v in needed]
        single = jaxpr.replace(
            constvars=read,
            invars=[key, *(folded[i] for i in own)],
            outvars=[var],
            eqns=[jaxpr.eqns[number] for number in sorted(numbers)],
            effects=set(),
        )
        closed = core.ClosedJaxpr(single, [consts[v] for v in read])
        return closed, [self._numbers[i] for i in own]


def _like(specs: PyTree, given: PyTree) -> PyTree:
    """What is given of a collection, if it has the same leaves."""
    is_like = jax.tree.structure(given) == jax.tree.structure(specs)
    return given if is_like else specs


def _specs(trees: PyTree) -> PyTree:
    return jax.tree.map(lambda x: _jaxpr.spec(jax.typeof(x)), tuple(trees))


def _check_made(
    closed: core.ClosedJaxpr,
    specs: Sequence[PyTree],
    given: Sequence[PyTree],
    is_list: bool,
) -> None:
    """Checks that what is made follows from the shapes of the input alone."""
    inputs = [n > 0 for n in range(len(closed.jaxpr.invars))]
    taken = {path for path, _ in jax.tree_util.tree_leaves_with_path(given)}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(specs)]
    found = zip(paths, _flow.reached(closed, inputs), strict=True)
    faults = [
        jax.tree_util.keystr(path[1:], simple=True, separator="/")
        + f" of layer {path[0].idx}" * is_list
        for path, is_reached in found
        if is_reached and path not in taken
    ]
    if faults:
        raise ValueError(
            f"what a layer holds at the start follows from the shapes of its input "
            f"alone, and not from its values, as {', '.join(faults)} would; {OF_DATA}"
        )


def strong(leaf: Any) -> Any:
    """An array that is not weakly typed, as after a step, so that programs fit both."""
    dtype = jnp.result_type(leaf)
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return leaf if is_key else jnp.asarray(leaf, dtype)


def _named(function: Any) -> Any:
    def draw(*args: Any) -> Any:
        return function(*args)

    return draw
