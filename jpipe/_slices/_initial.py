"""Initial variables of a model, leaf by leaf: each needs room for itself alone."""

from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
from jax.extend import core

from .._functions import _microbatch
from .._instructions import _transfer
from .._instructions._compile import Executable, compiling, drawing_options, is_ahead
from .._jaxprs import _jaxpr
from .._layers import _nnx
from .._layers._initialize import strong
from .._layers._layer import Layer
from .._layers._stage import shapes
from .._run import _variables
from ._folds import lifted

PyTree = Any


class Initial:
    """What makes the variables of a model.

    Args:
      layer: the model.
      key: a key, or one like it.
      spec: its inputs, of a micro-batch.

    Attributes:
      specs: the variables, as specs.
    """

    def __init__(self, layer: Layer, key: chex.PRNGKey, spec: PyTree) -> None:
        self._held: PyTree = None
        if _nnx.is_module(layer.owner):  # which has its values already
            self._held = jax.tree.map(strong, layer.init(key, spec))
            self.specs = jax.tree.map(lambda x: _jaxpr.spec(jax.typeof(x)), self._held)
            return

        def make(key: chex.PRNGKey) -> PyTree:
            return jax.tree.map(strong, layer.init(key, spec))

        self._closed, self.specs = _jaxpr.trace(make, _jaxpr.spec(jax.typeof(key)))

    def leaves(self, key: chex.PRNGKey, device: Any) -> Iterator[jax.Array]:
        """Makes them one after the other, on a device."""
        if self._held is not None:
            yield from jax.tree.leaves(self._held)
            return
        known: dict[Any, Executable] = {}
        key, runs = _transfer.put_tree(key, device), []
        with compiling() as add:
            for var in self._closed.jaxpr.outvars:
                closed, numbers = lifted(_jaxpr.prune(self._closed, [var]))
                # Of the text of a program its constants are no part.
                kind = str(closed.jaxpr), *map(id, closed.consts)
                if kind not in known:
                    run = jax.jit(_named(core.jaxpr_as_fun(closed)))
                    known[kind] = (
                        add(run.trace(key, *numbers), device, drawing_options(device))
                        if is_ahead()
                        else Executable(run)
                    )
                runs.append((known[kind], numbers))
        for executable, numbers in runs:
            yield executable.run(key, *_transfer.put(numbers, device))[0]


def check_given(layer: Layer, x: PyTree, variables: PyTree) -> None:
    """Checks that given variables are those of a model, where it can make such.

    Args:
      layer: the model.
      x: its inputs, of a micro-batch, as specs.
      variables: what the caller gave.

    Raises:
      ValueError: with every leaf that is missing, surplus or of another shape.
    """
    given = _microbatch.specs(variables, "variables")
    try:
        specs = Initial(layer, jax.random.key(0), x).specs
    except Exception:  # such as parameters that are made of data
        return
    told = (
        f"the variables are not those of this model for micro-batches of {shapes(x)}; "
        f"one of the two is wrong"
    )
    _variables.check({"variables": specs}, {"variables": given}, told)


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any) -> Any:
        return function(*args)

    return draw
