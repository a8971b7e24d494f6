"""What programs need while they run, on paper: by hand, and beside what XLA says."""

import jax
import jax.numpy as jnp

import jpipe


def test_it_is_no_less_than_what_xla_takes():
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
