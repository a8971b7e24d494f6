"""What `jpipe.pipeline` is given, checked: every fault found before any work."""

import operator
from collections.abc import Sequence
from typing import Any

import jax

from ._instructions._transfer import Device
from .schedules import Schedule


def check_num_microbatches(number: Any) -> int:
    """Returns the number of micro-batches if it is an int of at least 1."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(
            f"num_microbatches={number!r} is a {type(number).__name__}; needs an int "
            f"of at least 1"
        )
    number = operator.index(number)
    if number < 1:
        raise ValueError(f"num_microbatches={number}: needs at least 1")
    return number


def check_balance(balance: Any, num_layers: int) -> tuple[int, ...]:
    """Returns the number of layers of each stage.

    Args:
      balance: a sequence of positive ints that sum to the number of layers, or
        ``None`` for one layer per stage.
      num_layers: the number of layers.

    Raises:
      ValueError: with every fault of the numbers.
      TypeError: if it is not a sequence of ints.
    """
    if balance is None:
        return (1,) * num_layers
    if isinstance(balance, str):
        half = num_layers // 2
        example = [num_layers - half, half] if half else [num_layers]
        raise ValueError(
            f"balance={balance!r}: this version does not choose by itself; give the "
            f"number of layers of each stage, such as balance={example}"
        )
    sizes = list(balance) if hasattr(balance, "__iter__") else [balance, None]
    if any(isinstance(n, bool) or not hasattr(n, "__index__") for n in sizes):
        raise TypeError(
            f"balance={balance!r}: needs a sequence of ints, the number of layers of "
            f"each stage"
        )
    sizes = [operator.index(n) for n in sizes]
    faults = []
    if any(n < 1 for n in sizes):
        faults.append("every stage needs at least one layer")
    if sum(sizes) != num_layers:
        faults.append(f"its sum is {sum(sizes)}, the model has {num_layers} layers")
    if faults:
        raise ValueError(f"balance={sizes}: {'; '.join(faults)}")
    return tuple(sizes)


def choose_devices(devices: Any, schedule: Schedule) -> tuple[Device, ...]:
    """Returns the device of each stage.

    Args:
      devices: one device per rank; surplus ones are left idle; ``None`` means
        `jax.devices`.
      schedule: who runs which stage.

    Raises:
      ValueError: if there are fewer devices than ranks.
      TypeError: if an entry is not a device.
    """
    if isinstance(devices, str) or not hasattr(devices or [], "__iter__"):
        one = isinstance(devices, jax.Device)
        example = f"[{devices!r}]" if one else "jax.devices()[:2]"
        raise TypeError(
            f"devices={devices!r} is a {type(devices).__name__}; needs a sequence of "
            f"jax.Device objects, such as devices={example}"
        )
    given: Sequence[Any] = jax.devices() if devices is None else list(devices)
    not_devices = [d for d in given if not isinstance(d, jax.Device)]
    if not_devices:
        raise TypeError(f"devices: {not_devices!r} are not jax.Device objects")
    needed = schedule.num_ranks
    if len(given) < needed:
        what = "stages" if schedule.num_stages == needed else "ranks"
        raise ValueError(
            f"{needed} {what} need {needed} devices, there are {len(given)}; repeat "
            f"devices, as in devices=[jax.devices()[i % {max(len(given), 1)}] for i in "
            f"range({needed})], group layers with balance=, or, on CPU, make more "
            f"devices at the start of the program with "
            f"jax.config.update('jax_num_cpu_devices', {needed})"
        )
    return tuple(given[rank] for rank in schedule.placement)
