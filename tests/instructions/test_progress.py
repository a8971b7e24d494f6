"""The line on a terminal: what it says, that it goes on, and that files have none.

A private name is imported because the seconds until it appears are no option.
"""

import io
import re
import time
import types

import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jpipe
from jpipe._instructions import _progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(_progress, "_LONG", 0.0)
    monkeypatch.setattr(_progress, "_TICK", 0.01)
    shown = Terminal()
    # Pytest has its own between a fixture and its test.
    monkeypatch.setattr(_progress, "sys", types.SimpleNamespace(stderr=shown))
    return shown


def test_a_line_goes_on_while_nothing_is_counted_and_is_cleared(terminal):
    for _ in _progress.count_items("outer things done", range(2)):
        for _ in _progress.count_items("inner things done", range(1)):
            time.sleep(0.1)
    lines = terminal.getvalue().split("\r\x1b[K")
    assert lines[0] == lines[-1] == ""
    said = [line.partition(" in ")[0] for line in lines if line]
    assert said.count("jpipe: 0 of 1 inner things done") > 4
    assert [*dict.fromkeys(said)] == [
        "jpipe: 0 of 2 outer things done",
        "jpipe: 0 of 1 inner things done",
        "jpipe: 1 of 2 outer things done",
    ]
    ended = terminal.getvalue()
    time.sleep(0.05)
    assert terminal.getvalue() == ended


def plan():
    layers, x = [nn.Dense(8), nn.tanh, nn.Dense(2)], jnp.ones((8, 4))
    options = {"num_devices": 2, "data": 1, "schedules": ("1f1b", "gpipe")}
    jpipe.plan(layers, x, optax.sgd(0.1), measure=False, action_seconds=0.0, **options)


def test_a_terminal_shows_what_a_plan_does(terminal):
    plan()
    said = re.findall(r"\d+ of \d+ ([a-z ,-]+?) in \d+ s", terminal.getvalue())
    assert [*dict.fromkeys(said)] == [
        "models traced",
        "layers estimated",
        "layers traced",
        "candidates lowered",  # in turns with these two, which look for them
        "schedules tried",
        "candidates improved",
    ]


def test_a_file_gets_no_progress_line(monkeypatch, capsys):
    monkeypatch.setattr(_progress, "_LONG", 0.0)
    plan()
    assert capsys.readouterr().err == ""
