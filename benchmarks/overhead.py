"""What jpipe costs beside the arithmetic: throughput, Python per action, bytes held.

Run it with ``python -m benchmarks.overhead`` (about two minutes on two cores). Times
are compared within one run, the two sides interleaved, medians of many.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 4)

import flax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import linen as nn  # noqa: E402

import jpipe  # noqa: E402
from jpipe import _execute, _memory, _transfer  # noqa: E402
from jpipe._objective import Objective  # noqa: E402

PyTree = Any


class Block(nn.Module):
    """A pre-LN Transformer block with causal attention."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Float ``[batch, time, width]`` to the same."""
        mask = nn.make_causal_mask(x[..., 0])
        attend = nn.MultiHeadDotProductAttention(self.heads)
        x = x + attend(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(h)


def transformer() -> tuple[list[Any], jax.Array, jax.Array]:
    """Layers, tokens and next tokens: 0.9 M parameters, batch 64 of 64 tokens."""
    width, vocabulary = 128, 256
    layers = [nn.Embed(vocabulary, width), *(Block(width, 4) for _ in range(4))]
    layers += [nn.LayerNorm(), nn.Dense(vocabulary)]
    tokens = jax.random.randint(jax.random.key(1), (64, 65), 0, vocabulary)
    return layers, tokens[:, :-1], tokens[:, 1:]


def cnn() -> tuple[list[Any], jax.Array, jax.Array]:
    """Layers, images and labels: four convolutions, batch 64 of 32 x 32."""
    layers = [
        nn.Conv(32, (3, 3)),
        nn.relu,
        nn.Conv(64, (3, 3), strides=(2, 2)),
        nn.relu,
        nn.Conv(64, (3, 3)),
        nn.relu,
        nn.Conv(128, (3, 3), strides=(2, 2)),
        nn.relu,
        lambda x: jnp.mean(x, axis=(1, 2)),
        nn.Dense(10),
    ]
    images = jax.random.normal(jax.random.key(1), (64, 32, 32, 3))
    return layers, images, jax.random.randint(jax.random.key(2), (64,), 0, 10)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """A mean over examples."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def scan_step(
    layers: Sequence[Any],
    tx: optax.GradientTransformation,
    num_microbatches: int,
    unroll: bool,
) -> Callable[..., Any]:
    """The step that a user writes by hand: one jit, `lax.scan` over micro-batches.

    XLA on CPU runs a convolution inside a loop far slower than outside, so the scan
    can be unrolled; then XLA may also run micro-batches side by side.
    """

    def loss(params: PyTree, x: Any, targets: jax.Array) -> jax.Array:
        for layer, own in zip(layers, params, strict=True):
            is_module = isinstance(layer, nn.Module)
            x = layer.apply({"params": own}, x) if is_module else layer(x)
        return cross_entropy(x, targets)

    def step(params: PyTree, opt_state: PyTree, x: jax.Array, targets: jax.Array):
        def split(leaf: jax.Array) -> jax.Array:
            return leaf.reshape(num_microbatches, -1, *leaf.shape[1:])

        def body(sums: PyTree, part: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, *part)
            return jax.tree.map(jnp.add, sums, (value, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        parts = split(x), split(targets)
        sums, _ = jax.lax.scan(body, zeros, parts, unroll=unroll)
        value, grads = jax.tree.map(lambda leaf: leaf / num_microbatches, sums)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return jax.jit(step, donate_argnums=(0, 1))


def interleaved(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, list]:
    """Seconds of each side, taken in turns; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        names = list(sides) if number % 2 else list(sides)[::-1]
        for name in names:
            start = time.perf_counter()
            sides[name]()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def one_stage_throughput(model: Callable[[], Any], rounds: int) -> dict[str, float]:
    """One stage and M micro-batches against the hand-written step, same model.

    Args:
      model: gives layers, inputs and targets.
      rounds: how many steps of each side are timed.

    Returns:
      The median milliseconds of each, and the median over neighbouring steps of
      jpipe's throughput by that of each hand-written step.
    """
    layers, x, targets = model()
    number, tx = 8, optax.adamw(1e-3)
    pipe = jpipe.sequential(layers, number)
    state = pipe.init_train_state(jax.random.key(0), x, tx)
    step = pipe.train_step(cross_entropy, tx)

    def run_jpipe(state: Any) -> Any:
        return step(state, x, targets)[0]

    def run_by_hand(by_hand: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda state: by_hand(*state, x, targets)[:2]

    # Copies: every side overwrites its parameters.
    copies = [jax.tree.map(jnp.array, state.params) for _ in range(2)]
    states: dict[str, Any] = {"jpipe": state}
    runs: dict[str, Callable[[Any], Any]] = {"jpipe": run_jpipe}
    for name, params in zip(("scan", "unrolled"), copies, strict=True):
        states[name] = params, tx.init(params)
        runs[name] = run_by_hand(scan_step(layers, tx, number, name == "unrolled"))

    def once(name: str) -> Callable[[], None]:
        def run() -> None:
            states[name] = jax.block_until_ready(runs[name](states[name]))

        return run

    seconds = interleaved({name: once(name) for name in runs}, rounds)
    medians = {f"{n}_ms": 1e3 * statistics.median(t) for n, t in seconds.items()}
    ratios = {
        f"by_{name}": statistics.median(
            a / b for a, b in zip(seconds[name], seconds["jpipe"], strict=True)
        )
        for name in ("scan", "unrolled")
    }
    return {**medians, **ratios}


def dispatch_cost(rounds: int) -> dict[str, float]:
    """Microseconds of a step per action, on four stages of tiny layers, M = 32.

    The bare loop issues the same compiled calls and the same `jax.device_put`, on the
    arrays that the step issued them on, with nothing around them.

    Args:
      rounds: how many times each side is timed.

    Returns:
      Microseconds per action of the schedule: of the whole step, of the executor's
      loop, of the bare calls, and the difference of the last two.
    """
    width, number = 8, 32
    layers = [nn.Dense(width) for _ in range(4)]
    pipe = jpipe.pipeline(layers, number)
    x = jnp.ones((number, width))
    tx = optax.sgd(1e-3)
    state = pipe.init_train_state(jax.random.key(0), x, tx)

    def square(y: jax.Array, t: jax.Array) -> jax.Array:
        return jnp.mean((y - t) ** 2)

    step = pipe.train_step(square, tx)
    variables = pipe.place(state.variables)
    gradient = pipe._library.gradients(Objective(square))(variables, x, x, None, True)
    weights: list[Any] = [
        jax.tree.leaves(entry) for entry in pipe.init(jax.random.key(0), x)
    ]
    program = gradient.program
    box = {"state": state}

    def whole() -> None:
        box["state"], metrics = step(box["state"], x, x)
        jax.block_until_ready((box["state"], metrics))

    def fed() -> Any:
        live = program.feed(weights, [x], [x])
        jax.block_until_ready((live.x, live.extra, live.grads, live.tally))
        return live

    loop, bare = [], []
    for _ in range(rounds + 1):
        live = fed()
        start = time.perf_counter()
        _execute.execute(program.steps, live)
        loop.append(time.perf_counter() - start)
        jax.block_until_ready((live.grads, live.tally))
        bare.append(_bare_loop(program.steps, fed()))
    seconds = interleaved({"whole": whole}, rounds)["whole"]
    actions = 2 * 4 * number
    micro = 1e6 / actions
    loop_us = micro * statistics.median(loop[1:])
    bare_us = micro * statistics.median(bare[1:])
    return {
        "step_us": micro * statistics.median(seconds),
        "loop_us": loop_us,
        "bare_us": bare_us,
        "python_us": micro
        * statistics.median(a - b for a, b in zip(loop[1:], bare[1:], strict=True)),
    }


def _bare_loop(steps: Sequence[_execute.Step], live: _execute.Live) -> float:
    """Seconds in the compiled calls and moves alone, in the order of the steps."""
    seconds = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal seconds
            start = time.perf_counter()
            result = call(*args)
            seconds += time.perf_counter() - start
            return result

        return run

    wrapped = [
        step._replace(program=timed(step.program), send=timed(step.send))
        for step in steps
    ]
    _execute.execute(wrapped, live)
    jax.block_until_ready((live.grads, live.tally))
    return seconds


def held_bytes() -> list[dict[str, Any]]:
    """Bytes held between F and B per micro-batch, on a stage of one Block.

    Returns:
      For each remat: what the executor held at its peak, divided by the micro-batches
      in flight; the stage's input; the weights of the stage; what `jax.vjp` would
      return through `jax.jit` if nothing were done about it.
    """
    width, number = 128, 4
    layers = [Block(width, 4), Block(width, 4)]
    x = jnp.ones((2 * number, 64, width))
    rows = []
    for remat in ("full", "none"):
        pipe = jpipe.pipeline(layers, number, schedule="gpipe", remat=remat)
        variables = pipe.init(jax.random.key(0), x)

        def loss(y: jax.Array, t: jax.Array) -> jax.Array:
            return jnp.mean((y - t) ** 2)

        gradient = pipe._library.gradients(Objective(loss))(variables, x, x, None, True)
        meter = _memory.Meter(pipe.devices)
        weights: list[Any] = [jax.tree.leaves(entry) for entry in variables]
        gradient(weights, [x], [x], [], meter)
        part = x[:2]

        def naive(variables: PyTree, part: jax.Array, layer: nn.Module = layers[0]):
            return jax.vjp(layer.apply, variables, part)[1]

        pullback = jax.jit(naive)(
            _transfer.put_tree(variables[0], jax.devices()[0]), part
        )
        rows.append(
            {
                "remat": remat,
                "held": meter.activations[0] // number,
                "input": part.nbytes,
                "weights": _memory.nbytes(variables[0]),
                "naive_vjp": _memory.nbytes(pullback),
            }
        )
    return rows


def first_gradient(rounds: int) -> dict[str, float]:
    """How a sum of gradients begins: zeros to add to, or a first backward that writes.

    Writing saves the zeros and one reading of them, and needs a second compiled
    backward beside the one that adds.

    Args:
      rounds: how many times each side is timed.

    Returns:
      Seconds to compile each, and milliseconds of eight backwards of one Block.
    """
    layer, number = Block(256, 8), 8
    x = jax.random.normal(jax.random.key(1), (2, 64, 256))
    params = layer.init(jax.random.key(0), x)

    def new(params: PyTree, x: jax.Array) -> PyTree:
        def mean_square(params: PyTree) -> jax.Array:
            y: Any = layer.apply(params, x)
            return jnp.mean(y**2)

        return jax.grad(mean_square)(params)

    def added(params: PyTree, x: jax.Array, sums: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, sums, new(params, x))

    def zeros() -> PyTree:
        return jax.tree.map(jnp.zeros_like, params)

    def compiled(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        program = jax.jit(function, **options).lower(*args).compile()
        return program, time.perf_counter() - start

    write, write_s = compiled(new, params, x)
    add, add_s = compiled(added, params, x, params, donate_argnums=2)
    zero, zero_s = compiled(zeros)

    def run(start: Callable[[], PyTree], count: int) -> Callable[[], None]:
        def once() -> None:
            sums = start()
            for _ in range(count):
                sums = add(params, x, sums)
            jax.block_until_ready(sums)

        return once

    sides = {
        "zeros": run(zero, number),
        "write": run(lambda: write(params, x), number - 1),
    }
    seconds = interleaved(sides, rounds)
    return {
        "zeros_compile_s": add_s + zero_s,
        "write_compile_s": add_s + write_s,
        "zeros_ms": 1e3 * statistics.median(seconds["zeros"]),
        "write_ms": 1e3 * statistics.median(seconds["write"]),
    }


def provenance() -> str:
    """Where and with what the figures were made."""
    devices = jax.devices()
    return (
        f"jax {jax.__version__}, flax {flax.__version__}, Python "
        f"{platform.python_version()}, {len(devices)} {devices[0].device_kind} devices "
        f"on {platform.machine()}, {date.today().isoformat()}"
    )


def main() -> None:
    """Prints the tables, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="steps timed per side")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    result = {
        "provenance": provenance(),
        "throughput": {
            model.__name__: one_stage_throughput(model, options.rounds)
            for model in (transformer, cnn)
        },
        "dispatch": dispatch_cost(options.rounds),
        "held": held_bytes(),
        "first_gradient": first_gradient(options.rounds),
    }
    print(json.dumps(result, indent=2) if options.json else tables(result))


def tables(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        result["provenance"],
        "",
        "| one stage, M = 8 | jpipe, ms | `lax.scan`, ms | unrolled, ms "
        "| throughput by scan's | by unrolled's |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for name, row in result["throughput"].items():
        lines.append(
            f"| {name} | {row['jpipe_ms']:.1f} | {row['scan_ms']:.1f} | "
            f"{row['unrolled_ms']:.1f} | {row['by_scan']:.3f} | "
            f"{row['by_unrolled']:.3f} |"
        )
    cost = result["dispatch"]
    lines += [
        "",
        "| 4 stages of tiny layers, M = 32 | µs per action |",
        "| --- | --: |",
        f"| the whole step, to the last result | {cost['step_us']:.1f} |",
        f"| the executor's loop | {cost['loop_us']:.1f} |",
        f"| its compiled calls and moves alone | {cost['bare_us']:.1f} |",
        f"| Python beside them | {cost['python_us']:.1f} |",
        "",
        "| remat | held per micro-batch | stage input | weights | plain `jit(vjp)` |",
        "| --- | --: | --: | --: | --: |",
    ]
    for row in result["held"]:
        lines.append(
            f"| {row['remat']} | {row['held']:,} | {row['input']:,} | "
            f"{row['weights']:,} | {row['naive_vjp']:,} |"
        )
    first = result["first_gradient"]
    lines += [
        "",
        "| first micro-batch | compile, s | eight backwards, ms |",
        "| --- | --: | --: |",
        f"| adds to zeros | {first['zeros_compile_s']:.2f} | {first['zeros_ms']:.1f} |",
        f"| writes | {first['write_compile_s']:.2f} | {first['write_ms']:.1f} |",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
