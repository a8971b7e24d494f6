"""The sharding of variables between steps, where stages have several devices.

The user requests the axes of a parameter: by the rule of the pipeline, else by the box
of Flax around it or its metadata in nnx. Axes that the mesh of a stage does not have
are ignored. All else is replicated on each device.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from flax import linen
from flax.linen import spmd
from jax.sharding import PartitionSpec as P

from .._faults import refuse
from .._instructions._sharding import WHOLE, Sharding, SubMesh, narrowed
from .._instructions._transfer import Device
from .._layers import _nnx_values
from .._layers._linen import is_box
from ._pipe import Pipe

PyTree = Any
# `(path, spec) -> PartitionSpec`: the path of a parameter, in a list of layers from the
# layer's number on.
Rule = Callable[[tuple[Any, ...], jax.ShapeDtypeStruct], P | None]


def shardings(pipe: Pipe, variables: Sequence[PyTree]) -> list[Sharding]:
    """The sharding of each leaf of variables, of which each layer has an entry.

    Args:
      pipe: the stages, and where they run.
      variables: arrays or specs.

    Raises:
      ValueError: with every parameter that its axes do not divide.
      TypeError: if the rule returns something else.
    """
    found = []
    for i, (layer, stage) in enumerate(
        zip(pipe.layers, pipe.stage_of_layer, strict=True)
    ):
        devices = [pipe.devices[stage]] * len(jax.tree.leaves(variables[i]))
        found += of_tree(pipe, variables[i], devices, layer.owner, (i,))
    return found


def of_tree(
    pipe: Pipe,
    tree: PyTree,
    devices: Sequence[Device],
    owner: Any = None,
    layer: tuple[int, ...] = (),
    inside: tuple[str, ...] = (),
) -> list[Sharding]:
    """The sharding of each leaf of a tree of variables.

    Args:
      pipe: has the rule and the axes.
      tree: in arrays or specs.
      devices: where each leaf is.
      owner: the module that holds them.
      layer: its number, in a list of layers.
      inside: of what it is a part: ``("params",)`` of parameters alone.
    """
    if not any(isinstance(device, SubMesh) for device in devices):
        return [WHOLE] * len(devices)
    found, faults = [], list[str]()
    requested = _requested(pipe.rule, tree, owner, layer, inside)
    for (names, leaf, axes), device in zip(requested, devices, strict=True):
        path = *layer, *names
        spec = _spec(axes, device, pipe.axes if pipe.rule else None, path)
        if not math.prod(leaf.shape):  # of nothing there are no parts
            spec = P()
        faults += _faults(path, leaf, spec, device)
        found.append(Sharding(spec=spec))
    whose = f" of layer {layer[0]}" if layer else ""
    refuse(f"parameters{whose} cannot be cut as they are to be", faults)
    return found


def _requested(
    rule: Rule | None,
    tree: PyTree,
    owner: Any,
    layer: tuple[int, ...],
    inside: tuple[str, ...],
) -> Iterable[tuple[Any, Any, Any]]:
    """The path of each leaf, the leaf, and the requested axes of its sharding."""
    metadata = _nnx_values.parameters(owner)
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box)
    for at, node in nodes:
        names = (getattr(key, "key", getattr(key, "idx", key)) for key in at)
        path = *inside, *names
        is_param = path[:1] == ("params",)
        for leaf in jax.tree.leaves(node):
            axes: Any = None
            if is_param and rule is not None:
                spec = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                axes = rule((*layer, *path[1:]), spec)
            elif is_box(node):
                axes = _of_box(node)
            elif is_param and metadata:
                axes = _of_variable(metadata.get(path[1:]))
            yield path, leaf, axes


def _of_box(box: Any) -> Any:
    names = getattr(box, "names", None)
    if isinstance(box, linen.LogicallyPartitioned):
        return spmd.logical_to_mesh_axes(names, box.rules)
    return names


def _of_variable(variable: Any) -> Any:
    known = {} if variable is None else variable.get_metadata()
    axes = known.get("out_sharding") or ()
    rules = *linen.get_logical_axis_rules(), *(known.get("sharding_rules") or ())
    mesh_axes = dict(rules)
    return [mesh_axes.get(name, name) for name in getattr(axes, "spec", axes)]


def _spec(axes: Any, device: Device, known_axes: Any, path: Any) -> P:
    """The requested axes as a spec, without those that the place does not have.

    Args:
      axes: as requested by a rule or by a box.
      device: the place.
      known_axes: those of all places, which a rule may name; ``None``: any.
      path: of the parameter.
    """
    if axes is None or not isinstance(device, SubMesh):
        return P()
    if not isinstance(axes, P | tuple | list):
        kind = type(axes).__name__
        raise TypeError(
            f"sharding= returned a {kind} for {_text(path)}; needs a "
            f"jax.sharding.PartitionSpec, or None for what is whole on each device"
        )
    spec = P(*[tuple(part) if isinstance(part, list) else part for part in axes])
    if known_axes is not None:
        named = Sharding(spec=spec).axes
        missing = [name for name in named if name not in known_axes]
        if missing:
            raise ValueError(
                f"sharding= names {missing} for {_text(path)}; the mesh of a stage "
                f"has the axes {list(known_axes)}"
            )
    return narrowed(spec, device.mesh.shape.__contains__)


def _faults(path: Any, leaf: Any, spec: P, device: Any) -> Iterable[str]:
    if len(spec) > len(leaf.shape):
        yield f"{_text(path)} of shape {leaf.shape} has fewer axes than {spec}"
        return
    axes = Sharding(spec=spec).axes
    if len(set(axes)) < len(axes):
        yield f"{_text(path)} of shape {leaf.shape} as {spec}: an axis stands twice"
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
