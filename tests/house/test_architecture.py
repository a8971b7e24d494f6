"""The house rules that can be read off the source, and proof that each can fail."""

from collections.abc import Callable
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

# What breaks each rule: the source of a module, and what the rule says of it.
RULES: dict[Callable[[Path], list[str]], list[tuple[str, str, str]]] = {
    cycles: [
        ("_loop", "from . import _loop", "_loop -> _loop"),
        ("_loop", "def f():\n    from ._loop import OwnLoop", "_loop -> _loop"),
        ("_loop", "import jpipe._loop", "_loop -> _loop"),
        ("draw._svg", "from . import _svg", "draw._svg -> draw._svg"),
        ("draw._svg", "from ..draw._svg import f", "draw._svg -> draw._svg"),
    ],
    imports_upwards: [
        (
            "schedules._action",
            "from ._timeline import x\nfrom .._layers._stage import y",
            "schedules._action imports _layers",
        ),
        ("schedules", "from .._layers import _stage", "schedules imports _layers"),
        ("schedules", "from jpipe._layers import x", "schedules imports _layers"),
        ("schedules", "from .. import draw", "schedules imports draw"),
        ("draw._svg", "import jpipe._layers._stage", "draw._svg imports _layers"),
        (
            "_layers._stage",
            "from ..__main__ import main",
            "_layers._stage imports __main__",
        ),
        # What a step needs.
        (
            "_layers._stage",
            "def f():\n    from ..planning._cuts import x",
            "_layers._stage imports planning",
        ),
        (
            "planning._cuts",
            "from .._command import _models",
            "planning._cuts imports _command",
        ),
    ],
    in_an_unknown_folder: [("_new._module", "", "_new._module")],
    beyond_the_standard_library: [
        (
            "schedules._action",
            "import jax.numpy as jnp",
            "schedules._action imports jax.numpy",
        ),
        ("schedules", "from numpy import array", "schedules imports numpy.array"),
        (
            "schedules._timeline",
            "def f():\n    import flax",
            "schedules._timeline imports flax",
        ),
        ("draw._svg", "import matplotlib", "draw._svg imports matplotlib"),
        ("draw._png", "import matplotlib", "draw._png imports matplotlib"),
        (
            "draw._png",
            "try:\n    import matplotlib\nexcept ImportError:\n    pass",
            "draw._png imports matplotlib",
        ),
    ],
    moves_data: [
        ("_loop", "import jax\njax.device_put(0)", "_loop: device_put"),
        ("_loop", "from jax import device_put as put", "_loop: device_put"),
        ("_loop", "jax.device_put_sharded", "_loop: device_put_sharded"),
        ("draw._svg", "jax.device_put(0)", "draw._svg: device_put"),
    ],
    waits: [
        ("_loop", "x.block_until_ready()", "_loop: block_until_ready"),
        ("_loop", "from jax import device_get", "_loop: device_get"),
    ],
    private_names: [
        ("_loop", "import jax._src.core", "_loop: jax._src.core"),
        ("_loop", "from jax._src import core", "_loop: jax._src.core"),
        ("_loop", "import jax as j\nj._src.core", "_loop: jax._src"),
        ("_loop", "from jax import numpy\nnumpy._f()", "_loop: jax.numpy._f"),
        ("_loop", "from jax.interpreters import ad", "_loop: jax.interpreters.ad"),
        ("_loop", "import jaxlib", "_loop: jaxlib"),
        ("_loop", "import jax\ngetattr(jax, '_src')", "_loop: jax._src"),
        ("_loop", "load('jax._src.core')", "_loop: jax._src.core"),
        ("_loop", "import flax\nflax.core._f", "_loop: flax.core._f"),
    ],
    long_files: [
        ("_loop", "x = 0\n" * 401, "_loop: 401 lines"),
        ("draw", "x = 0\n" * 401, "draw: 401 lines"),
    ],
    without_a_subject: [
        ("_utils", "", "_utils"),
        ("helpers", "", "helpers"),
        ("draw._utils", "", "draw._utils"),
    ],
}


BROKEN = [
    pytest.param(rule, *case, id=f"{rule.__name__} {i}")
    for rule, cases in RULES.items()
    for i, case in enumerate(cases)
]


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


def test_imports_are_found_through_packages(package):
    assert graph(package) == {
        "schedules": {"schedules._timeline"},
        "schedules._action": set(),
        "schedules._timeline": {"schedules._action"},
        "draw": {"draw._trace"},
        "draw._trace": {"schedules"},
        "_layers": set(),
        "_layers._stage": {"schedules", "schedules._action", "draw"},
        "planning": set(),
        "planning._cuts": {"schedules"},
        "_command": set(),
        "_command._models": {"planning", "planning._cuts"},
        "__main__": {"_layers", "_layers._stage"},
    }


@pytest.mark.parametrize(("rule", "module", "source", "says"), BROKEN)
def test_a_broken_rule_is_noticed(package, rule, module, source, says):
    assert rule(package) == []
    write(package, module, source)
    faults = rule(package)
    assert faults
    assert faults[0].startswith(says)


@pytest.mark.parametrize(
    "source",
    [
        # Names of a package come from its `__init__`, which imports this module.
        "from . import Action",
        "from ..schedules import Action",
        "from jpipe.schedules import Action",
        # A module of another package runs the `__init__` of that package first.
        "from ..draw import trace",
        "from ..draw._shapes import Rect",
        "import jpipe.draw._shapes",
    ],
)
def test_a_cycle_through_packages_is_noticed(package, source):
    write(package, "draw._shapes", "")
    assert cycles(package) == []
    write(package, "schedules._action", source)
    (cycle,) = cycles(package)
    assert {"schedules", "schedules._action"} <= set(cycle.split(" -> "))


@pytest.mark.parametrize("module", ["_png", "_layout"])
def test_what_draws_bitmaps_may_ask_for_matplotlib_when_it_draws(package, module):
    write(package, f"draw.{module}", "def png():\n    import matplotlib.patches")
    says = [] if module == "_png" else ["draw._layout imports matplotlib.patches"]
    assert beyond_the_standard_library(package) == says


def test_what_measures_may_wait(package):
    write(package, "_profile", "x.block_until_ready()")
    assert waits(package) == []


@pytest.mark.parametrize(
    "source",
    [
        "import jax\njax.__version__",
        "from jax.extend import core\ncore.Literal",
        "import jax\nmodule._private\nself._weights",
        "from ._layer import x\nfrom . import _rng\n_rng._key",
        "'''jax._src is private, says the docstring.'''",
    ],
)
def test_public_names_are_not_taken_for_private(tmp_path, source):
    (tmp_path / "_loop.py").write_text(source)
    assert private_names(tmp_path) == []


def test_the_rules_read_the_whole_library():
    assert {"_pipeline", "_run._lower", ROOT, "schedules", "draw._svg"} <= set(
        modules(LIBRARY)
    )
    imports = graph(LIBRARY)
    assert sum(map(len, imports.values())) > 100
    assert {"schedules", "schedules._action"} <= imports["_run._lower"]
    assert "schedules._validate" in imports["schedules._schedule"]
    assert {"draw", "schedules"} <= imports["_command._schedules"]
    jaxprs = LIBRARY / "_jaxprs"
    assert "jax.extend.core.Literal" in foreign_names(jaxprs / "_jaxpr.py")
    assert "device_put" in words(LIBRARY / "_instructions" / "_transfer.py")


def test_every_folder_is_there():
    assert set(FOLDERS) == set(map(folder_of, modules(LIBRARY)))
