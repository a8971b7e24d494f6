"""Random programs, as text that a reader can paste.

`_remat.SETTINGS` is read because a remat setting that is added is to be drawn too.
"""

import random
from collections import Counter
from typing import Any, NamedTuple

import hypothesis.strategies as st

from jpipe._partition import _remat
from jpipe.schedules import BY_NAME, Schedule, ScheduleError

from ..schedules.orders import any_rows
from . import check

# Which parameters are trained, where the library lets one choose.
TRAINABLE = [
    None,
    "lambda path, leaf: path[0] > 0",
    "lambda path, leaf: path[0] % 2 == 0",
    "lambda path, leaf: leaf.ndim < 2",
    "lambda path, leaf: path[-1] == 'kernel'",
]

HEADER = """\
import tests.conftest  # eight CPU devices
from tests.fuzz.check import *

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)
"""


class Program:
    """The text of a call of `check.check`, which it prints as."""

    def __init__(self, text: str) -> None:
        self.text = text

    def run(self) -> None:
        """Does what a reader would, in the precision that is set."""
        exec(self.text, {name: getattr(check, name) for name in check.__all__})

    def __repr__(self) -> str:
        return f"\n{HEADER}{self.text}"


class Shape(NamedTuple):
    """What a layer is given: a tree or an array, its axes between, its width."""

    tree: bool
    axes: int
    width: int


class Choice(NamedTuple):
    """A layer that may come next.

    Attributes:
      text: the layer.
      after: what it gives.
      trait: words. "norm": gradients through it may be nothing but rounding errors;
        "kink": its derivative has steps; "batch": in training it looks at all
        examples; "random": in training it draws; "constants": it holds some.
      skip: 1 if it stashes, -1 if it pops.
    """

    text: str
    after: Shape
    trait: str = ""
    skip: int = 0


def _of_arrays(shape: Shape) -> list[Choice]:
    _, axes, width = shape
    wide = shape._replace(width=3)
    found = [
        Choice("dense(3, dtype)", wide),
        Choice("dense(2, dtype)", shape._replace(width=2)),
        Choice("jnp.tanh", shape),
        Choice("nn.relu", shape, "kink"),
        Choice("Block(dtype)", shape),
        Choice("nn.remat(Block, static_argnums=2)(dtype)", shape),
        Choice("Block(dtype, 0.5)", shape, "random"),
        Choice("nn.Dropout(0.5)", shape, "random"),
        Choice("noise", shape, "random"),
        Choice("Scanned(dtype)", shape),
        Choice("Odd(dtype)", wide),
        Choice("Averages(dtype)", shape, "batch"),
        Choice("batch_norm(dtype)", shape, "batch norm"),
        Choice(f"nnx_batch_norm({width}, dtype)", shape, "batch norm"),
        Choice(f"nnx_linear({width}, 3, dtype)", wide),
        Choice(f"NnxBlock({width}, dtype)", shape),
        Choice(f"NnxBlock({width}, dtype, 0.5)", shape, "random"),
        Choice("scale(dtype)", shape, "constants"),
        Choice("in_ref", shape),
        Choice("wrap", shape._replace(tree=True)),
    ]
    if width == 3:
        found.append(Choice("layer_norm(dtype)", shape, "norm"))
        found.append(Choice("Table(dtype)", shape._replace(width=2)))
    if axes:
        found.append(Choice("group_norm(dtype)", shape, "norm"))
        found.append(Choice(f"conv({axes}, dtype)", wide))
        found.append(Choice("join", Shape(False, 0, 3)))
    return found


@st.composite
def scans(draw: st.DrawFn, shape: Shape) -> Choice:
    """Blocks that are scanned, in any way in which they can be."""
    length = draw(st.integers(2, 5))
    axis = draw(st.integers(0, 1))
    reverse = draw(st.booleans())
    remat = draw(st.booleans())
    rate = draw(st.sampled_from([0.0, 0.0, 0.5]))
    options = f"{axis=}, {reverse=}, {remat=}, {rate=}"
    trait = "random" if rate else ""
    return Choice(f"Layers(dtype, {length}, {options})", shape, trait)


def _of_trees(shape: Shape) -> list[Choice]:
    return [
        Choice("masked", shape),
        Choice("hold", shape),
        Choice("use_held", shape),
        Choice("in_ref", shape),
        Choice("Fill(dtype)", shape),
        Choice("Around(dense(3, dtype))", shape._replace(width=3)),
        Choice("Around(Block(dtype, 0.5))", shape, "random"),
        Choice("unwrap", shape._replace(tree=False)),
    ]


class Model(NamedTuple):
    """The parts of a model's text, and how often what is in it."""

    names: dict[str, str]
    layers: list[str]
    traits: Counter[str]
    batch: str


@st.composite
def models(draw: st.DrawFn, dtype: str, size: int, api: str) -> Model:
    """Layers that fit on each other, some of them twice."""
    begin = draw(st.sampled_from(sorted(_BEGIN)))
    batch, shape, listed = _BEGIN[begin]
    names = {"embedding": "embed(dtype)"} if begin == "tokens" else {}
    layers, traits = list(listed), Counter[str]()
    # What may come again: its name, and what it is given and gives.
    tied: list[tuple[str, Shape, Choice]] = []
    skips: list[tuple[str, bool]] = []
    for number in range(draw(st.integers(0 if layers else 1, 6))):
        choices = (_of_trees if shape.tree else _of_arrays)(shape)
        choices += [
            Choice(text, shape) for text in ("same", "stop", "forget", "unread")
        ]
        choices += _of_skips(shape, skips, number)
        again = [choice for _, given, choice in tied if given == shape]
        if again and draw(st.booleans()):
            choices = again
        elif not shape.tree and draw(st.integers(0, 8 if api == "list" else 2)) == 2:
            choices = [draw(scans(shape))]  # those of a list are not divided
        choices = [c for c in choices if _allowed(c, dtype, api)]
        choice = draw(st.sampled_from(choices))
        text = choice.text
        if choice.skip:
            _note_skip(choice, skips, number)
        elif choice not in again and "(" in text and draw(st.integers(0, 2)) == 0:
            name = f"tied_{len(names)}"
            if not {"batch", "random", "constants"} & set(choice.trait.split()):
                names[name] = text
                tied += _uses(name, text, shape, choice)
                text = name
        layers.append(text)
        traits.update(choice.trait.split())
        shape = choice.after
    for name, isolated in reversed(skips):
        layers.append(_isolated("add('skip')", name) if isolated else f"add({name!r})")
    if begin == "tokens" and not shape.tree and shape.width == 3:
        layers += draw(st.sampled_from([[], ["jpipe.layer(embedding, 'attend')"]]))
    for name in list(names):
        if sum(name in text for text in layers) == 1:  # it has no need of a name
            own = names.pop(name)
            layers = [text.replace(name, own) for text in layers]
    return Model(names, layers, traits, batch.format(size=size))


# The batch, what its first layers give, and these.
_BEGIN: dict[str, tuple[str, Shape, list[str]]] = {
    "floats": ("floats({size}, 0, dtype)", Shape(False, 0, 3), []),
    "rows": ("floats({size}, 1, dtype)", Shape(False, 1, 3), []),
    "images": ("floats({size}, 2, dtype)", Shape(False, 2, 3), []),
    "tokens": ("tokens({size}, dtype)", Shape(False, 1, 3), ["embedding"]),
    "tree": ("tree({size}, dtype)", Shape(True, 1, 3), []),
    "time": ("time_major({size}, dtype)", Shape(False, 1, 3), ["batch_first"]),
    "memory": ("with_memory({size}, dtype)", Shape(False, 1, 3), ["attend"]),
}


def _allowed(choice: Choice, dtype: str, api: str) -> bool:
    # One module of linen holds linen alone.
    if api != "list" and choice.text.startswith(("nnx_", "Nnx", "scale")):
        return False
    # In low precision a step, or a division by what is almost zero, is another number.
    return dtype == "float64" or not {"norm", "kink"} & set(choice.trait.split())


def _uses(
    name: str, text: str, shape: Shape, choice: Choice
) -> list[tuple[str, Shape, Choice]]:
    """In which ways a module may be listed again."""
    found = [(name, shape, choice._replace(text=name))]
    found.append((name, shape, choice._replace(text=f"jpipe.layer({name})")))
    if text.startswith("Table"):
        back = Choice(f"jpipe.layer({name}, 'back')", shape)
        found.append((name, choice.after, back))
    found.append((name, shape, choice._replace(text=_isolated(name, "other"))))
    # Around gives the array of a tree alone, and no switch that is static; by hand it
    # is known around one module.
    if not text.lower().startswith(("nnx", "nn.remat", "fill", "around")):
        for tree in (False, True):
            around = choice._replace(
                text=f"Around({name})", after=choice.after._replace(tree=tree)
            )
            found.append((name, shape._replace(tree=tree), around))
    return found


def _isolated(text: str, namespace: str) -> str:
    return f"jpipe.isolate({text}, {namespace!r})"


def _of_skips(shape: Shape, skips: list[tuple[str, bool]], number: int) -> list[Choice]:
    """Stashes under new names, and pops of any that is open."""
    name = f"s{number}"
    found = [
        Choice(f"keep({name!r})", shape, skip=1),
        Choice(_isolated("keep('skip')", name), shape, skip=1),
    ]
    if not shape.tree:
        wide = shape._replace(width=3)
        found.append(Choice(f"Keep({name!r}, dtype)", wide, skip=1))
    for open_name, isolated in skips:
        text = (
            _isolated("add('skip')", open_name) if isolated else f"add({open_name!r})"
        )
        found += [Choice(text, shape, skip=-1)] * 2
    return found


def _note_skip(choice: Choice, skips: list[tuple[str, bool]], number: int) -> None:
    if choice.skip > 0:
        skips.append((f"s{number}", "isolate" in choice.text))
    else:
        skips[:] = [(name, how) for name, how in skips if repr(name) not in choice.text]


REMATS = [repr(name) for name in _remat.SETTINGS]
REMATS += [
    f"jax.checkpoint_policies.{policy}"
    for policy in (
        "dots_with_no_batch_dims_saveable",
        "everything_saveable",
        "nothing_saveable",
        "offload_dot_with_no_batch_dims('device', 'pinned_host')",
    )
]


def fitting(num_stages: int, num_microbatches: int) -> list[str]:
    """The names of schedules that there are for such numbers."""
    found = []
    for name, build in BY_NAME.items():
        for num_ranks in range(num_stages, 0, -1):
            try:
                schedule = build(num_ranks, num_microbatches)
            except ScheduleError:
                continue
            if schedule.num_stages == num_stages and not schedule.forward_only:
                found.append(name)
                break
    return found


@st.composite
def orders(draw: st.DrawFn, num_stages: int, num_microbatches: int) -> str:
    """Any valid schedule: stages on any ranks, backwards whole or split, any order."""
    chance = random.Random(draw(st.integers(0, 2**16), label="seed of the order"))
    num_ranks = chance.randint(1, num_stages)
    placement = [*range(num_ranks), *chance.choices(range(num_ranks), k=num_stages)]
    placement = placement[:num_stages]
    chance.shuffle(placement)
    rows = any_rows(chance, placement, num_microbatches)
    return "\n".join(" ".join(map(str, row)) for row in rows)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any program: its model, its cut, its schedule, its loss, its optimizer."""
    dtype = draw(st.sampled_from(["float64"] * 8 + ["float32", "bfloat16"]))
    number = draw(st.integers(1, 4))
    api = draw(st.sampled_from(["list", "list", "model", "loss"]))
    shards = draw(st.sampled_from([1, 1, 1, 2])) if api == "list" else 1
    size = (number + draw(st.integers(0, 5))) * shards
    model = draw(models(dtype, size, api))
    balance = _balance(draw, len(model.layers))
    stages = len(balance)
    schedule = draw(st.sampled_from(fitting(stages, number)) | orders(stages, number))
    order = schedule if schedule in BY_NAME else Schedule.from_text(schedule)
    ranks = stages if isinstance(order, str) else order.num_ranks
    devices = draw(st.lists(st.integers(0, 7), min_size=ranks, max_size=ranks))
    shards = 1 if shards * ranks > 8 else shards
    one_remat = st.sampled_from(REMATS)
    remat = draw(
        one_remat
        | st.lists(one_remat, min_size=stages, max_size=stages).map(
            lambda settings: f"[{', '.join(settings)}]"
        )
    )
    exact = dtype == "float64" and not model.traits.keys() & {"norm", "random"}
    optimizers = list(check.OPTIMIZERS)[: None if exact else -3]
    by_hand = "microbatches" if "batch" in model.traits else "whole"
    if "random" in model.traits or dtype == "bfloat16":
        by_hand = "nothing"
    settings = {
        "balance": balance,
        "devices": devices,
        "schedule": schedule,
        "reduction": draw(st.sampled_from(["mean", "sum", "weighted"])),
        "has_aux": draw(st.booleans()),
        "optimizer": draw(st.sampled_from(optimizers)),
        "by_hand": by_hand,
        "rough": max(model.traits["norm"], int(dtype == "bfloat16")),
        "shards": shards,
        "gather": draw(st.sampled_from([None, "step", "microbatch"])),
        "api": api,
    }
    if api == "loss":
        settings["penalty"] = draw(st.sampled_from([None, *check.PENALTIES]))
    trainable = draw(st.sampled_from(TRAINABLE * 2 + [None] * 4))
    return Program(_text(dtype, model, number, remat, trainable, settings))


def _balance(draw: st.DrawFn, count: int) -> list[int]:
    cuts = draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))
    balance = [1]
    for cut in cuts:
        if cut:
            balance.append(1)
        else:
            balance[-1] += 1
    return balance


def _text(
    dtype: str,
    model: Model,
    number: int,
    remat: str,
    trainable: str | None,
    settings: dict[str, Any],
) -> str:
    lines = [f"dtype = jnp.{dtype}"]
    lines += [f"{name} = {text}" for name, text in model.names.items()]
    lines += ["check(", "    ["]
    lines += [f"        {text}," for text in model.layers]
    lines += ["    ],", f"    {model.batch},", f"    {number},", f"    remat={remat},"]
    lines += [f"    trainable={trainable},"] if trainable else []
    for name, value in settings.items():
        if isinstance(value, str) and "\n" in value:
            rows = "\n".join(f"        {row}" for row in value.split("\n"))
            lines.append(f'    {name}="""\n{rows}\n    """,')
        else:
            lines.append(f"    {name}={value!r},")
    return "\n".join([*lines, ")\n"])
