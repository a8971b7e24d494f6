"""`jpipe.value_and_grad`, the transform: what users type."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from .._arguments._microbatch import check_axes
from .._arguments._objective import check_results
from .._arguments._trainable import Trainable
from .._arguments._wrong_call import explain_call
from .._instructions._transfer import Device
from .._layers._adapter import is_module
from .._lower._join import REDUCTIONS
from .._partition._options import REMAT, SCHEDULE
from .._partition._param_sharding import ShardingRule
from .._partition._partition import Partition
from .._processes._start import check_joined
from ..planning._plan_record import Plan
from ._function_gradient import FunctionGradient
from ._handle import Handle
from ._option_checks import check_options


@explain_call("jpipe.value_and_grad(fun, num_microbatches=4)")
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
    devices: Sequence[Device | Mesh] | np.ndarray | None = None,
    mesh: Mesh | None = None,
    sharding: ShardingRule | None = None,
    gather: str = "step",
    replicas: Sequence[int] | None = None,
    schedule: Any = SCHEDULE,
    remat: Any = REMAT,
    trainable: Any = None,
    plan: Plan | None = None,
) -> FunctionGradient:
    """Makes `jax.value_and_grad` of a whole training loss, through a pipeline.

    The function is traced once for each size of a micro-batch, and its operations are
    divided in stages, where that balances and few bytes cross, or where
    `jpipe.boundary` marks it. Nothing in it has to be rewritten: it may call models of
    Flax, Equinox or plain JAX, with tied weights, masks and long skips.

    Args:
      fun: ``(params, *args, **kwargs) -> loss``, a scalar; or ``(loss, aux)`` with
        ``has_aux``.
      num_microbatches: the number of micro-batches of a mini-batch.
      num_stages: the number of stages in which the function is divided; default: as
        many as marks make, or else one for each device, or fewer where the function
        has fewer cuts.
      argnums: the position of ``params`` among the arguments of ``fun``; or a sequence
        of positions, as in `jax.value_and_grad`, whose gradients are a tuple.
      has_aux: True if ``fun`` returns ``(loss, aux)``.
      aux_axes: the axes on which aux of micro-batches is joined, a pytree prefix of it.
        ``None``: a new axis. `jpipe.MEAN`: the mean over the examples; integers are
        those of the last micro-batch. `jpipe.SUM`: the sum. Where an axis is named, a
        leaf that follows from no example is what one device returns.
      in_axes: the axes of the examples in the arguments besides ``params``: a value for
        all, or a tuple with one for each, as `jax.vmap` takes it. With a tuple,
        arguments by name are split along axis 0, unless ``inputs(0, mask=None)`` gives
        their axes too. ``None``: each micro-batch gets the whole argument. A key of
        `jax.random.key` is folded with the index of the micro-batch: see
        `jpipe.microbatch_key`. An argument without arrays, such as ``True``, ``None``,
        a function or a number, is static: another value is another program. A number
        whose axis is ``None`` is an array.
      reduction: the loss is a ``"mean"`` or a ``"sum"`` over the examples;
        ``"weighted"``, where ``fun`` returns ``(total, weight)`` in place of a loss:
        the sum of totals over the sum of weights; ``"microbatch_mean"``: the mean of
        the losses of the micro-batches; or ``"batch"``: any loss, of what
        `jpipe.whole_batch` marks in ``fun``. Summands that depend on no example, such
        as a penalty on weights, count once.
      devices: as for `jpipe.pipeline`.
      mesh: as for `jpipe.pipeline`.
      sharding: as for `jpipe.pipeline`, of paths such as ``("block_0", "kernel")``.
      gather: as for `jpipe.pipeline`.
      replicas: as for `jpipe.pipeline`.
      schedule: as for `jpipe.pipeline`.
      remat: as for `jpipe.pipeline`.
      trainable: a selection of the parameters that have a gradient, ``None`` stands for
        that of others; as for `Pipeline.value_and_grad`: text such as ``"*/lora_*"``,
        or ``(path, leaf) -> bool`` of paths such as ``("block_0", "kernel")``.
        Optimizers take parameters with the same gaps.
      plan: the ``plan`` of such a ``grad_fn``, maybe from JSON, in place of
        ``num_microbatches``, ``num_stages``, ``replicas``, ``schedule`` and ``remat``:
        the function is divided at the same places.

    Returns:
      ``grad_fn(params, *args, **kwargs) -> (loss, grads)``; ``((loss, aux), grads)``
      with ``has_aux``. It has ``place``, ``compile``, ``check`` and ``profile``, of
      the same arguments, ``plan``, and ``jit`` and ``optimizer`` as a `Pipeline` has.
      ``print`` names its stages.

    Raises:
      ValueError: if an option does not exist or fit.
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
    arguments = {**locals()}  # all options, of which none can be forgotten
    check_joined()
    if isinstance(fun, Handle):
        raise TypeError(
            f"fun is {fun!r}; needs a function (params, *args) -> loss; of a pipeline "
            f"type pipe.value_and_grad(loss_fn)"
        )
    if not callable(fun):
        raise TypeError(f"fun={fun!r}: needs a function (params, *args) -> loss")
    if is_module(fun):
        raise TypeError(
            f"fun is a module, {type(fun).__name__}; needs a function (params, *args) "
            f"-> loss that calls it, such as lambda params, x, y: "
            f"loss_fn(model.apply(params, x), y); jpipe.pipeline takes the module"
        )
    check_results(has_aux, reduction, aux_axes)
    check_axes("in_axes", in_axes)
    check_axes("aux_axes", aux_axes, REDUCTIONS)
    options = check_options(value_and_grad, arguments, layers=None)
    return FunctionGradient(
        fun,
        Partition(options),
        argnums=argnums,
        has_aux=has_aux,
        aux_axes=aux_axes,
        in_axes=in_axes,
        reduction=reduction,
        trainable=Trainable(trainable, by_layer=False),
    )
