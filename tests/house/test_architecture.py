"""The house rules that can be read off the source, and proof that each can fail."""

import pytest

from .rules import (
    FOLDERS,
    LIBRARY,
    ROOT,
    cycles,
    folder_of,
    graph,
    imports_upwards,
    long_files,
    modules,
    moves_data,
    private_names,
    waits,
    words,
)

# What breaks each rule: a module, its source, and what the rule says of it.
BROKEN = [
    (cycles, "_loop", "def f():\n    from ._loop import x", "_loop -> _loop"),
    (
        imports_upwards,
        "_layers._layer_group",
        "def f():\n    import jpipe.planning._bottleneck_cut",
        "_layers._layer_group imports planning",
    ),
    (moves_data, "_loop", "from jax import device_put as put", "_loop: device_put"),
    (waits, "_loop", "x.block_until_ready()", "_loop: x.block_until_ready"),
    (private_names, "_loop", "from jax._src import core", "_loop: jax._src.core"),
    (private_names, "_loop", "import jaxlib", "_loop: jaxlib"),
    (long_files, "_loop", "x = 0\n" * 601, "_loop: 601 lines"),
]
RULES = dict.fromkeys(rule for rule, *_ in BROKEN)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_library_keeps_the_rule(rule):
    assert rule(LIBRARY) == []


# A package that keeps all rules, with packages in it.
SOUND = {
    "schedules": "from ._timeline import Timeline",
    "schedules._timeline": "import re",
    "draw": "from ._trace import trace",
    "draw._trace": "from ..schedules import Timeline",
    "_layers": "",
    "_layers._layer_group": (
        "from ..schedules._timeline import Timeline\nfrom .. import draw"
    ),
    "planning": "",
    "planning._bottleneck_cut": "from ..schedules import Timeline",
    "__main__": "from ._layers import _stage",
}


@pytest.mark.parametrize(("rule", "module", "source", "says"), BROKEN)
def test_a_broken_rule_is_noticed(tmp_path, rule, module, source, says):
    def write(module, source):
        path = tmp_path.joinpath("jpipe", *module.split("."))
        path = path / f"{ROOT}.py" if module in FOLDERS else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)

    for each in SOUND.items():
        write(*each)
    assert rule(tmp_path / "jpipe") == []
    write(module, source)
    faults = rule(tmp_path / "jpipe")
    assert faults
    assert faults[0].startswith(says)


def test_the_rules_read_the_whole_library():
    found = modules(LIBRARY)
    assert {"_api._pipeline", ROOT, "schedules", "draw._svg"} <= set(found)
    assert "schedules" in graph(LIBRARY)["_api._transform"]
    assert "jax.device_put" in words(LIBRARY / "_instructions" / "_transfer.py")
    assert set(FOLDERS) == set(map(folder_of, found))
