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
from .._jaxprs import _jaxpr, _nan_location, _sharding_constraints
from .._jaxprs._computation import Computation
from .._jaxprs._explicit_dtypes import are_narrowed, in_32_bits, keep_dtypes, make_jaxpr
from .._jaxprs._host_memory import is_on_host
from .._processes._arrays import is_key
from ._garbage_collector import pause_collector
from ._progress import Progress
from ._sharding import WHOLE, Sharding, StageMesh
from ._transfer import Device, array_spec, jax_sharding

# To a type checker it has no attributes.
_config: Any = jax.config

_NAME = re.compile(r"module @\S+")
# A call of Python in the text of a module.
_CALLBACK = re.compile(r"custom_call @\w*callback")
# An executable that several stages share lists so many of them in its name.
_MOST_STAGES_IN_NAME = 4


@dataclass(eq=False)
class PlacedExecutable:
    """A computation with all that XLA needs to compile it for one place.

    Attributes:
      function: the computation.
      arguments: the specs of its arguments.
      live_results: the positions of the results that somebody reads.
      donated: the positions of the arguments whose memory the results take over.
      device: the device of the place.
      argument_places: the place of each argument; less than zero: none yet.
      name: the name in profiles.
      mapped: True if each shard of the place calls it by itself.
      argument_shardings: the sharding of each argument, in a place of several devices.
      result_shardings: the sharding of each result, likewise.
      run: ``(*leaves) -> leaves``, compiled or not.
      seconds: the time that XLA took; zero if it is not compiled, or was before.
    """

    function: Computation
    arguments: Sequence[Any]
    live_results: Sequence[int]
    donated: Sequence[int]
    device: Device
    argument_places: Sequence[int]
    name: str
    mapped: bool = False
    argument_shardings: Sequence[Sharding] = ()
    result_shardings: Sequence[Sharding] = ()

    def __post_init__(self) -> None:
        live_results = self.live_results
        compute = self.function.run
        if self.function.has_constraints:
            compute = self._constrained()

        def run(*leaves: Any) -> Any:
            results = compute(*leaves)
            return tuple([results[i] for i in live_results])

        if isinstance(self.device, StageMesh) and self.mapped:
            run = self.device.mapped(run, self.argument_shardings)
        if are_narrowed(self.arguments):
            run = in_32_bits(run)
        run.__name__ = self.name
        self.run: Any = jax.jit(
            run,
            donate_argnums=tuple(self.donated),
            # All arguments are then in the text by which executables are looked up.
            keep_unused=True,
            out_shardings=self._out_shardings(),
        )
        self.seconds = 0.0

    def _out_shardings(self) -> Any:
        """The shardings of the live results as JAX calls them; ``None``: XLA's."""
        # Without arguments in a place it would run on the default device.
        is_nowhere = all(place < 0 for place in self.argument_places)
        if not (isinstance(self.device, StageMesh) or is_nowhere):
            return None
        shardings = self.result_shardings or [WHOLE] * len(self.function.results)
        return tuple(jax_sharding(self.device, shardings[i]) for i in self.live_results)

    def _constrained(self) -> Callable[..., Sequence[Any]]:
        """The function, with the constraints of a user's program as they hold here."""

        def constrain(array: Any, spec: Any) -> Any:
            if isinstance(self.device, StageMesh):
                array = self.device.constrained(array, spec, mapped=self.mapped)
            # An argument that is a result by itself would not be copied.
            return checkpoint_name(array, "constrained")

        closed = make_jaxpr(self.function.run)(*map(_jaxpr.spec, self.arguments))
        return lambda *leaves: _sharding_constraints.evaluate(closed, leaves, constrain)

    @property
    def is_compiled_ahead(self) -> bool:
        """True if it is compiled before it is called.

        An argument that is in no place, or in the memory of the host, may have another
        sharding in each call. Of elements smaller than a byte, such as int4, JAX says
        "compiled for input layouts that disagree" where it was compiled ahead. Nothing
        is compiled under `jax.disable_jit`; and where NaNs are looked for, `jax.jit`
        finds the operation.
        """
        specs = [*self.arguments, *self.function.results]
        is_placed = all(place >= 0 for place in self.argument_places)
        is_plain = not any(is_on_host(spec) or is_below_byte(spec) for spec in specs)
        return is_placed and is_plain and may_compile_ahead()

    @property
    def signature(self) -> Hashable:
        """A key that is equal for executables that differ by their devices alone."""
        mesh = self.device if isinstance(self.device, StageMesh) else None
        return (
            self.function,
            mesh,
            self.mapped,
            tuple(self.live_results),
            tuple(self.donated),
            tuple(self.argument_shardings),
            tuple(self.result_shardings),
            tuple((x.shape, x.dtype, x.weak_type) for x in self.arguments),
        )

    def trace(self) -> Any:
        """Traces it for XLA."""
        shardings = self.argument_shardings or [WHOLE] * len(self.arguments)
        pairs = zip(self.arguments, shardings, strict=True)
        specs = [array_spec(spec, self.device, sharding) for spec, sharding in pairs]
        with keep_dtypes(specs):
            return self.run.trace(*specs)

    @property
    def flops(self) -> float | None:
        """The FLOPs of a call; ``None`` if it is not compiled or XLA reports none."""
        analysis = getattr(self.run, "cost_analysis", dict)()
        return (analysis or {}).get("flops")

    @property
    def workspace_bytes(self) -> int | None:
        """The bytes that it needs while it runs, likewise."""
        analysis = getattr(self.run, "memory_analysis", lambda: None)()
        return getattr(analysis, "temp_size_in_bytes", None)


def may_compile_ahead() -> bool:
    """True if anything is compiled before it is called, under the settings of JAX."""
    return not (_config.jax_disable_jit or _nan_location.is_checking())


def _module_key(traced: Any, lowered: Any, options: Any) -> Any:
    """A key that is equal for modules of XLA that are equal but for their device.

    The text of a module has its operations, memory layouts and donation. It has no
    Python function that is called and no `jax.Ref` that is read: a module with these,
    as one with any effect, is equal to no other. The text does not tell keys and weakly
    typed arrays from the numbers that they hold, so avals are compared too.
    """
    # Without its name: equal stages have different names.
    text = _NAME.sub("module", lowered.as_text(), count=1)
    calls_python = _CALLBACK.search(text) or _jaxpr.contains(
        traced.jaxpr, "pure_callback"
    )
    if calls_python or traced.jaxpr.effects:
        return object()

    avals = [*traced.jaxpr.in_avals, *traced.jaxpr.out_avals]
    settings = sorted(_compat.settings().items())
    return (
        hashlib.sha256(text.encode()).digest(),
        tuple((x.shape, x.dtype, x.weak_type) for x in avals),
        lowered.in_tree,
        repr(settings),
        repr(options),
    )


# module key -> device -> what XLA compiled, so that a cell of a notebook that makes the
# same pipeline or the same step again compiles nothing. None belongs to a pipeline.
_cache: "OrderedDict[Any, dict[Device, Any]]" = OrderedDict()
# XLA for CPU maps memory about a hundred times for each executable, and Linux lets a
# process do that 65,530 times: beyond, LLVM aborts it.
_MAX_CACHED = 256


# What XLA compiled, and how many seconds it took.
Compilation = tuple[Any, float]


@dataclass
class Executable:
    """A compiled function of XLA, or a function that computes the same.

    A `PlacedExecutable` is what it is compiled from; those of one device whose modules
    are equal share one.

    Attributes:
      run: the function; ``None`` until `compile_side_by_side` is over.
      seconds: the time that XLA took; zero if it was compiled before.
    """

    run: Any = None
    seconds: float = 0.0


@contextmanager
def compile_side_by_side() -> Iterator[Callable[..., Executable]]:
    """A scope in which functions are compiled side by side.

    XLA compiles without the interpreter's lock: while some are compiled the next ones
    are traced, in the thread of the caller, as a `with` block around it, such as
    `jax.default_matmul_precision`, does not reach other threads.

    Yields:
      A function ``(trace, device, options, signature) -> executable`` that starts to
      compile what ``trace`` returns, unless that was compiled before. Of functions of
      one signature, which differ by their devices alone, one is traced and lowered
      where that suffices.
    """
    # signature -> module key
    module_keys: dict[Hashable, Any] = {}
    # (module key, device) -> executable
    executables: dict[Any, Executable] = {}
    # compilation that was started -> the executable that receives its result
    running: dict[Future[Compilation], Executable] = {}
    # module key -> the device for which it is compiled first, and that compilation
    first: dict[Any, tuple[Device, Future[Compilation]]] = {}

    # Loaders wait for compilers, so they are other threads.
    compilers = ThreadPoolExecutor(os.cpu_count() or 1)
    loaders = ThreadPoolExecutor(os.cpu_count() or 1)

    @pause_collector()
    def add(
        trace: Callable[[], Any],
        device: Device,
        options: Any = None,
        signature: Hashable = None,
    ) -> Executable:
        lowered = None
        module_key = module_keys.get(signature)
        if module_key is None:
            traced = trace()
            lowered = traced.lower()
            module_key = _module_key(traced, lowered, options)
            if signature is not None and isinstance(module_key, tuple):
                module_keys[signature] = module_key

        key = module_key, device
        if key in executables:
            return executables[key]
        compiled_before = _cache.get(module_key, {})
        executable = executables[key] = Executable(compiled_before.get(device))
        if device in compiled_before:
            return executable

        for source, compiled in compiled_before.items():
            if module_key not in first and _can_load(source, device):
                first[module_key] = source, _finished(compiled)
        source, compilation = first.get(module_key, (device, None))
        if compilation and _can_load(source, device):
            future = loaders.submit(_load, compilation, device)
        elif compilation and _can_read(source, device):
            lowered = lowered or trace().lower()
            future = loaders.submit(_compile, lowered, options, after=compilation)
        else:
            lowered = lowered or trace().lower()
            future = compilers.submit(_compile, lowered, options)
            first.setdefault(module_key, (device, future))
        running[future] = executable
        return executable

    with Progress("programs compiled") as progress, compilers, loaders:
        try:
            yield add
            for done, future in enumerate(as_completed(running), start=1):
                future.result()
                progress.show(done, len(executables))
        finally:
            # After an error, what has not started is not compiled any more, and what
            # has been compiled is kept.
            for pool in (compilers, loaders):
                pool.shutdown(cancel_futures=True)
            for future, executable in running.items():
                if not (future.cancelled() or future.exception()):
                    executable.run, executable.seconds = future.result()
            _keep_in_cache({key: x.run for key, x in executables.items() if x.run})


def _can_load(source: Device, device: Device) -> bool:
    """True if an executable of one device can be loaded for another."""
    if isinstance(source, StageMesh) or isinstance(device, StageMesh):
        return False
    # An executable that JAX has read from a directory cannot.
    is_read = _config.jax_compilation_cache_dir
    return not is_read and _compat.can_load(source, device)


def _can_read(source: Device, device: Device) -> bool:
    """True if JAX finds an executable of one device in its directory for another.

    The key under which it is there has the device on CPU; on GPUs it has not.
    """
    platforms = [getattr(x, "platform", None) for x in (source, device)]
    return bool(_config.jax_compilation_cache_dir) and platforms == ["gpu", "gpu"]


def _finished(compiled: Any) -> Future[Compilation]:
    """The compilation of what was compiled before."""
    compilation: Future[Compilation] = Future()
    compilation.set_result((compiled, 0.0))
    return compilation


def _load(compilation: Future[Compilation], device: Device) -> Compilation:
    """Loads the executable of another device for this one."""
    compiled, _ = compilation.result()
    start = time.monotonic()
    with suppress(Exception):  # then `jax.jit` compiles it when it is called
        return _compat.load_for_device(compiled, device), time.monotonic() - start
    return None, 0.0


def _compile(
    lowered: Any, options: Any, after: Future[Compilation] | None = None
) -> Compilation:
    """Compiles a module, after another compilation if there is one to wait for."""
    if after:
        after.result()
    start = time.monotonic()
    compiled = lowered.compile(compiler_options=options)
    return compiled, time.monotonic() - start


def compile_all(executables: Iterable[PlacedExecutable]) -> None:
    """Compiles executables side by side."""
    pairs: list[tuple[PlacedExecutable, Executable]] = []
    with compile_side_by_side() as add:
        for placed in executables:
            if placed.is_compiled_ahead:
                executable = add(
                    placed.trace, placed.device, signature=placed.signature
                )
                pairs.append((placed, executable))
    for placed, executable in pairs:
        placed.run = executable.run or placed.run
        # The first of those that share an executable took the time.
        placed.seconds = executable.seconds
        executable.seconds = 0.0


def drawing_options(device: Device) -> dict[str, Any] | None:
    """The options of XLA for functions that draw once; ``None``: the default.

    XLA for CPU optimizes that for seconds. With fewer optimizations the draws of
    `jax.nn.initializers` have the same bits, and most take no longer; a sum of some may
    be an ulp off.
    """
    is_quick = _compat.settings().get("jax_disable_most_optimizations")
    if device.platform != "cpu" or is_quick:
        return None
    return {"xla_backend_optimization_level": 1}


def _keep_in_cache(entries: Mapping[Any, Any]) -> None:
    """Adds ``(module key, device) -> executable`` to the cache; drops the oldest ones.

    All executables of a module are as old as the newest of them.
    """
    for (module_key, device), compiled in entries.items():
        _cache.setdefault(module_key, {})[device] = compiled
        _cache.move_to_end(module_key)
    while sum(map(len, _cache.values())) > _MAX_CACHED:
        _cache.popitem(last=False)


def is_below_byte(spec: Any) -> bool:
    """True if the elements of an array have fewer bits than a byte."""
    return not is_key(spec) and jax.dtypes.itemsize_bits(spec.dtype) < 8


def executable_name(name: str, labels: Sequence[Any]) -> str:
    """The name of an executable in profiles: its stages and the name of its function.

    It becomes the name of files, so it does not list a hundred stages.
    """
    stages = sorted({x.stage for x in labels if not isinstance(x, str)})
    if not stages:
        return name
    listed = "_".join(map(str, stages[:_MOST_STAGES_IN_NAME]))
    num_more = len(stages) - _MOST_STAGES_IN_NAME
    if num_more > 0:
        listed += f"_and_{num_more}_more"
    return f"stage{listed}_{name}"
