"""Commands about models: plan how to run one, profile its layers."""

import argparse
import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import draw
from . import _factory, _files
from ._arguments import (
    count,
    duration,
    picture_path,
    rate,
    schedule_key,
    several,
    size,
    speed,
)
from ._refusal import Unfit

# From what keeps most.
_REMATS = ("none", "dots", "min_cut", "full")
# Options of a plan that take a number: how it is read, called and explained.
_NUMBERS = (
    ("--devices", count, "N", "how many there are; default: those of this machine"),
    ("--memory", size, "BYTES", "of each device, such as 16GiB; default: no limit"),
    (
        "--bandwidth",
        rate,
        "BYTES",
        "per second between two devices, such as 50GB; default: as measured "
        "between two of this machine, else transfers take no time but the latency",
    ),
    (
        "--latency",
        duration,
        "TIME",
        "of a transfer, such as 5us; default: measured likewise, else 0",
    ),
    (
        "--microbatches",
        several(count),
        "M,M",
        "how many, or several to choose from, such as 8,16; default: one, two, "
        "four and eight times the number of stages that all devices make",
    ),
    (
        "--data",
        several(count),
        "D,D",
        "on how many devices each stage spreads the examples of a micro-batch, or "
        "several to choose from, such as 1,2; default: any that divides --devices and "
        "the examples",
    ),
    (
        "--batch-size",
        count,
        "N",
        "examples of the mini-batch, of which the factory's sample then says the "
        "shapes only; default: those of the sample",
    ),
)


def add_plan(commands: Any) -> None:
    """Adds ``plan`` to the commands."""
    says = "say how to cut a model, how many micro-batches, which schedule, and why"
    command = commands.add_parser("plan", help=says, description=says.capitalize())
    _add_factory(command)
    for option, read, metavar, what in _NUMBERS:
        command.add_argument(option, type=read, metavar=metavar, help=what)
    command.add_argument(
        "--schedule",
        type=several(schedule_key),
        action="extend",
        metavar="NAME,NAME",
        help="one, or several to choose from; default: all, and those made to measure",
    )
    command.add_argument(
        "--remat",
        type=several(_remat),
        action="extend",
        metavar="MODE,MODE",
        help=f"what stages may keep between forward and backward: "
        f"{', '.join(_REMATS)}; default: min_cut,full",
    )
    command.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="what profile --json wrote, in place of measuring",
    )
    _add_rates(command)
    _add_files(command)
    command.set_defaults(run=_plan)


def _remat(text: str) -> str:
    if text not in _REMATS:
        listed = ", ".join(_REMATS)
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose {listed})")
    return text


def add_profile(commands: Any) -> None:
    """Adds ``profile`` to the commands."""
    says = "say what each layer of a model takes and keeps"
    command = commands.add_parser("profile", help=says, description=says.capitalize())
    _add_factory(command)
    command.add_argument(
        "--microbatches",
        type=count,
        default=1,
        metavar="M",
        help="into how many the sample is cut, of which one is measured; default: 1",
    )
    _add_rates(command)
    _add_files(command)
    command.set_defaults(run=_profile)


def _plan(arguments: argparse.Namespace) -> int:
    rates = _rates(arguments)
    _check_files(arguments)
    # No other command needs JAX.
    import jax
    import optax

    from ..planning._decide import plan

    options: dict[str, Any] = {}
    if arguments.profile is not None:
        options["profile"] = _loaded(arguments)
    if arguments.remat is not None:
        options["remat"] = [mode for mode in _REMATS if mode in arguments.remat]
    model = _factory.load(arguments.factory)
    with _refused():
        made = plan(
            model.layers,
            model.sample,
            optax.adam(1e-3) if model.optimizer is None else model.optimizer,
            num_devices=arguments.devices,
            memory_limit=arguments.memory,
            bandwidth=arguments.bandwidth,
            latency=arguments.latency,
            num_microbatches=arguments.microbatches,
            data=arguments.data,
            batch_size=arguments.batch_size,
            schedules=arguments.schedule,
            loss=model.loss,
            targets=model.targets,
            **options,
            **rates,
        )
    print(made)
    if arguments.profile is not None:
        how, *_ = str(options["profile"]).splitlines()
        print(f"layers: as in {arguments.profile}, {how}")
    elif not arguments.estimate:
        print(f"layers: measured on {jax.devices()[0].device_kind}")
    elif None in rates.values():
        print("estimate: --flops, --memory-bandwidth and --action describe your device")
    if model.optimizer is None:
        print("optimizer: none was given; planned for the state of optax.adam")
    _write(arguments, made, _files.text(made.to_json))
    return 0


def _profile(arguments: argparse.Namespace) -> int:
    rates = _rates(arguments)
    _check_files(arguments)
    from ..planning._profiler import profile

    model = _factory.load(arguments.factory)
    with _refused():
        found = profile(
            model.layers,
            model.sample,
            num_microbatches=arguments.microbatches,
            loss=model.loss,
            targets=model.targets,
            **rates,
        )
    print(found)
    _write(arguments, found, found.save)
    return 0


def _write(arguments: argparse.Namespace, made: Any, save: Any) -> None:
    # What cannot be made again in no time is written first.
    _files.write(
        [
            (arguments.json, save),
            (arguments.svg, _files.text(lambda: draw.svg(made))),
            (arguments.png, lambda path: draw.png(made, path)),
        ]
    )


def _check_files(arguments: argparse.Namespace) -> None:
    """Before anything is measured, which may take minutes."""
    _files.check([arguments.json, arguments.svg, arguments.png])


def _rates(arguments: argparse.Namespace) -> dict[str, Any]:
    """How layers are timed, as `jpipe.profile` calls it."""
    given = {
        "--flops": arguments.flops,
        "--memory-bandwidth": arguments.memory_bandwidth,
        "--action": arguments.action,
    }
    named = [option for option, value in given.items() if value is not None]
    if named and not arguments.estimate:
        are = "is" if len(named) == 1 else "are"
        raise Unfit(f"{' and '.join(named)} {are} for an estimate: give --estimate too")
    if not arguments.estimate:
        return {}
    return {
        "measure": False,
        "peak_flops": arguments.flops,
        "memory_bandwidth": arguments.memory_bandwidth,
        "action_seconds": arguments.action,
    }


def _loaded(arguments: argparse.Namespace) -> Any:
    """A saved profile."""
    from ..planning._profile import Profile

    if arguments.estimate:
        raise Unfit("--profile takes the place of --estimate: give one of them")
    try:
        return Profile.load(arguments.profile)
    except (OSError, ValueError) as error:
        raise Unfit(f"{error}") from None


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Prints what jpipe refuses in a line; what a layer raises keeps its traceback."""
    try:
        yield
    except (ValueError, TypeError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] != "jpipe":
            raise
        raise Unfit(str(error)) from None


def _add_factory(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "factory",
        metavar="module:factory",
        help="or file.py:factory: a function without arguments that returns (layers, "
        "sample), (layers, sample, optimizer), or a dict of layers, sample, optimizer, "
        "loss, targets; the sample is of a whole mini-batch",
    )


def _add_rates(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--estimate",
        action="store_true",
        help="take the times of layers from their operations: nothing is run",
    )
    command.add_argument(
        "--flops",
        type=speed,
        metavar="RATE",
        help="of a device in a second, such as 1e14; for --estimate",
    )
    command.add_argument(
        "--memory-bandwidth",
        type=rate,
        metavar="BYTES",
        help="of a device's memory in a second, such as 1TB; for --estimate",
    )
    command.add_argument(
        "--action",
        type=duration,
        metavar="TIME",
        help="of a program that computes nothing, such as 20us; for --estimate",
    )


def _add_files(command: argparse.ArgumentParser) -> None:
    for option, read, what in (
        ("--json", Path, "all of it as JSON"),
        ("--svg", Path, "a picture as SVG"),
        (
            "--png",
            picture_path,
            "a picture as PNG, or PDF by its ending; needs matplotlib",
        ),
    ):
        command.add_argument(option, type=read, metavar="FILE", help=f"write {what}")
