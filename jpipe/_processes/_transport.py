"""How arrays pass from one process to another.

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
from ._elsewhere import ghost, is_here
from ._environment import DEVICE_PUT, TRANSFER
from ._group import group
from ._keys import as_key, as_numbers, is_key
from ._watch import Awaited, watch

# A number names a program, one of its moves and the run of pipelines that it is in:
# where one process has run something that another has not, nothing is mistaken for
# something else.
_RUNS, _MOVES = 24, 20
# Bytes of a piece of an array on its way, and how many are on their way at once.
_PIECE, _AT_ONCE = 4 << 20, 8
Leaves = Sequence[Any]
# What moves arrays, given the number of the move: ``(number, leaves) -> leaves``.
Move = Callable[[int, Leaves], Leaves]


def chosen() -> str:
    """How arrays pass in this job."""
    default = TRANSFER if jax.default_backend() == "cpu" else DEVICE_PUT
    return group().transport or default


@dataclass(frozen=True)
class Crossing:
    """A move between two processes, as one of them has it, or as a third sees it.

    Attributes:
      source: a device of the one.
      target: a device of the other.
      specs: what moves: the shape of the whole, the dtype, the sharding in the target.
      source_shardings: of each array in the source.
      index: its number among the moves of its program.
      label: what made what moves.
    """

    source: Any
    target: Any
    specs: Sequence[Any]
    source_shardings: Sequence[Any]
    index: int
    label: str

    @property
    def concerns(self) -> bool:
        """Whether this process has a part in it."""
        return self.is_received or is_here(self.source) or chosen() == DEVICE_PUT

    @property
    def is_received(self) -> bool:
        """Whether it comes here."""
        return is_here(self.target)

    def __str__(self) -> str:
        return (
            f"process {self.target.process_index} awaited {self.label} for "
            f"{self.target}, which process {self.source.process_index} sends from "
            f"{self.source}"
        )

    def opened(self, program: int) -> Callable[..., Leaves]:
        """What sends, or returns what comes, and never waits.

        Args:
          program: the number of its program, once all processes know it.
        """
        first = (program << _MOVES | self.index & (1 << _MOVES) - 1) << _RUNS
        passing = [*map(_as_passing, self.specs)]
        has_keys = any(map(is_key, self.specs))
        kinds: list[jax.Array] = []
        if has_keys and self.is_received:  # only an array has the kind of its keys
            kinds = _ghosts(self.specs, self.source_shardings)
        if chosen() == DEVICE_PUT:
            move = self._put(passing)
        elif self.is_received:
            move = _pull(_link(self.source.process_index), passing)
        else:
            move = _offer(passing)

        def run(*leaves: Any) -> Leaves:
            number = first | group().runs & (1 << _RUNS) - 1
            arrays = move(number, [*map(as_numbers, leaves)] if has_keys else leaves)
            if not self.is_received:
                return ()
            watch().add(Awaited(arrays, self, group().runs))
            return [*map(as_key, arrays, kinds)] if kinds else arrays

        return run

    def _put(self, passing: Leaves) -> Move:
        shardings = [spec.sharding for spec in passing]
        if is_here(self.source):
            return lambda _, leaves: jax.device_put(list(leaves), shardings)
        ghosts = _ghosts(passing, self.source_shardings)
        return lambda *_: jax.device_put(ghosts, shardings)


def _offer(passing: Leaves) -> Move:
    """What offers arrays to whoever pulls them."""
    server, has_values = _server(), [spec.size > 0 for spec in passing]

    def offer(number: int, leaves: Leaves) -> Leaves:
        server.await_pull(number, [*compress(leaves, has_values)])
        return ()

    return offer


def _pull(link: Any, passing: Leaves) -> Move:
    """What pulls arrays over a link."""
    wanted = [spec if spec.size else None for spec in passing]
    # What is empty would be awaited for ever.
    empty = [
        None if spec.size else jax.device_put(jnp.zeros_like(spec), spec.sharding)
        for spec in passing
    ]

    def pull(number: int, _: Leaves) -> Leaves:
        pairs = zip(link.pull(number, wanted), empty, strict=True)
        return [array if none is None else none for array, none in pairs]

    return pull


def _as_passing(spec: Any) -> jax.ShapeDtypeStruct:
    """As what an array passes: of keys the numbers that they are made of."""
    numbers = jax.eval_shape(as_numbers, spec)
    return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=spec.sharding)


def _ghosts(specs: Leaves, shardings: Sequence[Any]) -> list[jax.Array]:
    """What stands in this process for arrays of another."""
    pairs = zip(specs, shardings, strict=True)
    return [ghost(spec.shape, spec.dtype, sharding) for spec, sharding in pairs]


def on_one(leaf: jax.Array, device: Any) -> jax.Array:
    """An array of this process, all of it on one of its devices."""
    return jax.device_put(leaf, device)


@functools.cache
def _server() -> Any:
    """What others pull from, one for a process."""
    from jax.experimental import transfer  # one process alone does not need it

    host = _own_address(_compat.coordinator_address())
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
    """What pulls from a process."""
    server = _server()
    (address,) = group().receive({process: f"address/{process}"}, "its first transfer")
    return server.connect(address)


def _own_address(coordinator: str) -> str:
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
