"""The house rules, as functions from a folder of modules to what breaks them."""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import jpipe

LIBRARY = Path(jpipe.__file__).parent
# The folders of the library: nothing imports what stands below it. What users type is
# in no folder and stands last. A module in a folder has a dotted name;
# that of the folder is its `__init__`.
PURE = ("schedules", "draw")  # what a pipeline is, without jax
FOLDERS = (
    *PURE,
    "_compat",
    "_warn",
    "_faults",
    "_processes",
    "_jaxprs",
    "_layers",
    "_functions",
    "_instructions",
    "_run",
    "_check",
    "_train",
    "planning",
    "_command",
    "",
)
# `device_put` anywhere else would be a transfer that the memory count and a later
# multi-process transport do not see.
MOVES_DATA = {"_instructions._transfer", "_processes._transport", "_compat"}
# Python dispatches ahead of the devices: nothing in the library waits for a result but
# what measures how long results take, the thread that watches other processes, and what
# reads constants before a program is compiled.
MAY_WAIT = {
    "_functions._probe",
    "_processes._watch",
    "_profile",
    "planning._link",
    "planning._measure",
}
# An optional dependency, imported when it is asked for: inside a function.
OPTIONAL = {("draw._png", "matplotlib")}
# The one file that may hold private names of JAX, each with its reason.
MAY_BE_PRIVATE = {"_compat"}
LONGEST_FILE = 400
WITHOUT_A_SUBJECT = {"utils", "types", "core", "common", "helpers", "misc", "base"}
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
