"""Which residuals a stage stores between its forward and its backward."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

NAMES = ("full", "none", "dots", "min_cut", "except_last")

# One of these names but the last, or a policy of `jax.checkpoint_policies`.
Mode = Any
_POLICIES = {"full": None, "dots": jax.checkpoint_policies.dots_saveable}


def per_stage(remat: Any, num_stages: int) -> tuple[Any, ...]:
    """One setting per stage, from one for all or a sequence of them.

    Args:
      remat: a name, a policy of `jax.checkpoint_policies`, or one per stage.
      num_stages: the number of stages.

    Returns:
      A name or a policy for each stage.

    Raises:
      ValueError: with every setting that is none of these, or if their number is
        not that of the stages.
    """
    several = isinstance(remat, Sequence) and not isinstance(remat, str)
    settings = tuple(remat) if several else (remat,) * num_stages
    if len(settings) != num_stages:
        raise ValueError(
            f"remat has {len(settings)} entries for {num_stages} stages; give one for "
            f"all or one per stage"
        )
    unknown = [
        setting
        for setting in settings
        if setting not in NAMES and (not callable(setting) or setting is jax.checkpoint)
    ]
    if unknown:
        listed = ", ".join(dict.fromkeys(map(repr, unknown)))
        raise ValueError(
            f"unknown remat {listed}: choose "
            f"{', '.join(map(repr, NAMES))} or a policy of jax.checkpoint_policies"
        )
    return settings


def mode(setting: Any, microbatch: int, num_microbatches: int) -> Mode:
    """What one micro-batch does: ``"except_last"`` has residuals of the last only."""
    if setting == "except_last":
        return "none" if microbatch == num_microbatches - 1 else "full"
    return setting


def keeps_nothing(mode: Mode) -> bool:
    """Whether no residual is stored: a forward by itself makes only its output."""
    return mode == "full"


def keeps_fewest(mode: Mode) -> bool:
    """Whether of what a backward reads the fewest bytes are stored that it needs."""
    return mode == "min_cut"


def mode_in_one_program(setting: Any, whole: bool) -> Mode:
    """What a forward stores that is one program with its backward, or with I of it.

    Nothing is stored between the two; W comes later, and reads what I leaves.
    """
    return "none" if whole or setting == "none" else "min_cut"


def halves_keep_fewest(mode: Mode) -> bool:
    """Whether I leaves to W the fewest bytes that it needs."""
    return mode != "none"


def make_wrapper(mode: Mode) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The transform that makes `jax.vjp` store the residuals of the mode.

    Forward and backward are different programs: XLA needs no barrier against finding
    common subexpressions.
    """
    if mode in ("none", "min_cut"):
        return lambda function: function
    policy = _POLICIES[mode] if isinstance(mode, str) else mode
    return lambda function: jax.checkpoint(function, policy=policy, prevent_cse=False)


def mode_name(setting: Any) -> str:
    """How a plan prints a setting."""
    if isinstance(setting, str):
        return setting
    return getattr(setting, "__name__", None) or type(setting).__name__
