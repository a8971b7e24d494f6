"""Random chains of layers, whose times and sizes differ by several times."""

import random

from jpipe import Profile
from jpipe.planning._layer_profile import LayerProfile, SkipProfile


def random_chain(
    rng: random.Random,
    num_layers: int,
    *,
    is_whole: bool = False,
    num_skips: int = 0,
    num_ties: int = 0,
    action_seconds: float = 0.0,
) -> Profile:
    """A chain of layers; no backward takes as long as its two halves together.

    Args:
      rng: the source of all numbers.
      num_layers: the number of layers.
      is_whole: True for small whole numbers of seconds, also 0, so that many cuts are
        as good as others.
      num_skips: the number of skip connections.
      num_ties: the number of pairs of layers that share parameters.
      action_seconds: the seconds that any action takes.
    """
    layers = tuple(_random_layer(rng, i, is_whole=is_whole) for i in range(num_layers))
    skips = tuple(_random_skip(rng, layers, i) for i in range(num_skips))
    ties = tuple(tuple(rng.sample(range(num_layers), 2)) for _ in range(num_ties))
    return Profile(
        layers,
        input_bytes=rng.randint(1, 40),
        skips=skips,
        ties=ties,
        action_seconds=action_seconds,
    )


def _random_layer(
    rng: random.Random, layer_index: int, *, is_whole: bool
) -> LayerProfile:
    if is_whole:
        forward, input_grad, weight_grad = (float(rng.randrange(5)) for _ in range(3))
        backward = abs(input_grad + weight_grad + rng.choice([-1.0, 1.0]))
    else:
        forward = rng.lognormvariate(0, 0.7)
        input_grad = forward * rng.uniform(0.8, 1.1)
        weight_grad = forward * rng.uniform(0.8, 1.1)
        backward = (input_grad + weight_grad) * rng.uniform(0.7, 1.4)
    param_bytes = rng.randint(1, 60)
    output_bytes = rng.randint(1, 40)
    stored_bytes = int(output_bytes * rng.uniform(1, 6))
    return LayerProfile(
        name=f"layer {layer_index}",
        forward=forward,
        backward=backward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        param_bytes=param_bytes,
        state_bytes=2 * param_bytes,
        output_bytes=output_bytes,
        cotangent_bytes=output_bytes,
        residual_bytes={"none": 2 * stored_bytes, "min_cut": stored_bytes},
        workspace_bytes=output_bytes,
    )


def _random_skip(
    rng: random.Random, layers: tuple[LayerProfile, ...], skip_index: int
) -> SkipProfile:
    """A skip connection; some are the output of a layer that later ones read too."""
    source, target = sorted(rng.sample(range(len(layers)), 2))
    is_output = rng.random() < 0.3
    name = f"skip {skip_index}"
    num_bytes = rng.randint(1, 60)
    if is_output:
        name = layers[source].name
        num_bytes = layers[source].output_bytes
    return SkipProfile(
        name,
        source,
        target,
        bytes=num_bytes,
        cotangent_bytes=num_bytes,
        is_output=is_output,
    )
