"""Profiles in files: written and read, of PipeDream and DAPPLE, and of no use."""

import dataclasses
import json
import random

import pytest

from jpipe.planning._profile import LayerProfile, Profile, SkipProfile

from .chains import profile
from .published import read

MADE = {"device": "cpu", "jax": "0.10.2"}


def node(name, *, time=1.0, size="8", more=""):
    return (
        f"{name} -- Linear(2, 2) -- forward_compute_time={time}, "
        f"backward_compute_time=2, activation_size={size}, parameter_size=16{more}\n"
    )


def test_what_is_saved_is_loaded(tmp_path):
    given = dataclasses.replace(
        profile(random.Random(0), 6, skips=3, ties=1), made=MADE, microbatch_size=4
    )
    first = dataclasses.replace(
        given.layers[0], forward=1 / 3, input_grad=0.1, workspace_bytes=3, flops=1e30
    )
    given = dataclasses.replace(given, layers=(first, *given.layers[1:]))
    given.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == given


def test_a_file_of_no_use_tells_every_fault(tmp_path):
    path = tmp_path / "profile.json"
    given = profile(random.Random(0), 3, skips=1)
    given.save(path)
    good = json.loads(path.read_text())

    def says(fields):
        path.write_text(json.dumps(fields))
        with pytest.raises(ValueError, match="holds no profile") as refusal:
            Profile.load(path)
        return str(refusal.value)

    bad = json.loads(json.dumps(good))
    del bad["made"], bad["layers"][0]["forward"], bad["skips"][0]["source"]
    bad["layers"][1] = 7
    bad |= {"ties": 5, "colour": "red"}
    message = says(bad)
    for fault in (
        "missing: made",
        "surplus: ['colour']",
        "ties is a int; needs a list",
        "layers[0]: missing: forward",
        "layers[1] is a int; needs an object",
        "skips[0]: missing: source",
    ):
        assert fault in message
    bad = json.loads(json.dumps(good))
    bad["layers"][0] |= {"forward": -1, "param_bytes": 1.5, "kept_bytes": {"none": -2}}
    bad["skips"][0]["target"] = 9
    bad["ties"] = [[0, 9]]
    message = says(bad)
    for fault in (
        "layer 0 (layer0): forward=-1; needs a number, finite and not negative",
        "layer 0 (layer0): param_bytes=1.5 is a float; needs an int",
        "layer 0 (layer0): kept_bytes['none']=-2; needs an int",
        "to 9; needs 0 <= source < target < 3",
        "ties: (0, 9); needs numbers of two or more of the layers 0 to 2",
    ):
        assert fault in message
    assert "version 2; this jpipe reads version 1" in says(good | {"version": 2})
    assert "\"format\" is not 'jpipe profile'" in says({"layers": []})
    assert "a list; needs an object" in says([1])
    path.write_bytes(b"\xff{")
    with pytest.raises(ValueError, match="no JSON"):
        Profile.load(path)


def test_a_profile_of_no_use_is_not_saved(tmp_path):
    bad = Profile((LayerProfile("a", float("nan"), 1.0),), made={"devices": 2})
    with pytest.raises(ValueError, match="forward=nan") as refusal:
        bad.save(tmp_path / "profile.json")
    assert "made['devices']=2 is a int; needs a text" in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_a_stale_profile_is_refused_with_all_that_differs():
    stale = Profile((), made=MADE)
    stale.check(dict(MADE))
    with pytest.raises(ValueError, match="made on something else") as refusal:
        stale.check({"device": "gpu", "jax": "0.10.2", "shapes": "f32[8]"})
    assert str(refusal.value) == (
        "the profile was made on something else:\n"
        "  * device: 'cpu' in the profile, 'gpu' here\n"
        "  * shapes: nothing in the profile, 'f32[8]' here\n"
        "Measure again, or use the profile where it was made"
    )


@pytest.mark.parametrize(
    ("name", "num_layers", "num_skips", "seconds"),
    [
        ("pipedream/vgg16", 40, 1, 0.672535),
        ("pipedream/alexnet", 22, 1, 0.085321),
        ("pipedream/resnet101", 346, 38, 0.411092),
        ("dapple/amoeba-18-pbs-8", 25, 21, 0.71781),
        ("dapple/bert-24-pbs-6", 29, 25, 0.515357),
        ("dapple/vgg-19-pbs-32", 25, 0, 0.14421),
        ("dapple/xlnet-24-pbs-1", 30, 73, 0.20111),
    ],
)
def test_published_profiles_are_read(name, num_layers, num_skips, seconds, tmp_path):
    given = read(name)
    assert (len(given.layers), len(given.skips)) == (num_layers, num_skips)
    total = sum(layer.forward + layer.backward for layer in given.layers)
    assert total == pytest.approx(seconds, rel=1e-9)
    given.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == given


def test_an_edge_that_passes_by_is_a_skip():
    text = (
        "node1 -- Input -- forward_compute_time=9, backward_compute_time=0, "
        "activation_size=[100; 3], parameter_size=0\n"
        + node("node4", size="[5; 6]")
        + node("node3", size="8.000", more=" -- stage_id=3")
        + node("node5")
        + node("node6")
        + "\tnode1 -- node3\n\tnode1 -- node6\n"
        + "\tnode3 -- node4\n\tnode3 -- node5\n\tnode4 -- node5\n\tnode4 -- node6\n"
    )
    given = Profile.from_text(text, microbatch_size=6)
    assert [layer.name.split()[0] for layer in given.layers] == [
        "node3",
        "node4",
        "node5",
        "node6",
    ]
    assert given.input_bytes == 100
    # Nothing goes from node5 to node6.
    assert [layer.output_bytes for layer in given.layers] == [8, 5, 0, 0]
    assert given.layers[0] == LayerProfile(
        "node3 Linear(2, 2)",
        1e-3,
        2e-3,
        num_params=4,
        param_bytes=16,
        output_bytes=8,
        cotangent_bytes=8,
        kept_bytes={"none": 8},
    )
    assert given.skips == (
        SkipProfile("node3", 0, 2, 8, 8, is_output=True),
        SkipProfile("node4[1]", 1, 3, 6, 6),
    )
    assert given.microbatch_size == 6


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "layers is empty"),
        ("hello", "line 1: ['hello']: needs 'name -- description"),
        (node("node1", time="fast"), "line 1: node1: forward_compute_time=fast; needs"),
        (node("node1", size="-3"), "activation_size=-3; needs a number, 0 or more"),
        (node("node1", size="nan"), "activation_size=nan; needs a number, 0 or more"),
        ("node1 -- Linear -- forward_compute_time=1", "node1: no activation_size"),
        (node("node1") * 2, "line 2: node1 was there before"),
        (node("node1") + "\tnode1 -- node7", "line 2: 'node1 -- node7': needs two"),
        (
            node("node1") + node("node2") + "\tnode1 -- node2\n\tnode2 -- node1",
            "the edges make a ring: ['node1', 'node2']",
        ),
    ],
)
def test_a_text_of_no_use_tells_every_fault(text, says):
    with pytest.raises(ValueError, match="the text holds no profile") as refusal:
        Profile.from_text(text)
    assert says in str(refusal.value)


def test_all_lines_of_no_use_are_told_at_once():
    with pytest.raises(ValueError, match="the text holds no profile") as refusal:
        Profile.from_text(f"x\n{node('node1', time='?', size='?')}\tnode1")
    for says in ("line 1: ['x']", "line 2: node1: forward_", "activation", "line 3:"):
        assert says in str(refusal.value)
