"""The parent module of the linen modules of a list."""

from typing import Any

from flax import linen

LAYER = "layer"
MODULE = "module"


class LinenChild(linen.Module):
    """Holds one module, so that the first layer that has a module owns it.

    Flax adopts the items of a tuple before the attributes of these items.
    """

    module: Any


class LinenParent(linen.Module):
    """The parent: one child per layer of linen, ``None`` for all other layers."""

    layer: Any


def module_path(layer_index: int) -> tuple[str, str]:
    """The path of the module of a layer under the parent."""
    return f"{LAYER}_{layer_index}", MODULE


def path_in_layer(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path inside its layer of a module or a variable; undoes `module_path`."""
    # The path of an nnx module begins with its index in the list of modules.
    if path and isinstance(path[0], int):
        return path[1:]
    if len(path) > 1 and path[0].startswith(f"{LAYER}_") and path[1] == MODULE:
        return path[2:]
    return path
