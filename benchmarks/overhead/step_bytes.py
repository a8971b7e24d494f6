"""The bytes of a step of a model as it is, beside those of the same layers as a list.

Run it with ``python -m benchmarks.overhead.step_bytes``.
"""

import jax
import optax

import jpipe
from jpipe._instructions import _memory

from ..experiment import mean_cross_entropy
from ..markdown import table
from .first_step import MODELS, Model, module_pipeline, pipeline


def step_bytes(model: Model, pipe: jpipe.Pipeline) -> str:
    """The most MiB that each device holds in a step, by the list of instructions."""
    tx = optax.adamw(1e-3)
    state = pipe.init_train_state(jax.random.key(0), model.x, tx)
    step = pipe.train_step(mean_cross_entropy, tx)
    peaks = _memory.peak_bytes(step._program(state, model.x, model.targets))
    return ", ".join(f"{size / 2**20:.2f}" for size in peaks)


def main() -> None:
    """Prints a table."""
    jax.config.update("jax_num_cpu_devices", 4)
    rows = []
    for name in ("mlp", "vit", "gpt"):
        model = MODELS[name]()
        for stages in (2, 4):
            of_list = step_bytes(model, pipeline(model, stages))
            of_module = step_bytes(model, module_pipeline(model, stages))
            rows.append([name, f"{stages}", of_list, of_module])
    head = ["", "stages", "list, MiB of each device", "model, MiB of each device"]
    print(table(head, rows, left=4))


if __name__ == "__main__":
    main()
