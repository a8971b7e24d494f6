"""The parent that the linen modules of a list stand in."""

from typing import Any

from flax import linen

LAYER, MODULE = "layer", "module"


class Slot(linen.Module):
    """Holds one module, so that the first layer that has a module owns it.

    Flax adopts what a tuple holds before what is in the attributes of its items.
    """

    module: Any


class Slots(linen.Module):
    """The parent: a slot for each layer of linen, ``None`` for the others."""

    layer: Any


def slot(number: int) -> tuple[str, str]:
    """The names that lead to the variables of a layer."""
    return f"{LAYER}_{number}", MODULE


def inner(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path of a module, or of what it holds, in its layer."""
    if path and isinstance(path[0], int):  # of nnx: that of the layer in the list
        return path[1:]
    is_listed = len(path) > 1 and path[0].startswith(f"{LAYER}_") and path[1] == MODULE
    return path[2:] if is_listed else path
