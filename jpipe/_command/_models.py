"""Commands about models: plan how to run one, profile its layers."""

import argparse
import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import draw
from . import _factory, _files
from ._arguments import count, duration, several, size
from ._refusal import CommandError

# Options: how they are read, the keyword of the library, and what is explained.
_PLAN = {
    "--devices": (count, "num_devices", "N", "default: those of this machine"),
    "--memory": (size, "memory_limit", "BYTES", "of each device, such as 16GiB"),
    "--bandwidth": (size, "bandwidth", "BYTES", "per second, such as 50GB"),
    "--latency": (duration, "latency", "TIME", "of a transfer, such as 5us"),
    "--microbatches": (several(count), "num_microbatches", "M,M", "such as 8,16"),
    "--data": (several(count), "data", "D,D", "devices of each stage, such as 1,2"),
    "--schedule": (several(str), "schedules", "NAME,NAME", "such as 1f1b,zb_h1"),
    "--remat": (several(str), "remat", "MODE,MODE", "default: min_cut,full"),
}
_PROFILE = {
    "--microbatches": (count, "num_microbatches", "M", "default: 1"),
}
_RATES = {
    "--flops": (float, "peak_flops", "RATE", "for --estimate, such as 1e14"),
    "--memory-bandwidth": (size, "memory_bandwidth", "BYTES", "likewise, such as 1TB"),
    "--action": (duration, "action_seconds", "TIME", "likewise, such as 20us"),
}


def add_plan(commands: Any) -> None:
    """Adds ``plan`` to the commands."""
    text = "show how to cut a model, how many micro-batches, which schedule, and why"
    group = _add(commands, "plan", text, _PLAN, _plan, "json", "svg")
    what = "what profile --json wrote"
    group.add_argument("--profile", type=Path, metavar="FILE", help=what)


def add_profile(commands: Any) -> None:
    """Adds ``profile`` to the commands."""
    text = "show what each layer of a model takes and keeps"
    _add(commands, "profile", text, _PROFILE, _profile, "json")


def _add(
    commands: Any, name: str, text: str, options: Any, run: Any, *files: str
) -> Any:
    """Adds a command; returns the group of options that say where times are from."""
    command = commands.add_parser(
        name,
        help=text,
        description=f"{text.capitalize()}. Options are keywords of jpipe.{name}, which "
        f"python -c 'import jpipe; help(jpipe.{name})' explains.",
    )
    command.add_argument(
        "factory",
        metavar="module:factory",
        help="or file.py:factory: a function without arguments that returns (layers, "
        "sample), (layers, sample, optimizer), or a dict of layers, sample, optimizer, "
        "loss, targets; the sample is of a whole mini-batch",
    )
    times = command.add_mutually_exclusive_group()
    times.add_argument(
        "--estimate",
        action="store_true",
        help="take the times of layers from their operations: nothing is run",
    )
    for option, (read, keyword, metavar, what) in (options | _RATES).items():
        command.add_argument(
            option, type=read, dest=keyword, metavar=metavar, help=what
        )
    _files.add(command, *files)
    command.set_defaults(run=run)
    return times


def _given(arguments: argparse.Namespace, options: Any) -> dict[str, Any]:
    """What was typed, as the library calls it."""
    found: dict[str, Any] = {}
    for option, (_, keyword, *_) in (options | _RATES).items():
        if (value := getattr(arguments, keyword)) is not None:
            found[keyword] = value
            if option in _RATES and not arguments.estimate:
                raise CommandError(f"{option} is for an estimate: give --estimate too")
    return found | {"measure": False} if arguments.estimate else found


def _plan(arguments: argparse.Namespace) -> int:
    options = _given(arguments, _PLAN)
    # No other command needs JAX.
    import optax

    from ..planning._decide import plan
    from ..planning._profile import Profile

    if arguments.profile is not None:
        try:
            options["profile"] = Profile.from_json(arguments.profile.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise CommandError(f"--profile: {error}") from None
    model = _factory.load(arguments.factory)
    tx = optax.adam(1e-3) if model.optimizer is None else model.optimizer
    with _refused():
        given = {"loss": model.loss, "targets": model.targets, **options}
        made = plan(model.layers, model.sample, tx, **given)
    print(made)
    if arguments.profile is not None:
        how, *_ = str(options["profile"]).splitlines()
        print(f"layers: as in {arguments.profile}, {how}")
    if model.optimizer is None:
        print("optimizer: none was given; planned for the state of optax.adam")
    _files.write(arguments, json=made.to_json, svg=lambda: draw.svg(made))
    return 0


def _profile(arguments: argparse.Namespace) -> int:
    options = _given(arguments, _PROFILE)
    from ..planning._profiler import profile

    model = _factory.load(arguments.factory)
    with _refused():
        given = {"loss": model.loss, "targets": model.targets, **options}
        found = profile(model.layers, model.sample, **given)
    print(found)
    _files.write(arguments, json=found.to_json)
    return 0


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Prints what jpipe refuses in a line; what a layer raises keeps its traceback."""
    try:
        yield
    except (ValueError, TypeError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] != "jpipe":
            raise
        raise CommandError(str(error)) from None
