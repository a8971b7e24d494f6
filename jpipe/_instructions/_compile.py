"""A function compiled for one place."""

import hashlib
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from .. import _compat
from .._jaxprs import _constraints, _jaxpr
from .._jaxprs._function import Function
from .._processes._keys import is_key
from ._progress import Progress
from ._sharding import WHOLE, Sharding, SubMesh
from ._transfer import Device, located, on

# To a type checker it has no attributes.
_config: Any = jax.config

_NAME = re.compile(r"module @\S+")
# A call of Python in the text of a program.
_CALLBACK = re.compile(r"custom_call @\w*callback")
# How many of the stages that share a program its name lists.
_NAMED = 4


@dataclass(eq=False)
class Compiled:
    """A function compiled for one place.

    Attributes:
      function: what it computes.
      arguments: the specs of its arguments.
      live_results: the positions of the results that somebody reads.
      donated: those of the arguments whose memory these take over.
      device: where it runs.
      places: where the arguments are; of one that is nowhere yet less than zero.
      name: how profiles call it.
      mapped: whether each shard of the place calls it by itself.
      argument_shardings: of its arguments, where the place is several devices.
      result_shardings: of its results, likewise.
      run: ``(*leaves) -> leaves``, compiled or not.
      seconds: how long XLA took; zero if it is not compiled, or was before.
    """

    function: Function
    arguments: Sequence[Any]
    live_results: Sequence[int]
    donated: Sequence[int]
    device: Device
    places: Sequence[int]
    name: str
    mapped: bool = False
    argument_shardings: Sequence[Sharding] = ()
    result_shardings: Sequence[Sharding] = ()

    def __post_init__(self) -> None:
        live, device = self.live_results, self.device
        compute = self.function.run
        if self.function.has_constraints:
            compute = self._constrained()

        def run(*leaves: Any) -> Any:
            results = compute(*leaves)
            return tuple([results[i] for i in live])

        out: Any = None
        if isinstance(device, SubMesh):
            if self.mapped:
                run = device.mapped(run, self.argument_shardings)
            results = self.function.results
            pairs = [(self.result_shardings[i], results[i]) for i in live]
            out = tuple(on(device, sharding, on_host(spec)) for sharding, spec in pairs)
        elif all(place < 0 for place in self.places):
            # What has no arguments in a place would land on the default device.
            out = on(device)
        run.__name__ = self.name
        self.run: Any = jax.jit(
            run,
            donate_argnums=tuple(self.donated),
            # What is given is then a part of the text by which executables are found.
            keep_unused=True,
            out_shardings=out,
        )
        self.seconds = 0.0

    def _constrained(self) -> Callable[..., Sequence[Any]]:
        """The function, with what constraints of a user's program mean here."""

        def constrain(array: Any, spec: Any) -> Any:
            if isinstance(self.device, SubMesh):
                array = self.device.constrained(array, spec, mapped=self.mapped)
            # An argument that is a result by itself would not be copied.
            return checkpoint_name(array, "constrained")

        closed = jax.make_jaxpr(self.function.run)(*map(_jaxpr.spec, self.arguments))
        return lambda *leaves: _constraints.evaluate(closed, leaves, constrain)

    @property
    def is_ahead(self) -> bool:
        """Whether it is compiled before it is called.

        What it is given may be of other kinds each time where that is in no place, or
        in the memory of the host. Of elements smaller than a byte, such as int4, JAX
        says "compiled for input layouts that disagree" where it was compiled ahead.
        Nothing is compiled under `jax.disable_jit`; and where NaNs are looked for,
        `jax.jit` finds where.
        """
        specs = *self.arguments, *self.function.results
        is_placed = all(place >= 0 for place in self.places)
        is_plain = not any(on_host(spec) or is_below_byte(spec) for spec in specs)
        return is_placed and is_plain and is_ahead()

    @property
    def kind(self) -> Hashable:
        """What is equal for programs of one function that differ by their devices."""
        mesh = self.device if isinstance(self.device, SubMesh) else None
        arguments = ((x.shape, x.dtype, x.weak_type) for x in self.arguments)
        shardings = *self.argument_shardings, *self.result_shardings
        indices = tuple(self.live_results), tuple(self.donated)
        return self.function, mesh, self.mapped, *indices, *shardings, *arguments

    def trace(self) -> Any:
        """Traced for XLA."""
        shardings = self.argument_shardings or [WHOLE] * len(self.arguments)
        pairs = zip(self.arguments, shardings, strict=True)
        return self.run.trace(
            *[located(spec, self.device, sharding) for spec, sharding in pairs]
        )

    @property
    def flops(self) -> float | None:
        """Of one call; ``None`` if it is not compiled or XLA does not report it."""
        analysis = getattr(self.run, "cost_analysis", dict)()
        return (analysis or {}).get("flops")

    @property
    def workspace_bytes(self) -> int | None:
        """What it needs while it runs, likewise."""
        analysis = getattr(self.run, "memory_analysis", lambda: None)()
        return getattr(analysis, "temp_size_in_bytes", None)


def is_ahead() -> bool:
    """Whether anything is compiled before it is called, under the settings of JAX."""
    debug = _config.jax_debug_nans or _config.jax_debug_infs
    return not (_config.jax_disable_jit or debug)


def _key(traced: Any, lowered: Any, options: Any) -> Any:
    """What tells one executable from another: all of it but the device.

    The text has memory layouts, donation and what is computed. It has no Python
    functions that are called and no `jax.Ref` that is read: a program with these, as
    one with any effect, is like no other. Of keys and weakly typed arrays it has only
    what they are made of.
    """
    # But for its name: equal stages have names of their own.
    text = _NAME.sub("module", lowered.as_text(), count=1)
    calls_python = _CALLBACK.search(text) or _jaxpr.contains(
        traced.jaxpr, "pure_callback"
    )
    if calls_python or traced.jaxpr.effects:
        return object()
    text = hashlib.sha256(text.encode()).digest()
    avals = *traced.jaxpr.in_avals, *traced.jaxpr.out_avals
    settings = sorted(_compat.settings().items())
    kinds = tuple((x.shape, x.dtype, x.weak_type) for x in avals)
    return text, kinds, lowered.in_tree, repr(settings), repr(options)


# Executables by what was compiled, so that a cell of a notebook that makes the same
# pipeline or the same step again compiles nothing. None belongs to a pipeline.
_executables: "OrderedDict[Any, Any]" = OrderedDict()
# XLA for CPU maps memory about a hundred times for each, and Linux lets a process do
# that 65,530 times: beyond, LLVM aborts it.
_MOST = 256


@dataclass
class Executable:
    """A compiled program, or a function that computes the same.

    Attributes:
      run: calls it; ``None`` until `compiling` is over.
      seconds: how long XLA took; zero if it was compiled before.
    """

    run: Any = None
    seconds: float = 0.0


@contextmanager
def compiling() -> Iterator[Callable[..., Executable]]:
    """The scope in which programs are compiled side by side.

    XLA compiles without the interpreter's lock: while some are compiled the next ones
    are traced, in the thread of the caller, as a `with` block around it, such as
    `jax.default_matmul_precision`, does not reach other threads.

    Yields:
      A function ``(trace, device, options, kind) -> executable`` that starts to compile
      what is traced, unless that was compiled before. Of programs of one kind, which
      differ by their devices alone, one is traced and lowered where that suffices.
    """
    # Of each kind what tells its executables from others.
    kinds: dict[Hashable, Any] = {}
    found: dict[Any, Executable] = {}
    running: dict[Future[tuple[Any, float]], Executable] = {}
    # Where each program is compiled first.
    first: dict[Any, tuple[Device, Future[tuple[Any, float]]]] = {}

    def add(
        trace: Callable[[], Any],
        device: Device,
        options: Any = None,
        kind: Hashable = None,
    ) -> Executable:
        lowered, program = None, kinds.get(kind)
        if program is None:
            traced = trace()
            lowered = traced.lower()
            program = _key(traced, lowered, options)
            if kind is not None and isinstance(program, tuple):
                kinds[kind] = program
        key = program, device
        if key not in found:
            found[key] = Executable(_executables.get(key))
            if key in _executables:
                return found[key]
            source, once = first.get(program, (device, None))
            if once and _can_load(source, device):
                future = loaders.submit(_loaded, once, device)
            elif once and _can_read(source, device):
                lowered = lowered or trace().lower()
                future = loaders.submit(_timed, lowered, options, once)
            else:
                lowered = lowered or trace().lower()
                future = compilers.submit(_timed, lowered, options)
                first.setdefault(program, (device, future))
            running[future] = found[key]
        return found[key]

    # What is loaded waits for what is compiled, in threads of its own.
    compilers, loaders = (ThreadPoolExecutor(os.cpu_count() or 1) for _ in range(2))
    with Progress("programs compiled") as progress, compilers, loaders:
        try:
            yield add
            for done, future in enumerate(as_completed(running), start=1):
                future.result()
                progress.show(done, len(found))
        finally:
            # Where something was raised, what has not started is not compiled any more,
            # and what has been is stored.
            for pool in (compilers, loaders):
                pool.shutdown(cancel_futures=True)
            for future, made in running.items():
                if not (future.cancelled() or future.exception()):
                    made.run, made.seconds = future.result()
            _keep({key: made.run for key, made in found.items() if made.run})


def _can_load(source: Device, device: Device) -> bool:
    """Whether what is compiled for one device can be loaded for another."""
    if isinstance(source, SubMesh) or isinstance(device, SubMesh):
        return False
    # What JAX has read from a directory cannot.
    is_read = _config.jax_compilation_cache_dir
    return not is_read and _compat.can_load(source, device)


def _can_read(source: Device, device: Device) -> bool:
    """Whether JAX finds what it compiled for one device in its directory for another.

    The key under which it is there has the device on CPU; on GPUs it has not.
    """
    platforms = [getattr(each, "platform", None) for each in (source, device)]
    return bool(_config.jax_compilation_cache_dir) and platforms == ["gpu", "gpu"]


def _loaded(once: Future[tuple[Any, float]], device: Device) -> tuple[Any, float]:
    """What is compiled for another device, for this one, and in how many seconds."""
    compiled, _ = once.result()
    start = time.monotonic()
    with suppress(Exception):  # then `jax.jit` compiles it when it is called
        return _compat.loaded(compiled, device), time.monotonic() - start
    return None, 0.0


def compile_all(programs: Iterable[Compiled]) -> None:
    """Compiles programs side by side."""
    with compiling() as add:
        found = [
            (program, add(program.trace, program.device, kind=program.kind))
            for program in programs
            if program.is_ahead
        ]
    for program, executable in found:
        program.run = executable.run or program.run
        # Of programs that share an executable the first took the time.
        program.seconds, executable.seconds = executable.seconds, 0.0


def drawing_options(device: Device) -> dict[str, Any] | None:
    """The options of XLA for what draws random numbers once; ``None``: as ever.

    XLA for CPU optimizes that for seconds. With fewer optimizations the draws of
    `jax.nn.initializers` have the same bits, and most take no longer; a sum of some may
    be an ulp off.
    """
    is_quick = _compat.settings().get("jax_disable_most_optimizations")
    if device.platform != "cpu" or is_quick:
        return None
    return {"xla_backend_optimization_level": 1}


def _keep(found: Mapping[Any, Any]) -> None:
    """Keeps the executables that were used last."""
    _executables.update(found)
    for key in found:
        _executables.move_to_end(key)
    while len(_executables) > _MOST:
        _executables.popitem(last=False)


def _timed(
    lowered: Any, options: Any, once: Future[Any] | None = None
) -> tuple[Any, float]:
    """What is compiled, after another if it is to be, and in how many seconds."""
    if once:
        once.result()
    start = time.monotonic()
    compiled = lowered.compile(compiler_options=options)
    return compiled, time.monotonic() - start


def on_host(spec: Any) -> bool:
    """Whether a policy keeps an array in the memory of the host."""
    return getattr(spec, "memory_space", None) == jax.memory.Space.Host


def is_below_byte(spec: Any) -> bool:
    """Whether the elements of an array have fewer bits than a byte."""
    return not is_key(spec) and jax.dtypes.itemsize_bits(spec.dtype) < 8


def named(name: str, labels: Sequence[Any]) -> str:
    """A name for profiles; it becomes that of files: a hundred stages are too many."""
    stages = sorted({x.stage for x in labels if not isinstance(x, str)})
    if not stages:
        return name
    listed = "_".join(map(str, stages[:_NAMED]))
    rest = len(stages) - _NAMED
    return f"stage{listed}{f'_and_{rest}_more' if rest > 0 else ''}_{name}"
