"""The training step: gradients of a mini-batch, then one update."""

import operator
from collections.abc import Callable, Sequence
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
from .._slices._built import Built
from ._optimizer import Optimizer
from ._state import (
    Made,
    TrainState,
    become,
    check_apart,
    check_chosen,
    check_state,
    note_chosen,
    note_made,
)
from ._transformation import check_optimizer

PyTree = Any
# To a type checker it has no attributes.
_config: Any = jax.config


class TrainStep:
    """``step(state, x, targets) -> (state, metrics)``; made by `Pipeline.train_step`.

    Args:
      gradients: of its loss: what is built for variables, an input, targets, a key, and
        whether to train.
      tx: the optimizer.
      has_aux: whether the loss function returns something besides the loss.
      feed: gives what this process has to know of an input and targets.
      donate: whether the given state is overwritten.
      by_layer: whether states have an entry for each layer.
    """

    def __init__(
        self,
        gradients: Callable[..., Built],
        tx: optax.GradientTransformation,
        *,
        has_aux: bool,
        feed: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
        donate: bool,
        by_layer: bool = True,
    ) -> None:
        self._gradients = gradients
        self._feed, self._by_layer = feed, by_layer
        self._tx = check_optimizer(tx)
        self._has_aux = has_aux
        self._donate = donate
        self._optimizers: dict[Any, Optimizer] = {}
        self._compiled: dict[Any, _Compiled] = {}
        # The structure and the kinds of the leaves of states that were checked.
        self._forms: dict[Any, int] = {}

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
        check_state(state, self._by_layer)
        x, targets = self._feed(x, targets)
        trees = state.params, state.model_state, state.opt_state
        leaves, tree = jax.tree.flatten((trees, state.rng, state.step))
        known = state.made
        if known and known.by is self and _are(leaves, known.leaves):
            form = known.form
        else:
            known, form = None, self.form(tree, leaves)
        _variables.check_alive(leaves)
        compiled = self._compile(form, state, x, targets)
        if not known:
            _variables.check_concrete(leaves)
            own = [leaves[i] for i in compiled.order]
            compiled.gradient.layout.check(own, "state")
            compiled.optimizer.check(state.opt_state)
            check_chosen(state, compiled.gradient.layout.trained)
            check_apart(state, compiled.donated)
        batch = jax.tree.leaves((x, targets))
        _variables.check_concrete(batch)
        with Interrupts() as interrupts:
            outputs = compiled.program(leaves + batch, overwriting=interrupts.hold)
            new, metrics = compiled.result(outputs, self)
            note_chosen(new, state.chosen)
            taken.append(new)
        return new, metrics

    @outside_of_meshes
    def program(self, state: TrainState, x: PyTree, targets: PyTree) -> Program:
        """What a call with such arguments runs."""
        check_state(state, self._by_layer)
        trees = state.params, state.model_state, state.opt_state
        leaves, tree = jax.tree.flatten((trees, state.rng, state.step))
        return self._compile(self.form(tree, leaves), state, x, targets).program

    def form(self, tree: Any, leaves: Sequence[Any]) -> int:
        """The number of a structure and of the kinds of its leaves."""
        return self._forms.setdefault(
            (tree, _signature.kinds(leaves)), len(self._forms)
        )

    def _may_donate(self) -> bool:
        """Whether a state is overwritten: not where a program may be expected to fail.

        What was overwritten when it failed could not be given back.
        """
        return self._donate and not (_config.jax_debug_nans or _config.jax_debug_infs)

    def _compile(
        self, form: int, state: TrainState, x: PyTree, targets: PyTree
    ) -> "_Compiled":
        """The programs for such a state and batch; all checks of shapes are here.

        Args:
          form: what the leaves of the state are like: see `_form`.
          state: the state.
          x: the input of the mini-batch.
          targets: its targets.
        """
        kind = _signature.settings(), form
        signature = kind, _signature.of(x, targets)
        known = self._compiled
        if signature not in known:
            gradient = self._gradients(state.variables, x, targets, state.rng, True)
            # A batch of another size needs another gradient, not another optimizer.
            if kind not in self._optimizers:
                self._optimizers[kind] = _optimizer(self._tx, state, gradient)
            optimizer = self._optimizers[kind]
            known[signature] = _Compiled(
                gradient, optimizer, state, self._has_aux, self._may_donate()
            )
        return known[signature]


class _Compiled:
    """A step for one kind of state and batch, as one program.

    The leaves of a state count parameters first, then the other collections; those of
    variables count layer by layer.

    Attributes:
      gradient: of the mini-batch.
      optimizer: what makes an update of it.
      order: the positions of the leaves of the variables among those of a state.
      donated: the numbers of the slots that are overwritten, arguments first.
      program: ``(*params, *model_state, *opt_state, rng, step, *x, *targets)`` to
        ``(*params, *model_state, *opt_state, rng, step, loss, *aux)``.
    """

    def __init__(
        self,
        gradient: Built,
        optimizer: Optimizer,
        state: TrainState,
        has_aux: bool,
        donate: bool,
    ) -> None:
        self.gradient = gradient
        self.optimizer = optimizer
        self._has_aux = has_aux
        self.order = _order(state)
        trees = state.params, state.model_state, state.opt_state
        self._tree = jax.tree.structure((trees, state.rng, state.step))
        self._form: int | None = None
        self._num_params = len(jax.tree.leaves(state.params))
        self.program = self._lowered(donate, state.rng, state.step)
        self.donated = frozenset(
            slot
            for instruction in self.program.instructions
            for slot in instruction.donates
        )

    @paused
    def _lowered(self, donate: bool, rng: Any, step: Any) -> Program:
        gradient, optimizer = self.gradient, self.optimizer
        graph = gradient.pipe.graph()
        own = gradient.layout.specs
        position = {at: i for i, at in enumerate(self.order)}
        shardings = gradient.layout.shardings
        pool = [
            graph.argument(*own[position[at]], donate, shardings[position[at]])
            for at in range(len(self.order))
        ]
        opt_state = [leaf.argument(graph, donate) for leaf in optimizer.state]
        key, number = (_jaxpr.spec(jax.typeof(leaf)) for leaf in (rng, step))
        first = gradient.pipe.place(0)
        given = [graph.argument(spec, OUTSIDE) for spec in (key, number)]
        x, targets, _ = gradient.batch.args
        specs = jax.tree.leaves((x, targets))
        batch = [graph.argument(spec, OUTSIDE) for spec in specs]
        advance = Function("advance", _advance, [key, number])
        rngs, after = graph.call_everywhere(advance, first, given)
        variables = [pool[i] for i in self.order]
        loss, aux, grads, changed = gradient.into(graph, variables, [*batch, rngs])
        count = self._num_params
        free = [grads[position[i]] for i in range(count) if position[i] in grads]
        params, opt_state = optimizer.update(graph, free, opt_state, pool[:count])
        new = [*params, *pool[count:]]
        for leaf, value in changed.items():
            new[self.order[leaf]] = value
        metrics = map(graph.everywhere, [after, *graph.own([*loss, *aux])])
        outputs = [*new, *opt_state, given[0], *metrics]
        return Program(graph, outputs, gradient.pipe.places)

    def result(
        self, leaves: Sequence[Any], by: "TrainStep"
    ) -> tuple[TrainState, dict[str, Any]]:
        """What a step returns, of the outputs of its program."""
        count = self._tree.num_leaves
        held = leaves[:count]
        (params, model_state, opt_state), rng, step = jax.tree.unflatten(
            self._tree, held
        )
        state = TrainState(step, params, opt_state, model_state, rng)
        if self._form is None:  # that of what was given, but for weak types
            self._form = by.form(self._tree, held)
        note_made(state, Made(by, self._form, held))
        metrics = {"loss": leaves[count]}
        if self._has_aux:
            aux = leaves[count + 1 :]
            metrics["aux"] = jax.tree.unflatten(self.gradient.aux_tree, aux)
        return state, metrics


def _order(state: TrainState) -> list[int]:
    """Where the leaves of the variables are, among parameters and then the rest."""
    leaves, tree = jax.tree.flatten((state.params, state.model_state))
    params, rest = jax.tree.unflatten(tree, range(len(leaves)))
    numbered = TrainState(state.step, params, (), rest, state.rng)
    return jax.tree.leaves(numbered.variables)


def _optimizer(
    tx: optax.GradientTransformation, state: TrainState, gradient: Built
) -> Optimizer:
    """The optimizer of the parameters of a state."""
    specs, layout = _microbatch.specs(state.params, "params"), gradient.layout
    count = len(jax.tree.leaves(specs))
    at = {leaf: i for i, leaf in enumerate(_order(state))}
    leaves = [at[leaf] for leaf in range(count)]
    where = (
        [layout.owner_stages[i] for i in leaves],
        [layout.shardings[i] for i in leaves],
    )
    return Optimizer(tx, specs, layout.trained, gradient.pipe, *where)


def _are(leaves: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are those arrays."""
    return len(leaves) == len(others) and all(map(operator.is_, leaves, others))


def _advance(rng: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _rng.step_key(rng, step), step + 1
