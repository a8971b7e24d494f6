"""What may be loaded without JAX."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import jpipe

PROBE = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for module in sys.argv[2:]:
    importlib.import_module(f"jpipe.{module}")
print(*sorted({"jax", "jaxlib", "numpy", "flax", "optax"} & set(sys.modules)))
"""

LIBRARY = Path(jpipe.__file__).parent


def imported_by(*modules: str) -> list[str]:
    command = [sys.executable, "-c", PROBE, str(LIBRARY.parent), *modules]
    return subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()


def test_schedules_and_their_pictures_load_without_jax():
    modules = [
        ".".join(path.relative_to(LIBRARY).with_suffix("").parts)
        for folder in ("schedules", "draw")
        for path in (LIBRARY / folder).glob("*.py")
    ]
    assert {"schedules._zero_bubble", "schedules._validate"} <= set(modules)
    assert imported_by(*modules) == []


@pytest.mark.parametrize(
    "line",
    [
        "plan --help",
        "compare --ranks 2 --microbatches 4",
        "check -",
    ],
)
def test_commands_about_schedules_start_without_jax(line):
    said = """
import sys
from jpipe.__main__ import main
status = main(sys.argv[1:])
print(status, *sorted({"jax", "numpy", "flax", "optax"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", said, *line.split()],
        check=True,
        capture_output=True,
        text=True,
        input="0F0 0B0",
    )
    assert done.stdout.splitlines()[-1] == "0"


def test_names_of_the_package_are_there_when_they_are_asked_for():
    assert set(jpipe._HOME) | {"checkpoint", "draw", "schedules"} == set(jpipe.__all__)
    assert set(jpipe.__all__) <= set(dir(jpipe))
    for name, module in jpipe._HOME.items():
        home = importlib.import_module(module, "jpipe")
        assert getattr(jpipe, name) is getattr(home, name)
    with pytest.raises(AttributeError, match="has no attribute 'pipelin'"):
        _ = jpipe.pipelin  # pyright: ignore[reportAttributeAccessIssue]


def test_a_step_needs_no_planning_and_no_pictures():
    said = """
import sys
from jpipe import pipeline, sequential, layer, stash, TrainStep, TrainState, Plan
import jpipe
late = "jpipe.planning", "jpipe.draw"
print(*(name for name in sys.modules if name.startswith(late)))
print(jpipe.profile.__name__, "jpipe.planning" in sys.modules)
"""
    command = [sys.executable, "-c", said]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    # What a plan is, as values, is what `print(pipe)` prints.
    assert done.stdout.splitlines() == [
        "jpipe.planning jpipe.planning._json jpipe.planning._plan",
        "profile True",
    ]


def test_the_probe_sees_jax_and_numpy_where_they_are():
    assert imported_by("planning._partition") == ["numpy"]
    assert "jax" in imported_by("_run._signature")
