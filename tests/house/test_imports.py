"""What may be loaded without JAX.

`jpipe._HOME` is read because there is no other list of what is loaded late.
"""

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


def test_names_of_the_package_are_there_when_they_are_asked_for():
    assert set(jpipe._HOME) | {"checkpoint", "draw", "schedules"} == set(jpipe.__all__)
    assert set(jpipe.__all__) <= set(dir(jpipe))
    for name, module in jpipe._HOME.items():
        home = importlib.import_module(module, "jpipe")
        assert getattr(jpipe, name) is getattr(home, name)
    with pytest.raises(AttributeError, match="has no attribute 'pipelin'"):
        _ = jpipe.pipelin  # pyright: ignore[reportAttributeAccessIssue]


def test_the_probe_sees_jax_and_numpy_where_they_are():
    assert imported_by("planning._layer_partition") == ["numpy"]
    assert "jax" in imported_by("_arguments._signature")
