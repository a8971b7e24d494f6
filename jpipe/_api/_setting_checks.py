"""What `jpipe.pipeline` is given, checked: every fault found before any work."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .._instructions import _transfer
from .._instructions._sharding import DATA, StageMesh
from .._instructions._transfer import Device
from .._messages import warn
from ..planning._plan import Plan
from ..schedules import Schedule

# The axis of a mesh along which the stages are placed.
_STAGE = "stage"


def _example_mesh() -> str:
    """A mesh of all devices that there are, as a user would type it."""
    count = jax.device_count()
    num_data = 2 if count > 2 and count % 2 == 0 else 1
    return f'jax.make_mesh(({count // num_data}, {num_data}), ("stage", "data"))'


def check_num_microbatches(number: Any) -> int:
    """Returns the number of micro-batches if it is an int of at least 1."""
    if number is None:
        raise TypeError(
            "num_microbatches= is missing, into how many micro-batches a mini-batch is "
            "split: type an int of at least 1, such as num_microbatches=4, or plan="
        )
    return _check_count("num_microbatches", number, advice=", or plan=")


def check_num_stages(number: Any) -> int | None:
    """Returns the number of stages if it is an int of at least 1, or left out."""
    return None if number is None else _check_count("num_stages", number)


def _check_count(name: str, number: Any, advice: str = "") -> int:
    """Returns a number if it is an int of at least 1.

    Args:
      name: of the argument.
      number: its value.
      advice: on what to type in its place.

    Raises:
      TypeError: if it is no int.
      ValueError: if it is less than 1.
    """
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(
            f"{name}={number!r} is a {type(number).__name__}; needs an int of at least "
            f"1{advice}"
        )
    number = operator.index(number)
    if number < 1:
        raise ValueError(f"{name}={number}: needs at least 1")
    return number


def check_no_balance(balance: Any) -> None:
    """Raises a ValueError if one model was given a balance."""
    if balance is not None:
        raise ValueError(
            f"balance={balance!r} is for a list of layers; one model is divided by "
            f"itself: give num_stages=, or list its layers"
        )


def planned_mesh(plan: Plan, mesh: Any, devices: Any) -> tuple[Any, Any]:
    """The mesh and the devices of a plan; given ones have to have its shape.

    Args:
      plan: what was planned.
      mesh: as given.
      devices: as given; those of a plan of several per stage are laid out.

    Raises:
      ValueError: if a mesh is given that spreads examples over other devices, or there
        are too few.
    """
    ranks, data = plan.schedule.num_ranks, plan.data
    given = devices if mesh is None else mesh
    if isinstance(given, Mesh):
        has = given.shape.get(DATA, 1)
        if has != data:
            raise ValueError(
                f"plan: it is for {ranks} x {data} devices along {_STAGE!r} and "
                f"{DATA!r}, the mesh has {has} along {DATA!r}; leave out mesh=, or "
                f'type mesh=jax.make_mesh(({ranks}, {data}), ("stage", "data"))'
            )
        return mesh, devices
    listed = jax.devices() if devices is None else devices
    are_devices = isinstance(listed, Sequence) and all(
        isinstance(device, jax.Device) for device in listed
    )
    if data == 1 or mesh is not None or not are_devices:
        return mesh, devices
    count = ranks * data
    if len(dict.fromkeys(listed[:count])) < count:
        raise ValueError(
            f"plan: it is for {ranks} x {data} devices along {_STAGE!r} and {DATA!r}, "
            f"there are {len(dict.fromkeys(listed))} different ones; plan for as many "
            f"with jpipe.plan(..., num_devices=), or for one per stage with data=1"
        )
    laid = np.array(listed[:count], dtype=object).reshape(ranks, data)
    return Mesh(laid, (_STAGE, DATA)), None


def check_mesh(mesh: Any, devices: Any, sharding: Any, gather: Any) -> Any:
    """What is given of a mesh and devices, which both decide where stages run."""
    if gather not in ("step", "microbatch"):
        raise ValueError(f"gather={gather!r}: choose 'step' or 'microbatch'")
    if sharding is not None and not callable(sharding):
        raise TypeError(
            f"sharding={sharding!r} is a {type(sharding).__name__}; needs a function "
            f"(path, spec) -> PartitionSpec, such as lambda path, spec: {sharding!r}"
        )
    if mesh is None:
        if (sharding is not None or gather != "step") and not _has_mesh(devices):
            raise ValueError(
                f"sharding= and gather= are for stages of several devices; give mesh= "
                f"too, such as mesh={_example_mesh()}"
            )
        return devices
    if devices is not None:
        raise ValueError("mesh= decides where stages run; leave out devices=")
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh={mesh!r} is a {type(mesh).__name__}; needs a jax.sharding.Mesh, "
            f"such as {_example_mesh()}"
        )
    return mesh


def _has_mesh(devices: Any) -> bool:
    """Whether devices are given as a mesh, or one of them is."""
    listed = [devices, *devices] if isinstance(devices, list | tuple) else [devices]
    return any(isinstance(device, Mesh) for device in listed)


def _ranks(mesh: Mesh | Sequence[Any]) -> list[Device]:
    """The devices of each index along the axis of stages, or those given for each."""
    if not isinstance(mesh, Mesh):
        return [_rank(own) if isinstance(own, Mesh) else own for own in mesh]
    names = list(mesh.axis_names)
    if _STAGE not in names:
        raise ValueError(
            f"mesh has the axes {names}, none is called {_STAGE!r}, along which the "
            f"stages are placed; type {_example_mesh()}"
        )
    at = names.index(_STAGE)
    rest = names[:at] + names[at + 1 :]
    return [_place(own, rest) for own in np.moveaxis(mesh.devices, at, 0)]


def _rank(mesh: Mesh) -> Device:
    """The devices of a rank that were given as its own mesh."""
    if _STAGE in mesh.axis_names:
        raise ValueError(
            f"devices: the mesh of one rank has an axis {_STAGE!r}, along which ranks "
            f"are placed; type mesh={_example_mesh()} for all of them"
        )
    return _place(np.asarray(mesh.devices), mesh.axis_names)


def _place(devices: np.ndarray, names: Sequence[str]) -> Device:
    """The devices of a rank: one, or several of one process.

    Raises:
      ValueError: if they are of several processes.
    """
    processes = sorted({device.process_index for device in devices.flat})
    if len(processes) > 1:
        raise ValueError(
            f"the devices of a stage are of processes {processes}: "
            f"{', '.join(map(str, devices.flat))}; place stages along the processes, "
            f"and the other axes of the mesh inside of each"
        )
    return StageMesh.of(devices, names) if devices.size > 1 else devices.flat[0]


def _check_shards(ranks: Sequence[Device]) -> None:
    """Checks that all ranks spread examples over as many devices.

    Raises:
      ValueError: if they do not, or a device is in two meshes.
    """
    shapes = {
        getattr(rank, "mesh", None) and tuple(rank.mesh.shape.items()) for rank in ranks
    }
    if len(shapes) > 1 and len({rank.process_index for rank in ranks}) > 1:
        raise ValueError(
            "devices: ranks in several processes must have meshes of one shape"
        )
    counts = [getattr(rank, "num_shards", 1) for rank in ranks]
    if len(set(counts)) > 1:
        listed = ", ".join(f"rank {i} over {n}" for i, n in enumerate(counts))
        raise ValueError(
            f"devices: all ranks must spread the examples of a micro-batch over as "
            f"many devices along {DATA!r}; there is {listed}; give each as many, and "
            f"what is left another axis, such as 'model'"
        )
    owner: dict[Any, int] = {}
    for i, rank in enumerate(ranks):
        for device in _transfer.devices_of(rank):
            other = owner.setdefault(device, i)
            if ranks[other] != rank:
                raise ValueError(
                    f"devices: {device} is in the meshes of rank {other} and rank {i}; "
                    f"give each rank devices of its own, or both the same mesh"
                )


def warn_of_idle(ranks: Sequence[Device], schedule: Schedule) -> None:
    """Warns of devices that are idle though each stage could have its own.

    Args:
      ranks: the device of each rank that there could be.
      schedule: that of a name or a builder.
    """
    count = len(dict.fromkeys(ranks))
    stages, num_ranks = schedule.num_stages, schedule.num_ranks
    if num_ranks < stages <= count:
        each, idle = stages // num_ranks, count - num_ranks
        warn(
            f"{schedule.name} runs {each} stages per rank: {stages} stages make "
            f"{num_ranks} rank{'s' if num_ranks > 1 else ''}, {idle} of {count} "
            f"devices are idle; "
            f"give balance= {each * count} entries, or, if that is meant, "
            f"devices=jax.devices()[:{num_ranks}]"
        )


def ranks(devices: Any) -> Sequence[Device]:
    """Returns the devices of all ranks that there could be.

    Args:
      devices: one device per rank, or a mesh with those of each rank along the axis
        ``stage``; ``None`` means `jax.devices`.

    Raises:
      ValueError: if meshes of ranks do not go together.
      TypeError: if an entry is not a device.
    """
    if isinstance(devices, Mesh):
        return _ranks(devices)
    if isinstance(devices, str) or not hasattr(devices or [], "__iter__"):
        one = isinstance(devices, jax.Device)
        example = f"[{devices!r}]" if one else "jax.devices()[:2]"
        raise TypeError(
            f"devices={devices!r} is a {type(devices).__name__}; needs a sequence of "
            f"jax.Device objects, such as devices={example}"
        )
    given: Sequence[Any] = jax.devices() if devices is None else list(devices)
    if _has_mesh(given):
        given = _ranks(given)
        _check_shards(given)
    not_devices = [d for d in given if not isinstance(d, jax.Device | StageMesh)]
    if not_devices:
        raise TypeError(
            f"devices: {not_devices!r} are not jax.Device objects, such as "
            f"devices=jax.devices()[:{len(given)}]"
        )
    return given
