"""Trains a U-Net to take noise out of photographs, in four stages on four devices.

The images are patches of the two photographs that come with scikit-learn; those of
the lowest third are held back to judge by. What each level of the encoder sees at its
resolution goes to the decoder by `jpipe.stash` and `jpipe.pop`: straight from stage to
stage, past those between. The stages run on GPUs where there are any, else on devices
made of the host's CPU; the defaults take about a minute on two cores.

    python examples/unet.py
    python examples/unet.py --schedule gpipe --remat full --png after.png

At the end one step is taken twice, in stages and on one device, and compared. The exit
status is 1 if the two differ by more than rounding explains.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from scipy.ndimage import gaussian_filter
from sklearn.datasets import load_sample_images

import jpipe

LEVELS = 3
# The photographs have 427 rows; what is left above is trained on.
HELD_BACK_ROWS = 144
LARGEST = 256
JUDGED_SIZE = 48
SHOWN = 9
ROWS = ["noisy", "denoised", "clean"]
# How far a step may be from that on one device, in units of an array's largest number.
ROUNDING = 1e-5

Options = argparse.Namespace
Batch = tuple[np.ndarray, np.ndarray]


def main() -> int:
    """Trains, judges, draws and compares; returns the exit status."""
    options = parse_options()
    options.png.parent.mkdir(parents=True, exist_ok=True)
    training, clean = read_photos()
    batches = noisy_batches(training, options)
    layers = unet(options.width)
    try:
        pipe = jpipe.pipeline(
            layers,
            options.microbatches,
            balance=[2, 2, 3, 3],
            devices=make_devices(4),
            schedule=options.schedule,
            remat=options.remat,
        )
    except ValueError as error:
        sys.exit(str(error))
    # The rate falls to nothing, so that the last weights are good ones.
    tx = optax.adam(optax.cosine_decay_schedule(options.learning_rate, options.steps))
    # Keys of this kind make random weights by programs that are compiled much sooner.
    key = jax.random.key(options.seed, impl="rbg")
    state = pipe.init_train_state(key, next(batches)[0], tx)
    print(pipe, end="\n\n", flush=True)

    state = train(pipe.train_step(mean_square, tx), state, batches, options.steps)

    # Other noise than that of the training.
    noisy = add_noise(clean, np.random.default_rng(options.seed + 1), options.noise)
    denoised = np.clip(pipe.apply(state.variables, noisy), 0, 1)
    report(clean, noisy, denoised)
    draw([noisy, denoised, clean], options.png)
    print(f"{options.png}: the {SHOWN} patches with most detail", flush=True)

    one_device = jpipe.sequential(
        layers, options.microbatches, devices=pipe.devices[:1]
    )
    return 0 if agree(pipe, one_device, state.variables, next(batches)) else 1


def make_devices(number: int) -> list[Any]:
    """One device per stage; where there are fewer, some serve several stages."""
    # This concerns CPUs only: where there are GPUs, jax.devices() lists those.
    jax.config.update("jax_num_cpu_devices", number)
    # GPUs else round what they multiply to 11 bits, which would blur the comparison.
    jax.config.update("jax_default_matmul_precision", "highest")
    return (number * jax.devices())[:number]


class Down(nn.Module):
    """A level of the encoder: looks, puts aside what it saw, halves the resolution.

    Attributes:
      width: channels of what it makes.
    """

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, height, width, channels]`` to half the height and width."""
        x = Convolutions(self.width)(x)
        jpipe.stash("detail", x)
        return nn.avg_pool(x, (2, 2), strides=(2, 2))


class Up(nn.Module):
    """A level of the decoder: doubles the resolution, brings back what was put aside.

    Attributes:
      width: channels of what it makes.
    """

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[batch, height, width, channels]`` to twice the height and width."""
        x = nn.ConvTranspose(self.width, (2, 2), strides=(2, 2))(x)
        x = jnp.concatenate([x, jpipe.pop("detail")], axis=-1)
        return Convolutions(self.width)(x)


class Convolutions(nn.Module):
    """Two convolutions that keep the resolution.

    Attributes:
      width: channels of what each makes.
    """

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images to as many, with other channels."""
        x = nn.relu(nn.Conv(self.width, (3, 3))(x))
        return nn.relu(nn.Conv(self.width, (3, 3))(x))


def unet(width: int) -> list[Any]:
    """Layers from noisy images to clean ones, ``[batch, height, width, 3]``.

    Args:
      width: channels at full resolution; each level below has twice as many.
    """
    widths = [width * 2**level for level in range(LEVELS)]
    # The blocks of a level share a namespace, else all would stash the same "detail".
    down = [jpipe.isolate(Down(widths[n]), n) for n in range(LEVELS)]
    up = [jpipe.isolate(Up(widths[n]), n) for n in reversed(range(LEVELS))]
    # It starts from no noise at all: the first output is the input.
    noise = nn.Conv(3, (3, 3), kernel_init=nn.initializers.zeros)
    return [keep_image, *down, Convolutions(2 * widths[-1]), *up, noise, remove_noise]


def keep_image(x: jax.Array) -> jax.Array:
    """Puts the noisy image aside for `remove_noise`."""
    jpipe.stash("image", x)
    return x


def remove_noise(noise: jax.Array) -> jax.Array:
    """The image without the noise that the network found in it.

    Noise is the easier thing to learn: an image would have to be made from nothing.
    """
    return jpipe.pop("image") - noise


def mean_square(images: jax.Array, clean: jax.Array) -> jax.Array:
    """The loss: the mean over all numbers of the images."""
    return jnp.mean((images - clean) ** 2)


def read_photos() -> tuple[list[np.ndarray], np.ndarray]:
    """What is trained on, and what is judged by.

    Returns:
      The upper parts of the photographs, and patches ``[number, height, width, 3]``
      that tile their lower parts; from 0 to 1.
    """
    size = JUDGED_SIZE
    photos = [photo.astype(np.float32) / 255 for photo in load_sample_images().images]
    lower = [photo[-HELD_BACK_ROWS:] for photo in photos]
    patches = [
        photo[row : row + size, column : column + size]
        for photo in lower
        for row in range(0, photo.shape[0] - size + 1, size)
        for column in range(0, photo.shape[1] - size + 1, size)
    ]
    return [photo[:-HELD_BACK_ROWS] for photo in photos], np.stack(patches)


def noisy_batches(photos: Sequence[np.ndarray], options: Options) -> Iterator[Batch]:
    """Random patches without end, some mirrored: with noise, and without."""
    rng = np.random.default_rng(options.seed)
    size = options.patch
    while True:
        patches = []
        for photo in rng.integers(len(photos), size=options.batch_size):
            row, column = rng.integers(np.array(photos[photo].shape[:2]) - size + 1)
            patch = photos[photo][row : row + size, column : column + size]
            patches.append(patch[:, :: rng.choice([1, -1])])
        clean = np.stack(patches)
        yield add_noise(clean, rng, options.noise), clean


def add_noise(clean: np.ndarray, rng: np.random.Generator, sigma: float) -> np.ndarray:
    """Adds to every number one drawn from a normal distribution."""
    return clean + sigma * rng.standard_normal(clean.shape, np.float32)


def train(
    step: jpipe.TrainStep, state: jpipe.TrainState, batches: Iterator[Batch], steps: int
) -> jpipe.TrainState:
    """Takes all steps and shows how they go."""
    losses = []
    with Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.5f}"),
    ) as bar:
        task = bar.add_task("training", total=steps, loss=math.nan)
        for _ in range(steps):
            state, metrics = step(state, *next(batches))
            losses.append(metrics["loss"])
            # The loss of two steps ago is there: no device waits until it is read.
            bar.update(task, advance=1, loss=float(losses[-3:][0]))
        bar.update(task, loss=np.mean(losses[-20:]))
    return state


def report(clean: np.ndarray, noisy: np.ndarray, denoised: np.ndarray) -> None:
    """Prints how near the images come to the clean ones, beside what a blur does."""
    blurred = [gaussian_filter(noisy, [0, s, s, 0]) for s in np.arange(0.4, 3, 0.2)]
    best = max(map(partial(decibels, clean), blurred))
    print(f"\nPSNR on {len(clean)} patches of the part that was held back")
    print(f"  noisy               {decibels(clean, noisy):.1f} dB")
    print(f"  best Gaussian blur  {best:.1f} dB")
    print(f"  denoised            {decibels(clean, denoised):.1f} dB\n")


def decibels(clean: np.ndarray, images: np.ndarray) -> float:
    """The peak signal-to-noise ratio; the signal's peak is 1."""
    return -10 * math.log10(np.mean((images - clean) ** 2))


def draw(rows: Sequence[np.ndarray], path: Path) -> None:
    """Writes a picture of some patches: noisy, denoised and clean, one above another.

    Args:
      rows: the images of the three rows, all of them.
      path: of the PNG.
    """
    clean = rows[-1]
    chosen = np.argsort(-clean.std(axis=(1, 2)).mean(axis=-1))[:SHOWN]
    # Not pyplot: nothing here asks for a display.
    figure = Figure(figsize=(1.25 * SHOWN, 4.4), layout="constrained")
    axes = figure.subplots(len(rows), SHOWN, squeeze=False)
    for name, images, row in zip(ROWS, rows, axes, strict=True):
        row[0].set_ylabel(name, fontsize=11)
        for patch, cell in zip(chosen, row, strict=True):
            cell.imshow(np.clip(images[patch], 0, 1))
            cell.set(xticks=[], yticks=[])
            if images is not clean:
                ratio = decibels(clean[patch], images[patch])
                cell.set_xlabel(f"{ratio:.1f} dB", fontsize=9)
    figure.savefig(path, format="png", dpi=150)


def agree(
    pipe: jpipe.Pipeline,
    one_device: jpipe.Pipeline,
    variables: Sequence[Any],
    batch: Batch,
) -> bool:
    """Whether a step in stages is the same step on one device, up to rounding."""
    loss, grads = pipe.value_and_grad(mean_square)(variables, *batch)
    expected_loss, expected = one_device.value_and_grad(mean_square)(
        one_device.place(variables), *batch
    )
    pairs = [
        (np.asarray(value), np.asarray(other))
        for value, other in zip(
            jax.tree.leaves((loss, grads)),
            jax.tree.leaves((expected_loss, expected)),
            strict=True,
        )
    ]
    apart = [np.abs(value - other).max() for value, other in pairs]
    sizes = [np.abs(other).max() + np.finfo(np.float32).tiny for _, other in pairs]
    # Unlike Python's max, NumPy's keeps a NaN, which is not below anything.
    worst = np.max(np.divide(apart, sizes))
    print("one more step, in stages and on one device")
    print(f"  losses     differ by {apart[0]:.1e}")
    print(f"  gradients  differ by at most {np.max(apart[1:]):.1e}")
    print(f"  that is {worst:.1e} of the largest number of an array, or less")
    return bool(worst <= ROUNDING)


def parse_options() -> Options:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description="Trains a U-Net to take noise out of photographs, in four stages.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    schedules = sorted(jpipe.schedules.BY_NAME)
    remats = ["min_cut", "dots", "none", "except_last", "full"]
    add("--steps", type=int, default=1200, help="training steps")
    add("--schedule", choices=schedules, default="1f1b", help="the order of the parts")
    add("--remat", choices=remats, default="min_cut", help="what is kept for B")
    add("--batch-size", type=int, default=8, help="patches in a batch")
    add("--microbatches", type=int, default=4, help="parts that a batch is cut in")
    add("--patch", type=int, default=32, help="pixels along a patch to train on")
    add("--width", type=int, default=16, help="channels at full resolution")
    add("--noise", type=float, default=0.15, help="standard deviation of the noise")
    add("--learning-rate", type=float, default=4e-3, help="the first rate")
    add("--seed", type=int, default=0, help="of weights, patches and noise")
    add("--png", type=Path, default="build/unet.png", help="where the picture goes")
    options = parser.parse_args()
    if faults := list(_faults(options)):
        parser.error("; ".join(faults))
    return options


def _faults(options: Options) -> Iterator[str]:
    """What is wrong with the options."""
    for name in ["steps", "microbatches", "width", "noise", "learning_rate"]:
        if not 0 < getattr(options, name) < math.inf:
            yield f"--{name.replace('_', '-')} is not above 0"
    if options.batch_size < options.microbatches:
        yield (
            f"--batch-size {options.batch_size} is less than "
            f"--microbatches {options.microbatches}"
        )
    if options.patch % 2**LEVELS or not 0 < options.patch <= LARGEST:
        yield f"--patch is not a multiple of {2**LEVELS} from {2**LEVELS} to {LARGEST}"
    if options.seed < 0:
        yield "--seed is below 0"


if __name__ == "__main__":
    sys.exit(main())
