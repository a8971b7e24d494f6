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

# Nothing imports what stands below it. A new module has to say where it stands.
LAYERS = {
    "what a pipeline is, without jax": ["_action", "timeline", "schedules"],
    "what a model is: functions and abstract values": [
        "_linen",
        "_jaxpr",
        "_layer",
        "_microbatch",
        "_objective",
        "_rng",
        "_signature",
        "_stage",
        "_task",
        "_vjp",
    ],
    "who does what, when: moves nothing": ["_plan", "_remat"],
    "do it": [
        "_compile",
        "_execute",
        "_gradient",
        "_library",
        "_memory",
        "_optimizer",
        "_placed",
        "_program",
        "_train",
        "_transfer",
        "_variables",
    ],
    "what users type": ["__init__", "_pipeline", "_setup", "_transform"],
}
PURE = LAYERS["what a pipeline is, without jax"]

# `device_put` anywhere else would be a transfer that the memory count and a later
# multi-process transport do not see.
MOVES_DATA = {"_transfer"}
# Python dispatches ahead of the devices: nothing in the library waits for a result.
MAY_WAIT: set[str] = set()
# The one file that may hold private names of JAX, each with its reason.
MAY_BE_PRIVATE = {"_compat"}

LONGEST_FILE = 400
WITHOUT_A_SUBJECT = {"utils", "types", "core", "common", "helpers", "misc", "base"}


# ---------------------------------------------------------------- reading source


def modules(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.rglob("*.py"))}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def neighbours(path: Path) -> set[str]:
    """The modules of the same package that a file imports.

    Also those inside a function or under ``TYPE_CHECKING``: a cycle that is hidden is
    a cycle.
    """
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            names = [alias.name for alias in node.names]
            found.update([node.module.split(".")[0]] if node.module else names)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for name in absolute_imports(node):
                package, *inner = name.split(".")
                if package == path.parent.name:
                    found.add(inner[0] if inner else "__init__")
    return found


def absolute_imports(node: ast.ImportFrom | ast.Import) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def graph(folder: Path) -> dict[str, set[str]]:
    files = modules(folder)
    return {name: neighbours(path) & set(files) for name, path in files.items()}


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


def imports_upwards(folder: Path) -> list[str]:
    height = {name: i for i, layer in enumerate(LAYERS.values()) for name in layer}
    return [
        f"{name} imports {other}"
        for name, others in graph(folder).items()
        for other in sorted(others)
        if name in height and height.get(other, 0) > height[name]
    ]


def without_a_layer(folder: Path) -> list[str]:
    known = {name for layer in LAYERS.values() for name in layer} | MAY_BE_PRIVATE
    return sorted(set(modules(folder)) - known)


def beyond_the_standard_library(folder: Path) -> list[str]:
    files = modules(folder)
    return [
        f"{module} imports {name}"
        for module in PURE
        if module in files
        for node in ast.walk(parse(files[module]))
        if isinstance(node, ast.Import)
        or (isinstance(node, ast.ImportFrom) and not node.level)
        for name in absolute_imports(node)
        if name.split(".")[0] not in sys.stdlib_module_names
    ]


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
    return [name for name in modules(folder) if name.strip("_") in WITHOUT_A_SUBJECT]


# What breaks each rule: the source of a module, and what the rule says of it.
RULES: dict[Callable[[Path], list[str]], list[tuple[str, str, str]]] = {
    cycles: [
        ("_plan", "from . import _plan", "_plan -> _plan"),
        ("_plan", "def f():\n    from ._plan import Plan", "_plan -> _plan"),
        ("_plan", "import jpipe._plan", "_plan -> _plan"),
    ],
    imports_upwards: [
        (
            "_action",
            "from .timeline import x\nfrom ._remat import y",
            "_action imports",
        ),
        ("schedules", "from . import _remat", "schedules imports _remat"),
        ("schedules", "from jpipe import _remat", "schedules imports _remat"),
    ],
    without_a_layer: [("_new", "", "_new")],
    beyond_the_standard_library: [
        ("_action", "import jax.numpy as jnp", "_action imports jax.numpy"),
        ("schedules", "from numpy import array", "schedules imports numpy.array"),
        ("timeline", "def f():\n    import flax", "timeline imports flax"),
    ],
    moves_data: [
        ("_plan", "import jax\njax.device_put(0)", "_plan: device_put"),
        ("_plan", "from jax import device_put as put", "_plan: device_put"),
        ("_plan", "jax.device_put_sharded", "_plan: device_put_sharded"),
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
    long_files: [("_plan", "x = 0\n" * 401, "_plan: 401 lines")],
    without_a_subject: [("_utils", "", "_utils"), ("helpers", "", "helpers")],
}

BROKEN = [
    pytest.param(rule, *case, id=f"{rule.__name__} {i}")
    for rule, cases in RULES.items()
    for i, case in enumerate(cases)
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_library_keeps(rule):
    assert rule(LIBRARY) == []


@pytest.mark.parametrize(("rule", "module", "source", "says"), BROKEN)
def test_a_broken_rule_is_noticed(tmp_path, rule, module, source, says):
    package = tmp_path / "jpipe"
    package.mkdir()
    for name in ("_action", "timeline", "_remat"):
        (package / f"{name}.py").write_text("")
    assert rule(package) == []
    (package / f"{module}.py").write_text(source)
    faults = rule(package)
    assert faults
    assert faults[0].startswith(says)


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
    assert {"_action", "_pipeline", "_transfer", "schedules"} <= set(modules(LIBRARY))
    assert sum(map(len, graph(LIBRARY).values())) > 40
    assert "jax.extend.core.Literal" in foreign_names(LIBRARY / "_jaxpr.py")
    assert "device_put" in words(LIBRARY / "_transfer.py")


def test_every_layer_lists_modules_that_exist():
    listed = [name for layer in LAYERS.values() for name in layer]
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) <= set(modules(LIBRARY))
