"""How commands about models refuse what does not fit, and what they leave alone."""

import sys

import pytest

from .outcome import refused

MODEL = """
import jax.numpy as jnp
from collections import namedtuple
from flax import linen as nn
import sys

LAYERS, X = [nn.Dense(4), nn.tanh], jnp.ones((8, 4))

def make(): return LAYERS, X
def layers(): return LAYERS
def one_layer(): return LAYERS[0], X
def nothing(): make()
def four(): return LAYERS, X, None, None
def misspelt(): return {"layer": LAYERS, "samples": X}
def no_sample(): return namedtuple("Model", "layers sample")(LAYERS, None)
def no_optimizer(): return LAYERS, X, 1e-3
def with_arguments(width, *rest, depth): return LAYERS, X
def ends(): sys.exit(0)
def raises(): raise ValueError("mine")
def raises_in_a_layer():
    def fourth(x):
        raise TypeError("of a layer")
    return [nn.Dense(4), fourth], X
def does_not_fit(): return [], X
def opens(): open("/nowhere/data.txt")
def many_losses():
    return {"layers": LAYERS, "sample": X, "loss": lambda y, t: y, "targets": X}
def loss_only(): return {"layers": LAYERS, "sample": X, "targets": X}
"""
RETURNS = "needs (layers, sample), (layers, sample, optimizer), or a dict or named"


pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize(
    ("factory", "parts"),
    [
        ("layers", ["returned a list of Dense, ", RETURNS]),
        ("one_layer", ["layers is a Dense, not a list of layers", RETURNS]),
        ("nothing", ["returned None (is its return missing?)", RETURNS]),
        ("four", ["returned a tuple of list, ", "NoneType, NoneType; needs"]),
        (
            "misspelt",
            [
                "a dict of 'layer', 'samples': layers is missing; sample is missing; "
                "'layer' is unknown; 'samples' is unknown; needs"
            ],
        ),
        ("no_sample", ["a Model of list, NoneType: sample is missing"]),
        ("no_optimizer", ["optimizer is a float, not one of optax"]),
        ("with_arguments", ["needs arguments (width, depth)", "give them defaults"]),
        ("ends", ["model:ends ended the program: SystemExit(0)"]),
        ("LAYERS", ["model:LAYERS is a list; needs a function", "(layers, sample)"]),
        ("mak", ["model has no 'mak'; its functions: make, layers, ", "and 8 more"]),
        ("does_not_fit", ["a pipeline needs at least one layer"]),
        ("loss_only", ["targets are for a loss; give loss= too"]),
    ],
)
@pytest.mark.parametrize("name", ["plan", "profile"])
def test_what_is_no_factory_and_what_gives_no_model(command, name, factory, parts):
    refused(command(f"{name} model:{factory} --estimate"), "error: ", *parts)


@pytest.mark.parametrize(
    ("where", "parts"),
    [
        ("model", ["'model': write module:factory", "file.py:factory"]),
        (":make", ["':make': write module:factory"]),
        ("modell:make", ["no module 'modell' in ", "path/to/file.py:factory"]),
        ("model.inner:make", ["no module 'model.inner' in "]),
        ("modell.py:make", ["modell.py: No such file"]),
        ("dir/model:make", ["'dir/model' is no name of a module"]),
        ("exits.py:make", ["exits.py ended the program while", "if __name__ =="]),
    ],
)
def test_where_there_is_no_module(command, folder, where, parts):
    (folder / "exits.py").write_text("import sys\nsys.exit()")
    refused(command(f"plan {where} --estimate"), *parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--memory 16", ["--memory: '16': which unit? write bytes, such as 16GiB"]),
        ("--memory 16Gb", ["'16Gb': write bytes, such as 16GiB; units: B, kB, KB, MB"]),
        ("--memory 0", ["--memory: '0': needs at least one byte"]),
        ("--memory much", ["--memory: 'much': write bytes, such as 16GiB"]),
        ("--memory 1e999", ["--memory: '1e999': too large"]),
        ("--bandwidth 50", ["'50': which unit? write bytes per second, such as 50GB"]),
        ("--bandwidth 0GB", ["--bandwidth: '0GB': needs more than 0"]),
        ("--bandwidth=-1GB", ["--bandwidth: '-1GB': write bytes per second"]),
        ("--latency 5", ["--latency: '5': which unit? write a time, such as 5us"]),
        ("--latency 5m", ["'5m': write a time, such as 5us; units: s, ms, us"]),
        ("--estimate --flops 100", ["'100': so few? write operations per second"]),
        ("--estimate --flops 1T", ["'1T': write operations per second, such as 1e14"]),
        ("--flops 1e14", ["--flops is for an estimate: give --estimate too"]),
        (
            "--memory-bandwidth 1TB --flops 1e14",
            ["--flops and --memory-bandwidth are for an estimate"],
        ),
        ("--action 2us", ["--action is for an estimate: give --estimate too"]),
        ("--devices 0", ["--devices: '0': write a whole number of at least 1"]),
        ("--microbatches 8,x", ["--microbatches: 'x': write a whole number"]),
        ("--schedule gpip", ["unknown schedule 'gpip': choose gpipe, "]),
        ("--remat most", ["--remat: invalid choice: 'most'", "min_cut"]),
        ("--png plan.gif", ["'plan.gif'", ".png or .pdf"]),
        ("--profile none.json", ["error: none.json: No such file or directory\n"]),
        ("--profile model.py", ["error: model.py holds no profile", "no JSON"]),
        ("--profile x --estimate", ["--profile takes the place of --estimate"]),
        ("--svg no/a.svg", ["error: no/a.svg: No such file or directory\n"]),
        ("--json .", ["error: .: Is a directory\n"]),
        (
            "--json no/a.json --svg .",
            ["error: no/a.json: No such file or directory\n.: Is a directory\n"],
        ),
        ("--json a --svg ./a", ["error: a: two outputs would be written there\n"]),
        ("--batch-size 0", ["--batch-size: '0': write a whole number of at least 1"]),
    ],
)
def test_options_that_do_not_fit(command, options, parts):
    refused(command(f"plan model:make {options}"), *parts)


@pytest.mark.parametrize("error", [RuntimeError("no TPU"), AssertionError()])
def test_where_jax_finds_no_device(command, monkeypatch, error):
    def fails():
        raise error

    monkeypatch.setattr("jax.devices", fails)
    for line in ("plan model:make --devices 2 --estimate", "profile model:make"):
        refused(
            command(line), "error: JAX finds no device", "JAX_PLATFORMS=cpu", str(error)
        )


def test_no_plan_that_fits_says_what_to_type(command):
    line = "plan model:make --devices 2 --estimate --memory "
    refused(
        command(line + "450B"),
        "error: memory_limit=450 bytes on 2 devices: no plan fits. The nearest is ",
        "take more devices (num_devices=)",
        "\nOn the command line num_devices= is --devices, memory_limit= is --memory, "
        "num_microbatches= is --microbatches\n",
    )
    refused(
        command(line + "100B"),
        "error: memory_limit=100 bytes on 2 devices: no plan fits, whatever the part",
        "\nOn the command line memory_limit= is --memory\n",
    )


def test_faults_are_told_together(command):
    refused(
        command("plan model:make --estimate --devices 2 --microbatches 9,10"),
        "error: plan: num_microbatches=9 for 8 examples; num_microbatches=10 for 8",
        "\nOn the command line num_microbatches= is --microbatches\n",
    )


def test_what_cannot_be_written_is_told_before_anything_is_done(command, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    line = "plan modell:make --estimate --json plan.json --svg plan.svg"
    says = "error: plan.json: Permission denied\nplan.svg: Permission denied\n"
    refused(command(line), says)


def test_what_jax_says_of_its_traceback_is_left_out(command):
    result = command("plan model:many_losses --estimate --devices 2")
    refused(result, "error: loss_fn must return a scalar loss")
    assert "JAX" not in result[2]


def test_a_batch_too_small_names_the_option(command):
    refused(
        command("plan model:make --estimate --microbatches 8 --batch-size 4"),
        "num_microbatches=8 for 4 examples",
        "num_microbatches= is --microbatches",
    )


def test_a_profile_of_another_model_is_refused(command):
    assert command("profile model:make --estimate --json costs.json")[0] == 0
    other = "plan other.py:make --devices 2 --profile costs.json"
    with open("other.py", "w") as file:
        file.write(MODEL.replace("Dense(4)", "Dense(5)"))
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


def test_a_module_that_does_not_import_is_left_alone(command, folder):
    (folder / "lacking.py").write_text("import not_installed_here")
    for where in ("lacking", "lacking.py"):
        with pytest.raises(ModuleNotFoundError, match="not_installed_here"):
            command(f"plan {where}:make --estimate")
    assert "lacking" not in sys.modules


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
