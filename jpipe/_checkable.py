"""`Pipeline.check`, and the check of the first mini-batch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._cache import ProgramCache
from ._check._layers import Checking
from ._check._report import CheckReport
from ._functions import _microbatch
from ._functions._objective import Objective
from ._instructions import _transfer
from ._layers import _rng
from ._run import _layout, _variables
from ._run._context import outside_of_meshes
from ._run._pipe import Pipe
from ._warn import warn

PyTree = Any
# So many examples a micro-batch has at most where the first mini-batch is checked.
_FEW = 8


class Checkable:
    """The methods of a pipeline that compare micro-batches with the mini-batch."""

    _pipe: Pipe
    _cache: ProgramCache

    @outside_of_meshes
    def check(
        self,
        variables: Sequence[PyTree],
        x: PyTree,
        targets: PyTree = None,
        loss_fn: Callable[..., Any] | None = None,
        *,
        reduction: str = "mean",
        has_aux: bool = False,
        rngs: _rng.Rngs = None,
        train: bool = True,
        parts: Sequence[int] | None = None,
        tolerance: float | None = None,
    ) -> CheckReport:
        """Runs each layer and the loss at once and in micro-batches, and compares.

        Compared are outputs, what training writes, and gradients by the input and the
        parameters; then the loss and its gradient. Each layer is given what the one
        before it made of all examples at once. Flax's batch norms, which normalize
        each micro-batch by itself, are left out of outputs, and their statistics are
        compared as they are merged. Of the keys in ``rngs`` all random numbers are the
        middle one: a dropout leaves out nothing. All is computed on the device of the
        first stage, one layer after the other.

        Args:
          variables: one entry per layer.
          x: an input, of two examples at least, such as two micro-batches.
          targets: its targets.
          loss_fn: as for `value_and_grad`; ``None``: layers only.
          reduction: as for `value_and_grad`.
          has_aux: as for `value_and_grad`.
          rngs: as for `apply`.
          train: whether layers are run as in training.
          parts: how many examples each micro-batch has, such as ``(4, 8)``; default:
            two of different sizes.
          tolerance: how far numbers may be apart, relative to the largest of the same
            example; default: as far as rounding explains in the narrowest dtype that a
            layer computes in.

        Returns:
          What was found: prints as a table, is true where nothing differs, and has
          ``raise_if_different()``.

        Raises:
          ValueError: if the batch, ``parts`` or the variables do not fit, or there are
            several processes.
          TypeError: if a leaf of the batch is not an array.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe
          >>> layers = [jnp.sin, lambda x: x - x.mean(0)]
          >>> pipe = jpipe.pipeline(layers, num_microbatches=2)
          >>> x = jax.random.normal(jax.random.key(0), (6, 2))
          >>> report = pipe.check(({}, {}), x)
          >>> [layer.is_same for layer in report.layers]
          [True, False]
        """
        objective = None
        if loss_fn is not None:
            objective = Objective(loss_fn, has_aux, reduction)
        how = objective, rngs, train
        return self._checked(variables, x, targets, *how, tolerance, parts)

    def _checked(
        self,
        variables: Sequence[PyTree],
        x: PyTree,
        targets: PyTree,
        objective: Objective | None,
        rngs: _rng.Rngs,
        train: bool,
        tolerance: float | None = None,
        parts: Sequence[int] | None = None,
        most: int | None = None,
    ) -> CheckReport:
        """As `check`; of micro-batches of ``most`` examples the first ones."""
        if self._pipe.copies is not None:
            raise ValueError(
                "what several processes have cannot be checked in one of them; check "
                "jpipe.sequential of the same layers, in one process"
            )
        if rngs is not None:
            _rng.check_rngs(rngs)
        _variables.check_concrete(jax.tree.leaves((x, targets, rngs)))
        examples = self._cache.examples(x, targets)
        count = _microbatch.batch_size(examples, 2)
        if parts is None:
            number = self._pipe.schedule.num_microbatches * self._pipe.num_shards
            parts = _sizes(count, -(-count // number), most or count)
        elif len(parts) < 2 or min(parts) < 1 or sum(parts) != count:
            raise ValueError(
                f"parts={parts}: needs the numbers of examples in two micro-batches or "
                f"more, together the {count} of the batch"
            )
        self._cache.by_owner(variables, self._cache.sample(x))
        _variables.check_alive(jax.tree.leaves(variables))
        entries = _layout.complete(self._pipe.sharing, variables)
        sizes, layers = tuple(parts), self._pipe.layers
        (_, _, x_axes), (_, _, target_axes) = examples
        with jax.default_device(_transfer.one_of(self._pipe.devices[0])):
            checking = Checking(x, x_axes, sizes, rngs, train, tolerance)
            found = tuple(map(checking.layer, range(len(layers)), layers, entries))
            loss = None
            if objective is not None:
                loss = checking.loss(objective, targets, target_axes)
        return CheckReport(sizes, found, loss)

    def _check_first(self, *given: Any) -> None:
        """Checks a few examples of the first mini-batch that is trained on.

        Args:
          *given: what `_checked` is given.

        Raises:
          ValueError: if the loss is another in micro-batches.
        """
        report = self._checked(*given, most=_FEW)
        mixed = [i for i, layer in enumerate(report.layers) if not layer.is_same]
        report.raise_if_different(accept=mixed)
        self._cache.check_first = None
        if mixed:
            warn(f"layers give something else in micro-batches:\n{report}")


def _sizes(batch_size: int, microbatch: int, most: int) -> tuple[int, int]:
    """Two micro-batches of different sizes, if they can be.

    Layers may take examples in groups: the first is as large as a micro-batch of the
    pipeline, or else even, and the second twice that at least.

    Args:
      batch_size: how many examples there are, two at least.
      microbatch: how many a micro-batch of the pipeline has.
      most: how many the first may have; with more, all examples are taken.
    """
    first = max(min(microbatch, batch_size // 3, most), min(2, batch_size // 2))
    first -= first % 2 if 2 < first != microbatch else 0
    rest = batch_size - first
    return first, rest if most >= batch_size else min(2 * first, rest)
