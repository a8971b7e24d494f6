"""The sharding of variables between steps, where stages have several devices.

The user requests the axes of a parameter: by the rule of the pipeline, else by the box
of Flax around it or its metadata in nnx. Axes that the mesh of a stage does not have
are ignored. All other variables are replicated on each device.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from flax import linen
from flax.linen import spmd
from jax.sharding import PartitionSpec as P

from .._arguments._stacked import PieceKey
from .._instructions._sharding import WHOLE, Sharding, StageMesh, narrowed
from .._instructions._transfer import Device
from .._layers import _nnx_values
from .._layers._linen import is_boxed
from .._messages import raise_all
from ..schedules._formats import format_type
from ._stage_placement import StagePlacement

PyTree = Any
# ``(path, spec) -> PartitionSpec``; the path of a parameter of a list of layers begins
# with the index of the layer.
ShardingRule = Callable[[tuple[Any, ...], jax.ShapeDtypeStruct], P | None]


def tree_shardings(
    placement: StagePlacement,
    tree: PyTree,
    devices: Sequence[Device],
    owner: Any = None,
    *,
    layer: tuple[int, ...] = (),
    inside: tuple[str, ...] = (),
) -> list[Sharding]:
    """The sharding of each leaf of a tree of variables.

    Args:
      placement: the stages, with the rule and the axes of their meshes.
      tree: variables, arrays or specs.
      devices: the device of each leaf.
      owner: the module that holds the variables.
      layer: the index of the layer, in a list of layers.
      inside: the path of the tree: ``("params",)`` for parameters alone.
    """
    if not any(isinstance(device, StageMesh) for device in devices):
        return [WHOLE] * len(devices)
    leaf_shardings: list[Sharding] = []
    faults: list[str] = []
    requests = _requests(placement.rule, tree, owner=owner, layer=layer, inside=inside)
    for (names, leaf, axes), device in zip(requests, devices, strict=True):
        path = (*layer, *names)
        allowed_axes = placement.axes if placement.rule else None
        spec = _spec(axes, device, path=path, allowed_axes=allowed_axes)
        if not math.prod(leaf.shape):  # an empty array cannot be sharded
            spec = P()
        faults += _faults(path, leaf, spec, device)
        leaf_shardings.append(Sharding(spec=spec))
    layer_text = f" of layer {layer[0]}" if layer else ""
    raise_all(f"parameters{layer_text} cannot be sharded as they are to be", faults)
    return leaf_shardings


def _requests(
    rule: ShardingRule | None,
    tree: PyTree,
    *,
    owner: Any,
    layer: tuple[int, ...],
    inside: tuple[str, ...],
) -> Iterable[tuple[Any, Any, Any]]:
    """Yields the path of each leaf, the leaf, and the requested axes."""
    metadata = _nnx_values.parameters(owner)
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_boxed)
    for key_path, node in nodes:
        names = [
            getattr(key, "key", getattr(key, "idx", key))
            for key in key_path
            if not isinstance(key, PieceKey)
        ]
        path = (*inside, *names)
        is_param = path[:1] == ("params",)
        for leaf in jax.tree.leaves(node):
            axes: Any = None
            if is_param and rule is not None:
                spec = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                axes = rule((*layer, *path[1:]), spec)
            elif is_boxed(node):
                axes = _axes_of_box(node)
            elif is_param and metadata:
                axes = _axes_of_variable(metadata.get(path[1:]))
            yield path, leaf, axes


def _axes_of_box(box: Any) -> Any:
    names = getattr(box, "names", None)
    if isinstance(box, linen.LogicallyPartitioned):
        return spmd.logical_to_mesh_axes(names, box.rules)
    return names


def _axes_of_variable(variable: Any) -> Any:
    metadata = {} if variable is None else variable.get_metadata()
    axes = metadata.get("out_sharding") or ()
    mesh_axes = dict(linen.get_logical_axis_rules())
    mesh_axes |= dict(metadata.get("sharding_rules") or ())
    return [mesh_axes.get(name, name) for name in getattr(axes, "spec", axes)]


def _spec(axes: Any, device: Device, *, path: Any, allowed_axes: Any) -> P:
    """The requested axes as a spec, without those that the device does not have.

    Args:
      axes: the request of a rule or a box.
      device: the device or mesh of the stage.
      path: the path of the parameter.
      allowed_axes: the axes that a rule may name, those of all meshes; ``None``: any.
    """
    if axes is None or not isinstance(device, StageMesh):
        return P()
    if not isinstance(axes, P | tuple | list):
        raise TypeError(
            f"sharding= returned {format_type(axes)} for {_text(path)}; needs a "
            f"jax.sharding.PartitionSpec, or None for what is whole on each device"
        )
    parts = [tuple(part) if isinstance(part, list) else part for part in axes]
    spec = P(*parts)
    if allowed_axes is not None:
        names = Sharding(spec=spec).axes
        missing = [name for name in names if name not in allowed_axes]
        if missing:
            raise ValueError(
                f"sharding= names {missing} for {_text(path)}; the mesh of a stage "
                f"has the axes {list(allowed_axes)}"
            )
    return narrowed(spec, device.mesh.shape.__contains__)


def _faults(path: Any, leaf: Any, spec: P, device: Any) -> Iterable[str]:
    """Yields a sentence for each reason why a spec cannot shard a leaf."""
    if len(spec) > len(leaf.shape):
        yield f"{_text(path)} of shape {leaf.shape} has fewer axes than {spec}"
        return
    axes = Sharding(spec=spec).axes
    if len(set(axes)) < len(axes):
        yield (
            f"{_text(path)} of shape {leaf.shape} as {spec}: a mesh axis is used twice"
        )
        return
    for size, part in zip(leaf.shape, spec, strict=False):
        names = part if isinstance(part, tuple) else (part,)
        count = math.prod(device.mesh.shape[name] for name in names if name)
        if size % count:
            yield (
                f"{_text(path)} of shape {leaf.shape} as {spec}: {count} devices do "
                f"not divide {size}"
            )


def _text(path: Any) -> str:
    return "variables" + "".join(f"[{name!r}]" for name in path)
