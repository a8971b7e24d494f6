"""The compiled programs of a stage and its equals, for micro-batches of one size.

Each is one `jax.jit` call over flat leaves; sums are kept inside it, in donated
buffers, so that an action of the schedule costs a single dispatch.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from .._functions import _split
from .._functions._derivatives import Derivatives
from .._functions._vjp import Leaves
from .._functions._weights import accumulate, sum_spec
from ._transfer import Device

Compiled = Callable[..., Any]

# How many of the stages that share a program its name lists.
_NAMED = 4


class StagePrograms:
    """What a stage can be asked to do; compiled when it is first asked.

    Equal stages on one device have one.

    Args:
      derivatives: the function of the stage, and what differentiation makes of it.
      device: where it runs.
      owns_x: whether the input belongs to the pipeline, which may then reuse its
        memory, and not to the caller, as that of the first stage.

    Attributes:
      derivatives: of the task of the first of these stages.
    """

    def __init__(self, derivatives: Derivatives, device: Device, owns_x: bool) -> None:
        self.derivatives = derivatives
        self._task = derivatives.task
        self._device = device
        self._owns_x = owns_x
        self._stages: dict[int, None] = {}

    def serve(self, stage: int) -> None:
        """Takes the number of a stage in the names of its programs, for profiles."""
        self._stages[stage] = None

    def _named(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # Names become file names: those of a hundred stages would be too long.
        first, rest = list(self._stages)[:_NAMED], len(self._stages) - _NAMED
        stages = "_".join(map(str, first)) + (f"_and_{rest}_more" if rest > 0 else "")
        function.__name__ = f"stage{stages}_{function.__name__}"
        return function

    @cached_property
    def infer(self) -> Compiled:
        """``(weights, x, extra) -> y``: a forward of which nothing is kept."""

        def infer(weights: Leaves, x: Leaves, extra: Leaves) -> list[Any]:
            outputs, aux = self._task.run(weights, x, extra)
            return self._task.send(outputs, aux)

        y = jax.tree.leaves(self._task.y)
        donated = self._reusable([(1, self._task.x, self._owns_x)], y)
        return self._jit(infer, donated)

    @cached_property
    def forward(self) -> Compiled:
        """``(weights, x, extra, tally) -> (y, tally, emitted, carried)``.

        Donated memory is given to the first results that fit. What a policy offloads
        is on the host and must not get it, so what is carried comes last.
        """
        task, cut = self._task, self.derivatives.cut

        def forward(weights: Leaves, x: Leaves, extra: Leaves, tally: Leaves) -> Any:
            outputs, aux, carried = cut.forward(weights, x, extra)
            sums = task.tally(tally, outputs, aux, extra)
            return task.send(outputs, aux), sums, task.emit(aux), carried

        y = [] if task.has_loss else jax.tree.leaves(task.y)
        donated = self._reusable([(1, task.x, self._owns_x and not cut.kept)], y)
        return self._jit(forward, (*donated, 3))

    @cached_property
    def backward(self) -> Compiled:
        """``(weights, kept, extra, carried, cotangents, grads) -> (x_grads, grads)``.

        The gradients of the weights are added to the sums that it is given.
        """
        task, cut = self._task, self.derivatives.cut

        def backward(
            weights: Leaves,
            kept: Leaves,
            extra: Leaves,
            carried: Leaves,
            cotangents: Leaves,
            grads: Leaves,
        ) -> Any:
            new, x_grads = cut.backward(weights, kept, extra, carried, cotangents)
            return x_grads, accumulate(grads, new)

        x_grads = _chosen(task.x, task.wanted.x)
        kept = [task.x[i] for i in cut.kept]
        groups = [
            (1, kept, self._owns_x),
            (4, cut.outputs, True),
            (3, cut.carried, not cut.offloaded),
        ]
        return self._jit(backward, (*self._reusable(groups, x_grads), 5))

    @cached_property
    def fused(self) -> Compiled:
        """``(weights, x, extra, tally, grads) -> (x_grads, tally, emitted, grads)``.

        Forward and backward of the stage with the loss in one: nothing leaves in
        between and nothing is computed twice.
        """
        task, derivatives = self._task, self.derivatives

        def forward_backward(
            weights: Leaves, x: Leaves, extra: Leaves, tally: Leaves, grads: Leaves
        ) -> Any:
            outputs, aux, new, x_grads = derivatives.fused(weights, x, extra)
            sums = task.tally(tally, outputs, aux, extra)
            return x_grads, sums, task.emit(aux), accumulate(grads, new)

        x_grads = _chosen(task.x, task.wanted.x)
        donated = self._reusable([(1, task.x, self._owns_x)], x_grads)
        return self._jit(forward_backward, (*donated, 3, 4))

    @cached_property
    def input_grad(self) -> Compiled:
        """``(weights, kept, extra, carried, cotangents) -> (x_grads, crossing)``."""
        task, halves = self._task, self.derivatives.halves

        def input_grad(
            weights: Leaves,
            kept: Leaves,
            extra: Leaves,
            carried: Leaves,
            cotangents: Leaves,
        ) -> Any:
            return halves.first(weights, [*kept, *extra, *carried, *cotangents])

        results = [*_chosen(task.x, task.wanted.x), *halves.crossing]
        return self._jit(input_grad, self._reusable(self._unread(), results))

    def _unread(self) -> list[tuple[int, Leaves, bool]]:
        """What the first half is given and the second half does not read."""
        task, cut = self._task, self.derivatives.cut
        kept = [task.x[i] for i in cut.kept]
        groups = []
        end = 0
        for argument, leaves in enumerate(
            (kept, task.extra_specs, cut.carried, cut.outputs), start=1
        ):
            start, end = end, end + len(leaves)
            unread = not any(start <= i < end for i in self.derivatives.halves.read)
            owned = {1: self._owns_x, 2: False, 3: not cut.offloaded}.get(
                argument, True
            )
            groups.append((argument, leaves, owned and unread))
        return groups

    @cached_property
    def weight_grad(self) -> Compiled:
        """``(weights, left, grads) -> grads``, after `input_grad`."""
        return self._second_half(self.derivatives.halves)

    @cached_property
    def fused_input(self) -> Compiled:
        """``(weights, x, extra, tally) -> (x_grads, tally, emitted, crossing)``."""
        task, halves = self._task, self.derivatives.fused_halves

        def forward_input_grad(
            weights: Leaves, x: Leaves, extra: Leaves, tally: Leaves
        ) -> Any:
            results, crossing = halves.first(weights, [*x, *extra])
            first_aux, first_x = task.num_outputs, task.num_results
            aux = results[first_aux:first_x]
            sums = task.tally(tally, results[:first_aux], aux, extra)
            return results[first_x:], sums, task.emit(aux), crossing

        results = [*_chosen(task.x, task.wanted.x), *halves.crossing]
        unread = not any(i < len(task.x) for i in halves.read)
        groups = [(1, task.x, self._owns_x and unread)]
        return self._jit(forward_input_grad, (*self._reusable(groups, results), 3))

    @cached_property
    def fused_weight(self) -> Compiled:
        """``(weights, left, grads) -> grads``, after `fused_input`."""
        return self._second_half(self.derivatives.fused_halves)

    def _second_half(self, halves: _split.Halves) -> Compiled:
        def weight_grad(weights: Leaves, left: Leaves, grads: Leaves) -> list[Any]:
            return accumulate(grads, halves.second(weights, left))

        return self._jit(weight_grad, (2,))

    @cached_property
    def zeros(self) -> Compiled:
        """``() -> (grads, tally)``: the sums before the first micro-batch."""
        task = self._task
        trainable = _chosen(task.weights.specs, task.wanted.weights)
        specs = [[sum_spec(leaf) for leaf in trainable], task.tally_specs]
        if not any(specs):
            return lambda: ([], [])

        def zeros() -> Any:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), specs)

        return jax.jit(
            self._named(zeros), out_shardings=SingleDeviceSharding(self._device)
        )

    @cached_property
    def commit(self) -> Compiled | None:
        """``(old, tally) -> new``: what training makes of the changed leaves."""
        if not self._task.changed:
            return None

        def commit(old: Leaves, tally: Leaves) -> list[Any]:
            return self._task.commit(old, tally)

        return self._jit(commit, ())

    def _jit(self, function: Callable[..., Any], donated: Sequence[int]) -> Compiled:
        return jax.jit(self._named(function), donate_argnums=tuple(donated))

    @staticmethod
    def _reusable(
        groups: Sequence[tuple[int, Leaves, bool]], results: Leaves
    ) -> list[int]:
        """The arguments whose memory the results can take over, leaf for leaf.

        JAX warns of a donated array that no result fits, so an argument is donated
        only if all its leaves find one.
        """
        free = Counter((leaf.shape, leaf.dtype) for leaf in results)
        donated = []
        for argument, leaves, owned in groups:
            wanted = Counter((leaf.shape, leaf.dtype) for leaf in leaves)
            if owned and leaves and wanted <= free:
                free -= wanted
                donated.append(argument)
        return donated


def _chosen(leaves: Leaves, chosen: Sequence[bool]) -> list[Any]:
    return [leaf for leaf, yes in zip(leaves, chosen, strict=True) if yes]
