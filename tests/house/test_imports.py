"""What may be loaded without JAX."""

import subprocess
import sys
from pathlib import Path

import jpipe

# Loads modules of the package without running its __init__, which imports JAX.
PROBE = """
import importlib, sys, types
package = types.ModuleType("jpipe")
package.__path__ = [sys.argv[1]]
sys.modules["jpipe"] = package
for module in sys.argv[2:]:
    importlib.import_module(f"jpipe.{module}")
print(*sorted({"jax", "jaxlib", "numpy", "flax", "optax"} & set(sys.modules)))
"""


LIBRARY = Path(jpipe.__file__).parent


def imported_by(*modules: str) -> list[str]:
    command = [sys.executable, "-c", PROBE, str(LIBRARY), *modules]
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


def test_models_are_cut_without_jax():
    loaded = imported_by("planning._partition", "planning._replicas")
    assert loaded == ["numpy"]


def test_a_step_needs_no_planning_and_no_pictures():
    said = """
import sys, jpipe
late = "jpipe.planning", "jpipe.draw"
print(*(name for name in sys.modules if name.startswith(late)))
print(jpipe.profile.__name__, "jpipe.planning" in sys.modules)
"""
    command = [sys.executable, "-c", said]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    # What a plan is, as values, is what `print(pipe)` prints.
    assert done.stdout.splitlines() == [
        "jpipe.planning jpipe.planning._json jpipe.planning._units "
        "jpipe.planning._plan",
        "profile True",
    ]


def test_the_probe_sees_jax_where_it_is():
    assert "jax" in imported_by("_run._signature")
