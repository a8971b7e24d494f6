"""Every private name of JAX in use, with its reason and when it can be removed.

Where a name is missing, or behaves otherwise, the public way is taken, which returns
the same arrays and distinguishes the same settings; or a check is left out. Options of
XLA, which no release promises to keep, are here too.
"""

import atexit
import importlib
import io
import itertools
import os
import pickle
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.extend import core
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

Copy = Callable[..., list[jax.Array]]

# Typed, as the attributes of `jax.config` are unknown to a type checker.
_config: Any = jax.config


def settings_reader() -> Callable[[], Hashable]:
    """Returns a function that reads the settings of JAX which change a trace.

    Uses ``jax._src.config.trace_context``, a part of the key of the caches of `jax.jit`
    itself: the settings of numbers, `jax.disable_jit`, the mesh that is set, contexts
    of the user. It takes a tenth of a microsecond; the public way takes two, and runs
    an empty program on every device of a mesh that is set.
    Free when JAX has a public name for it; it has none up to JAX 0.12.

    Returns:
      The function; its results are equal when `jax.jit` would not trace again.
    """
    try:
        read: Any = importlib.import_module("jax._src.config").trace_context
        before = read()
        with jax.disable_jit(not _config.jax_disable_jit):
            # A set, since the results must be hashable too.
            is_sensitive = before not in {read()}
    except (ImportError, AttributeError, TypeError):
        return _settings_of_jit
    is_stable = read() == before
    return read if is_sensitive and is_stable else _settings_of_jit


def refuse_transformations(primitive: Any, refuse: Callable[[str], None]) -> None:
    """Makes a primitive refuse `jax.vmap` and derivatives, in words of its own.

    Uses the tables ``jax.interpreters.batching.primitive_batchers`` and
    ``jax.interpreters.ad.primitive_jvps``. Without them JAX raises a
    NotImplementedError, which names the primitive.
    Free when `jax.extend` has a way to give rules to primitives; not up to JAX 0.12.

    Args:
      primitive: the primitive.
      refuse: raises an error that names a transformation.
    """
    with suppress(ImportError, AttributeError):
        batching: Any = importlib.import_module("jax.interpreters.batching")
        ad: Any = importlib.import_module("jax.interpreters.ad")
        batching.primitive_batchers[primitive] = lambda *_, **__: refuse("jax.vmap")
        ad.primitive_jvps[primitive] = lambda *_, **__: refuse(
            "jax.grad or another derivative"
        )


def settings() -> dict[str, Any]:
    """All settings of JAX, by name.

    Uses ``jax.config.values``, which has settings that are no attributes of
    `jax.config` too, such as ``jax_disable_most_optimizations``.
    Free when JAX lists its settings; it does not up to JAX 0.12.
    """
    try:
        return dict(_config.values)
    except (AttributeError, TypeError):
        names = (name for name in dir(_config) if name.startswith("jax_"))
        return {name: getattr(_config, name) for name in names}


def quick_to_compile() -> dict[str, Any] | None:
    """Options of XLA for a program that runs once or twice.

    They halve the time to compile on CPUs and GPUs; other backends may not take them.
    """
    if jax.default_backend() not in ("cpu", "gpu"):
        return None
    return {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }


@jax.tree_util.register_static
class _TraceId:
    """The result of one trace, which is equal to itself only."""


@jax.jit
def _trace_id() -> _TraceId:
    return _TraceId()


def _settings_of_jit() -> Hashable:
    """The public way: `jax.jit` returns another object where it traces again."""
    is_jit_disabled = _config.jax_disable_jit
    with jax.disable_jit(disable=False):
        return is_jit_disabled, _trace_id()


def as_weakly_typed(array: jax.Array) -> jax.Array:
    """Returns an array without a part here as a weakly typed one.

    As it is, where JAX does not allow that. Calls the class of the array, as
    `jax.make_array_from_single_device_arrays` does, which takes a shape and a dtype.
    Free when that takes a weak type; it does not up to JAX 0.12.
    """
    weak: Any = jax.typeof(array)
    new_array: Any = type(array)
    with suppress(AttributeError, TypeError):
        weak = weak.update(weak_type=True)
        return new_array(weak, array.sharding, [], committed=True)
    return array


def copier(source: Any, targets: Sequence[Sharding]) -> Copy | None:
    """Returns a faster `jax.device_put` for arrays that one stage sends to another.

    Uses ``jaxlib._jax.batched_copy_array_to_devices_with_sharding``, where every
    `jax.device_put` onto an equal sharding ends, with all arrays at once. Before it
    gets there `jax.device_put` spends on each array more Python than the call of a
    compiled function takes, on questions that have one answer for all arrays that one
    stage sends to another (benchmarks/overhead/dispatch.py measures it). To a transfer
    guard these copies are explicit inside `explicit_transfers`.
    Free when `jax.device_put` has a fast path as `jax.jit` has; it has none up to JAX
    0.12.

    Args:
      source: a device where the arrays are.
      targets: the sharding that each array gets: it has the partitions of the array,
        and as many devices.

    Returns:
      The function, for arrays other than typed keys; ``None`` if this JAX does not
      offer it, or a device is of another process.
    """
    target_devices = [_devices_of(target) for target in targets]
    for device in itertools.chain(*target_devices):
        if not _can_copy(source, device):
            return None

    jaxlib: Any = importlib.import_module("jaxlib._jax")
    copy_arrays = jaxlib.batched_copy_array_to_devices_with_sharding
    device_lists = [jaxlib.DeviceList(devices) for devices in target_devices]
    shardings = list(targets)
    semantics = [jaxlib.ArrayCopySemantics.ALWAYS_COPY] * len(shardings)

    def copy(*arrays: jax.Array) -> Any:
        return copy_arrays(arrays, device_lists, shardings, semantics)

    return copy


def _devices_of(sharding: Any) -> tuple[Any, ...]:
    """The devices of a sharding, in its order."""
    if isinstance(sharding, NamedSharding):
        return tuple(np.asarray(sharding.mesh.devices).flat)
    return tuple(sharding.device_set)


def _can_copy(source: Any, target: Any) -> bool:
    """True if `copier` makes the arrays that `jax.device_put` makes."""
    process_index = jax.process_index()
    if {source.process_index, target.process_index} != {process_index}:
        return False
    pair = (source.device_kind, target.device_kind, source == target)
    if pair not in _copies:
        _copies[pair] = _copies_as_put(source, target)
    return _copies[pair]


# (kind of source, kind of target, is one device) -> `_copies_as_put` of the first pair
_copies: dict[Any, bool] = {}


def _copies_as_put(source: Any, target: Any) -> bool:
    """Tries it with one number."""
    sharding = SingleDeviceSharding(target)
    try:
        jaxlib: Any = importlib.import_module("jaxlib._jax")
        # The first step may be inside of a transfer guard or a trace.
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            (probe,) = jaxlib.batched_copy_array_to_devices_with_sharding(
                (jax.device_put(1.0, source),),
                [jaxlib.DeviceList((target,))],
                [sharding],
                [jaxlib.ArrayCopySemantics.ALWAYS_COPY],
            )
            # Compared on the host: on the device the comparison would be compiled.
            has_value = float(probe) == 1.0
            is_equal = has_value and probe.committed and probe.sharding == sharding
        return is_equal and _transfer_state() is not None
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return False


def _transfer_state() -> Any:
    """The state of the transfer guard of this thread; ``None`` if this JAX hides it.

    Uses ``jaxlib._jax.guard_lib``, where `jax.device_put` marks its copies as explicit.
    Free with `copier`.
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
    if not state:
        yield
        return
    was_explicit = state.explicit_device_put
    state.explicit_device_put = True
    try:
        yield
    finally:
        state.explicit_device_put = was_explicit


def load_for_device(compiled: jax.stages.Compiled, device: Any) -> jax.stages.Compiled:
    """Loads a program, compiled for one device, on another device of the same kind.

    Uses ``jaxlib._jax.CompileOptions``, ``DeviceAssignment`` and ``DeviceList``, to
    read the text of `jax.experimental.serialize_executable`: the public
    `deserialize_and_load(..., execution_devices=)` finds no other device than the one
    that the program was compiled for (a ``KeyError``).
    Free when it does; it does not up to JAX 0.12.

    Raises:
      Exception: any exception, if this JAX cannot do that.
    """
    jaxlib: Any = importlib.import_module("jaxlib._jax")
    client = device.client
    device_ids = np.array([[device.id]])  # [replica, partition]
    options = jaxlib.CompileOptions()
    options.num_replicas = 1
    options.num_partitions = 1
    options.device_assignment = jaxlib.DeviceAssignment.create(device_ids)
    devices = jaxlib.DeviceList((device,))

    class Reader(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            tag, *content = pid
            if tag == "exec":
                return client.deserialize_executable(*content, devices, options)
            return {"device": device, "client": client}[tag]

    serialized, in_tree, out_tree = serialize_executable.serialize(compiled)
    program, flat_args_info, no_kwargs = Reader(io.BytesIO(serialized)).load()
    make_compiled: Any = jax.stages.Compiled
    return make_compiled(
        program.load(),
        [],  # constants
        in_tree.unflatten(flat_args_info),
        out_tree,
        no_kwargs=no_kwargs,
    )


def can_load(source: Any, target: Any) -> bool:
    """True if `load_for_device` loads on one device what was compiled for another."""
    if source.device_kind != target.device_kind or source.client is not target.client:
        return False
    device_kind = (source.client, source.device_kind)
    if device_kind not in _loads:
        _loads[device_kind] = _loads_on(source, target)
    return _loads[device_kind]


# (client, kind of device) -> `_loads_on` of the first two devices
_loads: dict[Any, bool] = {}


def _loads_on(source: Any, target: Any) -> bool:
    """Tries it with a small program."""
    source_sharding = SingleDeviceSharding(source)
    target_sharding = SingleDeviceSharding(target)
    try:
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            spec = jax.ShapeDtypeStruct((), jnp.float32, sharding=source_sharding)
            double = jax.jit(lambda x: 2 * x, donate_argnums=0)
            program = load_for_device(double.lower(spec).compile(), target)
            result = program(jax.device_put(np.float32(1), target_sharding))
    except Exception:
        return False
    return result.sharding == target_sharding and result == 2


def replace_refs(closed: core.ClosedJaxpr) -> core.ClosedJaxpr | None:
    """Replaces the refs that a jaxpr makes by the values that they hold.

    Uses ``jax._src.state.discharge.discharge_state``, with which `jax.jit` does so when
    it lowers a program: that is too late for a program that is cut and differentiated.
    Free when JAX has a public name for it; it has none up to JAX 0.12.

    Returns:
      The jaxpr, or ``None`` if this JAX does not offer it, or has no rule for a
      primitive that uses a ref.
    """
    try:
        discharge: Any = importlib.import_module("jax._src.state.discharge")
        # Without what only kernels lower to: as when a program is differentiated.
        return discharge.discharge_state(closed, lower=False)
    except (ImportError, AttributeError, TypeError, NotImplementedError):
        return None


def coordination_client() -> Any:
    """The key-value store that the processes of a job share.

    Uses ``jax._src.distributed.global_state.client``, which `jax.distributed` makes:
    the public barriers and broadcasts are computations of all devices, which hang where
    a process is late and do not name it.
    Free when `jax.distributed` offers it; it does not up to JAX 0.12.

    Raises:
      RuntimeError: if this JAX keeps it elsewhere, or the job was not started.
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
    """The address of the first process of a job: see `coordination_client`."""
    try:
        distributed: Any = importlib.import_module("jax._src.distributed")
        return distributed.global_state.coordinator_address or ""
    except (ImportError, AttributeError):
        return ""


def detect_job(
    address: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    method: str | None,
) -> tuple[str | None, int | None, int | None]:
    """The job as `jax.distributed.initialize` finds it: in Slurm, MPI, Kubernetes.

    Uses ``ClusterEnv.auto_detect_unset_distributed_params`` of ``jax._src.clusters``,
    as `initialize` tells it to nobody before all processes have come, and aborts the
    program where one does not come.
    Free when `jax.distributed` offers it; it does not up to JAX 0.12.

    Args:
      address: host and port of the first process, or ``None`` to find it.
      num_processes: the number of processes, likewise.
      process_id: the number of this one, likewise.
      method: the ``cluster_detection_method`` of `initialize`.

    Returns:
      The three; ``None`` for what this JAX does not tell.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    job = (address, num_processes, process_id)
    if method == "deactivate" or None not in job:
        return address, num_processes, process_id
    try:
        clusters: Any = importlib.import_module("jax._src.clusters")
        detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
        detected = detect(address, num_processes, process_id, None, method, 300)
        address, num_processes, process_id, _ = detected
    except (ImportError, AttributeError, TypeError, ValueError):
        pass
    return address, num_processes, process_id


def process_index_and_count() -> tuple[int, int]:
    """The index of this process and the number of processes: see `coordination_client`.

    `jax.process_index` makes the devices, and waits for all processes to do so.
    """
    try:
        state: Any = importlib.import_module("jax._src.distributed").global_state
        return state.process_id, state.num_processes
    except (ImportError, AttributeError):
        return jax.process_index(), jax.process_count()


def run_before_threads_end(function: Callable[[], None]) -> None:
    """Runs a function when the program ends, while threads can still start others.

    Uses ``threading._register_atexit`` of Python, as `concurrent.futures` does, whose
    threads Orbax starts to the end of a save: those of `atexit` run too late for that.
    Free when Orbax waits for its saves; it does not up to 0.12.
    """
    register: Any = getattr(threading, "_register_atexit", atexit.register)
    register(function)
