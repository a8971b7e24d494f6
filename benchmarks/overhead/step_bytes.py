"""The bytes of a step of a model as it is, beside those of the same layers as a list.

Run it with ``python -m benchmarks.overhead.step_bytes``.
"""

import jax
import optax

import jpipe
from jpipe._instructions import _memory

from ..experiment import mean_cross_entropy
from .first_step import MICROBATCHES, MODELS, Model, Whole, balanced


def step_bytes(pipe: jpipe.Pipeline, model: Model) -> list[int]:
    """The most that each device holds in a step, by the list of instructions."""
    tx = optax.adamw(1e-3)
    state = pipe.init_train_state(jax.random.key(0), model.x, tx)
    step = pipe.train_step(mean_cross_entropy, tx)
    return _memory.peak_bytes(step.program(state, model.x, model.targets))


def main() -> None:
    """Prints a table."""
    jax.config.update("jax_num_cpu_devices", 4)
    print("| | stages | list, MiB of each device | model, MiB of each device |")
    print("| --- | --: | --- | --- |")
    for name in ("mlp", "vit", "gpt"):
        model = MODELS[name]()
        for stages in (2, 4):
            balance = balanced(model, stages)
            pipes = (
                jpipe.pipeline(model.layers, MICROBATCHES, balance=balance),
                jpipe.pipeline(Whole(model.layers), MICROBATCHES, num_stages=stages),
            )
            peaks = (step_bytes(pipe, model) for pipe in pipes)
            cells = (", ".join(f"{n / 2**20:.2f}" for n in own) for own in peaks)
            print(f"| {name} | {stages} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
