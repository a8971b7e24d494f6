"""Rows of a table, measured on the devices that are there.

Where there are fewer devices than stages, neighbouring stages share one: that shows
what partitioning costs. Or such rows are predicted:

    programs of each stage, timed on one device   }
    the schedule                                  }  simulated  ->  samples/s
    bytes between stages by a stated bandwidth    }

Rows are compiled side by side before one is timed.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jpipe._jaxprs._jaxpr import nbytes

from ..cells.compiled import Way
from ..cells.measure import Compiled, initial, measure, prepare, spread
from ..cells.predict import Link, Predictor
from ..experiment import Experiment, Setting, Work
from ..published import Benchmark
from ..result import GIB, MEASURED, Cell
from .options import Jobs, Options, devices_for

KINDS = ("speed", "memory")
# After so many seconds no other step of a row begins.
SECONDS = 10.0
# "except_last" does not rematerialize the last micro-batch. One of so many is less than
# a hundredth of a step, and half of the programs; and where stages share a device it
# would hold what all of them keep. There all are rematerialized.
MANY = 32


def rows(
    benchmark: Benchmark, names: Sequence[str], options: Options
) -> tuple[str, Jobs]:
    """Compiles rows of a table.

    Args:
      benchmark: the table, of one of `KINDS`.
      names: of its rows; one, if it is of memory.
      options: how.

    Returns:
      How long that took, and what fills the cells of each row.

    Raises:
      SystemExit: at full scale on a CPU, where a row takes hours.
    """
    devices = devices_for(options.scale)
    if not devices:
        raise SystemExit(
            "JAX found no accelerator, and a CPU is too slow for the published size; "
            "type --scale small, or install jax[cuda12]"
        )
    start = time.monotonic()
    hits = _cache_hits()
    compiled = _compile(benchmark, names, options, devices)
    took = f"traced and compiled in {time.monotonic() - start:.0f} s"
    took += f", {len(hits)} programs from the cache" if hits else ""
    return took, _jobs(compiled, benchmark.kind, options, devices[0])


def _jobs(compiled: "list[_Row]", kind: str, options: Options, device: Any) -> Jobs:
    predictor = Predictor(device, most_examples=options.examples or None)
    while compiled:
        row = compiled.pop(0)

        def fill_cells(row: _Row = row) -> dict[str, Cell]:
            cells = row.measured_cells(kind, options.steps)
            if options.predict:
                cells |= row.predicted_cells(predictor, options.bandwidth)
            return cells

        yield row.name, fill_cells
        del row, fill_cells  # with the arrays, before those of the next


@dataclass(frozen=True)
class _Row:
    """A row that is being compiled; ``None`` if it is predicted alone."""

    published: Experiment
    setting: Setting
    way: Way
    devices: list[Any]
    compiled: "Future[Compiled] | None"

    @property
    def name(self) -> str:
        return self.published.name

    def predicted_cells(
        self, predictor: Predictor, bandwidth: float
    ) -> dict[str, Cell]:
        """Cells of as many devices as stages, from times of one."""
        link = Link(1e9 * (self.published.bandwidth or bandwidth))
        prediction = predictor.predict(self.setting, self.way, link)
        return {"predicted samples/s": prediction.cell}

    def measured_cells(self, kind: str, steps: int) -> dict[str, Cell]:
        """Cells of the devices that are there."""
        if self.compiled is None:
            return {}
        compiled = self.compiled.result()
        detail = self.way.detail(self.setting) | {"devices": len(self.devices)}
        before = _peaks(self.devices)
        timed = measure(compiled, self.setting.batch, steps, SECONDS)
        cells = timed.cells(compiled, detail)
        if kind == "speed":
            return cells
        return {**self._bytes(before), "compiling": cells["compiling"]}

    def _bytes(self, before: list[int]) -> dict[str, Cell]:
        """The model's, and the most that the allocators had given out."""
        parameters, model = _model_bytes(self.setting.work)
        cells = {
            "parameters": Cell(parameters, MEASURED),
            "model": Cell(model / GIB, MEASURED, "GiB"),
        }
        after = _peaks(self.devices)
        if not after:
            print(f"  {self.devices[0].platform}: its allocator does not count")
            return cells
        detail = {"bytes of each device": after, "before the steps": before}
        if after == before:
            print("  compiling took as much: run it again, from the cache")
        used = sum(after) / GIB
        cells["memory"] = Cell(used, MEASURED, "GiB", detail=detail)
        cells["activations"] = Cell(used - model / GIB, MEASURED, "GiB")
        return cells


def _model_bytes(work: Work) -> tuple[int, int]:
    """The parameters; and the bytes of them, gradients and the optimizer's state."""
    params = [entry.get("params", {}) for entry in initial(work)]
    leaves = jax.tree.leaves(params)
    slots = jax.tree.leaves(jax.eval_shape(work.tx.init, params))
    return sum(leaf.size for leaf in leaves), sum(map(nbytes, 2 * leaves + slots))


def _compile(
    benchmark: Benchmark, names: Sequence[str], options: Options, devices: Sequence[Any]
) -> list[_Row]:
    """Traces and compiles rows, the smallest mini-batch first."""
    compiled = []
    with ThreadPoolExecutor(len(benchmark.rows)) as pool:
        for name in names:
            row = benchmark.row(name)
            is_sharing = row.num_stages > len(devices)
            if benchmark.kind == "memory" and is_sharing:
                there = f"needs {row.num_stages} devices, has {len(devices)}"
                print(f"  {name}: left out: {there}")
                continue
            setting = _setting(benchmark, row, options)
            way = _way(benchmark, row, setting, options, is_sharing)
            future = None
            if not (is_sharing and options.predict):
                future = _start_compiling(setting, way, devices, pool)
            own = list(dict.fromkeys(spread(devices, row.num_stages)))
            compiled.append(_Row(row, setting, way, own, future))
    return sorted(compiled, key=lambda row: row.setting.batch)


def _setting(benchmark: Benchmark, row: Experiment, options: Options) -> Setting:
    """A row at a scale, in a dtype."""
    if options.dtype == "float32":
        return benchmark.setting(row, options.scale)
    dtype = jnp.dtype(options.dtype)
    row = replace(row, options={**row.options, "dtype": dtype})
    setting = benchmark.setting(row, options.scale)
    x = setting.work.x
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.ShapeDtypeStruct(x.shape, dtype)
    return replace(setting, work=replace(setting.work, x=x))


def _way(
    benchmark: Benchmark,
    row: Experiment,
    setting: Setting,
    options: Options,
    is_sharing: bool,
) -> Way:
    """How a row is run; ``is_sharing``: whether it has more stages than devices."""
    if row.remat == "none":  # the plain step, without a pipeline
        return Way("gpipe", "none")
    remat = options.remat or row.remat
    # What is predicted has a device for each stage.
    is_sharing = is_sharing and not options.predict
    has_one_mode = setting.microbatches >= MANY or is_sharing
    if benchmark.kind == "speed" and has_one_mode and remat == "except_last":
        remat = "full"
    return Way(options.schedule or "gpipe", remat)


def _start_compiling(
    setting: Setting, way: Way, devices: Sequence[Any], pool: ThreadPoolExecutor
) -> "Future[Compiled]":
    try:
        return prepare(setting, way, devices, pool)
    except Exception as error:  # told where its figures would be
        compiled = Future[Compiled]()
        compiled.set_exception(error)
        return compiled


def _cache_hits() -> list[str]:
    """Grows with each program that is found in the cache of an earlier run."""
    hits: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    return hits


def _peaks(devices: Sequence[Any]) -> list[int]:
    """The most bytes that each allocator had given out; empty if one does not count."""
    counts = [device.memory_stats() or {} for device in devices]
    key = "peak_bytes_in_use"
    return [stats[key] for stats in counts] if all(key in s for s in counts) else []
