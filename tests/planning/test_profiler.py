"""Layers that are measured: what is the same as on paper, and orders of magnitude."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe

from .models import X, profile

TIMES = {"forward", "backward", "input_grad", "weight_grad", "workspace_bytes"}


def test_all_but_times_is_as_estimated():
    measured, paper = profile("skips", rounds=1), profile("skips", measure=False)
    for one, other in zip(measured.layers, paper.layers, strict=True):
        rest = vars(one).keys() - TIMES
        assert {key: vars(one)[key] for key in rest} == {
            key: vars(other)[key] for key in rest
        }
    assert measured.skips == paper.skips
    assert measured.ties == paper.ties
    assert measured.fingerprint == paper.fingerprint
    assert measured.origin["how"] == "measured"
    assert measured.origin["device"].startswith("cpu (")
    lines = str(measured).splitlines()
    assert lines[0].startswith("measured on cpu (")
    assert lines[2].startswith("cores: each layer had all of them to itself")
    assert lines[3].startswith("transfers: ")
    assert lines[3].endswith(f"from {measured.link.source} to {measured.link.target}")
    assert (paper.link, "cores" in str(paper)) == (None, False)
    assert 1e-7 < measured.action_seconds < 1e-2


def test_the_first_layer_is_given_the_sample_and_others_valid_numbers():
    seen = {}

    def look(name):
        def layer(x):
            jax.debug.callback(lambda x: seen.setdefault(name, np.array(x)), x)
            return x

        return layer

    tokens = np.arange(3, 11)
    layers = [look("first"), look("second"), lambda x: x / 2, look("third")]
    jpipe.profile(layers, tokens, num_microbatches=2, rounds=1)
    np.testing.assert_array_equal(seen["first"], tokens[:4])
    np.testing.assert_array_equal(seen["second"], np.zeros(4, int))
    assert np.std(seen["third"]) > 0.1


def test_an_error_names_the_layer_that_was_measured():
    def refuse(x):
        raise ValueError("broken on purpose")

    def breaking(x):
        return jax.pure_callback(refuse, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    layers = [jnp.tanh, breaking]
    with pytest.raises(Exception, match="broken on purpose") as caught:
        jpipe.profile(layers, X, rounds=1)
    assert "raised when layer 1 (breaking) was measured" in caught.value.__notes__


def test_a_workspace_on_paper_is_no_less_than_what_xla_takes():
    def attend(x):
        scores = jax.nn.softmax(x @ jnp.swapaxes(x, -1, -2))
        return x + jax.nn.gelu(scores @ x)

    x = jnp.ones((4, 32, 64))
    paper, measured = (
        jpipe.profile([jnp.sin, attend], x, rounds=1, measure=False),
        jpipe.profile([jnp.sin, attend], x, rounds=1),
    )
    least, most = (p.layers[1].workspace_bytes for p in (measured, paper))
    assert 0 < least <= most
