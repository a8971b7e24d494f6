"""Rows of a table, measured on the devices that are there.

Where there are fewer devices than stages, neighbouring stages share one: that shows
what partitioning costs. Or such rows are predicted:

    programs of each stage, timed on one device   }
    the schedule                                  }  simulated  ->  samples/s
    bytes between stages by a stated bandwidth    }

Rows are compiled side by side before one is timed.
"""

import gc
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jpipe._jaxprs._jaxpr import nbytes

from .cells.compiled import Way
from .cells.measure import Compiled, initial, measure, prepare, spread
from .cells.predict import Link, Predictor
from .experiment import Experiment, Setting, Work
from .provenance import cores, provenance
from .published import Benchmark
from .result import GIB, MEASURED, Cell, Result

KINDS = ("speed", "memory")
# After so many seconds no other step of a row begins.
SECONDS = 10.0
# "except_last" does not rematerialize the last micro-batch. One of so many is less than
# a hundredth of a step, and half of the programs; and where stages share a device it
# would hold what all of them keep. There all are rematerialized.
MANY = 32


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
      scale: one of `SCALES`.
      dtype: of the arithmetic and of images: one of `DTYPES`.
      steps: how many are timed at most.
      folder: where the results are kept.
      schedule: of all rows but the plain step; empty: GPipe's, as published.
      remat: of all rows but the plain step; empty: as published.
      bandwidth: gigabytes per second between devices that are not there; if it is
        stated, rows of more stages than devices are predicted, and the others too.
      examples: the largest micro-batch that is timed for a prediction.
    """

    scale: str
    dtype: str
    steps: int
    folder: Path
    schedule: str = ""
    remat: str = ""
    bandwidth: float | None = None
    examples: int | None = None

    @property
    def variant(self) -> str:
        """The options that the result's file is named by."""
        dtype = "" if self.dtype == "float32" else self.dtype
        predict = "predict" if self.bandwidth else ""
        words = ("measured", dtype, self.schedule, self.remat, predict)
        return "-".join(filter(None, words))


def run(
    benchmark: Benchmark, names: Iterable[str], options: Options
) -> tuple[Result, list[str]]:
    """Measures rows of a table; saves each as it comes.

    Args:
      benchmark: the table, of one of `KINDS`.
      names: of its rows; one, if it is of memory.
      options: how.

    Returns:
      What the folder now has of the table, and what failed, with the reason.
    """
    devices = _devices(options.scale)
    start, hits = time.monotonic(), _cache_hits()
    rows = _compile(benchmark, names, options, devices)
    took = f"traced and compiled in {time.monotonic() - start:.0f} s"
    took += f", {len(hits)} programs from the cache" if hits else ""
    print(f"{benchmark.name}: {len(rows)} rows {took}", flush=True)
    result = Result(benchmark.name, options.scale, {}, {}, options.variant)
    told: dict[str, Any] = {"steps": options.steps, "took": took}
    if options.bandwidth:
        told |= {"bandwidth": options.bandwidth, "examples": options.examples}
    # Read once: what is saved may be part of what is checked out.
    where = provenance() | {"options": told}
    predictor = Predictor(devices[0], most_examples=options.examples)
    failed = []
    while rows:
        row = rows.pop(0)
        try:
            cells = row.measured_cells(benchmark.kind, options.steps)
            if options.bandwidth:
                cells |= row.predicted_cells(predictor, options.bandwidth)
        except Exception as error:  # the others may still run
            failed.append(f"{benchmark.name}: {row.name}: {advice(error, devices[0])}")
            print(f"  {row.name}: {error!r}"[:400], flush=True)
        else:
            made = replace(result, provenance={row.name: where}, rows={row.name: cells})
            result, _ = made.keep(options.folder)
            print(f"  {row.name}: {_said(cells)}", flush=True)
        del row
        gc.collect()  # its arrays, before those of the next
    return result, failed


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
        found = measure(compiled, self.setting.batch, steps, SECONDS)
        cells = found.cells(compiled, detail)
        if kind == "speed":
            return cells
        return {**self._bytes(before), "compiling": cells["compiling"]}

    def _bytes(self, before: list[int]) -> dict[str, Cell]:
        """The model's, and the most that the allocators had given out."""
        parameters, model = model_of(self.setting.work)
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


def model_of(work: Work) -> tuple[int, int]:
    """The parameters; and the bytes of them, gradients and the optimizer's state."""
    params = [entry.get("params", {}) for entry in initial(work)]
    leaves = jax.tree.leaves(params)
    slots = jax.tree.leaves(jax.eval_shape(work.tx.init, params))
    return sum(leaf.size for leaf in leaves), sum(map(nbytes, 2 * leaves + slots))


def advice(error: Exception, device: Any) -> str:
    """An error; of too little memory what there was and what to type."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return repr(error)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    size = f" of {limit / GIB:.0f} GiB" if limit else ""
    return (
        f"RESOURCE_EXHAUSTED: it needs more than this device{size} has. If programs "
        "were compiled just now, type the same again: XLA's search takes more memory "
        "than steps, and what it compiled is kept. Else add --dtype bfloat16, or "
        "--schedule 1f1b --remat full, or --predict, or choose smaller rows by "
        "--experiment"
    )


def _compile(
    benchmark: Benchmark, names: Iterable[str], options: Options, devices: Sequence[Any]
) -> list[_Row]:
    """Traces and compiles rows, the smallest mini-batch first."""
    rows = []
    with ThreadPoolExecutor(len(benchmark.rows)) as pool:
        for name in names:
            published = benchmark.row(name)
            stages = published.num_stages
            if benchmark.kind == "memory" and stages > len(devices):
                print(f"  {name}: left out: needs {stages} devices, has {len(devices)}")
                continue
            setting = _setting(benchmark, name, options)
            shares = stages > len(devices)
            way = _way(benchmark, published, setting, options, shares)
            compiled = None
            if not (shares and options.bandwidth):
                compiled = _start_compiling(setting, way, devices, pool)
            stage_devices = list(dict.fromkeys(spread(devices, stages)))
            rows.append(_Row(published, setting, way, stage_devices, compiled))
    return sorted(rows, key=lambda row: row.setting.batch)


def _way(
    benchmark: Benchmark,
    row: Experiment,
    setting: Setting,
    options: Options,
    shares: bool,
) -> Way:
    """How a row is run; ``shares``: whether it has more stages than devices."""
    if row.remat == "none":  # the plain step, without a pipeline
        return Way("gpipe", "none")
    remat = options.remat or row.remat
    # What is predicted has a device for each stage.
    is_like_all = setting.microbatches >= MANY or (shares and not options.bandwidth)
    if benchmark.kind == "speed" and is_like_all and remat == "except_last":
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


def _setting(benchmark: Benchmark, name: str, options: Options) -> Setting:
    """A row at a scale, in a dtype."""
    row = benchmark.row(name)
    if options.dtype == "float32":
        return benchmark.setting(row, options.scale)
    dtype = jnp.dtype(options.dtype)
    row = replace(row, options={**row.options, "dtype": dtype})
    setting = benchmark.setting(row, options.scale)
    x = setting.work.x
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.ShapeDtypeStruct(x.shape, dtype)
    return replace(setting, work=replace(setting.work, x=x))


def _devices(scale: str) -> list[Any]:
    """Accelerators, or as many CPU devices as there are cores.

    Raises:
      SystemExit: at full scale on a CPU, where a row takes hours.
    """
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return devices
    if scale == "full":
        raise SystemExit(
            "JAX found no accelerator, and a CPU is too slow for the published size; "
            "type --scale small, or install jax[cuda12]"
        )
    return devices[: cores()]


def _peaks(devices: Sequence[Any]) -> list[int]:
    """The most bytes that each allocator had given out; empty if one does not count."""
    counts = [device.memory_stats() or {} for device in devices]
    key = "peak_bytes_in_use"
    return [stats[key] for stats in counts] if all(key in s for s in counts) else []


def _said(cells: dict[str, Cell]) -> str:
    return ", ".join(
        f"{column} {cell.value:,.5g}{f' {cell.unit}' * (cell.unit != column)}"
        for column, cell in cells.items()
    )
