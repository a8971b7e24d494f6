"""Makes a program one of several processes."""

import atexit
import errno
import functools
import os
import socket
import sys
import time
from typing import Any

import jax

from ._environment import (
    COORDINATOR,
    LOCAL_PROCESSES,
    PROCESS,
    PROCESSES,
    check_transport,
    parse_seconds,
    read_job,
)
from ._group import group
from ._watch import FAILED, watch

# Threads of XLA for each CPU device of several: programs of a stage's devices wait in
# them for each other. With as many threads as devices, or one more, they wait for ever
# where parameters are cut (jax 0.10.2); with twice as many they did not.
_THREADS_PER_DEVICE = 4
_FEWEST_THREADS_PER_DEVICE = 2
# Seconds by which the timeouts of JAX are longer than ours, whose errors say more.
_EXTRA_TIMEOUT = 30
_START_TIMEOUT = 300
# Seconds in which the watch may name a process that has failed.
_SECONDS_TO_EXPLAIN = 2.0
# Seconds for which the first process, without which JAX ends the others, waits for
# their explanations.
_SECONDS_OF_FAREWELL = 5.0
_LONGEST_ERROR = 200  # letters that others print


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
    before anything gets the devices of JAX: then `jax.devices` are those of all of
    them. It is `jax.distributed.initialize`, which finds Slurm, Open MPI, Kubernetes
    and TPU pods by itself, with waits that end. Under ``python -m jpipe launch`` it
    needs no arguments.

    A process that has failed, or awaits what does not come, ends at once (`os._exit`),
    so that the others know it and none waits for ever. What other libraries do at the
    end of a program is then not done.

    Args:
      coordinator_address: host and port of the first process, such as
        ``"10.0.0.1:1234"``.
      num_processes: the number of processes.
      process_id: the number of this one, from 0.
      timeout: the seconds for which a process waits for another one before it ends with
        the name of what it awaited; default: the environment variable
        ``JPIPE_TIMEOUT``, or 600. A step whose first backward comes later needs more.
      transport: the transport of arrays: ``"transfer"``, through sockets,
        or ``"device_put"``, through the links of the accelerators; default:
        ``JPIPE_TRANSPORT``, or the first on CPUs and the second elsewhere.
      **options: for `jax.distributed.initialize`.

    Raises:
      ValueError: if a number or a name does not fit.
      RuntimeError: if JAX has its devices already, or cannot tell the processes, or
        the port is in use.

    Example:
      >>> import jpipe
      >>> jpipe.distributed("127.0.0.1:1234", 2, 0)  # doctest: +SKIP
    """
    peers = group()
    if timeout is not None:
        peers.timeout = parse_seconds("timeout", timeout)
    if transport is not None:
        peers.transport = check_transport("transport", transport)
    if not jax.distributed.is_initialized():
        _initialize(coordinator_address, num_processes, process_id, options)
    _leave_together()


def _initialize(
    address: str | None, num_processes: int | None, process_id: int | None, options: Any
) -> None:
    """Starts `jax.distributed`, with our timeouts: see `distributed`."""
    if (address, num_processes, process_id) == (None, None, None):
        address, num_processes, process_id = read_job()
    if process_id == 0 and address is not None:
        has_bind_address = "coordinator_bind_address" in options
        if not has_bind_address and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
            _check_port(address)
    # Read when the devices are made.
    os.environ.setdefault("PJRT_NPROC", str(_num_threads()))
    timeout = max(int(group().timeout), 1)
    waits = {
        # Schedulers start some processes later than others.
        "initialization_timeout": max(timeout, _START_TIMEOUT),
        # Our own end before, with an error that names what was awaited.
        "heartbeat_timeout_seconds": timeout + _EXTRA_TIMEOUT,
        "shutdown_timeout_seconds": timeout + _EXTRA_TIMEOUT,
    }
    try:
        jax.distributed.initialize(
            address, num_processes, process_id, **{**waits, **options}
        )
    except ValueError as error:
        if address is not None:
            raise
        raise RuntimeError(
            f"the processes are unknown ({error}): type python -m jpipe launch "
            f"--processes 2 script.py, or set {COORDINATOR}, {PROCESSES} and "
            f"{PROCESS}, or leave jpipe.distributed() out where there is one"
        ) from error


def _check_port(address: str) -> None:
    """Refuses a port that is in use, at which JAX ends in a segmentation fault.

    Args:
      address: host and port of the first process, which is this one.

    Raises:
      RuntimeError: if another program listens there.
    """
    port = address.rpartition(":")[2]
    if not port.isdecimal():  # which JAX refuses
        return
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        # As JAX does, at all addresses, and where an earlier run has just ended.
        with socket.create_server(
            ("", int(port)), family=family, dualstack_ipv6=is_dual
        ):
            pass
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) != errno.EADDRINUSE:
            return
        raise RuntimeError(
            f"port {port} of coordinator_address={address!r} is in use on this host, "
            f"by another job or by a run that has not ended; give another port, the "
            f"same in all processes"
        ) from None


def check_joined() -> None:
    """Refuses to go on alone as one of several processes that were launched.

    Raises:
      RuntimeError: if `distributed` has not been called.
    """
    count = os.environ.get(PROCESSES, "1")
    if jax.distributed.is_initialized():
        _leave_together()
    elif count != "1":
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
    devices = jax.local_device_count()
    limit = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or _num_cores()
    threads = max(int(limit), devices)
    if threads < _FEWEST_THREADS_PER_DEVICE * devices:
        enough = _THREADS_PER_DEVICE * devices
        raise RuntimeError(
            f"process {jax.process_index()} has {devices} CPU devices and {threads} "
            f"threads for their programs, which would wait for each other for ever: "
            f"call jax.config.update('jax_num_cpu_devices', {devices}) before "
            f"jpipe.distributed(), or set PJRT_NPROC={enough} before Python starts"
        )


def _num_threads() -> int:
    """The threads that XLA may use for CPU devices: more than cores make it slow."""
    devices = getattr(jax.config, "jax_num_cpu_devices", 1)  # made at run time
    cores = max(_num_cores() // int(os.environ.get(LOCAL_PROCESSES, "1")), 1)
    return max(cores, _THREADS_PER_DEVICE * devices) if devices > 1 else cores


def _num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _leave_together() -> None:
    """Lets the other processes know when and why this one ends."""
    watch()  # no thread can be started at the end
    # The function that is registered last is called first: before JAX leaves them.
    atexit.register(_leave)


def _leave() -> None:
    """Ends the program: at once if it has raised an exception, else with the others.

    JAX would let a process that failed wait for the others, and they would wait for
    what it sends: where a connection ends they know at once.
    """
    error = getattr(sys, "last_value", None)
    peers = group()
    if peers.num_processes == 1:
        return
    if isinstance(error, jax.errors.JaxRuntimeError):
        time.sleep(_SECONDS_TO_EXPLAIN)  # the watch may name a process that has failed
    try:
        if error is None:
            peers.leave("")
            peers.check_runs()
            watch().finish()
            return
        peers.leave(f"{type(error).__name__}: {error}"[:_LONGEST_ERROR])
    except (RuntimeError, TimeoutError, ValueError) as fault:
        if error is None:
            sys.stderr.write(f"jpipe: {fault}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    if peers.process_index == 0:
        time.sleep(_SECONDS_OF_FAREWELL)
    os._exit(FAILED if error is None else 1)
