"""The house rules that can be read off the source, and proof that each can fail."""

from pathlib import Path

import pytest

from .rules import (
    FOLDERS,
    LIBRARY,
    ROOT,
    beyond_the_standard_library,
    cycles,
    folder_of,
    foreign_names,
    graph,
    imports_upwards,
    in_an_unknown_folder,
    long_files,
    modules,
    moves_data,
    private_names,
    waits,
    without_a_subject,
    words,
)

# What breaks each rule: a module, its source, and what the rule says of it.
BROKEN = [
    (cycles, "_loop", "def f():\n    from ._loop import x", "_loop -> _loop"),
    (cycles, "draw._svg", "from . import _svg", "draw._svg -> draw._svg"),
    (imports_upwards, "schedules", "from .. import draw", "schedules imports draw"),
    (
        imports_upwards,
        "_layers._stage",
        "def f():\n    from ..planning._cuts import x",
        "_layers._stage imports planning",
    ),
    (
        imports_upwards,
        "draw._svg",
        "import jpipe._layers._stage",
        "draw._svg imports _layers",
    ),
    (in_an_unknown_folder, "_new._module", "", "_new._module"),
    (
        beyond_the_standard_library,
        "schedules._action",
        "def f():\n    import jax.numpy as jnp",
        "schedules._action imports jax.numpy",
    ),
    (
        beyond_the_standard_library,
        "draw._svg",
        "import matplotlib",
        "draw._svg imports matplotlib",
    ),
    (moves_data, "_loop", "from jax import device_put as put", "_loop: device_put"),
    (waits, "_loop", "x.block_until_ready()", "_loop: block_until_ready"),
    (private_names, "_loop", "from jax._src import core", "_loop: jax._src.core"),
    (private_names, "_loop", "import jax as j\nj._src.core", "_loop: jax._src"),
    (private_names, "_loop", "import jaxlib", "_loop: jaxlib"),
    (private_names, "_loop", "import jax\ngetattr(jax, '_src')", "_loop: jax._src"),
    (long_files, "_loop", "x = 0\n" * 401, "_loop: 401 lines"),
    (without_a_subject, "draw._utils", "", "draw._utils"),
]
RULES = dict.fromkeys(rule for rule, *_ in BROKEN)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_library_keeps(rule):
    assert rule(LIBRARY) == []


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "tests"])
def test_files_outside_of_it_are_short_and_have_a_subject(folder):
    folder = LIBRARY.parent / folder
    assert [*long_files(folder), *without_a_subject(folder)] == []


# A package that keeps all rules, with packages in it.
SOUND = {
    "schedules": "from ._timeline import Timeline",
    "schedules._action": "import re",
    "schedules._timeline": "from ._action import Action\nfrom . import _action",
    "draw": "from ._trace import trace",
    "draw._trace": "from ..schedules import Timeline",
    "_layers": "",
    "_layers._stage": "from ..schedules._action import Action\nfrom .. import draw",
    "planning": "",
    "planning._cuts": "from ..schedules import Timeline",
    "_command": "",
    "_command._models": "from ..planning import _cuts",
    "__main__": "from ._layers import _stage",
}


def write(folder: Path, module: str, source: str) -> None:
    path = folder.joinpath(*module.split("."))
    path = path / f"{ROOT}.py" if module in FOLDERS else path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".py").write_text(source)


@pytest.fixture
def package(tmp_path):
    for module, source in SOUND.items():
        write(tmp_path / "jpipe", module, source)
    return tmp_path / "jpipe"


@pytest.mark.parametrize(("rule", "module", "source", "says"), BROKEN)
def test_a_broken_rule_is_noticed(package, rule, module, source, says):
    assert rule(package) == []
    write(package, module, source)
    faults = rule(package)
    assert faults
    assert faults[0].startswith(says)


@pytest.mark.parametrize(
    "source", ["from ..schedules import Action", "from ..draw import trace"]
)
def test_a_cycle_through_packages_is_noticed(package, source):
    assert cycles(package) == []
    write(package, "schedules._action", source)
    (cycle,) = cycles(package)
    assert {"schedules", "schedules._action"} <= set(cycle.split(" -> "))


def test_the_rules_read_the_whole_library():
    found = modules(LIBRARY)
    assert {"_pipeline", "_run._lower", ROOT, "schedules", "draw._svg"} <= set(found)
    imports = graph(LIBRARY)
    assert {"schedules", "schedules._action"} <= imports["_run._lower"]
    jaxprs = LIBRARY / "_jaxprs"
    assert "jax.extend.core.Literal" in foreign_names(jaxprs / "_jaxpr.py")
    assert "device_put" in words(LIBRARY / "_instructions" / "_transfer.py")
    assert set(FOLDERS) == set(map(folder_of, found))
