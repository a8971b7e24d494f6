"""Which layers are alike, so that what is made for one serves all."""

from collections.abc import Hashable
from typing import Any

from . import _linen, _nnx
from ._layer import Layer, Method


def kind(source: Any) -> Hashable:
    """What is equal for layers that are made and applied alike.

    Two linen modules do the same if their attributes are the same. To Python 1 and 1.0
    are equal, to dtypes they are not, and a field can be left out of comparisons: so
    they must read the same too.

    Args:
      source: the object that the user listed.

    Returns:
      Something hashable for linen modules and their methods; ``None`` where it cannot
      be told.
    """
    if isinstance(source, Method):
        inner = kind(source.module)
        return None if inner is None else (inner, source.method)
    if not _linen.is_module(source):
        return None
    try:
        hash(source)
    except TypeError:  # an array or a list among its attributes
        return None
    return type(source), source, repr(source)


def function(layer: Layer) -> Hashable:
    """What is equal for layers that do the same with the same variables.

    Args:
      layer: a layer, whose source stays alive: an object that is listed twice is told
        by its identity.

    Returns:
      Something hashable.
    """
    source, method = layer.source, ""
    if isinstance(source, Method):
        source, method = source.module, source.method
    known = _nnx.kind(source) if _nnx.is_module(source) else kind(source)
    return (id(source) if known is None else known), method, layer.namespace
