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
    of_layers = [key for key in paper.fingerprint if "layer" in key]
    assert [measured.fingerprint.get(key) for key in of_layers] == [
        paper.fingerprint[key] for key in of_layers
    ]
    assert measured.fingerprint["how"] == "measured"
    assert measured.fingerprint["device"].startswith("cpu (")
    assert str(measured).startswith("measured on cpu (")
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
