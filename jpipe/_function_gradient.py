"""`jpipe.value_and_grad`: any loss function through a pipeline."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._functions import _microbatch, _remat
from ._functions._batch import Batch
from ._functions._weights import is_inexact
from ._instructions import _transfer
from ._instructions._collector import paused
from ._instructions._graph import OUTSIDE
from ._instructions._program import Program
from ._jaxprs import _jaxpr
from ._jaxprs._function import Function
from ._layers._stage import StageFunction
from ._report import Report, report
from ._run import _signature, _variables
from ._run._context import outside_of_meshes
from ._run._pipe import Pipe
from ._slices import _cut, _program, _summands
from ._slices._lower import Lowering
from ._slices._slice import specs as specs_of
from ._slices._stages import Stages
from ._train import _spread
from .schedules._choose import choose_schedule

PyTree = Any
REDUCTIONS = ("mean", "sum", "microbatch_mean")
_MOST = 64


class _Built(NamedTuple):
    """What runs for arguments of one kind.

    Attributes:
      pipe: the schedule and the devices.
      stages: the slices.
      program: ``(*params, *args) -> (loss, *aux, *grads)``.
      aux: the structure of what is returned beside the loss.
      devices: the device of each parameter.
      constants: the arrays that the function closes over, in place.
    """

    pipe: Pipe
    stages: Stages
    program: Program
    aux: Any
    devices: list[Any]
    constants: list[Any]


class FunctionGradient:
    """``grad_fn(params, *args) -> (loss, grads)``: see `jpipe.value_and_grad`.

    Args:
      function: the loss function.
      num_microbatches: how many there are.
      num_stages: as for `jpipe.value_and_grad`, and so is the rest.
      has_aux: whether it returns something beside the loss.
      aux_axes: on which axes that is joined.
      in_axes: where the examples are.
      reduction: what the loss is.
      devices: one for each rank.
      schedule: who runs what when.
      remat: what stages store.
      trainable: ``(path, leaf) -> bool``, or ``None``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        num_microbatches: int,
        *,
        num_stages: int | None,
        has_aux: bool,
        aux_axes: Any,
        in_axes: Any,
        reduction: str,
        devices: Sequence[Any],
        schedule: Any,
        remat: Any,
        trainable: Callable[[str, Any], bool] | None,
    ) -> None:
        self._function, self._num_microbatches = function, num_microbatches
        self._num_stages, self._has_aux, self._aux_axes = num_stages, has_aux, aux_axes
        self._in_axes, self._reduction, self._devices = in_axes, reduction, devices
        self._schedule, self._remat, self._trainable = schedule, remat, trainable
        self._known: dict[Any, _Built] = {}
        self._last: _Built | None = None

    @outside_of_meshes
    def __call__(self, params: PyTree, *args: PyTree) -> Any:
        """Returns as soon as the work is dispatched.

        Args:
          params: the parameters, each leaf in its place: see `place`.
          *args: the rest of a mini-batch, on the host or any device.

        Returns:
          ``(loss, grads)``, or ``((loss, aux), grads)``; the gradients have the
          structure of ``params`` and are where these are.

        Raises:
          ValueError: if parameters are not in place, or the batch does not fit.
          TypeError: if a leaf is not an array.
        """
        built = self._build(params, args)
        leaves, tree = jax.tree.flatten(params)
        _variables.check_alive(leaves)
        _check_in_place(params, leaves, built.devices)
        batch = jax.tree.leaves(args)
        _variables.check_concrete([*leaves, *batch])
        loss, *rest = built.program([*leaves, *built.constants, *batch])
        found = iter(rest)
        aux = [next(found) for _ in range(built.aux.num_leaves)]
        trained = built.stages.trained
        grads = [
            next(found) if yes else None
            for _, yes in zip(leaves, trained, strict=False)
        ]
        value = (loss, jax.tree.unflatten(built.aux, aux)) if self._has_aux else loss
        return value, jax.tree.unflatten(tree, grads)

    def place(self, params: PyTree, *args: PyTree) -> PyTree:
        """Puts each parameter onto the device of the first stage that reads it.

        Args:
          params: the parameters, anywhere.
          *args: the rest of a mini-batch, or `jax.ShapeDtypeStruct` leaves like it.

        Returns:
          The parameters in place.
        """
        built = self._build(params, args)
        leaves, tree = jax.tree.flatten(params)
        pairs = zip(leaves, built.devices, strict=True)
        return tree.unflatten([_put(*pair) for pair in pairs])

    @outside_of_meshes
    def program(self, params: PyTree, *args: PyTree) -> Program:
        """What a call with such arguments runs."""
        return self._build(params, args).program

    @outside_of_meshes
    def compile(self, params: PyTree, *args: PyTree) -> Report:
        """Compiles all programs ahead, and returns what is known of them.

        Args:
          params: the parameters, or `jax.ShapeDtypeStruct` leaves like them.
          *args: the rest of a mini-batch, likewise.
        """
        begin = time.perf_counter()
        program = self._build(params, args).program
        program.compile()
        return report(program, time.perf_counter() - begin)

    def jit(
        self,
        function: Callable[..., Any],
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
    ) -> Callable[..., Any]:
        """A function of trees that are spread over the devices: see `Pipeline.jit`."""
        return _spread.jit(function, self._devices, donate_argnums, static_argnums)

    def optimizer(self, tx: Any) -> Any:
        """The optax transformation that works in place: see `Pipeline.optimizer`."""
        return _spread.optimizer(tx, self._devices)

    def __str__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        head = (
            f"jpipe.value_and_grad({name}), {self._num_microbatches} micro-batches, "
            f"reduction {self._reduction!r}: not checked"
        )
        if self._last is None:
            return head + "; the stages are known once it is called or placed"
        return "\n".join([head, *_rows(self._last)])

    # ------------------------------------------------------------------------- building

    def _build(self, params: PyTree, args: Sequence[PyTree]) -> _Built:
        key = _signature.settings(), _signature.of(params, args)
        if key not in self._known:
            self._known[key] = self._built(params, args)
            if len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
        self._last = self._known[key]
        return self._last

    @paused
    def _built(self, params: PyTree, args: Sequence[PyTree]) -> _Built:
        specs = _microbatch.specs(params, "params")
        given = tuple(
            _microbatch.specs(arg, f"argument {i + 1}") for i, arg in enumerate(args)
        )
        _check_params(params, specs)
        axes = self._axes(given)
        size = _batch_size(given, axes, self._num_microbatches)
        sizes = _microbatch.sizes(size, self._num_microbatches)
        flat = [axis for own in axes for axis in own]
        leaves, tree = jax.tree.flatten(given)
        split, share = [axis is not None for axis in flat], 1 / len(sizes)
        programs = {}
        for n in dict.fromkeys(sizes):
            part = tree.unflatten(_microbatch.part_specs(leaves, flat, n))
            scale = {"mean": n / size, "sum": 1.0}.get(self._reduction, share)
            traced = _program.traced(self._function, specs, part, self._has_aux)
            programs[n] = _summands.apart(traced, split, scale, share)
        first = programs[sizes[0]]
        cuts = {sizes[0]: _cut.positions(first, self._num_stages, len(self._devices))}
        for n, program in programs.items():
            cuts.setdefault(n, _cut.same_cuts(first, cuts[sizes[0]], program))
        count = len(cuts[sizes[0]]) + 1
        schedule = choose_schedule(self._schedule, count, len(sizes))
        remat = _remat.per_stage(self._remat, count)
        stages = Stages(programs, cuts, sizes, remat, self._trained(specs))
        functions = tuple(StageFunction(s, s, ()) for s in range(count))
        ranks = tuple(_ranks(self._devices, schedule.num_ranks))
        pipe = Pipe(functions, ranks, schedule, remat)
        batch = Batch(given, flat, (), [], None, sizes)
        return self._lowered(pipe, stages, batch, specs)

    def _lowered(
        self, pipe: Pipe, stages: Stages, batch: Batch, specs: PyTree
    ) -> _Built:
        constants = [jnp.asarray(array) for array in stages.first.constants]
        leaves = [*jax.tree.leaves(specs), *map(_jaxpr.spec, constants)]
        graph = pipe.graph()
        places = [pipe.place(stages.owner[i]) for i in range(len(leaves))]
        params = [graph.argument(*pair) for pair in zip(leaves, places, strict=True)]
        given = [graph.argument(leaf, OUTSIDE) for leaf in jax.tree.leaves(batch.x)]
        lowering = Lowering(graph, pipe, stages, batch, params, given)
        loss, grads = lowering.run()
        aux_tree = jax.tree.structure(stages.first.aux)
        aux = self._joined(graph, pipe, stages, lowering) if aux_tree.num_leaves else []
        outputs = graph.own([loss, *aux, *grads.values()])
        devices = [pipe.places[place] for place in places]
        count = len(devices) - len(constants)
        pairs = zip(constants, devices[count:], strict=True)
        constants = [_put(*pair) for pair in pairs]
        program = Program(graph, outputs, pipe.places)
        return _Built(pipe, stages, program, aux_tree, devices[:count], constants)

    def _joined(
        self, graph: Any, pipe: Pipe, stages: Stages, lowering: Lowering
    ) -> list[int]:
        axes = _microbatch.flat_axes(
            self._aux_axes, stages.first.aux, "aux", "aux_axes"
        )
        join = _microbatch.joiner(axes)
        reads = [value for row in lowering.aux() for value in row]
        function = Function.like("join_aux", join, *(graph.specs[v] for v in reads))
        return graph.call(function, pipe.place(stages.num_stages - 1), reads)

    def _axes(self, given: Sequence[PyTree]) -> list[list[int | None]]:
        """Where the examples are in each leaf of each argument; keys have none."""
        each = self._in_axes if isinstance(self._in_axes, tuple) else None
        each = [self._in_axes] * len(given) if each is None else list(each)
        if len(each) != len(given):
            raise ValueError(
                f"in_axes={self._in_axes!r} has {len(each)} entries for {len(given)} "
                f"arguments after params; give one for each, or one for all"
            )
        found = []
        for i, (axes, tree) in enumerate(zip(each, given, strict=True)):
            own = _microbatch.flat_axes(axes, tree, f"argument {i + 1}", "in_axes")
            leaves = jax.tree.leaves(tree)
            found.append(
                [
                    None if _program.is_single_key(leaf) else axis
                    for leaf, axis in zip(leaves, own, strict=True)
                ]
            )
        return found

    def _trained(self, specs: PyTree) -> list[bool]:
        flat = jax.tree_util.tree_leaves_with_path(specs)
        if self._trainable is None:
            return [is_inexact(leaf) for _, leaf in flat]
        return [
            is_inexact(leaf) and bool(self._trainable(_name(path), leaf))
            for path, leaf in flat
        ]


def _put(leaf: Any, device: Any) -> jax.Array:
    return _transfer.put([leaf], device)[0]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _check_params(params: PyTree, specs: PyTree) -> None:
    """Checks that all leaves of the parameters have a gradient."""
    from flax import nnx

    if isinstance(params, nnx.Module):
        raise TypeError(
            "params is an nnx.Module, whose state would be lost; split it: graphdef, "
            "params, rest = nnx.split(module, nnx.Param, ...), give params first and "
            "rest with in_axes=None, and return in aux what changes"
        )
    others = [
        f"params{jax.tree_util.keystr(path)} is {leaf.dtype}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(specs)
        if not is_inexact(leaf)
    ]
    if others:
        raise TypeError(
            f"parameters need a floating dtype: {'; '.join(others[:8])}; give the "
            f"others as an argument of their own, with in_axes=None"
        )


def _batch_size(
    given: Sequence[PyTree], axes: Sequence[Sequence[int | None]], count: int
) -> int:
    parts = [
        (f"argument {i + 1}", tree, own)
        for i, (tree, own) in enumerate(zip(given, axes, strict=True))
    ]
    try:
        return _microbatch.batch_size(parts, count)
    except ValueError as error:
        error.add_note(
            "in_axes is a value for all arguments after params, or a tuple with one "
            "for each: None for what each micro-batch is given whole, such as a "
            "number, a table or running statistics"
        )
        raise


def _check_in_place(params: PyTree, leaves: Sequence[Any], devices: Any) -> None:
    pairs = zip(leaves, devices, strict=True)
    lost = [
        i
        for i, (leaf, device) in enumerate(pairs)
        if not isinstance(leaf, jax.Array) or not _transfer.is_at(leaf, device)
    ]
    if lost:
        path, _ = jax.tree_util.tree_leaves_with_path(params)[lost[0]]
        raise ValueError(
            f"params{jax.tree_util.keystr(path)} is not on {devices[lost[0]]}, where "
            f"the first stage that reads it runs; type "
            f"params = grad_fn.place(params, *args)"
        )


def _ranks(devices: Sequence[Any], count: int) -> Sequence[Any]:
    if len(devices) < count:
        raise ValueError(
            f"{count} ranks need {count} devices, there are {len(devices)}; give "
            f"num_stages={len(devices)}, or let a device serve several stages: "
            f"devices=({count} * jax.devices())[:{count}]"
        )
    return devices[:count]


def _rows(built: _Built) -> list[str]:
    """A line for each stage: where it runs, and what crosses from it."""
    rows = []
    for s in range(built.stages.num_stages):
        part, first = built.stages.part(s), built.stages.first
        params = [i for i in built.stages.weights(s) if i < first.num_params]
        count = sum(spec.size for spec in specs_of([first.params[i] for i in params]))
        sent = specs_of([*part.leaves, *part.beside])
        nbytes = sum(spec.size * spec.dtype.itemsize for spec in sent if spec.shape)
        last = s == built.stages.num_stages - 1
        rows.append(
            f"stage {s} on {built.pipe.devices[s]}: {count:,} parameters, "
            f"{len(part.closed.jaxpr.eqns)} operations"
            + ("" if last else f", {nbytes:,} bytes of a micro-batch leave it")
        )
    return rows
