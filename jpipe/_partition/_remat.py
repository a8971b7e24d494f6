"""Remat: the residuals that a stage stores between forward and backward.

A *remat setting* is what a user says for a stage, by a name or a policy of JAX. It
tells the *remat mode* of each micro-batch: the values that its forward stores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ._remat_mode import FULL, MODES, NONE, Policy, RematMode


@dataclass(frozen=True)
class RematSetting:
    """The remat modes of one stage on all micro-batches.

    Attributes:
      name: the name that users write and that plans print.
      mode: the mode of all micro-batches but the last.
      last_mode: the mode of the last one, whose backward may follow at once.
    """

    name: str
    mode: RematMode
    last_mode: RematMode

    def mode_of(self, microbatch: int, num_microbatches: int) -> RematMode:
        """The mode of one micro-batch."""
        is_last = microbatch == num_microbatches - 1
        return self.last_mode if is_last else self.mode


# name -> the setting that users choose by it
SETTINGS = {mode.name: RematSetting(mode.name, mode, mode) for mode in MODES} | {
    "except_last": RematSetting("except_last", FULL, NONE)
}


def settings_of_stages(remat: Any, num_stages: int) -> tuple[RematSetting, ...]:
    """Returns one setting per stage, from one for all or a sequence of them.

    Args:
      remat: a name, a policy of `jax.checkpoint_policies`, or one per stage.
      num_stages: the number of stages.

    Raises:
      ValueError: with every setting that is none of these, or if their number is
        not that of the stages.
    """
    settings = find_settings(remat)
    if not _is_per_stage(remat):
        return settings * num_stages
    if len(settings) != num_stages:
        raise ValueError(
            f"remat has {len(settings)} entries for {num_stages} stages; give one for "
            f"all or one per stage"
        )
    return settings


def find_settings(remat: Any) -> tuple[RematSetting, ...]:
    """Returns the setting for all stages, or those of a sequence.

    Args:
      remat: see `settings_of_stages`.

    Raises:
      ValueError: with every setting that there is not.
    """
    arguments = tuple(remat) if _is_per_stage(remat) else (remat,)
    settings = list[RematSetting]()
    unknown = list[Any]()
    for argument in arguments:
        if isinstance(argument, str) and argument in SETTINGS:
            settings.append(SETTINGS[argument])
        elif callable(argument) and argument is not jax.checkpoint:
            settings.append(_setting_of_policy(argument))
        else:
            unknown.append(argument)
    if unknown:
        listed = ", ".join(dict.fromkeys(map(repr, unknown)))
        raise ValueError(
            f"unknown remat {listed}: choose "
            f"{', '.join(map(repr, SETTINGS))} or a policy of jax.checkpoint_policies"
        )
    return tuple(settings)


def _is_per_stage(remat: Any) -> bool:
    """True if a value of ``remat`` is a sequence of values."""
    return isinstance(remat, Sequence) and not isinstance(remat, str)


def _setting_of_policy(policy: Policy) -> RematSetting:
    """The setting of a user's policy, by the name of its function or class."""
    name = getattr(policy, "__name__", None) or type(policy).__name__
    mode = RematMode(name, policy)
    return RematSetting(name, mode, mode)
