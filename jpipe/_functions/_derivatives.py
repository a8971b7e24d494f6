"""What differentiation makes of a task: traced when first asked, not yet compiled."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from jax.extend import core

from .._jaxprs import _jaxpr, _loops
from .._jaxprs._function import Function
from . import _kept, _remat, _split, _vjp
from ._task import Task
from ._weights import accumulate, sum_spec


class Programs:
    """A function of weights, x and extra as forwards and backwards.

    Args:
      cut: gives its `_vjp.Cut`, when first asked.
      mode: what is stored between the two.
      num_weights: how many weights it reads.
      num_grads: how many of them are differentiated.
    """

    def __init__(
        self,
        cut: Callable[[], _vjp.Cut],
        mode: _remat.Mode,
        num_weights: int,
        num_grads: int,
    ) -> None:
        self._differentiated, self._mode = cut, mode
        self._num_weights, self.num_grads = num_weights, num_grads

    @cached_property
    def _cut(self) -> _vjp.Cut:
        return self._differentiated()

    @cached_property
    def forward(self) -> Function:
        """``(weights, x, extra) -> (outputs, aux, residuals)``."""
        return Function.of("forward", self._cut.forward)

    @cached_property
    def backward(self) -> Function:
        """``(weights, x, extra, residuals, cotangents) -> (weight_grads, x_grads)``.

        Of a loss with its divisors in place of cotangents: see `_vjp.cut`.
        """
        return Function.of("backward", self._cut.backward)

    @cached_property
    def _halves(self) -> _split.Halves:
        backward, count = self._cut.backward, self.num_grads
        is_first = [i >= count for i in range(len(backward.jaxpr.outvars))]
        fewest = _remat.halves_keep_fewest(self._mode)
        return _split.split(backward, self._num_weights, is_first, fewest)

    @cached_property
    def input_grad(self) -> Function:
        """``(weights, x, extra, residuals, cotangents) -> (x_grads, residuals)``."""
        return Function.of("input_grad", self._halves.first)

    @cached_property
    def weight_grad(self) -> Function:
        """``(*what input_grad reads, *residuals of it) -> weight_grads``."""
        return Function.of("weight_grad", self._halves.second)


class Derivatives(Programs):
    """A task as forwards and backwards; equal stages on any device have one.

    Attributes:
      task: that of the first of the equal stages, whose number and whose neighbours
        are not those of the others.
    """

    def __init__(self, task: Task, mode: _remat.Mode) -> None:
        self.task = task
        counts = len(task.weights.specs), sum(task.wanted.weights)
        super().__init__(self._of_task, mode, *counts)

    @cached_property
    def infer(self) -> Function:
        """``(weights, x, extra) -> (outputs, aux)``: of which nothing is kept."""
        return Function.of("forward", self.task.closed)

    def _of_task(self) -> _vjp.Cut:
        task, fewest = self.task, _remat.keeps_fewest(self._mode)
        if fewest:
            task = replace(task, closed=_loops.keep_fewest(task.closed))
        return _vjp.cut(
            task.run,
            task.weights.specs,
            task.x,
            task.extra_specs,
            task.wanted,
            _remat.wrapper(self._mode),
            fewest,
            task.divisors if task.has_loss else None,
        )

    @cached_property
    def kept(self) -> _kept.Kept:
        """What is kept of a micro-batch, and what is computed again."""
        task = self.task
        sizes = len(task.weights.specs), len(task.x), len(task.extra_specs)
        cut = self._cut
        return _kept.kept(cut.reads, cut.residuals, sizes, _remat.name(self._mode))

    @cached_property
    def add_grads(self) -> Function:
        """``(sums, weight_grads, *factor) -> sums``: times a factor if there is one."""
        specs = [sum_spec(leaf) for leaf in self.task.weights.trainable_specs]
        count = len(specs)

        def add(*leaves):
            sums, grads, factor = leaves[:count], leaves[count:], leaves[2 * count :]
            return accumulate(sums, grads[:count], *factor)

        return Function("add_grads", add, specs)

    @cached_property
    def weight(self) -> Function | None:
        """``targets -> weight`` of a weighted loss; ``None`` if it reads more."""
        task, closed = self.task, self.task.closed
        part = _jaxpr.values(closed, closed.jaxpr.outvars[1 : task.num_losses])
        first = len(task.weights.specs) + len(task.x)
        own = slice(first, first + len(task.extra.get("targets", ())))
        live = _jaxpr.live_inputs(part)
        if any(live[: own.start]) or any(live[own.stop :]):
            return None
        jaxpr = part.jaxpr.replace(invars=part.jaxpr.invars[own])
        return Function.of("weight", core.ClosedJaxpr(jaxpr, part.consts))

    @cached_property
    def add_results(self) -> Function:
        """``(sums, outputs, aux, extra) -> sums``: adds one micro-batch."""
        task = self.task
        sizes = len(task.sum_specs), task.num_outputs, task.num_aux
        first, second, third = sizes[0], sum(sizes[:2]), sum(sizes)

        def add(*leaves):
            return task.add_results(
                leaves[:first],
                leaves[first:second],
                leaves[second:third],
                leaves[third:],
            )

        results = task.closed.out_avals
        specs = [*task.sum_specs, *results, *task.extra_specs]
        return Function.like("add_results", add, *specs)

    @cached_property
    def commit(self) -> Function:
        """``(changed, sums) -> changed``: what training makes of these leaves."""
        task = self.task
        old = [task.weights.specs[i] for i in task.changed]
        return Function(
            "commit",
            lambda *leaves: task.commit(leaves[: len(old)], leaves[len(old) :]),
            old,
        )
