"""The house rules that can be read off the source, and proof that each can fail."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import jpipe

LIBRARY = Path(jpipe.__file__).parent

# The folders of the library: nothing imports what stands below it. What
# users type is in no folder and stands last. A module in a folder has a dotted name;
# that of the folder is its `__init__`.
PURE = ("schedules", "draw")  # what a pipeline is, without jax
FOLDERS = (*PURE, "_layers", "_functions", "_run", "_train", "")

# `device_put` anywhere else would be a transfer that the memory count and a later
# multi-process transport do not see.
MOVES_DATA = {"_run._transfer", "_run._compat"}
# Python dispatches ahead of the devices: nothing in the library waits for a result but
# what measures how long results take.
MAY_WAIT = {"_profile"}
# An optional dependency, imported when it is asked for: inside a function.
OPTIONAL = {("draw._png", "matplotlib")}
# The one file that may hold private names of JAX, each with its reason.
MAY_BE_PRIVATE = {"_run._compat"}

LONGEST_FILE = 400
WITHOUT_A_SUBJECT = {"utils", "types", "core", "common", "helpers", "misc", "base"}


# ---------------------------------------------------------------- reading source


ROOT = "__init__"


def modules(folder: Path) -> dict[str, Path]:
    """The files of a package by their names in it, those of its packages included."""
    return {name_of(path, folder): path for path in sorted(folder.rglob("*.py"))}


def name_of(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == ROOT else parts) or ROOT


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def neighbours(path: Path, folder: Path) -> set[str]:
    """The modules of the same package that a file imports.

    Also those inside a function or under ``TYPE_CHECKING``: a cycle that is hidden is
    a cycle.

    Args:
      path: the file.
      folder: of the package; what a sub-package imports from it counts too.
    """
    files = set(modules(folder))
    here = path.relative_to(folder).parent.parts
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            package = here[: len(here) - (node.level - 1)]
            inner = node.module.split(".") if node.module else []
            targets = [(*package, *inner, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [name.split(".") for name in absolute_imports(node)]
            targets = [tuple(rest) for first, *rest in names if first == folder.name]
        else:
            continue
        for target in targets:
            found |= loaded(target, files, here)
    return found & files


def loaded(target: tuple[str, ...], files: set[str], here: tuple[str, ...]) -> set[str]:
    """The module that an import names, and the packages that run before it does.

    What follows the last module is a name in it. The packages that the importing file
    is in itself are running already.
    """
    depth = len(target)
    while depth and ".".join(target[:depth]) not in files:
        depth -= 1
    module = ".".join(target[:depth]) or ROOT
    outer = {target[:n] for n in range(1, depth)}
    return {module} | {".".join(p) for p in outer if here[: len(p)] != p}


def absolute_imports(node: ast.ImportFrom | ast.Import) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def graph(folder: Path) -> dict[str, set[str]]:
    return {name: neighbours(path, folder) for name, path in modules(folder).items()}


def foreign_names(path: Path) -> set[str]:
    """The dotted names of other packages that a file uses, whatever it calls them."""
    tree = parse(path)
    alias_of: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                alias_of[alias.asname or first] = alias.name if alias.asname else first
                found.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                alias_of[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add(f"{node.module}.{alias.name}")

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return alias_of.get(node.id)
        inner = attribute = None
        if isinstance(node, ast.Attribute):
            inner, attribute = dotted(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            inner = dotted(node.args[0])
            attribute = getattr(node.args[1], "value", "")
        return f"{inner}.{attribute}" if inner else None

    for node in ast.walk(tree):
        if name := dotted(node):
            found.add(name)
        # As in importlib.import_module("jax._src.core").
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"\A\w+(?:\.\w+)+\Z", node.value))
    return found


def words(path: Path) -> Iterator[str]:
    """Every identifier that a file uses, imported or as an attribute."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.name


# -------------------------------------------------------------------- the rules
#
# Each takes a folder and returns what breaks it.


def cycles(folder: Path) -> list[str]:
    try:
        TopologicalSorter(graph(folder)).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def folder_of(module: str) -> str:
    """The folder of a module; empty for what is in none."""
    first, *rest = module.split(".")
    return first if rest or first in FOLDERS else ""


def imports_upwards(folder: Path) -> list[str]:
    height = {name: i for i, name in enumerate(FOLDERS)}
    return [
        f"{name} imports {other}"
        for name, others in graph(folder).items()
        for other in sorted(others)
        if height.get(folder_of(name), 0) < height.get(folder_of(other), 0)
    ]


def in_an_unknown_folder(folder: Path) -> list[str]:
    return [name for name in modules(folder) if folder_of(name) not in FOLDERS]


def beyond_the_standard_library(folder: Path) -> list[str]:
    return [
        f"{module} imports {name}"
        for module, path in modules(folder).items()
        if folder_of(module) in PURE
        for name, late in foreign_imports(parse(path))
        if name.split(".")[0] not in sys.stdlib_module_names
        and not (late and (module, name.split(".")[0]) in OPTIONAL)
    ]


def foreign_imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """What is imported from other packages, and whether only inside a function."""
    late = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        relative = isinstance(node, ast.ImportFrom) and node.level
        if isinstance(node, ast.ImportFrom | ast.Import) and not relative:
            yield from ((name, node in late) for name in absolute_imports(node))


def moves_data(folder: Path) -> list[str]:
    return [
        f"{name}: {word}"
        for name, path in modules(folder).items()
        if name not in MOVES_DATA
        for word in words(path)
        if word.startswith("device_put")
    ]


def waits(folder: Path) -> list[str]:
    return [
        f"{name}: {word}"
        for name, path in modules(folder).items()
        if name not in MAY_WAIT
        for word in words(path)
        if word in ("block_until_ready", "device_get")
    ]


def private_names(folder: Path) -> list[str]:
    return [
        f"{module}: {name}"
        for module, path in modules(folder).items()
        if module not in MAY_BE_PRIVATE
        for name in sorted(foreign_names(path))
        if is_private(name)
    ]


def is_private(name: str) -> bool:
    package, *inner = name.split(".")
    if package not in ("jax", "jaxlib", "flax", "optax", "chex", "numpy"):
        return False
    hidden = any(re.match(r"_(?!_)", part) for part in inner)
    return hidden or package == "jaxlib" or "interpreters" in inner


def long_files(folder: Path) -> list[str]:
    counts = {
        name: len(path.read_text().splitlines())
        for name, path in modules(folder).items()
    }
    return [f"{name}: {n} lines" for name, n in counts.items() if n > LONGEST_FILE]


def without_a_subject(folder: Path) -> list[str]:
    return [
        name
        for name in modules(folder)
        if name.split(".")[-1].strip("_") in WITHOUT_A_SUBJECT
    ]


# What breaks each rule: the source of a module, and what the rule says of it.
RULES: dict[Callable[[Path], list[str]], list[tuple[str, str, str]]] = {
    cycles: [
        ("_plan", "from . import _plan", "_plan -> _plan"),
        ("_plan", "def f():\n    from ._plan import Plan", "_plan -> _plan"),
        ("_plan", "import jpipe._plan", "_plan -> _plan"),
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
        ("_plan", "import jax\njax.device_put(0)", "_plan: device_put"),
        ("_plan", "from jax import device_put as put", "_plan: device_put"),
        ("_plan", "jax.device_put_sharded", "_plan: device_put_sharded"),
        ("draw._svg", "jax.device_put(0)", "draw._svg: device_put"),
    ],
    waits: [
        ("_plan", "x.block_until_ready()", "_plan: block_until_ready"),
        ("_plan", "from jax import device_get", "_plan: device_get"),
    ],
    private_names: [
        ("_plan", "import jax._src.core", "_plan: jax._src.core"),
        ("_plan", "from jax._src import core", "_plan: jax._src.core"),
        ("_plan", "import jax as j\nj._src.core", "_plan: jax._src"),
        ("_plan", "from jax import numpy\nnumpy._f()", "_plan: jax.numpy._f"),
        ("_plan", "from jax.interpreters import ad", "_plan: jax.interpreters.ad"),
        ("_plan", "import jaxlib", "_plan: jaxlib"),
        ("_plan", "import jax\ngetattr(jax, '_src')", "_plan: jax._src"),
        ("_plan", "load('jax._src.core')", "_plan: jax._src.core"),
        ("_plan", "import flax\nflax.core._f", "_plan: flax.core._f"),
    ],
    long_files: [
        ("_plan", "x = 0\n" * 401, "_plan: 401 lines"),
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


# A package that keeps all rules, with packages in it.
SOUND = {
    "schedules": "from ._timeline import Timeline",
    "schedules._action": "import re",
    "schedules._timeline": "from ._action import Action\nfrom . import _action",
    "draw": "from ._trace import trace",
    "draw._trace": "from ..schedules import Timeline",
    "_layers": "",
    "_layers._stage": "from ..schedules._action import Action\nfrom .. import draw",
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
    (tmp_path / "_plan.py").write_text(source)
    assert private_names(tmp_path) == []


def test_the_rules_read_the_whole_library():
    assert {"_pipeline", "_run._transfer", ROOT, "schedules", "draw._svg"} <= set(
        modules(LIBRARY)
    )
    imports = graph(LIBRARY)
    assert sum(map(len, imports.values())) > 100
    assert {"schedules", "schedules._action"} <= imports["_run._execute"]
    assert "schedules._validate" in imports["schedules._schedule"]
    assert {"draw", "schedules"} <= imports["__main__"]
    functions = LIBRARY / "_functions"
    assert "jax.extend.core.Literal" in foreign_names(functions / "_jaxpr.py")
    assert "device_put" in words(LIBRARY / "_run" / "_transfer.py")


def test_every_folder_is_there():
    assert set(FOLDERS) == set(map(folder_of, modules(LIBRARY)))
