"""`jpipe.pipeline`: a sequence of layers as one program over many devices."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import _microbatch, _remat, _rng, _setup, _signature, _transfer, _variables
from ._execute import execute
from ._gradient import Gradient, gradient_tree
from ._layer import as_layers
from ._memory import nbytes, predict
from ._objective import Objective
from ._plan import Plan, StagePlan
from ._program import Batch, Pipe, Program
from ._stage import fuse, walk
from ._task import Weights, is_params
from ._optimizer import Optimizer
from ._train import TrainState, TrainStep, check_optimizer
from .schedules import Schedule, ScheduleBuilder

PyTree = Any
LossFunction = Callable[[PyTree, PyTree], Any]


def pipeline(
    stages: Sequence[Any],
    num_microbatches: int,
    *,
    balance: Sequence[int] | None = None,
    devices: Sequence[jax.Device] | None = None,
    schedule: str | ScheduleBuilder | Schedule = "1f1b",
    remat: Any = "full",
    in_axes: Any = 0,
    target_axes: Any = 0,
    out_axes: int = 0,
) -> "Pipeline":
    """Turns a sequence of layers into one training program over many devices.

    The program gives the numbers of the same layers on one device. Each stage, a
    group of neighbouring layers, is compiled onto its own device; a mini-batch is cut
    in micro-batches, which pass through the stages in the order of a schedule.

    Args:
      stages: the layers: linen modules, `Stage` objects, functions ``x -> y``; each
        maps one pytree to one pytree.
      num_microbatches: into how many micro-batches a mini-batch is cut, at least 1.
        Their sizes differ by at most one.
      balance: how many layers each stage takes, such as ``[3, 2, 4]``; left out,
        each layer is a stage.
      devices: one per rank, default `jax.devices`; repeat a device to let it serve
        several stages.
      schedule: a name of `jpipe.schedules.BY_NAME`, a builder, or a `Schedule`.
      remat: what is kept between forward and backward. ``"full"``: the stage's
        inputs; the rest is computed again. ``"none"``: the residuals.
        ``"except_last"``: residuals of the last micro-batch only. Or a policy of
        `jax.checkpoint_policies`. One for all stages, or one per stage.
      in_axes: the batch axis of the inputs, as `jax.vmap` takes it: an int, ``None``
        for what every micro-batch gets whole, or a pytree prefix of these.
      target_axes: the same for the targets.
      out_axes: the batch axis of the outputs, on which `Pipeline.apply` joins them.

    Returns:
      The pipeline. Nothing is compiled yet.

    Raises:
      ValueError: if a number, name or length does not fit; with all faults of a kind.
      TypeError: if a layer, device or number is of a wrong type.
      ScheduleError: if a schedule cannot run.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe
      >>> from flax import linen as nn
      >>> pipe = jpipe.pipeline(
      ...     [nn.Dense(8), nn.relu, nn.Dense(1)], num_microbatches=2, balance=[2, 1]
      ... )
      >>> x = jnp.ones((4, 3))
      >>> variables = pipe.init(jax.random.key(0), x)
      >>> pipe.apply(variables, x).shape
      (4, 1)

    References:
      Huang et al., `GPipe: Efficient Training of Giant Neural Networks using
      Pipeline Parallelism <https://arxiv.org/abs/1811.06965>`_ (2019).
      Kim et al., `torchgpipe: On-the-fly Pipeline Parallelism for Training Giant
      Models <https://arxiv.org/abs/2004.09910>`_ (2020).
    """
    layers = as_layers(stages)
    number = _setup.check_num_microbatches(num_microbatches)
    groups = fuse(layers, _setup.check_balance(balance, len(layers)))
    settings = _remat.per_stage(remat, len(groups))
    chosen = _setup.choose_schedule(schedule, len(groups), number)
    placed = _setup.choose_devices(devices, chosen)
    pipe = Pipe(groups, placed, chosen, settings)
    return Pipeline(pipe, in_axes, target_axes, out_axes)


def sequential(
    layers: Sequence[Any],
    num_microbatches: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
    **options: Any,
) -> "Pipeline":
    """The unpipelined twin of `pipeline`: the same layers as one stage on one device.

    With the same number of micro-batches it draws the same dropout. Each micro-batch
    is one compiled forward and backward; nothing is recomputed.

    Args:
      layers: as for `pipeline`.
      num_microbatches: as for `pipeline`; the gradients are accumulated.
      devices: the device, as a sequence of one; default the first.
      **options: ``in_axes``, ``target_axes`` and ``out_axes`` of `pipeline`.

    Returns:
      A pipeline with one stage.

    Raises:
      ValueError: as for `pipeline`.
      TypeError: as for `pipeline`.

    Example:
      >>> import jpipe
      >>> from flax import linen as nn
      >>> jpipe.sequential([nn.Dense(8), nn.relu]).num_stages
      1
    """
    listed = list(layers)
    return pipeline(
        listed,
        num_microbatches,
        balance=[len(listed)] if listed else None,
        devices=devices,
        remat="none",
        **options,
    )


class Pipeline:
    """A sequence of layers spread over devices; made by `pipeline`.

    It holds no arrays: variables and train states are given and returned. What it
    compiled is kept and used again for batches of the same shapes.
    """

    def __init__(
        self, pipe: Pipe, in_axes: Any, target_axes: Any, out_axes: int
    ) -> None:
        self._pipe = pipe
        self._in_axes = in_axes
        self._target_axes = target_axes
        self._out_axes = out_axes
        self._inference: dict[Any, tuple[Program, Any, Any]] = {}
        self._gradients = lru_cache(maxsize=64)(self._new_gradients)
        # For print: the shapes and the program that were seen last.
        self._seen_weights: Sequence[Weights] = ()
        self._seen_program: Program | None = None

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self._pipe.stages)

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a mini-batch."""
        return self._pipe.schedule.num_microbatches

    @property
    def schedule(self) -> Schedule:
        """Who runs which action, in which order."""
        return self._pipe.schedule

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The device of each stage."""
        return self._pipe.devices

    @property
    def plan(self) -> Plan:
        """Who runs what, in names and numbers; says more the more is known."""
        pipe, program = self._pipe, self._seen_program
        meter = predict(program) if program else None
        stages = []
        for s, stage in enumerate(pipe.stages):
            specs = []
            if self._seen_weights:
                own = self._seen_weights[s]
                pairs = zip(own.specs, own.paths, strict=True)
                specs = [spec for spec, path in pairs if is_params(path)]
            stages.append(
                StagePlan(
                    index=s,
                    rank=pipe.schedule.placement[s],
                    device=str(pipe.devices[s]),
                    layers=tuple(layer.name for layer in stage.layers),
                    remat=_remat.name(pipe.remat[s]),
                    num_params=sum(spec.size for spec in specs)
                    if self._seen_weights
                    else None,
                    param_bytes=nbytes(specs) if self._seen_weights else None,
                    held_bytes=meter.activations[s] if meter else None,
                )
            )
        peak = meter.peak.items() if meter else ()
        listed = tuple((str(device), count) for device, count in peak)
        return Plan(tuple(stages), pipe.schedule, listed)

    def __repr__(self) -> str:
        return (
            f"<jpipe.Pipeline: {sum(len(s.layers) for s in self._pipe.stages)} layers "
            f"in {self.num_stages} stages, {self.num_microbatches} micro-batches, "
            f"{self.schedule.name}>"
        )

    def __str__(self) -> str:
        return str(self.plan)

    def init(self, key: jax.Array, x: PyTree) -> tuple[PyTree, ...]:
        """Makes the variables of all layers, each on its layer's device.

        The values depend on the key, the layer's number and shapes only, not on
        balance, devices or schedule. Only the shapes of ``x`` are used.

        Args:
          key: a JAX random key.
          x: an input, or its `jax.ShapeDtypeStruct` leaves.

        Returns:
          One entry per layer: its Flax variables, ``{}`` where it has none.

        Raises:
          TypeError: if a leaf of ``x`` is not an array.
          ValueError: if one module with parameters stands twice in the list.
        """
        variables = []
        specs = []
        spec = _microbatch.specs(x, "x")
        for number, (s, layer, x_spec, expected) in enumerate(
            walk(self._pipe.stages, key, spec)
        ):
            specs.append(expected)
            own = _transfer.put([_rng.layer_key(key, number)], self.devices[s])[0]
            if not jax.tree.leaves(expected):
                variables.append(expected)
                continue
            make = jax.jit(lambda k, layer=layer, x_spec=x_spec: layer.init(k, x_spec))
            variables.append(make(own))
        self._check_untied(specs)
        self._seen_weights = self._weights(specs)
        return tuple(variables)

    def place(self, variables: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """Puts variables on the devices of their layers.

        Args:
          variables: one entry per layer, on the host or any device: from `init` of a
            pipeline of another balance, or from a checkpoint.

        Returns:
          The same values in place.

        Raises:
          ValueError: if there is not one entry per layer.
        """
        number = sum(len(stage.layers) for stage in self._pipe.stages)
        if not isinstance(variables, Sequence) or len(variables) != number:
            _variables.check([{}] * number, variables)
        return tuple(
            jax.device_put(entry, device)
            for stage, device in zip(self._pipe.stages, self.devices, strict=True)
            for entry in variables[stage.span]
        )

    def apply(
        self,
        variables: Sequence[PyTree],
        x: PyTree,
        *,
        rngs: _rng.Rngs = None,
        train: bool = False,
    ) -> PyTree:
        """Applies all layers, forward only.

        Args:
          variables: one entry per layer, in place.
          x: the input, on the host or any device.
          rngs: a key, or keys by stream name such as ``{"dropout": key}``.
          train: given to layers that take ``train``, ``deterministic`` or
            ``use_running_average``.

        Returns:
          The output of the last layer for the whole mini-batch, on its device.

        Raises:
          ValueError: if the batch or the variables do not fit the model.
          TypeError: if a leaf of ``x`` is not an array.
        """
        signature = _signature.of(variables, x, rngs), train
        if signature not in self._inference:
            self._inference[signature] = self._compile_inference(
                variables, x, rngs, train
            )
        program, join, tree = self._inference[signature]
        weights = self._leaves(variables)
        live = program.feed(weights, jax.tree.leaves(x), (), jax.tree.leaves(rngs))
        execute(program.steps, live)
        return jax.tree.unflatten(tree, join(live.x[-1]))

    def value_and_grad(
        self,
        loss_fn: LossFunction,
        *,
        has_aux: bool = False,
        reduction: str = "mean",
    ) -> Callable[..., Any]:
        """The loss of a mini-batch and its gradients, as `jax.value_and_grad`.

        Args:
          loss_fn: ``(outputs, targets) -> scalar``, applied to each micro-batch on the
            last device.
          has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
          reduction: how micro-batches combine. ``"mean"``: the loss is a mean over
            examples. ``"sum"``: it is a sum. ``"weighted"``: ``loss_fn`` returns
            ``(total, weight)`` and the loss is the sum of totals over the sum of
            weights; the weight is taken as a constant.

        Returns:
          ``f(variables, x, targets, *, rngs=None, train=True) -> (loss, grads)``, or
          ``((loss, aux), grads)``: ``grads[i]`` has the structure of
          ``variables[i]["params"]`` and its device; ``aux`` has a new first axis, one
          entry per micro-batch.

        Raises:
          ValueError: if the reduction is unknown; from ``f``, if batch, targets or
            variables do not fit.
          TypeError: if ``loss_fn`` is no function; from ``f``, if it does not return
            what was agreed.

        Example:
          >>> import jax, jax.numpy as jnp, jpipe
          >>> pipe = jpipe.pipeline([lambda x: 2 * x], num_microbatches=2)
          >>> square = lambda y, t: jnp.mean((y - t) ** 2)
          >>> loss, grads = pipe.value_and_grad(square)(({},), jnp.ones(4), jnp.ones(4))
          >>> float(loss), grads
          (1.0, ({},))
        """
        gradients = self._gradients(Objective(loss_fn, has_aux, reduction))

        def run(
            variables: Sequence[PyTree],
            x: PyTree,
            targets: PyTree,
            *,
            rngs: _rng.Rngs = None,
            train: bool = True,
        ) -> Any:
            gradient = gradients(variables, x, targets, rngs, train)
            outcome = gradient(
                self._leaves(variables),
                jax.tree.leaves(x),
                jax.tree.leaves(targets),
                jax.tree.leaves(rngs),
            )
            leaves = [leaf for stage in outcome.grads for leaf in stage]
            grads = gradient_tree(_variables.params(variables), leaves)
            value = (outcome.loss, outcome.aux) if has_aux else outcome.loss
            return value, grads

        return run

    def init_train_state(
        self, key: jax.Array, x: PyTree, tx: optax.GradientTransformation
    ) -> TrainState:
        """Makes everything that training changes, each part where it is used.

        Args:
          key: a JAX random key; the state keeps a key that follows from it.
          x: an input, or its `jax.ShapeDtypeStruct` leaves.
          tx: the optax optimizer.

        Returns:
          The state at step 0.

        Raises:
          TypeError: if ``tx`` is no optax transformation.
        """
        check_optimizer(tx)
        variables = self.init(key, x)
        params = _variables.params(variables)
        first = self.devices[0]
        rng, step = _transfer.put([_rng.training_key(key), jnp.int32(0)], first)
        return TrainState(
            step=step,
            params=params,
            opt_state=self._optimizer(tx, params, donate=False).init(params),
            model_state=_variables.model_state(variables),
            rng=rng,
        )

    def train_step(
        self,
        loss_fn: LossFunction,
        tx: optax.GradientTransformation,
        *,
        has_aux: bool = False,
        reduction: str = "mean",
        donate: bool = True,
    ) -> TrainStep:
        """One training step: gradients of a mini-batch, and one optax update.

        Args:
          loss_fn: as for `value_and_grad`.
          tx: the optax optimizer with which the state was made. It sees all
            parameters, as on one device, whatever their devices.
          has_aux: as for `value_and_grad`; ``metrics["aux"]``.
          reduction: as for `value_and_grad`.
          donate: whether a step overwrites the memory of the state that it is given;
            that state cannot be used again. Without it a step needs room for both.

        Returns:
          ``step(state, x, targets) -> (state, metrics)`` with ``metrics["loss"]``.

        Raises:
          ValueError: if the reduction is unknown.
          TypeError: if ``tx`` is no optax transformation.
        """
        check_optimizer(tx)
        return TrainStep(
            self._gradients(Objective(loss_fn, has_aux, reduction)),
            lambda params: self._optimizer(tx, params, donate),
            self._check_placed,
            has_aux=has_aux,
            donate=donate,
        )

    def _leaves(self, variables: Sequence[PyTree]) -> list[list[jax.Array]]:
        weights = [
            jax.tree.leaves(tuple(variables[stage.span])) for stage in self._pipe.stages
        ]
        self._check_placed(weights)
        return weights

    def _check_placed(self, weights: Sequence[Sequence[Any]]) -> None:
        _variables.check_placed(weights, self._pipe.stages, self.devices)

    def _optimizer(
        self, tx: optax.GradientTransformation, params: PyTree, donate: bool
    ) -> Optimizer:
        specs = _microbatch.specs(params, "params")
        return Optimizer(tx, specs, self._stage_of_layer(), self.devices, donate)

    def _stage_of_layer(self) -> list[int]:
        return [stage.index for stage in self._pipe.stages for _ in stage.layers]

    def _weights(self, variables: Sequence[PyTree]) -> list[Weights]:
        return [Weights.of(variables[stage.span]) for stage in self._pipe.stages]

    def _check_untied(self, specs: Sequence[PyTree]) -> None:
        layers = [layer for stage in self._pipe.stages for layer in stage.layers]
        seen: dict[int, int] = {}
        for number, (layer, variables) in enumerate(zip(layers, specs, strict=True)):
            first = seen.setdefault(id(layer.source), number)
            if first != number and jax.tree.leaves(variables):
                raise ValueError(
                    f"layers {first} and {number} are the same {layer.name} object: "
                    f"shared parameters are not in this version; list two modules, or "
                    f"wrap both uses in one module"
                )

    def _check_variables(self, variables: Any, x: PyTree) -> None:
        walked = walk(self._pipe.stages, jax.random.key(0), x)
        expected = [spec for _, _, _, spec in walked]
        self._check_untied(expected)
        _variables.check(expected, variables)

    def _batch(self, x: PyTree, targets: PyTree, rngs: _rng.Rngs) -> Batch:
        x = _microbatch.specs(x, "x")
        targets = _microbatch.specs(targets, "targets")
        x_axes = _microbatch.flat_axes(self._in_axes, x, "x", "in_axes")
        target_axes = _microbatch.flat_axes(
            self._target_axes, targets, "targets", "target_axes"
        )
        size = _microbatch.batch_size(
            [("x", x, x_axes), ("targets", targets, target_axes)], self.num_microbatches
        )
        sizes = _microbatch.sizes(size, self.num_microbatches)
        keys = None if rngs is None else _microbatch.specs(rngs, "rngs")
        return Batch(x, x_axes, targets, target_axes, keys, sizes)

    def _compile_inference(
        self, variables: Any, x: PyTree, rngs: _rng.Rngs, train: bool
    ) -> tuple[Program, Any, Any]:
        batch = self._batch(x, (), rngs)
        self._check_variables(variables, batch.x)
        self._seen_weights = self._weights(variables)
        program = Program(self._pipe, self._seen_weights, batch, train=train)
        leaves, tree = jax.tree.flatten(program.last_task.y)
        _microbatch.check_joinable(program.last_task.y, self._out_axes, batch.sizes[0])
        return program, _microbatch.joiner([self._out_axes] * len(leaves)), tree

    def _new_gradients(self, objective: Objective) -> Callable[..., Gradient]:
        compiled: dict[Any, Gradient] = {}

        def find(
            variables: Any, x: PyTree, targets: PyTree, rngs: _rng.Rngs, train: bool
        ) -> Gradient:
            signature = _signature.of(variables, x, targets, rngs), train
            if signature not in compiled:
                batch = self._batch(x, targets, rngs)
                self._check_variables(variables, batch.x)
                weights = self._weights(variables)
                program = Program(
                    self._pipe, weights, batch, train=train, objective=objective
                )
                compiled[signature] = Gradient(program, objective)
                self._seen_weights, self._seen_program = weights, program
            return compiled[signature]

        return find
