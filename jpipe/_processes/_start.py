"""How a program becomes one of several processes."""

import atexit
import os
import re
import sys
from typing import Any

import jax

from ._environment import COORDINATOR, LOCAL_PROCESSES, PROCESS, PROCESSES
from ._group import group
from ._transport import TRANSPORTS
from ._watch import watch

# Threads of XLA for each CPU device of several: programs of a stage's devices wait in
# them for each other. With as many threads as devices, or one more, they wait for ever
# where parameters are cut (jax 0.10.2); with twice as many they did not.
_WAITING, _FEWEST = 4, 2
_LATER = 30
_TO_START = 300
_TO_SAY = 2.0


def distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float | None = None,
    transport: str | None = None,
    **options: Any,
) -> None:
    """Makes this program one of several processes that run the same pipeline.

    The same script is started once per host, or several times on one. Call this first,
    before anything asks JAX for its devices: then `jax.devices` are those of all of
    them. It is `jax.distributed.initialize`, which finds Slurm, Open MPI, Kubernetes
    and TPU pods by itself, with waits that end. Under ``python -m jpipe launch`` it
    needs no arguments.

    Args:
      coordinator_address: host and port of the first process, such as
        ``"10.0.0.1:1234"``.
      num_processes: how many there are.
      process_id: the number of this one, from 0.
      timeout: for how many seconds a process waits for another one before it ends with
        the name of what it awaited; default: the environment variable
        ``JPIPE_TIMEOUT``, or 600. A step whose first backward comes later needs more.
      transport: how arrays pass between processes: ``"transfer"``, through sockets, or
        ``"device_put"``, through the links of the accelerators; default:
        ``JPIPE_TRANSPORT``, or the first on CPUs and the second elsewhere.
      **options: for `jax.distributed.initialize`.

    Raises:
      ValueError: if a number or a name does not fit.
      RuntimeError: if JAX has its devices already, or cannot tell the processes.

    Example:
      >>> import jpipe
      >>> jpipe.distributed("127.0.0.1:1234", 2, 0)  # doctest: +SKIP
    """
    own = group()
    if timeout is not None:
        if isinstance(timeout, bool) or not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: needs seconds, more than 0")
        own.timeout = float(timeout)
    if transport is not None:
        if transport not in TRANSPORTS:
            listed = ", ".join(map(repr, TRANSPORTS))
            raise ValueError(f"transport={transport!r}: choose from {listed}")
        own.transport = transport
    if jax.distributed.is_initialized():
        return
    if (coordinator_address, num_processes, process_id) == (None, None, None):
        coordinator_address = os.environ.get(COORDINATOR)
        if coordinator_address is not None:
            num_processes = int(os.environ[PROCESSES])
            process_id = int(os.environ[PROCESS])
    # Read when the devices are made.
    os.environ.setdefault("PJRT_NPROC", str(_threads()))
    seconds = max(int(own.timeout), 1)
    waits = {
        # Some come later than others, as schedulers start them.
        "initialization_timeout": max(seconds, _TO_START),
        # Later than our own, which tells what was awaited.
        "heartbeat_timeout_seconds": seconds + _LATER,
        "shutdown_timeout_seconds": seconds,
    }
    jax.distributed.initialize(
        coordinator_address, num_processes, process_id, **{**waits, **options}
    )
    atexit.register(_leave_if_failed)


def check_joined() -> None:
    """Refuses to go on alone as one of several processes that were launched.

    Raises:
      RuntimeError: if `distributed` has not been called.
    """
    count = os.environ.get(PROCESSES, "1")
    if int(count) > 1 and not jax.distributed.is_initialized():
        raise RuntimeError(
            f"this is process {os.environ.get(PROCESS)} of {count}, says {PROCESSES}, "
            f"and each would train a model of its own: call jpipe.distributed() "
            f"first, before anything asks JAX for its devices"
        )


def check_threads() -> None:
    """Refuses stages of several CPU devices that would wait for each other for ever.

    Raises:
      RuntimeError: if XLA has too few threads for the devices of this process.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    own = jax.local_device_count()
    told = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    threads = max(int(told) if told else _cores(), own)
    if threads < _FEWEST * own:
        raise RuntimeError(
            f"process {jax.process_index()} has {own} CPU devices and {threads} "
            f"threads for their programs, which would wait for each other for ever: "
            f"call jax.config.update('jax_num_cpu_devices', {own}) before "
            f"jpipe.distributed(), or set PJRT_NPROC={_WAITING * own} before Python "
            f"starts"
        )


def _threads() -> int:
    """How many XLA may use for CPU devices: more than its cores make it slow."""
    forced = re.search(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    told = getattr(jax.config, "jax_num_cpu_devices", 1)
    devices = max(told, int(forced[1]) if forced else 1)
    own = max(_cores() // int(os.environ.get(LOCAL_PROCESSES, "1")), 1)
    return own if devices == 1 else max(own, _WAITING * devices)


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _leave_if_failed() -> None:
    """Ends a program that has raised an exception, without a word to the others.

    JAX would have it wait for them, and they go on waiting for what it sends: where a
    connection ends they know at once.
    """
    error = getattr(sys, "last_value", None)
    if isinstance(error, jax.errors.JaxRuntimeError):
        watch().said.wait(_TO_SAY)  # of which process it is
    if error is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
