"""Makes a program one of several processes."""

import atexit
import contextlib
import functools
import os
import sys
from typing import Any, NoReturn

import jax

from .. import _compat
from ._environment import (
    COORDINATOR,
    FAILED,
    LOCAL_PROCESSES,
    PROCESS,
    PROCESSES,
    check_transport,
    parse_seconds,
    read_job,
)
from ._group import group
from ._lines import Fault, Lines, PeerError
from ._rendezvous import is_loopback, join_first, listen, receive_all, split_address
from ._transport import own_address
from ._watch import await_fault, give_farewell, watch

# Threads of XLA for each CPU device of several: programs of a stage's devices wait in
# them for each other. With as many threads as devices, or one more, they wait for ever
# where parameters are cut (jax 0.10.2); with twice as many they did not.
_THREADS_PER_DEVICE = 4
_FEWEST_THREADS_PER_DEVICE = 2
# Seconds by which the timeouts of JAX are longer than ours, whose errors say more.
_EXTRA_TIMEOUT = 30
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
      timeout: the seconds for which a process waits for another one, from the start on,
        before it ends with the name of what it awaited and who hangs; default: the
        environment variable ``JPIPE_TIMEOUT``, or 600. A start, a compilation or a step
        that takes longer in one of them needs more. For a process that has failed or
        was killed nobody waits.
      transport: the transport of arrays: ``"transfer"``, through sockets,
        or ``"device_put"``, through the links of the accelerators; default:
        ``JPIPE_TRANSPORT``, or the first on CPUs and the second elsewhere.
      **options: for `jax.distributed.initialize`.

    Raises:
      ValueError: if a number or a name does not fit.
      RuntimeError: if JAX has its devices already, or cannot tell the processes, or
        the port is in use; if another process ends before all have started.
      TimeoutError: with the processes that have not come.

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
    """Brings the processes together, then starts `jax.distributed`: see `distributed`.

    Args:
      address: host and port of the first process, or ``None``.
      num_processes: the number of processes, likewise.
      process_id: the number of this one, likewise.
      options: for `jax.distributed.initialize`.
    """
    if (address, num_processes, process_id) == (None, None, None):
        address, num_processes, process_id = read_job()
    job = _compat.detect_job(
        address,
        num_processes,
        process_id,
        method=options.get("cluster_detection_method"),
    )
    _come_together(*job, options)
    # Read when the devices are made.
    os.environ.setdefault("PJRT_NPROC", str(_num_threads()))
    # Our own end before, with an error that names what was awaited.
    timeout = max(int(group().timeout), 1) + _EXTRA_TIMEOUT
    waits = {
        "initialization_timeout": timeout,
        "heartbeat_timeout_seconds": timeout,
        "shutdown_timeout_seconds": timeout,
    }
    _leave_sigterm()
    try:
        with group().waiting(sorted(group().lines.peers), "the start of JAX"):
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


def _leave_sigterm() -> None:
    """Keeps JAX from catching SIGTERM, which `preempted` does where a program asks.

    A program that never asks would not end; and JAX, told to stop in the last steps,
    does not end either (jax 0.10.2).
    """
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        with contextlib.suppress(AttributeError):
            jax.config.update("jax_enable_preemption_service", val=False)


def _come_together(
    address: str | None, num_processes: int | None, process_id: int | None, options: Any
) -> None:
    """Waits until all processes have started, and joins them by lines.

    JAX listens afterwards where process 0 does now: on one machine, at loopback alone.

    Args:
      address: host and port of the first process, or ``None`` if it is unknown.
      num_processes: the number of processes, likewise.
      process_id: the number of this one, likewise.
      options: for `jax.distributed.initialize`; an address to listen at is added.
    """
    if address is None or num_processes is None or process_id is None:
        return
    host_and_port = split_address(address)
    if host_and_port is None or not 0 <= process_id < num_processes:
        return
    host, port = host_and_port
    timeout = group().timeout
    if process_id > 0:
        line = join_first(
            host_and_port,
            process=process_id,
            num_processes=num_processes,
            timeout=timeout,
        )
        _watch_over(Lines(process_id, num_processes, {0: line}))
        return

    bind_address = options.get("coordinator_bind_address") or os.environ.get(
        "JAX_COORDINATOR_BIND_ADDRESS"
    )
    if bind_address is None and is_loopback(host):
        bind_address = address
        options["coordinator_bind_address"] = address
    bind_host, bind_port = split_address(bind_address or "") or ("", port)
    lines = receive_all(listen(bind_host, bind_port), num_processes, timeout=timeout)
    _watch_over(Lines(0, num_processes, lines))


def _come_together_by_store() -> None:
    """Joins processes by lines in which somebody else has started JAX."""
    process_index, num_processes = _compat.process_index_and_count()
    if num_processes == 1:
        return
    peers = group()
    key = "lines"
    if process_index > 0:
        (address,) = peers.receive({0: key}, "its lines")
        line = join_first(
            split_address(address) or ("", 0),
            process=process_index,
            num_processes=num_processes,
            timeout=peers.timeout,
        )
        _watch_over(Lines(process_index, num_processes, {0: line}))
        return
    host = own_address(_compat.coordinator_address())
    listener = listen(host.strip("[]"), 0)
    peers.publish(key, f"{host}:{listener.getsockname()[1]}")
    lines = receive_all(listener, num_processes, timeout=peers.timeout)
    _watch_over(Lines(0, num_processes, lines))


def _watch_over(lines: Lines) -> None:
    """Lets the other processes know when and why this one ends, and it of them."""
    group().lines = lines
    if not lines.peers:
        return
    watch()  # no thread can be started at the end
    _note_exit_status()
    # The function that is registered last is called first: before JAX leaves them.
    atexit.register(_leave)


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
    """Joins the processes by lines, if `distributed` has not."""
    if not group().lines.peers:
        _come_together_by_store()


# The argument of the last `sys.exit`; Python tells it to nobody at the end.
_exit_argument: Any = None


@functools.cache
def _note_exit_status() -> None:
    """Notes the argument of `sys.exit`, for a process that ends before others."""
    leave_program = sys.exit

    @functools.wraps(leave_program)
    def note_and_leave(status: Any = None, /) -> NoReturn:
        global _exit_argument
        _exit_argument = status
        leave_program(status)

    sys.exit = note_and_leave


def _leave() -> None:
    """Ends the program: at once if it has raised an exception, else with the others.

    JAX would let a process that failed wait for the others, and they would wait for
    what it sends: where a connection ends they know at once.
    """
    error = getattr(sys, "last_value", None)
    peers = group()
    if error is not None:
        fault = _root(error)
        peers.leave("has failed", fault)
        status = 1 if fault.processes == (peers.lines.process,) else FAILED
    elif fault := _leave_with_others():
        status = _exit_status()
    else:
        return
    watch().dismiss()
    sys.stdout.flush()
    sys.stderr.flush()
    give_farewell(fault)
    os._exit(status)


def _leave_with_others() -> Fault | None:
    """Comes to the end of the program; returns the fault if the others do not.

    They may await more of this process, or one of them has failed.
    """
    peers = group()
    by_exit = f" by sys.exit({_exit_argument!r})" if _exit_argument else ""
    try:
        peers.leave(f"came to its end{by_exit}")
        peers.wait_for_end()
        watch().finish()
    except (RuntimeError, ValueError) as error:
        watch().print_once(str(error))
        is_of_peer = isinstance(error, PeerError)
        return error.fault if is_of_peer else Fault((), "other numbers of calls")
    return None


def _exit_status() -> int:
    """The status of a program that has come to its end, and others have not."""
    if isinstance(_exit_argument, int) and _exit_argument != 0:
        return _exit_argument
    return FAILED


def _root(error: BaseException) -> Fault:
    """The fault for which an exception was raised: of another process, or this one."""
    peers = group()
    if isinstance(error, PeerError):
        return error.fault
    if isinstance(error, jax.errors.JaxRuntimeError) and (fault := await_fault()):
        watch().explain(fault)
        return fault
    text = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
    return Fault((peers.lines.process,), f"has failed: {text}")
