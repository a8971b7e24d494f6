"""A factory of the user's: where it is, and the model that it gives."""

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ._refusal import CommandError

_RETURNS = (
    "(layers, sample), (layers, sample, optimizer), or a dict of layers and sample "
    "and, where there are such, optimizer, loss, targets"
)


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
      CommandError: if there is no such factory, or it gives something else. What the
        user's own code raises is left as it is.
    """
    where, _, attribute = name.rpartition(":")
    if not (where and attribute):
        raise CommandError(
            f"{name!r}: write module:factory, such as my_model:make, or "
            f"file.py:factory; the factory returns {_RETURNS}"
        )
    factory = getattr(_module(where), attribute, None)
    if not callable(factory):
        raise CommandError(f"{where} has no function {attribute!r}")
    made: Any = factory()
    fields: Any = made
    if isinstance(made, tuple) and len(made) in (2, 3):
        fields = dict(zip(("layers", "sample", "optimizer"), made, strict=False))
    try:
        return Model(**{k: v for k, v in fields.items() if v is not None})
    except (TypeError, AttributeError):
        text = list(fields) if isinstance(fields, dict) else f"a {type(made).__name__}"
        raise CommandError(f"{name} returned {text}; needs {_RETURNS}") from None


def _module(where: str) -> ModuleType:
    """A module by its name or its file, which finds its neighbours."""
    path, is_file = Path(where), where.endswith(".py")
    if is_file and not path.is_file():
        raise CommandError(f"{path}: No such file")
    folder = str(path.resolve().parent) if is_file else os.getcwd()
    sys.path.insert(0, folder)
    if is_file:
        return _of_file(path)
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if f"{where}.".startswith(f"{error.name}."):
            raise CommandError(
                f"no module {error.name!r} in {folder}, and none is installed; a file "
                f"is named path/to/file.py:factory"
            ) from None
        raise  # the module is there, and imports another that is not


def _of_file(path: Path) -> ModuleType:
    # Under a name that is not taken.
    name = f"__{path.stem}__"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # as it ends in .py
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
