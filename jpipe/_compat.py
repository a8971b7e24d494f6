"""Every private name of JAX that jpipe uses, with its reason and what would free it.

Where a JAX has such a name no more, or it behaves otherwise, the public way is taken,
which gives the same arrays.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

Copy = Callable[[Sequence[jax.Array]], list[jax.Array]]


@functools.cache
def copier(device: Any) -> Copy | None:
    """A function that does what `jax.device_put` does with arrays, in less time.

    Uses ``jaxlib._jax.batched_device_put``, where every `jax.device_put` of an array
    onto one device ends, and the thread's transfer guard, to which these copies are
    as explicit as that. Before it gets there `jax.device_put` spends 15 to 30
    microseconds of Python on each array, as much as two calls of a compiled function,
    on questions that have one answer for all arrays that one stage sends to another.
    Free when `jax.device_put` has a fast path as `jax.jit` has; it has none up to JAX
    0.12.

    Args:
      device: the target, of this process.

    Returns:
      The function, for arrays that are each on one device of this process, typed keys
      excepted; ``None`` if this JAX does not offer it.
    """
    try:
        jaxlib: Any = importlib.import_module("jaxlib._jax")
        copy = _copy_to(device, jaxlib.batched_device_put, jaxlib.guard_lib)
        (probe,) = copy([jax.device_put(0.0, _another(device))])
        same = probe.committed and probe.sharding == SingleDeviceSharding(device)
    except Exception:
        return None
    return copy if same else None


def _copy_to(device: Any, put: Any, guards: Any) -> Copy:
    sharding, devices = SingleDeviceSharding(device), [device]

    def copy(leaves: Sequence[jax.Array]) -> list[jax.Array]:
        state: Any = guards.thread_local_state()
        before = state.explicit_device_put
        state.explicit_device_put = True
        try:
            return [put(leaf.aval, sharding, [leaf], devices) for leaf in leaves]
        finally:
            state.explicit_device_put = before

    return copy


def _another(device: Any) -> Any:
    """A device of this process, another than this one if there is one."""
    local = jax.local_devices(backend=device.platform)
    if device not in local:
        raise ValueError(f"{device} belongs to another process")
    return next((other for other in local if other != device), device)
