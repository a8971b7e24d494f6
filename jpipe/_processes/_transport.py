"""Sends arrays from one process to another.

``"transfer"``: point to point, by `jax.experimental.transfer`, on every backend;
whoever reads pulls, and in no order. ``"device_put"``: `jax.device_put` onto devices of
the other process, which goes over the links of the accelerators; every process issues
all of them, its own or not, in one order. The first is what CPUs have.

What was sent is nobody's to overwrite: it may not have left yet.
"""

import functools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from .. import _compat
from ._arrays import as_key, as_numbers, is_here, is_key, placeholder
from ._environment import DEVICE_PUT, TRANSFER
from ._group import group
from ._watch import Awaited, watch

# A move has a number, made of that of its program, its index in the program and the run
# of pipelines that it is in: where one process has run something that another has not,
# nothing is mistaken for something else.
_MOVE_BITS = 20
_RUN_BITS = 24
# Bytes of a piece of an array on its way, and how many are on their way at once.
_PIECE = 4 << 20
_AT_ONCE = 8
Leaves = Sequence[Any]
# (number of the move, leaves to send) -> received leaves
Move = Callable[[int, Leaves], Leaves]


def transport() -> str:
    """The transport of this job."""
    default = TRANSFER if jax.default_backend() == "cpu" else DEVICE_PUT
    return group().transport or default


@dataclass(frozen=True)
class Crossing:
    """A move between two processes, as one of them has it, or as a third sees it.

    Attributes:
      source: a device of the process that sends.
      target: a device of the process that receives.
      specs: the arrays: the shape of the whole, the dtype, the sharding in the target.
      source_shardings: the sharding of each array in the source.
      index: the position among the moves of its program.
      label: the name of what made the arrays.
    """

    source: Any
    target: Any
    specs: Sequence[Any]
    source_shardings: Sequence[Any]
    index: int
    label: str

    @property
    def is_local_part(self) -> bool:
        """True if this process has a part in it."""
        return self.is_received or is_here(self.source) or transport() == DEVICE_PUT

    @property
    def is_received(self) -> bool:
        """True if this process receives the arrays."""
        return is_here(self.target)

    def __str__(self) -> str:
        return (
            f"{self.label} for {self.target}, which process "
            f"{self.source.process_index} sends from {self.source}"
        )

    def connect(self, program: int) -> Callable[..., Leaves]:
        """Connects the two processes.

        Args:
          program: the number of its program, once all processes know it.

        Returns:
          ``(*leaves) -> leaves``, called once in each run: it sends its arguments, or
          returns the arrays that come. It never waits.
        """
        sent_specs = [_sent_spec(spec) for spec in self.specs]
        has_keys = any(map(is_key, self.specs))
        keys: list[jax.Array] = []
        if has_keys and self.is_received:  # a spec does not tell the type of its keys
            keys = _placeholders(self.specs, self.source_shardings)

        if transport() == DEVICE_PUT:
            move = self._put(sent_specs)
        elif self.is_received:
            move = _pull(_link(self.source.process_index), sent_specs)
        else:
            move = _offer(sent_specs)

        def run(*leaves: Any) -> Leaves:
            number = _move_number(program, move=self.index, run=group().runs)
            arrays = move(number, [*map(as_numbers, leaves)] if has_keys else leaves)
            if not self.is_received:
                return ()
            watch().add(Awaited(arrays, self, group().runs))
            return [*map(as_key, arrays, keys)] if keys else arrays

        return run

    def _put(self, specs: Leaves) -> Move:
        """Moves arrays by `jax.device_put`, which all processes call."""
        shardings = [spec.sharding for spec in specs]
        if is_here(self.source):
            return lambda _, leaves: jax.device_put(list(leaves), shardings)
        placeholders = _placeholders(specs, self.source_shardings)
        return lambda *_: jax.device_put(placeholders, shardings)


def put_whole(leaf: jax.Array, device: Any) -> jax.Array:
    """Puts an array of this process, all of it, on one of its devices."""
    return jax.device_put(leaf, device)


def _move_number(program: int, *, move: int, run: int) -> int:
    """The bits of the three numbers in a row; of the last two the lowest bits."""
    low_move = move & (1 << _MOVE_BITS) - 1
    low_run = run & (1 << _RUN_BITS) - 1
    return (program << _MOVE_BITS | low_move) << _RUN_BITS | low_run


def _offer(specs: Leaves) -> Move:
    """Offers arrays to the process that pulls them."""
    server = _server()
    has_values = [spec.size > 0 for spec in specs]

    def offer(number: int, leaves: Leaves) -> Leaves:
        server.await_pull(number, [*compress(leaves, has_values)])
        return ()

    return offer


def _pull(link: Any, specs: Leaves) -> Move:
    """Pulls arrays over a link."""
    pulled = [spec if spec.size else None for spec in specs]
    # An empty array would be awaited for ever: it is made here.
    empty = [
        None if spec.size else jax.device_put(jnp.zeros_like(spec), spec.sharding)
        for spec in specs
    ]

    def pull(number: int, _: Leaves) -> Leaves:
        pairs = zip(link.pull(number, pulled), empty, strict=True)
        return [array if zeros is None else zeros for array, zeros in pairs]

    return pull


def _sent_spec(spec: Any) -> jax.ShapeDtypeStruct:
    """The spec of an array on its way; of a key, that of its numbers."""
    numbers = jax.eval_shape(as_numbers, spec)
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=spec.sharding)


def _placeholders(specs: Leaves, shardings: Sequence[Any]) -> list[jax.Array]:
    pairs = zip(specs, shardings, strict=True)
    return [placeholder(spec.shape, spec.dtype, sharding) for spec, sharding in pairs]


@functools.cache
def _server() -> Any:
    """The server of this process, from which others pull."""
    from jax.experimental import transfer  # one process alone does not need it

    host = own_address(_compat.coordinator_address())
    server = transfer.start_transfer_server(
        jax.local_devices()[0].client,
        f"{host}:0",
        [f"{host}:0"] * 4,
        max_num_parallel_copies=_AT_ONCE,
        transfer_size=_PIECE,
    )
    group().publish(f"address/{jax.process_index()}", server.address())
    return server


@functools.cache
def _link(process: int) -> Any:
    """The link by which this process pulls from another one."""
    server = _server()
    (address,) = group().receive({process: f"address/{process}"}, "its first transfer")
    return server.connect(address)


def own_address(coordinator: str) -> str:
    """The address of this host as the one of the first process sees it."""
    host = coordinator.rpartition(":")[0].strip("[]") or "127.0.0.1"
    try:
        family, *_, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing
            address = probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"
    return f"[{address}]" if ":" in address else address
