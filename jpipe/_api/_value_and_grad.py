"""`jpipe.value_and_grad`, the transform: what users type."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from .._arguments._objective import REDUCTIONS
from .._arguments._trainable import Trainable
from .._layers._adapter import is_module
from .._partition._param_sharding import ShardingRule
from .._partition._partition import Partition
from .._processes._start import check_joined
from ..planning._plan import Plan
from ._function_gradient import FunctionGradient
from ._settings import configure


def value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    num_stages: int | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    aux_axes: Any = None,
    in_axes: Any = 0,
    reduction: str = "mean",
    devices: Sequence[Any] | None = None,
    mesh: Mesh | None = None,
    sharding: ShardingRule | None = None,
    gather: str = "step",
    replicas: Sequence[int] | None = None,
    schedule: Any = "1f1b",
    remat: Any = "min_cut",
    trainable: Any = None,
    plan: Plan | None = None,
) -> FunctionGradient:
    """`jax.value_and_grad` of a whole training loss, through a pipeline.

    The function is traced once for each size of a micro-batch, and its operations are
    divided in stages, where that balances and few bytes cross, or where
    `jpipe.boundary` marks it. Nothing in it has to be rewritten: models of Flax,
    Equinox or plain JAX, tied weights, masks and long skips are what reads which value.

    Args:
      fun: ``(params, *args, **kwargs) -> loss``, a scalar; or ``(loss, aux)`` with
        ``has_aux``.
      num_microbatches: into how many micro-batches a mini-batch is split.
      num_stages: into how many stages the function is divided; default: one for each
        device, or as many as marks make.
      argnums: which argument of ``fun`` is ``params``, or, as in `jax.value_and_grad`,
        which ones are: their gradients are a tuple.
      has_aux: whether ``fun`` returns something besides the loss.
      aux_axes: on which axes aux of micro-batches is joined, a prefix of it; ``None``:
        on a new one; `jpipe.MEAN`: the mean over the examples, of integers what the
        last micro-batch returns; `jpipe.SUM`: their sum. What follows from no example
        is that of one device, where an axis is named.
      in_axes: where the examples are in the arguments besides ``params``: a value for
        all, or a tuple with one for each, as `jax.vmap` takes it; what is given by name
        is then split along axis 0, unless axes are given as ``inputs(0, mask=None)``.
        ``None``: each micro-batch is given the whole. A key of `jax.random.key` is
        folded with the number of the micro-batch: see `jpipe.microbatch_key`. An
        argument without arrays, such as ``True``, ``None``, a function or a number, is
        fixed: another value is another program. A number is not if its axis is
        ``None``.
      reduction: what the loss is: a ``"mean"`` or a ``"sum"`` over the examples;
        ``"weighted"``, where ``fun`` returns ``(total, weight)`` in place of a loss:
        the sum of totals by the sum of weights; or ``"microbatch_mean"``, the mean of
        what each micro-batch gives by itself.
        Summands that depend on no example, such as a penalty on weights, count once.
      devices: one for each rank, default `jax.devices`.
      mesh: several devices per stage, as for `jpipe.pipeline`.
      sharding: as for `jpipe.pipeline`, of paths such as ``("block_0", "kernel")``.
      gather: as for `jpipe.pipeline`.
      replicas: as for `jpipe.pipeline`.
      schedule: as for `jpipe.pipeline`.
      remat: as for `jpipe.pipeline`.
      trainable: which parameters have a gradient, others have ``None``; as for
        `Pipeline.value_and_grad`: by text such as ``"*/lora_*"``, or by
        ``(path, leaf) -> bool`` of paths such as ``("block_0", "kernel")``. Optimizers
        are given parameters with the same gaps.
      plan: the ``plan`` of such a ``grad_fn``, maybe from JSON, in place of
        ``num_microbatches``, ``num_stages``, ``schedule`` and ``remat``: the function
        is divided at the same places.

    Returns:
      ``grad_fn(params, *args, **kwargs) -> (loss, grads)``; ``((loss, aux), grads)``
      with ``has_aux``. It has ``place`` and ``compile``, of the same arguments, and
      ``jit`` and ``optimizer`` as a `Pipeline` has. ``print`` names its stages.

    Raises:
      ValueError: for options that do not exist.
      TypeError: if ``fun`` is no function.

    Example:
      >>> import jax, jax.numpy as jnp, jpipe
      >>> def loss_fn(params, x, targets):
      ...     h = jnp.tanh(x @ params["first"])
      ...     return jnp.mean((h @ params["last"] - targets) ** 2)
      >>> params = {"first": jnp.ones((3, 8)), "last": jnp.ones((8, 1))}
      >>> x, targets = jnp.ones((4, 3)), jnp.zeros((4, 1))
      >>> grad_fn = jpipe.value_and_grad(loss_fn, num_microbatches=2, num_stages=2)
      >>> params = grad_fn.place(params, x, targets)
      >>> loss, grads = grad_fn(params, x, targets)
      >>> grads["first"].devices() == params["first"].devices()
      True
    """
    check_joined()
    if not callable(fun):
        raise TypeError(f"fun={fun!r}: needs a function (params, *args) -> loss")
    if is_module(fun):
        raise TypeError(
            f"fun is a module, {type(fun).__name__}; needs a function (params, *args) "
            f"-> loss that calls it, such as lambda params, x, y: "
            f"loss_fn(model.apply(params, x), y); jpipe.pipeline takes the module"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"reduction={reduction!r}: choose {', '.join(map(repr, REDUCTIONS))}"
        )
    config = configure(
        plan=plan,
        layers=None,
        num_microbatches=num_microbatches,
        num_stages=num_stages,
        devices=devices,
        mesh=mesh,
        sharding=sharding,
        gather=gather,
        replicas=replicas,
        schedule=schedule,
        remat=remat,
    )
    return FunctionGradient(
        fun,
        Partition(config),
        argnums=argnums,
        has_aux=has_aux,
        aux_axes=aux_axes,
        in_axes=in_axes,
        reduction=reduction,
        trainable=Trainable(trainable, by_layer=False),
    )
