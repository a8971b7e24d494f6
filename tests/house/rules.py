"""The house rules, as functions from a folder of modules to what breaks them."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import jpipe

LIBRARY = Path(jpipe.__file__).parent
# What a pipeline is, without jax.
PURE = ("schedules", "draw")
# The folders of the library: nothing imports what stands below it. What users type is
# in no folder and stands last. A module in a folder has a dotted name;
# that of the folder is its `__init__`.
FOLDERS = (
    *PURE,
    *(
        "_compat",
        "_messages",
        "_processes",
        "_jaxprs",
        "_layers",
        "_arguments",
        "_disk",
    ),
    *("_instructions", "_placed", "_trace", "_partition", "_stage", "_lower"),
    *("_model", "_check", "_pipelined", "_train", "planning", "_api"),
    *("_command", ""),
)
# `device_put` anywhere else would be a transfer that the memory count and a later
# multi-process transport do not see.
MOVES_DATA = {"_instructions._transfer", "_processes._transport", "_compat"}
# Python dispatches ahead of the devices: nothing in the library waits for a result but
# what measures how long results take, the thread that watches other processes, and a
# leaf in pieces of which its user asks that, as of an array.
MAY_WAIT = {
    *(
        "_processes._watch",
        "_api._process_link",
        "_api._running_step",
        "_api._step_profile",
        "planning._measure",
    ),
    "_arguments._stacked",
}
# The one file that may hold private names of JAX, each with its reason.
MAY_BE_PRIVATE = {"_compat"}
PRIVATE = re.compile(
    r"(jax|flax|optax|chex|numpy)\b.*\._(?!_)|jaxlib|jax\.interpreters"
)
LONGEST_FILE = 600
ROOT = "__init__"


def modules(folder: Path) -> dict[str, Path]:
    """The files of a package by their names in it, those of its packages included."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == ROOT else parts) or ROOT] = path
    return found


def imported(path: Path, folder: Path) -> Iterator[str]:
    """The dotted names that a file imports.

    Those of its own package begin with that of the package, however they are written.
    """
    tree = ast.parse(path.read_text())
    here = (folder.name, *path.relative_to(folder).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            outer = here[: len(here) - node.level + 1] if node.level else ()
            start = [*outer, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                yield ".".join([*start, alias.name])


def graph(folder: Path) -> dict[str, set[str]]:
    """The modules of the package that each imports.

    Also those inside a function or under ``TYPE_CHECKING``: a cycle that is hidden is
    a cycle.
    """
    files = modules(folder)

    def module(name: str) -> str:
        parts = name.split(".")
        while parts and ".".join(parts) not in files:
            parts.pop()  # a name in a module
        return ".".join(parts) or ROOT

    return {
        name: {
            module(other.partition(".")[2])
            for other in imported(path, folder)
            if other.split(".")[0] == folder.name
        }
        for name, path in files.items()
    }


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
        if height.get(folder_of(name), -1) < height.get(folder_of(other), 0)
    ]


def words(path: Path) -> Iterator[str]:
    """Every name that a file uses, imported or dotted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name):
            yield ast.unparse(node)


def moves_data(folder: Path) -> list[str]:
    return _uses(folder, "device_put.*", MOVES_DATA)


def waits(folder: Path) -> list[str]:
    return _uses(folder, "block_until_ready|device_get", MAY_WAIT)


def _uses(folder: Path, pattern: str, but: set[str]) -> list[str]:
    return [
        f"{name}: {word}"
        for name, path in modules(folder).items()
        if name not in but
        for word in words(path)
        if re.fullmatch(rf"(.*\.)?({pattern})", word)
    ]


def private_names(folder: Path) -> list[str]:
    """Those that are imported or reached by attributes, of libraries that have them."""
    return [
        f"{module}: {name}"
        for module, path in modules(folder).items()
        if module not in MAY_BE_PRIVATE
        for name in (*imported(path, folder), *words(path))
        if PRIVATE.match(name)
    ]


def long_files(folder: Path) -> list[str]:
    found = {n: len(p.read_text().splitlines()) for n, p in modules(folder).items()}
    return [f"{name}: {n} lines" for name, n in found.items() if n > LONGEST_FILE]
