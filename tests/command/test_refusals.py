"""How commands about models refuse what does not fit, and what they leave alone."""

import sys
from pathlib import Path

import pytest

from .outcome import refused

RETURNS = "needs (layers, sample), (layers, sample, optimizer), or a dict of"


pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize(
    ("factory", "parts"),
    [
        ("model:only_layers", ["model:only_layers returned a list; ", RETURNS]),
        ("model:no_sample", ["returned ['layers', 'sample']; ", RETURNS]),
        ("model:no_optimizer", ["optax"]),
        ("model:mak", ["model has no function 'mak'"]),
        ("model", ["'model': write module:factory", "file.py:factory"]),
        ("modell:make", ["no module 'modell' in ", "path/to/file.py:factory"]),
        ("modell.py:make", ["modell.py: No such file"]),
    ],
)
def test_what_is_no_factory_and_what_gives_no_model(command, factory, parts):
    refused(command(f"plan {factory} --estimate"), "error: ", *parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--memory 16", ["--memory: '16': write bytes, such as 16GiB; units: B, kB"]),
        ("--latency 5m", ["'5m': write a time, such as 5us; units: s, ms, us"]),
        ("--estimate --flops 1T", ["--flops: invalid float value: '1T'"]),
        ("--flops 1e14", ["--flops is for an estimate: give --estimate too"]),
        (
            "--profile none.json",
            ["--profile: ", "No such file or directory: 'none.json'"],
        ),
        (
            "--profile model.py",
            ["--profile: no profile as Profile.to_json", "JSONDecodeError"],
        ),
        ("--json .", ["--json: '.' cannot be written"]),
        ("--estimate --profile a.json", ["--profile: not allowed with argument"]),
    ],
)
def test_options_that_do_not_fit(command, options, parts):
    refused(command(f"plan model:make {options}"), *parts)


def test_a_profile_of_another_model_is_refused(command):
    assert command("profile model:make --estimate --json costs.json")[0] == 0
    other = "plan other.py:make --devices 2 --profile costs.json"
    text = Path("model.py").read_text()
    Path("other.py").write_text(text.replace("Dense(8)", "Dense(9)"))
    refused(command(other), "made on something else:\n  * layer 0: 'Dense: ")


@pytest.mark.parametrize(
    ("factory", "kind", "says"),
    [
        ("raises", ValueError, "mine"),
        ("raises_in_a_layer", TypeError, "of a layer"),
        ("opens", FileNotFoundError, "nowhere"),
    ],
)
def test_what_the_users_code_raises_is_left_alone(command, factory, kind, says):
    with pytest.raises(kind, match=says) as raised:
        command(f"plan model:{factory} --estimate")
    assert raised.traceback[-1].path.name == "model.py"


def test_a_file_has_its_neighbours_and_does_not_take_the_place_of_others(
    command, folder
):
    inner = folder / "inner"
    inner.mkdir()
    (inner / "neighbour.py").write_text("from flax import linen as nn\nL = [nn.tanh]")
    (inner / "json.py").write_text(
        "import jax.numpy as jnp, neighbour\n"
        "def make(): return neighbour.L, jnp.ones(4)"
    )
    json = sys.modules["json"]
    assert command("profile inner/json.py:make --estimate")[0] == 0
    assert sys.modules["json"] is json
