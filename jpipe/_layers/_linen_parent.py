"""The parent module of the linen modules of a list."""

from typing import Any

from flax import linen

LAYER = "layer"
MODULE = "module"


class Slot(linen.Module):
    """Holds one module, so that the first layer that has a module owns it.

    Flax adopts the items of a tuple before the attributes of these items.
    """

    module: Any


class Slots(linen.Module):
    """The parent: one slot per layer of linen, ``None`` for all other layers."""

    layer: Any


def slot_names(layer_index: int) -> tuple[str, str]:
    """The names that lead to the variables of a layer."""
    return f"{LAYER}_{layer_index}", MODULE


def path_in_layer(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path inside its layer of a module or a variable; undoes `slot_names`."""
    # The path of an nnx module begins with its index in the list of modules.
    if path and isinstance(path[0], int):
        return path[1:]
    is_in_slot = len(path) > 1 and path[0].startswith(f"{LAYER}_") and path[1] == MODULE
    return path[2:] if is_in_slot else path
