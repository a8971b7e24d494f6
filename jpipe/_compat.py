"""Every private name of JAX in use here, with its reason and when it can be removed.

Where one is there no more, or behaves otherwise, the public way is taken, which gives
the same arrays and distinguishes the same settings; or a check is left out.
"""

import importlib
import io
import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

Copy = Callable[..., list[jax.Array]]

# To a type checker it has no attributes.
_config: Any = jax.config


def settings_reader() -> Callable[[], Hashable]:
    """A function that tells under which settings of JAX it is called.

    Uses ``jax._src.config.trace_context``, by which `jax.jit` itself finds what it has
    traced: the settings of numbers, `jax.disable_jit`, the mesh that is set, contexts
    of the user. It takes a tenth of a microsecond; the public way takes two, and runs
    an empty program on every device of a mesh that is set.
    Free when JAX has a public name for it; it has none up to JAX 0.12.

    Returns:
      The function; what it gives is equal when `jax.jit` would not trace again.
    """
    try:
        read: Any = importlib.import_module("jax._src.config").trace_context
        before = read()
        with jax.disable_jit(not _config.jax_disable_jit):
            tells = before not in {read()}
    except (ImportError, AttributeError, TypeError):
        return _settings_of_jit
    return read if tells and read() == before else _settings_of_jit


def settings() -> dict[str, Any]:
    """All settings of JAX, by name.

    Uses ``jax.config.values``, which has those that are no attributes of `jax.config`
    too, such as ``jax_disable_most_optimizations``.
    Free when JAX lists its settings; it does not up to JAX 0.12.
    """
    try:
        return dict(_config.values)
    except (AttributeError, TypeError):
        names = (name for name in dir(_config) if name.startswith("jax_"))
        return {name: getattr(_config, name) for name in names}


def quick_to_compile() -> dict[str, Any] | None:
    """Options of XLA for a program that runs once or twice.

    They halve the time to compile. Of other backends than these it is not known whether
    they take such options.
    """
    if jax.default_backend() not in ("cpu", "gpu"):
        return None
    return {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }


@jax.tree_util.register_static
class _Traced:
    """What one trace returned, which is equal to itself only."""


@jax.jit
def _trace() -> _Traced:
    return _Traced()


def _settings_of_jit() -> Hashable:
    """What a compiled function without arguments returns: one object per trace."""
    disabled = _config.jax_disable_jit
    with jax.disable_jit(False):
        return disabled, _trace()


def copier(source: Any, targets: Sequence[Sharding]) -> Copy | None:
    """A function that does what `jax.device_put` does with arrays, in less time.

    Uses ``jaxlib._jax.batched_copy_array_to_devices_with_sharding``, where every
    `jax.device_put` onto an equal sharding ends, with all arrays at once. Before it
    gets there `jax.device_put` spends on each array more Python than the call of a
    compiled function takes, on questions that have one answer for all arrays that one
    stage sends to another (benchmarks/overhead/dispatch.py measures it). To a transfer
    guard these copies are as explicit as that inside `explicit_transfers`.
    Free when `jax.device_put` has a fast path as `jax.jit` has; it has none up to JAX
    0.12.

    Args:
      source: a device where the arrays are.
      targets: the shardings that they get: each has the partitions of the array, and
        as many devices.

    Returns:
      The function, for arrays other than typed keys; ``None`` if this JAX does not
      offer it, or a device is of another process.
    """
    every = [_devices_of(target) for target in targets]
    if not all(_can_copy(source, device) for devices in every for device in devices):
        return None
    jaxlib: Any = importlib.import_module("jaxlib._jax")
    put = jaxlib.batched_copy_array_to_devices_with_sharding
    lists = [jaxlib.DeviceList(devices) for devices in every]
    shardings = list(targets)
    semantics = [jaxlib.ArrayCopySemantics.ALWAYS_COPY] * len(shardings)

    def copy(*leaves: jax.Array) -> Any:
        return put(leaves, lists, shardings, semantics)

    return copy


def _devices_of(sharding: Any) -> tuple[Any, ...]:
    """The devices of a sharding, in its order."""
    if isinstance(sharding, NamedSharding):
        return tuple(np.asarray(sharding.mesh.devices).flat)
    return tuple(sharding.device_set)


def _can_copy(source: Any, target: Any) -> bool:
    """Whether `copier` makes the arrays that `jax.device_put` makes."""
    mine = jax.process_index()
    if source.process_index != mine or target.process_index != mine:
        return False
    kind = source.device_kind, target.device_kind, source == target
    if kind not in _copies:
        _copies[kind] = _copies_as_put(source, target)
    return _copies[kind]


# Of the kinds of two devices whether it does, as found of the first such pair.
_copies: dict[Any, bool] = {}


def _copies_as_put(source: Any, target: Any) -> bool:
    sharding = SingleDeviceSharding(target)
    try:
        jaxlib: Any = importlib.import_module("jaxlib._jax")
        # Whatever guard or trace the first step may be in is no business of this.
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            (probe,) = jaxlib.batched_copy_array_to_devices_with_sharding(
                (jax.device_put(1.0, source),),
                [jaxlib.DeviceList((target,))],
                [sharding],
                [jaxlib.ArrayCopySemantics.ALWAYS_COPY],
            )
            # Read, and not compared on the device, where that would be compiled.
            is_one = float(probe) == 1.0
            same = is_one and probe.committed and probe.sharding == sharding
        return same and _transfer_state() is not None
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return False


def _transfer_state() -> Any:
    """What this thread's transfer guard knows; ``None`` if this JAX tells it not.

    Uses ``jaxlib._jax.guard_lib``, by which `jax.device_put` marks that its copies are
    explicit. Free with `copier`.
    """
    try:
        jaxlib: Any = importlib.import_module("jaxlib._jax")
        state = jaxlib.guard_lib.thread_local_state()
        return state if isinstance(state.explicit_device_put, bool) else None
    except (ImportError, AttributeError):
        return None


@contextmanager
def explicit_transfers() -> Iterator[None]:
    """The scope in which a transfer guard takes all copies for explicit ones."""
    state = _transfer_state()
    before = state and state.explicit_device_put
    if state:
        state.explicit_device_put = True
    try:
        yield
    finally:
        if state:
            state.explicit_device_put = before


def loaded(compiled: jax.stages.Compiled, device: Any) -> jax.stages.Compiled:
    """A program that was compiled for one device, for another of the same kind.

    Uses ``jaxlib._jax.CompileOptions``, ``DeviceAssignment`` and ``DeviceList``, to
    read what `jax.experimental.serialize_executable` writes:
    `deserialize_and_load(..., execution_devices=)` of it finds no other device than
    that for which was compiled (a ``KeyError``).
    Free when it does; it does not up to JAX 0.12.

    Raises:
      Exception: of any kind, if this JAX cannot do that.
    """
    jaxlib: Any = importlib.import_module("jaxlib._jax")
    client, at = device.client, np.array([[device.id]])
    options = jaxlib.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.device_assignment = jaxlib.DeviceAssignment.create(at)
    devices = jaxlib.DeviceList((device,))

    class Reader(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            kind, *content = pid
            if kind == "exec":
                return client.deserialize_executable(*content, devices, options)
            return {"device": device, "client": client}[kind]

    written, in_tree, out_tree = serialize_executable.serialize(compiled)
    program, args, no_kwargs = Reader(io.BytesIO(written)).load()
    args = in_tree.unflatten(args)
    given: Any = program.load(), [], args, out_tree
    return jax.stages.Compiled(*given, no_kwargs=no_kwargs)


def can_load(source: Any, target: Any) -> bool:
    """Whether `loaded` gives to one device what was compiled for another."""
    if source.device_kind != target.device_kind or source.client is not target.client:
        return False
    kind = source.client, source.device_kind
    if kind not in _loads:
        _loads[kind] = _loads_on(source, target)
    return _loads[kind]


# Of a kind of devices whether a program for one was loaded for another.
_loads: dict[Any, bool] = {}


def _loads_on(source: Any, target: Any) -> bool:
    at, to = map(SingleDeviceSharding, (source, target))
    try:
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            spec = jax.ShapeDtypeStruct((), jnp.float32, sharding=at)
            double = jax.jit(lambda x: 2 * x, donate_argnums=0)
            result = loaded(double.lower(spec).compile(), target)(
                jax.device_put(np.float32(1), to)
            )
    except Exception:
        return False
    return result.sharding == to and result == 2


def coordination() -> Any:
    """The key-value store that the processes of a job share.

    Uses ``jax._src.distributed.global_state.client``, the one that `jax.distributed`
    makes: its public barriers and broadcasts are computations of all devices, which
    hang where a process is late and do not name it.
    Free when `jax.distributed` offers it; it does not up to JAX 0.12.

    Raises:
      RuntimeError: if this JAX has it elsewhere, or the job was not started.
    """
    try:
        distributed: Any = importlib.import_module("jax._src.distributed")
        client = distributed.global_state.client
    except (ImportError, AttributeError):
        client = None
    if client is None:
        raise RuntimeError(
            "the processes of this job cannot reach each other: call "
            "jpipe.distributed() or jax.distributed.initialize() first, with a JAX "
            "that jpipe knows"
        )
    return client


def coordinator_address() -> str:
    """Where the first process of a job listens: see `coordination`."""
    try:
        distributed: Any = importlib.import_module("jax._src.distributed")
        return distributed.global_state.coordinator_address or ""
    except (ImportError, AttributeError):
        return ""


def own_process() -> tuple[int, int]:
    """The number of this process, and how many there are: see `coordination`.

    `jax.process_index` makes the devices, and waits for all processes to do so.
    """
    try:
        state: Any = importlib.import_module("jax._src.distributed").global_state
        return state.process_id, state.num_processes
    except (ImportError, AttributeError):
        return jax.process_index(), jax.process_count()


def is_ready(array: Any) -> bool:
    """Whether an array is there, or failed, so that nothing waits for it.

    Uses ``is_ready`` of arrays, which `jax.Array` does not declare. Without it arrays
    that never come are awaited without an end.
    Free when `jax.Array` declares it; it does not up to JAX 0.12.
    """
    return getattr(array, "is_ready", lambda: True)()
