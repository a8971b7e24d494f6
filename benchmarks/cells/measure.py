"""Cells that are measured: training steps on devices that are there.

A row is traced, then compiled by threads beside the other rows, and only then put on
its devices and timed.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import optax

import jpipe
from jpipe._arguments import _variables

from ..experiment import PyTree, Setting, Work, arrays, random_key
from ..result import MEASURED, Cell
from .compiled import Way

Step = Callable[[], PyTree]


class Compiled(NamedTuple):
    """A row of which every program is compiled and nothing is on a device.

    Attributes:
      start: puts the state and a mini-batch on the devices; the function that it
        returns takes one step, waits for all devices and gives the parameters.
      seconds: of XLA, those of all programs added up.
      programs: their number.
    """

    start: Callable[[], Step]
    seconds: float
    programs: int


class Measurement(NamedTuple):
    """Training steps, timed.

    Attributes:
      seconds: of each step that counts.
      examples: of a mini-batch.
    """

    seconds: tuple[float, ...]
    examples: int

    @property
    def throughput(self) -> float:
        """Examples per second, of the median step."""
        return self.examples / statistics.median(self.seconds)

    @property
    def spread(self) -> float | None:
        """Half the distance between the quartiles of the throughput; none of one."""
        rates = sorted(self.examples / s for s in self.seconds)
        if len(rates) < 2:
            return None
        low, _, high = statistics.quantiles(rates, n=4, method="inclusive")
        return (high - low) / 2

    def cells(self, compiled: Compiled, detail: Mapping[str, Any]) -> dict[str, Cell]:
        """The throughput and the seconds of compiling, with what was run."""
        steps = {**detail, "seconds": self.seconds}
        programs = {**detail, "programs": compiled.programs}
        return {
            "samples/s": Cell(
                self.throughput, MEASURED, "samples/s", self.spread, steps
            ),
            "compiling": Cell(compiled.seconds, MEASURED, "s", detail=programs),
        }


def initial(work: Work) -> PyTree:
    """The initial variables of a model, on the host: where they take no room."""
    return _initial(tuple(work.layers), work.x)


@lru_cache(maxsize=1)  # rows of one table mostly have the same layers
def _initial(layers: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> PyTree:
    one = jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
    return jax.device_get(jpipe.sequential(layers).init(random_key(), one))


def spread(devices: Sequence[Any], stages: int) -> list[Any]:
    """A device for each stage; neighbours share one where there are too few.

    Example:
      >>> spread("ab", 4)
      ['a', 'a', 'b', 'b']
    """
    count = min(len(devices), stages)
    return [devices[stage * count // stages] for stage in range(stages)]


def prepare(
    setting: Setting,
    way: Way,
    devices: Sequence[Any],
    pool: Executor,
) -> "Future[Compiled]":
    """Traces a row now, and compiles it in another thread.

    Args:
      setting: the model, its data and how it is cut.
      way: schedule and remat; ``"none"`` in one stage and one micro-batch is the plain
        jitted step, without a pipeline.
      devices: those that there are.
      pool: its threads compile.
    """
    is_plain = way.remat == "none" and setting.microbatches == len(setting.balance) == 1
    build = _plain if is_plain else _pipeline
    return build(setting, way, spread(devices, len(setting.balance)), pool)


def measure(
    compiled: Compiled, examples: int, steps: int, limit: float = float("inf")
) -> Measurement:
    """Times steps on random numbers, all devices waited for after each.

    Args:
      compiled: the row.
      examples: of its mini-batch.
      steps: how many count at most; one more comes before them.
      limit: no other step begins after so many seconds. A first one of twice as many
        counts: it differs by little, for everything is compiled.
    """
    step = compiled.start()

    def timed() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    first = timed()
    seconds = [first] if first > 2 * limit else []
    while not seconds or (len(seconds) < steps and sum(seconds) < limit):
        seconds.append(timed())
    return Measurement(tuple(seconds), examples)


def _pipeline(
    setting: Setting, way: Way, devices: list[Any], pool: Executor
) -> "Future[Compiled]":
    work, (x, targets) = setting.work, setting.work.specs(setting.batch)
    pipe = way.pipe(setting, devices)
    step = pipe.train_step(work.loss, work.tx)

    variables = initial(work)

    def state() -> Any:
        return pipe.init_train_state(random_key(), x, work.tx, variables=variables)

    def start() -> Step:
        given, batch = state(), _batch(setting, devices)

        def once() -> PyTree:
            nonlocal given
            given, metrics = step(given, *batch)
            return jax.block_until_ready((given, metrics))[0].params

        return once

    def compiled() -> Compiled:
        report = step.compile(specs, x, targets)
        seconds = sum(program.seconds for program in report.programs)
        return Compiled(start, seconds, len(report.programs))

    specs = _specs(state())
    # The interpreter traces one row at a time, while XLA compiles those before.
    step._program(specs, x, targets)
    return pool.submit(compiled)


def _plain(
    setting: Setting, way: Way, devices: list[Any], pool: Executor
) -> "Future[Compiled]":
    work, batch = setting.work, setting.work.specs(setting.batch)
    pipe = jpipe.sequential(work.layers, devices=devices)
    model, variables = pipe._pipelined_model.model, initial(work)

    def step(carry: Any, x: Any, targets: Any) -> Any:
        params, rest, opt_state, key = carry
        key, now = jax.random.split(key)

        def loss(params: Any) -> Any:
            given = _variables.merge(params, rest)
            y, changed = model.apply_mutable(given, x, now, train=True)
            return work.loss(y, targets), changed

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = work.tx.update(grads, opt_state, params)
        merged = tuple({**a, **b} for a, b in zip(rest, changed, strict=True))
        return (optax.apply_updates(params, updates), merged, opt_state, key), value

    def state() -> Any:
        made = pipe.init_train_state(
            random_key(), batch[0], work.tx, variables=variables
        )
        return made.params, made.model_state, made.opt_state, random_key(1)

    def start(run: Any) -> Step:
        carry, made = state(), _batch(setting, devices)

        def once() -> PyTree:
            nonlocal carry
            carry, value = run(carry, *made)
            return jax.block_until_ready((carry, value))[0][0]

        return once

    lowered = jax.jit(step, donate_argnums=0).lower(_specs(state()), *batch)

    def compiled() -> Compiled:
        begin = time.perf_counter()
        run = lowered.compile()
        return Compiled(partial(start, run), time.perf_counter() - begin, 1)

    return pool.submit(compiled)


def _specs(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def _batch(setting: Setting, devices: Sequence[Any]) -> tuple[PyTree, PyTree]:
    """The input where the first stage is, the targets where the last is."""
    made = arrays(setting, devices[0], devices[-1])
    return jax.block_until_ready(made)
