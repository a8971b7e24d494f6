"""The library keeps the rules of plain text, and each of these can fail."""

import pytest

from .plain import (
    backward_docstrings,
    doubled_classes,
    doubled_files,
    splatted_tuples,
    vague_names,
)
from .rules import LIBRARY

# What breaks each rule: the source of two modules of the same name in two folders, and
# what the rule says of it.
BROKEN = [
    (doubled_files, "", "_first._module and _second._module"),
    (doubled_classes, "class Graph: pass", "_first._module.Graph and _second._module"),
    (vague_names, "def f(given): pass", "_first._module: given, line 1"),
    (vague_names, "x.found = 1", "_first._module: found, line 1"),
    (
        splatted_tuples,
        "def f(g, x):\n    pair = x, x\n    return g(*pair)",
        "_first._module: *pair, line 3",
    ),
    (
        backward_docstrings,
        '"""Of each stage its device."""',
        "_first._module: Of each stage its device.",
    ),
    (
        backward_docstrings,
        'def f(x):\n    """Runs.\n\n    Args:\n      x: what runs.\n    """',
        "_first._module: what runs.",
    ),
]
RULES = dict.fromkeys(rule for rule, *_ in BROKEN)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_library_is_plain(rule):
    assert rule(LIBRARY) == [], rule.__doc__


@pytest.mark.parametrize(("rule", "source", "message"), BROKEN)
def test_a_fault_is_noticed(tmp_path, rule, source, message):
    for folder in ("_first", "_second"):
        path = tmp_path / "jpipe" / folder
        path.mkdir(parents=True)
        (path / "__init__.py").write_text('"""A folder."""')
        (path / "_module.py").write_text(source)
    faults = rule(tmp_path / "jpipe")
    assert faults
    assert faults[0].startswith(message)
