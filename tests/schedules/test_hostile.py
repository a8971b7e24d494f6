"""Texts and JSON that are not schedules: refused in time and memory of their size."""

import io
import json
import sys
import tracemalloc
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from jpipe.__main__ import main
from jpipe.schedules import BY_NAME, Schedule, ScheduleError

from .orders import fewest


@st.composite
def schedules(draw) -> Schedule:
    name = draw(st.sampled_from(sorted(BY_NAME)))
    p = draw(st.integers(1, 4))
    return BY_NAME[name](p, fewest(name, p) + draw(st.integers(0, 3)))


@st.composite
def texts(draw) -> str:
    """A text of the catalogue, changed in one to three places."""
    text = draw(schedules()).to_text()
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(text)))
        end = draw(st.integers(begin, min(begin + 8, len(text))))
        some = text[begin:end]
        kind = draw(st.sampled_from(["drop", "repeat", "blow up", "swap", "write"]))
        if kind == "drop":
            some = ""
        elif kind == "repeat":
            some *= draw(st.sampled_from([2, 3, 100, 5000]))
        elif kind == "blow up":
            some += "0" * draw(st.integers(1, 20))
        elif kind == "swap":
            some = some[::-1]
        else:
            some = draw(st.text("0123456789FBIWfx-.#{}[]\n \t\0\u0660", max_size=6))
        text = text[:begin] + some + text[end:]
    return text


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 10**12 - 1, 10**12, 10**400]),
    st.text(max_size=4),
    st.sampled_from(["0F1000000000000", "999999999999F0", "9" * 5000 + "F0"]),
    st.lists(st.integers(-1, 10**13), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@st.composite
def jsons(draw) -> str:
    """JSON of the catalogue with something else in one to three places."""
    fields = json.loads(draw(schedules()).to_json())
    for _ in range(draw(st.integers(1, 3))):
        node, key = fields, draw(st.sampled_from([*fields, "more"]))
        while isinstance(
            inner := node[key] if node is not fields else fields.get(key), list
        ):
            if not inner or draw(st.booleans()):
                break
            node, key = inner, draw(st.integers(0, len(inner) - 1))
        node[key] = draw(ODD)
    return json.dumps(fields)


def check(read: Callable[[str], Schedule], text: str) -> None:
    """A text is a schedule, or it is refused with some reason, of some lines."""
    try:
        schedule = read(text)
    except ScheduleError as error:
        refusal = str(error)
    else:
        assert schedule.validate() is schedule
        return
    assert len(refusal) < 20_000 + 20 * len(text)
    assert len(refusal.splitlines()) < 200


@pytest.mark.filterwarnings("ignore:E12")
@settings(deadline=1000, max_examples=100)
@given(texts())
@example("0F1000000000000")
@example("0F0 0B0 999999999999F0")
def test_texts_that_were_changed_anyhow(text):
    check(Schedule.from_text, text)


@pytest.mark.filterwarnings("ignore:E12")
@settings(deadline=1000, max_examples=100)
@given(jsons())
def test_jsons_that_were_changed_anyhow(text):
    check(Schedule.from_json, text)


LARGE = {
    "a micro-batch": "0F999999999999",
    "a deep nest": "[" * 100_000,
    "words": "no schedule " * 10_000,
    "one cell many times": "0F0 " * 2_000,
    "forwards alone, the wrong way": " ".join(f"0F{i}" for i in range(1000, 0, -1)),
    "ranks the wrong way": "\n".join(f"{s}F0 {s}B0" for s in range(600, -1, -1)),
}
VALID = {LARGE["ranks the wrong way"]: "stdin: time 1803 "}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_large_texts_take_memory_of_their_size(text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    tracemalloc.start()
    status = main(["check", "-"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    told = capsys.readouterr()
    # Only ranks the wrong way are a schedule, if one that is not drawn.
    assert status == (0 if told.out else 1)
    assert told.out.startswith(VALID.get(text, ""))
    assert len(told.err) < 20_000
    assert peak < 1_000_000 + 2000 * len(text)
