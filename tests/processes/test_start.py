"""How processes come together, and when they are told to stop: `jpipe.distributed`."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from .jobs import ROOT

JOIN = """
import os, sys, threading
import jpipe
process, num_processes, port = map(int, sys.argv[1:])
jpipe.distributed(f"127.0.0.1:{port}", num_processes, process, timeout=20)
print("joined")
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(program, *words):
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def join(*numbers):
    """What processes print that say they are ``(process, num_processes)``."""
    port = free_port()
    jobs = [start(JOIN, *pair, port) for pair in numbers]
    printed = [job.communicate(timeout=120)[0] for job in jobs]
    assert all(job.returncode == 1 for job in jobs), printed
    return printed


def test_processes_of_other_numbers_are_told_so_at_once():
    for printed in join((0, 2), (1, 3)):
        assert (
            "RuntimeError: the processes cannot start: process 1 says that there are 3 "
            "processes, and process 0 that there are 2: set JPIPE_PROCESSES alike"
        ) in printed


def test_two_processes_of_one_number_are_told_so_at_once():
    for printed in join((0, 3), (1, 3), (1, 3)):
        assert "two processes say that they are process 1: give each another" in printed


def test_whoever_else_calls_at_the_port_is_sent_away():
    port = free_port()
    first = start(JOIN, 0, 2, port)
    connections = []
    while len(connections) < 3:
        try:
            connections.append(socket.create_connection(("127.0.0.1", port), 1))
        except OSError:
            assert first.poll() is None
    connections[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    connections[1].close()
    second = start(JOIN, 1, 2, port)
    for job in (first, second):
        printed, _ = job.communicate(timeout=120)
        assert (job.returncode, printed) == (0, "joined\n")
    assert connections[0].recv(1) == b""
    for connection in connections:
        connection.close()


def test_a_port_of_another_program_is_named_by_who_calls_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = start(JOIN.replace("timeout=20", "timeout=3"), 1, 2, port)
        printed, _ = job.communicate(timeout=120)
    assert f"TimeoutError: process 1 did not reach process 0 at port {port}" in printed
    assert "within 3 s" in printed


LOOP = """
import os, signal, sys, time
import jpipe
print(jpipe.preempted(), jpipe.preempted())
os.kill(os.getpid(), int(sys.argv[1]))
print(jpipe.preempted(), jpipe.preempted())
os.kill(os.getpid(), int(sys.argv[1]))
print("not reached")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_loop_in_one_process_learns_of_a_signal_and_a_second_one_ends_it(number):
    job = start(LOOP, int(number))
    printed, _ = job.communicate(timeout=120)
    assert printed == "False False\nTrue True\n"
    assert job.returncode == -number


def test_a_program_that_never_asks_is_ended_by_a_signal():
    program = JOIN + "import signal\nsignal.raise_signal(signal.SIGTERM)\nprint('on')\n"
    job = start(program, 0, 1, free_port())
    printed, _ = job.communicate(timeout=120)
    assert printed == "joined\n"
    assert job.returncode == -signal.SIGTERM


BY_JAX = """
import os, sys
import jax
process, port = map(int, sys.argv[1:])
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
import jax.numpy as jnp, optax
from flax import linen as nn
import jpipe
pipe = jpipe.pipeline([nn.Dense(3), nn.Dense(3)], 2)
x, tx = jnp.ones((4, 3)), optax.sgd(0.1)
state = pipe.init_train_state(jax.random.key(0), x, tx)
step = pipe.train_step(lambda y, _: jnp.mean(y**2), tx)
# When process 1 has the second loss, process 0 has printed the first one.
for num_steps in range(1, 4):
    state, metrics = step(state, x, ())
    print("loss", float(metrics["loss"]), flush=True)
    if process == 1 and num_steps == 2:
        os._exit(4)
"""


@pytest.mark.slow
def test_processes_that_jax_has_joined_know_of_each_other_too():
    port = free_port()
    jobs = [start(BY_JAX, process, port) for process in range(2)]
    texts = [job.communicate(timeout=120)[0] for job in jobs]
    assert all("loss" in text for text in texts), texts
    assert jobs[1].returncode == 4
    assert jobs[0].returncode not in (0, 4)
    assert "process 1 is gone: it was killed, or its host or network" in texts[0]
