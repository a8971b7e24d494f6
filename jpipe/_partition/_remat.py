"""Remat modes: the residuals that a stage stores between forward and backward."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

NAMES = ("full", "none", "dots", "min_cut", "except_last")

# One of these names but the last, or a policy of `jax.checkpoint_policies`.
Mode = Any
_POLICIES = {"full": None, "dots": jax.checkpoint_policies.dots_saveable}


def modes_per_stage(remat: Any, num_stages: int) -> tuple[Any, ...]:
    """Returns one setting per stage, from one for all or a sequence of them.

    Args:
      remat: a name, a policy of `jax.checkpoint_policies`, or one per stage.
      num_stages: the number of stages.

    Returns:
      A name or a policy for each stage.

    Raises:
      ValueError: with every setting that is none of these, or if their number is
        not that of the stages.
    """
    is_per_stage = isinstance(remat, Sequence) and not isinstance(remat, str)
    settings = tuple(remat) if is_per_stage else (remat,) * num_stages
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
    """The mode of one micro-batch: ``"except_last"`` stores those of the last only."""
    if setting == "except_last":
        return "none" if microbatch == num_microbatches - 1 else "full"
    return setting


def keeps_nothing(mode: Mode) -> bool:
    """True if no residual is stored: a forward by itself makes only its output."""
    return mode == "full"


def keeps_fewest(mode: Mode) -> bool:
    """True if the fewest bytes are stored from which a backward can run."""
    return mode == "min_cut"


def mode_in_one_program(setting: Any, *, is_whole_backward: bool) -> Mode:
    """The mode of a forward that is one program with its backward, or with I of it.

    Nothing is stored between the two; W comes later, and reads what I leaves.
    """
    return "none" if is_whole_backward or setting == "none" else "min_cut"


def halves_keep_fewest(mode: Mode) -> bool:
    """True if I stores the fewest bytes from which W can run."""
    return mode != "none"


def make_wrapper(mode: Mode) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a transform of functions; `jax.vjp` then stores the mode's residuals.

    Forward and backward are different programs: XLA needs no barrier against finding
    common subexpressions.
    """
    if mode in ("none", "min_cut"):
        return lambda function: function
    policy = _POLICIES[mode] if isinstance(mode, str) else mode
    return lambda function: jax.checkpoint(function, policy=policy, prevent_cse=False)


def mode_name(setting: Any) -> str:
    """The name of a setting, as plans print it."""
    if isinstance(setting, str):
        return setting
    return getattr(setting, "__name__", None) or type(setting).__name__
