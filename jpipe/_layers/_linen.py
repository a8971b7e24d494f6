"""Flax linen modules as layers."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import chex
import jax
from flax import errors, linen
from flax.core import DenyList
from flax.core.partial_eval import lazy_init

from . import _batchnorm
from ._tree import flat, nested

PyTree = Any

_NOT_SOWN = "what it computes leaves it as a part of its output, not by sow"


def is_module(source: Any) -> bool:
    """Whether an object is a linen module."""
    return isinstance(source, linen.Module)


def is_box(node: Any) -> bool:
    """Whether a node of variables is a box, such as a `flax.linen.Partitioned`."""
    return isinstance(node, linen.meta.AxisMetadata)


def name(module: linen.Module) -> str:
    """What to call a module: its own name or that of its class."""
    return module.name or type(module).__name__


def switches(train: bool) -> dict[str, bool]:
    """The names by which Flax layers ask whether they are being trained."""
    return {
        "train": train,
        "deterministic": not train,
        "use_running_average": not train,
    }


def init(
    module: linen.Module, method: str = "__call__"
) -> Callable[[chex.PRNGKey, PyTree], dict[str, PyTree]]:
    """``(key, spec) -> variables`` of a module, from the shapes of its input alone.

    The values are those of ``module.init(key, x)``. A module whose parameters
    depend on the values of ``x`` raises Flax's ``LazyInitError``.
    """

    def run(key: chex.PRNGKey, spec: PyTree) -> dict[str, PyTree]:
        args, keywords = _asked(module, method, train=False)
        called = getattr(type(module), method)
        with _explained():
            made = module.lazy_init(key, spec, *args, method=called, **keywords)
        return dict(made)

    return run


def extend(
    module: linen.Module, method: str = "__call__"
) -> Callable[[chex.PRNGKey, PyTree, PyTree], dict[str, PyTree]]:
    """``(key, spec, borrowed) -> variables``: what a method makes beside given ones."""

    def run(key: chex.PRNGKey, spec: PyTree, borrowed: PyTree) -> dict[str, PyTree]:
        args, keywords = _asked(module, method, train=False)
        given = flat(borrowed)

        def added(key: chex.PRNGKey, borrowed: PyTree, x: PyTree) -> PyTree:
            _, made = module.apply(
                borrowed,
                x,
                *args,
                rngs={"params": key},
                method=getattr(type(module), method),
                mutable=DenyList("intermediates"),
                **keywords,
            )
            made = flat(made)
            return nested({name: made[name] for name in made if name not in given})

        with _explained():
            return lazy_init(added)(key, borrowed, spec)

    return run


def apply(
    module: linen.Module, method: str = "__call__"
) -> Callable[..., tuple[PyTree, dict[str, PyTree]]]:
    """``(variables, x, rngs, train) -> (y, changed)`` of a module."""

    def run(variables, x, rngs, train):
        args, keywords = _asked(module, method, train)
        mutable = [key for key in variables if key != "params"] if train else []
        keywords |= {"rngs": rngs, "method": method}
        if not mutable:
            with _explained():
                return module.apply(variables, x, *args, **keywords), {}
        with _batchnorm.meeting(mutable), linen.intercept_methods(_batchnorm.intercept):
            y, changed = module.apply(variables, x, *args, mutable=mutable, **keywords)
        _check_none_made(module, variables, changed)
        return y, dict(changed)

    return run


@contextmanager
def _explained() -> Iterator[None]:
    """Adds to errors of Flax what to type instead, in a pipeline."""
    try:
        yield
    except errors.ModifyScopeVariableError as error:
        error.add_note(
            "where it is not trained a layer may not change what it holds: let its "
            "__call__ take train, and write (use_running_average=not train) only then"
        )
        raise
    except errors.ScopeParamNotFoundError as error:
        error.add_note(
            "what a layer holds is what it needs in evaluation: let it use the same "
            "parameters in training"
        )
        raise
    except errors.LazyInitError as error:
        error.add_note(
            f"what a layer holds at the start follows from the shapes of its input "
            f"alone; {_NOT_SOWN}"
        )
        raise


def _check_none_made(
    module: linen.Module, before: Mapping[str, PyTree], after: Mapping[str, PyTree]
) -> None:
    """Checks that a call only changed what there was.

    Raises:
      ValueError: with what it made.
    """
    made = _paths(after) - _paths({name: before[name] for name in after})
    if made:
        raise ValueError(
            f"a call of this {type(module).__name__} changes which variables there "
            f"are, by {', '.join(sorted(made))}; {_NOT_SOWN}"
        )


def _paths(tree: PyTree) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves
    }


def _asked(
    module: linen.Module, method: str, train: bool
) -> tuple[list[Any], dict[str, Any]]:
    """The switches that a method names and the module has not set itself.

    They are passed by position where they can be: `flax.linen.remat` lets only such
    arguments be static.
    """
    signature = inspect.signature(getattr(type(module), method))
    _, _, *after_x = signature.parameters.values()
    values = {
        name: value
        for name, value in switches(train).items()
        if not _is_set(module, name)
    }
    asked = [parameter.name for parameter in after_x if parameter.name in values]
    args = []
    for parameter in after_x:
        by_position = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        value = values.get(parameter.name, parameter.default)
        if not by_position or value is inspect.Parameter.empty:
            break
        if not set(asked) - {p.name for p in after_x[: len(args)]}:
            break
        args.append(value)
    given = {parameter.name for parameter in after_x[: len(args)]}
    return args, {name: values[name] for name in asked if name not in given}


def _is_set(module: linen.Module, name: str) -> bool:
    """Whether the user chose a switch when making the module."""
    fields = type(module).__dataclass_fields__
    return name in fields and getattr(module, name) is not None
