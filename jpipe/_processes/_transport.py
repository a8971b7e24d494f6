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
from typing import Any

import jax
import numpy as np

from .. import _compat
from ._elsewhere import ghost, is_here
from ._group import group
from ._keys import as_key, as_numbers, is_key
from ._watch import Awaited, watch

TRANSFER, DEVICE_PUT = TRANSPORTS = "transfer", "device_put"
# A number tells a program, one of its moves and the run of pipelines that it is in:
# where one process has run something that another has not, nothing is taken for what
# it is not.
_RUNS, _MOVES = 24, 20
# Bytes of a piece of an array on its way, and how many are on their way at once.
_PIECE, _AT_ONCE = 4 << 20, 8
Leaves = Sequence[Any]


def chosen() -> str:
    """How arrays pass in this job."""
    own = group().transport
    if own and own not in TRANSPORTS:
        raise ValueError(f"transport={own!r}: choose from {', '.join(TRANSPORTS)}")
    return own or (TRANSFER if jax.default_backend() == "cpu" else DEVICE_PUT)


@dataclass
class Crossing:
    """A move between two processes, as one of them has it, or as a third sees it.

    Attributes:
      source: a device of the one.
      target: a device of the other.
      specs: what moves: the shape of the whole and the dtype.
      source_shardings: of each array in the source, as JAX calls them.
      target_shardings: of each in the target.
      index: its number among the moves of its program.
      label: what made what moves.
    """

    source: Any
    target: Any
    specs: Sequence[Any]
    source_shardings: Sequence[Any]
    target_shardings: Sequence[Any]
    index: int
    label: str

    def __post_init__(self) -> None:
        self._first = 0
        self._run: Callable[[Leaves], Leaves] | None = None

    @property
    def concerns(self) -> bool:
        """Whether this process has a part in it."""
        return self.is_received or is_here(self.source) or chosen() == DEVICE_PUT

    @property
    def is_received(self) -> bool:
        """Whether it comes here."""
        return is_here(self.target)

    def open(self, program: int) -> None:
        """Readies it, once all processes know the number of its program."""
        self._first = (program << _MOVES | self.index & (1 << _MOVES) - 1) << _RUNS
        if chosen() == DEVICE_PUT:
            self._run = self._put()
        else:
            self._run = self._pull() if self.is_received else self._offer()

    def __call__(self, *leaves: Any) -> Leaves:
        """Sends, or gives what comes. Never waits."""
        assert self._run is not None
        made = self._run(leaves)
        if not self.is_received:
            return ()
        watch().add(Awaited(made, self.label, self.source, self.target, group().runs))
        return made

    def _number(self) -> int:
        return self._first | group().runs & (1 << _RUNS) - 1

    def _put(self) -> Callable[[Leaves], Leaves]:
        shardings = list(self.target_shardings)
        if is_here(self.source):
            return lambda leaves: jax.device_put(list(leaves), shardings)
        triples = zip(self.specs, self.source_shardings, strict=True)
        nothing = [
            ghost(spec.shape, spec.dtype, sharding) for spec, sharding in triples
        ]
        return lambda _: jax.device_put(nothing, shardings)

    def _offer(self) -> Callable[[Leaves], Leaves]:
        sent = [i for i, spec in enumerate(self.specs) if spec.size]
        has_keys = any(map(is_key, self.specs))
        server = _server()

        def offer(leaves: Leaves) -> Leaves:
            parts = [leaves[i] for i in sent]
            if has_keys:
                parts = [*map(as_numbers, parts)]
            if parts:
                server.await_pull(self._number(), parts)
            return ()

        return offer

    def _pull(self) -> Callable[[Leaves], Leaves]:
        specs, wanted, empty = self.specs, [], {}
        for i, (spec, sharding) in enumerate(
            zip(specs, self.target_shardings, strict=True)
        ):
            if not spec.size:
                empty[i] = jax.device_put(np.zeros(spec.shape, spec.dtype), sharding)
                continue
            spec = jax.eval_shape(as_numbers, spec)
            wanted.append(
                jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)
            )
        # Only an array of keys says of which kind they are.
        keys = {
            i: ghost(spec.shape, spec.dtype, self.source_shardings[i])
            for i, spec in enumerate(specs)
            if is_key(spec)
        }
        link = _link(self.source.process_index)

        def pull(_: Leaves) -> Leaves:
            found = link.pull(self._number(), wanted) if wanted else []
            if not keys and not empty:
                return found
            rest = iter(found)
            found = [empty[i] if i in empty else next(rest) for i in range(len(specs))]
            for i, like in keys.items():
                found[i] = as_key(found[i], like)
            return found

        return pull


def on_one(leaf: jax.Array, device: Any) -> jax.Array:
    """An array of this process, all of it on one of its devices."""
    return jax.device_put(leaf, device)


@functools.cache
def _server() -> Any:
    """What others pull from, one for a process."""
    from jax.experimental import transfer  # which one process has no use for

    host = _own_address(_compat.coordinator_address())
    server = transfer.start_transfer_server(
        jax.local_devices()[0].client,
        f"{host}:0",
        [f"{host}:0"] * 4,
        max_num_parallel_copies=_AT_ONCE,
        transfer_size=_PIECE,
    )
    group().tell(f"address/{jax.process_index()}", server.address())
    return server


@functools.cache
def _link(process: int) -> Any:
    """To pull from a process."""
    server = _server()
    address = group().ask(f"address/{process}", process, "its first transfer")
    return server.connect(address)


def start() -> None:
    """Lets other processes pull from this one, where that is how arrays pass."""
    if chosen() == TRANSFER:
        _server()


def _own_address(coordinator: str) -> str:
    """The address of this host as the one of the first process sees it."""
    host = coordinator.rpartition(":")[0].strip("[]") or "127.0.0.1"
    try:
        family, *_, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"
    return f"[{own}]" if ":" in own else own
