"""The rows of the matrix: a program each, so that every pair of kinds is in one.

The quick ones alone have every kind; `make test-all` runs the others too.

`_remat.SETTINGS` is read because a remat setting that is added needs a row.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jpipe._partition import _remat

from .models import MODELS


class Row(NamedTuple):
    """A program.

    Attributes:
      api: how the layers are given: as a "list", as one "model", or in a "loss".
      model: a name of `MODELS`.
      balance: layers per stage of a list; of others only their number says something.
      num_microbatches: how many.
      size: the examples of the mini-batch.
      schedule: a name of the catalogue, or "own".
      remat: a name of `REMATS`, or "mixed", which is another one in each stage.
      reduction: as for `jpipe.Pipeline.value_and_grad`.
      has_aux: as for `jpipe.Pipeline.value_and_grad`.
      optimizer: a name of `tests.fuzz.check.OPTIMIZERS`.
      trainable: a name of `TRAINABLE`.
      shards: the devices of each rank, over which examples are spread.
      gather: how parameters are sharded over these.
      dtype: of parameters and arithmetic.
    """

    api: str
    model: str
    balance: list[int]
    num_microbatches: int
    size: int
    schedule: str
    remat: str
    reduction: str
    has_aux: bool
    optimizer: str
    trainable: str
    shards: int
    gather: str | None
    dtype: str


def read(api: str, line: str) -> Row:
    """A row of the table."""
    model, balance, sizes, schedule, remat, loss, *rest = line.split()
    optimizer, trainable, mesh, dtype = [*rest, "f64"][:4]
    number, size = map(int, sizes.split("/"))
    return Row(
        api,
        model,
        [int(count) for count in balance],
        number,
        size,
        schedule,
        remat,
        "microbatch_mean" if loss.startswith("each") else loss.removesuffix("+"),
        loss.endswith("+"),
        optimizer.replace("_", " "),
        trainable,
        int(mesh[0]),
        {"": None, "s": "step", "m": "microbatch"}[mesh[1:]],
        {"f64": "float64", "f32": "float32", "bf16": "bfloat16"}[dtype],
    )


def read_table(table: dict[str, str]) -> list[Row]:
    """The rows of all APIs."""
    rows = []
    for api, lines in table.items():
        rows += [read(api, line) for line in lines.strip().split("\n")]
    return rows


_policies = jax.checkpoint_policies
REMATS: dict[str, Any] = {
    **{name: name for name in _remat.SETTINGS},
    "policy": _policies.dots_with_no_batch_dims_saveable,
    "offload": _policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


def remat_of(row: Row) -> Any:
    """One setting, or one per stage."""
    if row.remat != "mixed":
        return REMATS[row.remat]
    order = ["full", "offload", "none", "min_cut", "except_last", "policy", "dots"]
    return [REMATS[order[stage % 7]] for stage in range(len(row.balance))]


TRAINABLE: dict[str, Callable[[tuple[Any, ...], Any], bool] | None] = {
    "all": None,
    "layers": lambda path, leaf: path[0] % 2 == 0,
    "later": lambda path, leaf: path[0] > 1,
    "vectors": lambda path, leaf: leaf.ndim < 2,
    "kernels": lambda path, leaf: path[-1] == "kernel",
    "lora": lambda path, leaf: str(path[-1]).startswith("lora_"),
}


def own(num_stages: int, num_microbatches: int) -> str:
    """A schedule that the catalogue has not, as a user would write it.

    1F1B with one more forward of warm-up; every other backward is split, and has the
    second half after the next forward; the last rank has the first stage.
    """
    lines = []
    for stage in range(num_stages):
        ahead = min(num_microbatches, num_stages - stage + 1)
        cells = [f"{stage}F{i}" for i in range(ahead)]
        for i in range(num_microbatches):
            is_split = (stage + i) % 2
            cells.append(f"{stage}I{i}" if is_split else f"{stage}B{i}")
            if ahead + i < num_microbatches:
                cells.append(f"{stage}F{ahead + i}")
            if is_split:
                cells.append(f"{stage}W{i}")
        lines.insert(0, " ".join(cells))
    return "\n".join(lines)


# By API: model, layers per stage, micro-batches/examples, schedule, remat, loss (with
# aux: "+"; "each" is "microbatch_mean"), optimizer, what is trained, devices of each
# rank (where parameters are sharded and gathered once in a step: "s", for each
# micro-batch: "m"), and the dtype, if it is not double.
# Each value of a factor is in a quick row, and each pair of values in one of all.
QUICK = {
    "list": """
methods     1222    3/6  zb_v            full        weighted+ clipped_adamw lora    1
nnx         111111  3/12 1f1b_v          dots        mean      adam          vectors 2m
constants   61      4/8  eager_1f1b      mixed       sum       skipping      lora    2
constants   52      3/6  zb_h2           min_cut     weighted  lion          layers  2s
averages    6       4/12 gpipe_last_1f1b offload     weighted  adafactor     vectors 2s
""",
    "model": """
mlp         33      2/4  1f1b            dots        mean      every_other   all 2 f32
mlp         33      2/8  1f1b            except_last each+     every_other   lora 1 bf16
conv_norm   33      2/10 v_half          full        each      lion          later   2
conv_norm   1221    1/2  interleaved     except_last weighted  sgd           all     1
time_major  1131    1/4  interleaved_zb  none        each+     lion          lora    2s
memory      1321    1/1  looped_bfs      min_cut     mean      adam          kernels 1
dropout     1123    4/8  dualpipe_v      offload     each      lion          vectors 2
integers    1141    1/4  gpipe           offload     mean+     lamb          layers  2
""",
    "loss": """
time_major  6       1/2  own             full        each      schedule      lora    1
memory      25      3/6  v_min           except_last each      schedule      all     2
scans       313     1/3  zb_h1           policy      each      momentum      lora    1
""",
}
SLOW = {
    "list": """
child       111111  1/4  v_half          except_last sum+      momentum      all     2s
nnx_norm    13      2/8  zb_v            mixed       weighted+ lion          later   2m
nnx_norm    1111    2/10 zb_h1           min_cut     sum+      skipping      all     2
time_major  111111  3/6  1f1b_v          policy      weighted+ clipped_adamw later   2
nnx_dropout 16      1/4  eager_1f1b      except_last sum+      lamb          later   2s
nnx_dropout 7       4/16 own             dots        sum       skipping      kernels 2s
nnx_dropout 1111111 1/3  zb_h1           none        weighted  every_other   all     1
scans       1111111 4/4  gpipe           mixed       each+     sgd           lora    1
remat       42      4/4  interleaved_zb  min_cut     mean      lamb          lora    1
remat       111111  1/4  1f1b_v          full        each      skipping      all     2s
remat       111111  3/6  own             offload     weighted  schedule      kernels 1
odd         2113    1/2  gpipe           none        weighted  sgd           later   2m
odd         1222    2/3  interleaved     full        sum+      every_other   layers  1
odd         2212    1/6  own             except_last each      momentum      kernels 2
integers    1111111 3/3  own             min_cut     each+     adafactor     later   1
averages    111111  1/4  v_min           dots        sum+      skipping      all     2
averages    24      1/6  own             policy      mean+     lion          all     2m
stopped     4122    4/12 v_min           policy      sum+      adam          kernels 2s
stopped     1611    4/6  own             mixed       sum       momentum      later   1
stopped     63      3/3  interleaved_zb  dots        each+     schedule      layers  1
""",
    "model": """
tied        151     4/10 1f1b            min_cut     sum       every_other   layers  2m
methods     1411    3/3  interleaved     offload     weighted+ adam          lora    1
skips       235     2/6  1f1b            full        mean+     clipped_adamw kernels 2s
isolated    1111111 4/6  zb_h2           none        mean      clipped_adamw kernels 1
tree        1214    4/5  zb_v            except_last mean+     clipped_adamw layers  1
time_major  213     2/4  zb_h1           dots        each+     skipping      all     1
memory      34      2/2  gpipe_last_1f1b mixed       sum+      lion          later   1
dropout     34      2/4  looped_bfs      mixed       mean+     momentum      kernels 2m
dropout     7       3/5  1f1b            policy      sum+      every_other   layers  1
dropout     214     2/6  zb_h1           full        each+     adafactor     all     2m
scans       7       3/6  own             none        sum       schedule      all     2
bare        51      4/8  eager_1f1b      except_last each      clipped_adamw kernels 1
norms       51      1/1  zb_h1           offload     weighted  skipping      layers  1
""",
    "loss": """
equal       17      1/2  zb_h2           mixed       mean+     adafactor     all     2s
conv_norm   42      2/8  interleaved     none        mean+     schedule      later   2s
time_major  1212    4/12 1f1b            offload     sum+      sgd           all     2m
dropout     7       4/5  gpipe_last_1f1b min_cut     mean+     adam          vectors 1
scans       1141    2/6  looped_bfs      dots        weighted+ clipped_adamw lora    2s
integers    7       4/8  zb_h2           except_last weighted+ skipping      all     2m
""",
}
QUICK_ROWS = read_table(QUICK)
SLOW_ROWS = read_table(SLOW)
ROWS = QUICK_ROWS + SLOW_ROWS

# ------------------------------------------------------------------- their kinds

_SCHEDULES = {
    "whole": "gpipe gpipe_last_1f1b 1f1b eager_1f1b",
    "split": "zb_h1 zb_h2",
    "several stages": "interleaved looped_bfs 1f1b_v",
    "several stages, split": "interleaved_zb zb_v v_half v_min dualpipe_v",
    "own": "own",
}
SCHEDULES = {name: kind for kind, s in _SCHEDULES.items() for name in s.split()}
_OPTIMIZERS = {
    "each entry": ["sgd", "momentum", "adam", "schedule", "lion"],
    "norms": ["clipped adamw", "adafactor", "lamb"],
    "now and then": ["skipping", "every other"],
}
OPTIMIZERS = {name: kind for kind, names in _OPTIMIZERS.items() for name in names}


def kinds(row: Row) -> dict[str, set[str]]:
    """Of what kinds a row is, by factor."""
    layers, stages = sum(row.balance), len(row.balance)
    partition = "one stage" if stages == 1 else "parts"
    if stages == layers and row.api == "list":
        partition = "stage per layer"
    uneven = row.size % (row.num_microbatches * row.shards)
    size = "one" if row.num_microbatches == 1 else "uneven" if uneven else "even"
    layers_only = row.trainable in ("layers", "later")
    mesh = f"gather {row.gather}" if row.gather else "shards"
    return {
        "api": {row.api},
        "model": set(MODELS[row.model].traits.split()),
        "partition": {partition},
        "micro-batches": {size},
        "schedule": {SCHEDULES[row.schedule]},
        "remat": {row.remat},
        "reduction": {row.reduction},
        "aux": {"aux" if row.has_aux else "no aux"},
        "optimizer": {OPTIMIZERS[row.optimizer]},
        "trainable": {
            "all" if row.trainable == "all" else "layers" if layers_only else "leaves"
        },
        "mesh": {"one device" if row.shards == 1 else mesh},
    }


# One stage is one program: it has one setting, on one rank. One module, which linen
# applies, has no other layers inside, and is divided elsewhere than between layers.
IMPOSSIBLE = [
    *itertools.product(("model", "loss"), ("nnx", "constants", "stage per layer")),
    ("one stage", "mixed"),
    ("one stage", "several stages"),
    ("one stage", "several stages, split"),
]
