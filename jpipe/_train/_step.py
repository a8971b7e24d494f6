"""The training step: gradients of a mini-batch, then one update."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from .._functions import _microbatch
from .._instructions._collector import paused
from .._instructions._graph import OUTSIDE
from .._instructions._interrupts import Interrupts
from .._instructions._program import Program
from .._jaxprs import _jaxpr
from .._jaxprs._function import Function
from .._layers import _rng
from .._run import _signature, _variables
from .._run._context import outside_of_meshes
from .._run._recent import Recent
from .._slices._built import Built
from ._optimizer import Optimizer
from ._state import (
    StateOrigin,
    TrainState,
    become,
    check_apart,
    check_state,
    set_origin,
)

PyTree = Any
# To a type checker it has no attributes.
_config: Any = jax.config


@dataclass(eq=False, repr=False)
class TrainStep:
    """``step(state, x, targets) -> (state, metrics)``; made by `Pipeline.train_step`.

    Attributes:
      gradients: of its loss: what is built for variables, an input, targets, a key, and
        whether to train.
      tx: the optimizer.
      has_aux: whether the loss function returns something besides the loss.
      feed: gives what this process has to know of an input and targets.
      donate: whether the given state is overwritten.
      by_layer: whether states have an entry for each layer.
    """

    gradients: Callable[..., Built]
    tx: optax.GradientTransformation
    has_aux: bool
    feed: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    donate: bool
    by_layer: bool

    def __post_init__(self) -> None:
        self._optimizers = Recent[Any, Optimizer]()
        self._compiled = Recent[Any, _Compiled]()
        # (structure, kinds of leaves) of the states that were checked -> a number
        self._forms = Recent[Any, int]()
        self._form_numbers = itertools.count()

    def __call__(
        self, state: TrainState, x: PyTree, targets: PyTree
    ) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step. Returns as soon as the work is dispatched.

        Args:
          state: the state; its arrays are donated, unless ``donate=False``.
          x: the input of the mini-batch, on the host or any device; of several
            processes those that do not run the first stage may give ``None``.
          targets: its targets, likewise, for the last stage.

        Returns:
          The new state, and ``{"loss": ...}`` with ``"aux"`` where there is one.

        Raises:
          KeyboardInterrupt: as ever; then ``state`` is as it was, or, if it was being
            overwritten, what the step would have returned: ``state.step`` tells.
          ValueError: if the state or the batch does not fit; nothing is changed.
          TypeError: if a leaf of the batch is not an array; nothing is changed.
        """
        taken: list[TrainState] = []
        try:
            return self._take(taken, state, x, targets)
        except BaseException:
            # What was given is overwritten, and what is returned arrives nowhere.
            if taken and self._may_donate():
                become(state, taken[0])
            raise

    @outside_of_meshes
    def _take(
        self, taken: list[TrainState], state: TrainState, x: PyTree, targets: PyTree
    ) -> tuple[TrainState, dict[str, Any]]:
        """Takes one step; ``taken`` receives the new state before it is returned."""
        check_state(state, self.by_layer)
        x, targets = self.feed(x, targets)
        leaves, tree = jax.tree.flatten(state)
        origin = state.origin
        if origin and origin.matches(self, leaves):
            form = origin.form
        else:
            origin, form = None, self.form(tree, leaves)
        _variables.check_alive(leaves)
        compiled = self._compile(form, state, x, targets)
        if not origin:
            _variables.check_concrete(leaves)
            own = [leaves[i] for i in compiled.order]
            compiled.gradient.layout.check(own, "state")
            compiled.optimizer.check_places(state.opt_state)
            check_apart(state, compiled.program)
        batch = jax.tree.leaves((x, targets))
        _variables.check_concrete(batch)
        with Interrupts() as interrupts:
            outputs = compiled.program(leaves + batch, overwriting=interrupts.hold)
            new, metrics = compiled.result(outputs, self)
            taken.append(new)
        return new, metrics

    @outside_of_meshes
    def program(self, state: TrainState, x: PyTree, targets: PyTree) -> Program:
        """What a call with such arguments runs."""
        check_state(state, self.by_layer)
        leaves, tree = jax.tree.flatten(state)
        return self._compile(self.form(tree, leaves), state, x, targets).program

    def form(self, tree: Any, leaves: Sequence[Any]) -> int:
        """The number of a structure and of the kinds of its leaves."""
        signature = tree, _signature.kinds(leaves)
        if signature not in self._forms:
            self._forms[signature] = next(self._form_numbers)
        return self._forms[signature]

    def _may_donate(self) -> bool:
        """Whether a state is overwritten: not where a program may be expected to fail.

        What was overwritten when it failed could not be given back.
        """
        return self.donate and not (_config.jax_debug_nans or _config.jax_debug_infs)

    def _compile(
        self, form: int, state: TrainState, x: PyTree, targets: PyTree
    ) -> "_Compiled":
        """The programs for such a state and batch; all checks of shapes are here.

        Args:
          form: what the leaves of the state are like: see `form`.
          state: the state.
          x: the input of the mini-batch.
          targets: its targets.
        """
        kind = _signature.settings(), form
        signature = kind, _signature.of(x, targets)
        known = self._compiled
        if signature not in known:
            gradient = self.gradients(state.variables, x, targets, state.rng, True)
            # A batch of another size needs another gradient, not another optimizer.
            if kind not in self._optimizers:
                self._optimizers[kind] = _optimizer(self.tx, state, gradient)
            optimizer = self._optimizers[kind]
            optimizer.check(state.opt_state)
            known[signature] = _Compiled(
                gradient, optimizer, state, self.has_aux, self._may_donate()
            )
        return known[signature]


class _Compiled:
    """A step for one kind of state and batch, as one program.

    Attributes:
      gradient: of the mini-batch.
      optimizer: what makes an update of it.
      order: the numbers that the leaves of the variables have among those of a state.
      program: ``(*state, *x, *targets)`` to ``(*state, loss, *aux)``.
    """

    def __init__(
        self,
        gradient: Built,
        optimizer: Optimizer,
        state: TrainState,
        has_aux: bool,
        donate: bool,
    ) -> None:
        self.gradient, self.optimizer, self._has_aux = gradient, optimizer, has_aux
        self._tree = jax.tree.structure(state)
        numbers = jax.tree.unflatten(self._tree, range(self._tree.num_leaves))
        self.order = jax.tree.leaves(numbers.variables)
        self._form: int | None = None
        self.program = self._lowered(donate, numbers, state.rng, state.step)

    @paused()
    def _lowered(self, donate: bool, numbers: Any, rng: Any, step: Any) -> Program:
        gradient, layout = self.gradient, self.gradient.layout
        graph = gradient.pipe.graph()
        params, opt_state = map(jax.tree.leaves, (numbers.params, numbers.opt_state))
        key, number = (_jaxpr.spec(jax.typeof(leaf)) for leaf in (rng, step))
        # The arguments of `Graph.argument`, by the number of a leaf of the state.
        leaves: dict[int, Any] = {numbers.rng: (key, OUTSIDE)}
        leaves[numbers.step] = number, OUTSIDE
        for i, spec, at in zip(self.order, layout.specs, layout.shardings, strict=True):
            leaves[i] = *spec, donate, at
        for i, leaf in zip(opt_state, self.optimizer.state, strict=True):
            leaves[i] = leaf.value, leaf.place, donate, leaf.sharding
        state = [graph.argument(*leaves[i]) for i in sorted(leaves)]
        x, targets, _ = gradient.batch.args
        specs = jax.tree.leaves((x, targets))
        batch = [graph.argument(spec, OUTSIDE) for spec in specs]
        advance = Function("advance", _advance, [key, number])
        given = [state[numbers.rng], state[numbers.step]]
        rngs, after = graph.call_everywhere(advance, gradient.pipe.place(0), given)
        variables = [state[i] for i in self.order]
        loss, aux, grads, changed = gradient.into(graph, variables, [*batch, rngs])
        free = [i for i, yes in zip(params, layout.trained, strict=True) if yes]
        reads = [state[i] for i in (*free, *opt_state)]
        reads += [grads[i] for i in layout.params if i in grads]
        new: dict[int, Any] = dict(enumerate(state))
        updated = self.optimizer.update.into(graph, reads)
        new |= zip([*free, *opt_state], updated, strict=True)
        for leaf, value in changed.items():
            new[self.order[leaf]] = value
        new[numbers.step] = graph.everywhere(after)
        metrics = map(graph.everywhere, graph.own([*loss, *aux]))
        return Program(graph, [*new.values(), *metrics])

    def result(
        self, leaves: Sequence[Any], by: "TrainStep"
    ) -> tuple[TrainState, dict[str, Any]]:
        """What a step returns, of the outputs of its program."""
        count = self._tree.num_leaves
        own = leaves[:count]
        state = jax.tree.unflatten(self._tree, own)
        if self._form is None:  # that of what was given, but for weak types
            self._form = by.form(self._tree, own)
        set_origin(state, StateOrigin(weakref.ref(by), self._form, own))
        loss, aux, _ = self.gradient.returned(leaves[count:])
        return state, {"loss": loss, "aux": aux} if self._has_aux else {"loss": loss}


def _optimizer(
    tx: optax.GradientTransformation, state: TrainState, gradient: Built
) -> Optimizer:
    """The optimizer of the parameters of a state."""
    specs, layout = _microbatch.specs(state.params, "params"), gradient.layout
    where = [(layout.owner_stages[i], layout.shardings[i]) for i in layout.params]
    return Optimizer(tx, specs, layout.trained, gradient.pipe, where)


def _advance(rng: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _rng.step_key(rng, step), step + 1
