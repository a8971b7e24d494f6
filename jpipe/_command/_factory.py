"""A factory of the user's: where it is, and the model that it gives."""

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ._refusal import Unfit

_NEEDED, _OPTIONAL = ("layers", "sample"), ("optimizer", "loss", "targets")
_RETURNS = (
    "(layers, sample), (layers, sample, optimizer), or a dict or named tuple of "
    "layers and sample and, where there are such, optimizer, loss, targets"
)
# So many names are listed of what a module has, and types of what was returned.
_MOST = 8


@dataclass(frozen=True)
class Model:
    """What a factory gives.

    Attributes:
      layers: as `jpipe.pipeline` takes them.
      sample: an input of a mini-batch, in arrays or specs.
      optimizer: of optax; ``None`` if none was given.
      loss: ``(outputs, targets) -> scalar``; ``None`` if none was given.
      targets: those of the mini-batch.
    """

    layers: Any
    sample: Any
    optimizer: Any = None
    loss: Any = None
    targets: Any = ()


def load(name: str) -> Model:
    """Calls a factory.

    Args:
      name: ``module:factory`` or ``file.py:factory``.

    Returns:
      What it gives.

    Raises:
      Unfit: if there is no such factory, or it gives something else. What the user's
        own code raises is left as it is.
    """
    where, colon, attribute = name.rpartition(":")
    if not (colon and where and attribute):
        raise Unfit(
            f"{name!r}: write module:factory, such as my_model:make, or "
            f"file.py:factory; the factory returns {_RETURNS}"
        )
    factory = _attribute(_module(where), where, attribute)
    if not callable(factory):
        raise Unfit(
            f"{name} is a {type(factory).__name__}; needs a function without arguments "
            f"that returns {_RETURNS}"
        )
    if needs := _arguments(factory):
        raise Unfit(
            f"{name} needs arguments ({', '.join(needs)}), and is called without: give "
            f"them defaults, or name a function that gives them"
        )
    try:
        made = factory()
    except SystemExit as end:
        raise Unfit(f"{name} ended the program: {end!r}") from end
    return _model(made, name)


def _module(where: str) -> ModuleType:
    try:
        return _of_file(Path(where)) if where.endswith(".py") else _of_name(where)
    except SystemExit as end:
        raise Unfit(
            f"{where} ended the program while it was imported: {end!r}; put what it "
            f"runs as a program below if __name__ == '__main__':"
        ) from end


def _of_name(where: str) -> ModuleType:
    folder = os.getcwd()
    if not all(part.isidentifier() for part in where.split(".")):
        raise Unfit(
            f"{where!r} is no name of a module: write package.module:factory or "
            f"path/to/file.py:factory"
        )
    _look_in(folder)
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if f"{where}.".startswith(f"{error.name}."):
            raise Unfit(
                f"no module {error.name!r} in {folder}, and none is installed; a file "
                f"is named path/to/file.py:factory"
            ) from None
        raise  # the module is there, and imports another that is not


def _of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise Unfit(f"{path}: No such file")
    _look_in(str(path.resolve().parent))
    # Under its own name, as its neighbours would import it, unless that is taken.
    name = path.stem if path.stem not in sys.modules else f"__{path.stem}__"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # as it ends in .py
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _look_in(folder: str) -> None:
    """As ``python -m`` and ``python file.py`` do, for what the module imports."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _attribute(module: ModuleType, where: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        more = [f"and {len(own) - _MOST} more"] if len(own) > _MOST else []
        listed = ", ".join([*own[:_MOST], *more]) or "none"
        raise Unfit(f"{where} has no {name!r}; its functions: {listed}") from None


def _arguments(factory: Any) -> list[str]:
    """The arguments without which it cannot be called."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # of what is not written in Python
        return []
    open_ended = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [
        p.name for p in parameters if p.default is p.empty and p.kind not in open_ended
    ]


def _model(made: Any, name: str) -> Model:
    """The model in what a factory returned."""
    if isinstance(made, Mapping):
        fields = dict(made)
    elif isinstance(made, tuple) and hasattr(made, "_fields"):
        fields = made._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    elif isinstance(made, tuple) and len(made) in (2, 3):
        fields = dict(zip((*_NEEDED, _OPTIONAL[0]), made, strict=False))
    else:
        raise Unfit(f"{name} returned {_told(made)}; needs {_RETURNS}")
    fields = {key: value for key, value in fields.items() if value is not None}
    faults = [f"{key} is missing" for key in _NEEDED if key not in fields]
    known = *_NEEDED, *_OPTIONAL
    faults += [f"{key!r} is unknown" for key in fields if key not in known]
    layers, optimizer = fields.get("layers", ()), fields.get("optimizer")
    if not isinstance(layers, Iterable):
        faults.append(f"layers is a {type(layers).__name__}, not a list of layers")
    if optimizer is not None and not hasattr(optimizer, "update"):
        kind = type(optimizer).__name__
        faults.append(f"optimizer is a {kind}, not one of optax")
    if faults:
        raise Unfit(
            f"{name} returned {_told(made)}: {'; '.join(faults)}; needs {_RETURNS}"
        )
    return Model(**fields)


def _told(made: Any) -> str:
    """What was returned, in types."""
    kind = type(made).__name__
    if isinstance(made, Mapping):
        return f"a {kind} of {', '.join(map(repr, made)) or 'nothing'}"
    if isinstance(made, tuple | list):
        more = [f"{len(made) - _MOST} more"] if len(made) > _MOST else []
        listed = [type(each).__name__ for each in made[:_MOST]]
        return f"a {kind} of {', '.join([*listed, *more]) or 'nothing'}"
    return "None (is its return missing?)" if made is None else f"a {kind}"
