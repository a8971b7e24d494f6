"""The rules of plain text that a machine can read off the source."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from .rules import ROOT, modules

# Words of grammar, which say nothing of what has them for a name.
VAGUE = {
    *("own", "given", "made", "found", "known", "kind", "one", "each", "at", "yes"),
    *("by", "back", "same", "alike", "rest", "others", "several", "wanted", "such"),
    "way",
}
# Sentences that begin so have their subject last; entries of arguments may say whether
# something is so, or where it is.
BACKWARD = re.compile(r"(What|Of|By|Whether|Where|Which|How|Who|Why|Those|Theirs)\b")
BACKWARD_ENTRY = re.compile(r"(what|of|by|which|who|those|theirs)\b", re.IGNORECASE)


def doubled_files(folder: Path) -> list[str]:
    """Files of the same name in several folders."""
    places = defaultdict[str, list[str]](list)
    for module, path in modules(folder).items():
        if path.stem != ROOT:
            places[module.split(".")[-1]].append(module)
    return [" and ".join(names) for names in places.values() if len(names) > 1]


def doubled_classes(folder: Path) -> list[str]:
    """Classes of the same name in several files."""
    places = defaultdict[str, list[str]](list)
    for module, node in _nodes(folder):
        if isinstance(node, ast.ClassDef):
            places[node.name.strip("_")].append(f"{module}.{node.name}")
    return [" and ".join(names) for names in places.values() if len(names) > 1]


def vague_names(folder: Path) -> list[str]:
    """Variables, parameters, attributes and functions with a vague word for a name."""
    return [
        f"{module}: {name}, line {node.lineno}"
        for module, node in _nodes(folder)
        for name in _bound_names(node)
        if name.strip("_") in VAGUE
    ]


def splatted_tuples(folder: Path) -> list[str]:
    """Tuples that a function makes and then passes as several arguments."""
    faults = []
    for module, function in _nodes(folder):
        if not isinstance(function, ast.FunctionDef):
            continue
        tuples = set(_local_tuples(function))
        for call in ast.walk(function):
            if not isinstance(call, ast.Call):
                continue
            for arg in call.args:
                is_splat = isinstance(arg, ast.Starred)
                if is_splat and ast.unparse(arg.value) in tuples:
                    faults.append(f"{module}: {ast.unparse(arg)}, line {arg.lineno}")
    return faults


def backward_docstrings(folder: Path) -> list[str]:
    """Docstrings, and entries of their arguments, that do not begin with a subject.

    They begin with a word of `BACKWARD` or `BACKWARD_ENTRY`: begin with a noun.
    """
    faults = []
    for module, node in _nodes(folder):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            continue
        text = ast.get_docstring(node) or ""
        entries = re.findall(r"^ {2}[\w*]+: (.*)$", text, re.MULTILINE)
        sentences = [entry for entry in entries if BACKWARD_ENTRY.match(entry)]
        if BACKWARD.match(text):
            sentences.append(text.splitlines()[0])
        faults += [f"{module}: {sentence}" for sentence in sentences]
    return faults


def _nodes(folder: Path) -> Iterator[tuple[str, ast.AST]]:
    """The nodes of all syntax trees, with the module that each is in."""
    for module, path in modules(folder).items():
        for node in ast.walk(ast.parse(path.read_text())):
            yield module, node


def _bound_names(node: ast.AST) -> list[str]:
    """The names that a node gives to something."""
    if isinstance(node, ast.Name | ast.Attribute):
        is_bound = isinstance(node.ctx, ast.Store)
        name = node.id if isinstance(node, ast.Name) else node.attr
        return [name] if is_bound else []
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return []


def _local_tuples(function: ast.FunctionDef) -> Iterator[str]:
    """The names of tuples that a function makes."""
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        (target,) = node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Tuple):
            yield target.id
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for name, value in zip(target.elts, node.value.elts, strict=False):
                if isinstance(value, ast.Tuple):
                    yield ast.unparse(name)
