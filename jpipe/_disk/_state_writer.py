"""A state written to a folder, or to that of a step, at once or in the background."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from .. import _compat
from .._processes._arrays import as_numbers
from ._leaf_entries import write_entries

PyTree = Any
# The end of the name of a folder that Orbax has not written all of.
_UNFINISHED = ".orbax-checkpoint-tmp"


def process_options() -> Any:
    """Options of Orbax, which does not wait for other processes."""
    import orbax.checkpoint as ocp  # takes a second, which a step does not need

    process_index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=process_index,
        active_processes={process_index},
        barrier_sync_key_prefix=f"process{process_index}",
    )


def make_handler() -> Any:
    """The handler of Orbax for pytrees."""
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler(multiprocessing_options=process_options())


class StateWriter:
    """Writes states; one of them may be on its way, in threads of Orbax."""

    def __init__(self) -> None:
        # The manager of Orbax whose threads may write yet, and the folder they write.
        self._unfinished: tuple[Any, epath.Path] | None = None
        self._waits_at_exit = False

    def write(self, folder: epath.Path, state: PyTree) -> None:
        """Writes a state to a folder that does not exist.

        Args:
          folder: the folder.
          state: the state, without any `Stacked` leaf.

        Raises:
          OSError: if it cannot be written.
        """
        import orbax.checkpoint as ocp

        args = _save_args(state)
        with (
            _explained_failure(folder),
            ocp.Checkpointer(
                make_handler(), multiprocessing_options=process_options()
            ) as checkpointer,
        ):
            checkpointer.save(folder, args)

    def write_step(
        self,
        folder: epath.Path,
        state: PyTree,
        *,
        step: int,
        keep: int,
        background: bool,
    ) -> None:
        """Writes the state of a step; deletes the oldest ones of the folder.

        Args:
          folder: the folder of all steps.
          state: the state, without any `Stacked` leaf.
          step: the number of the step.
          keep: the number of states that stay.
          background: True to return when the values are on the host.

        Raises:
          OSError: if it cannot be written.
        """
        import orbax.checkpoint as ocp

        args = _save_args(state)
        target = folder / str(step)
        with _explained_failure(target):
            folder.mkdir(parents=True, exist_ok=True)
            manager = ocp.CheckpointManager(
                folder,
                item_handlers=make_handler(),
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=keep,
                    create=False,
                    cleanup_tmp_directories=True,  # those of saves that were killed
                    multiprocessing_options=process_options(),
                ),
            )
            # An interrupt from here on leaves threads that write: see `finish`.
            self._unfinished = manager, target
            try:
                manager.save(step, args=args, force=True)
            except Exception:
                self._unfinished = None
                raise
        if not background:
            self.finish()
        elif not self._waits_at_exit:
            self._waits_at_exit = True
            _compat.run_before_threads_end(self.finish)

    def finish(self) -> None:
        """Waits for the last save; again, if the wait for it was interrupted.

        Raises:
          OSError: if it could not be written.
        """
        if self._unfinished is None:
            return
        manager, target = self._unfinished
        with _explained_failure(target):
            try:
                manager.wait_until_finished()
                manager.close()
            except Exception:
                self._unfinished = None
                raise
        self._unfinished = None


def _save_args(state: PyTree) -> Any:
    """The arguments with which Orbax saves a state: its values, and their digests."""
    import orbax.checkpoint as ocp

    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    values = jax.tree.map(lambda leaf: np.asarray(as_numbers(leaf)), state)
    return ocp.args.PyTreeSave(values, custom_metadata=write_entries(values))


@contextlib.contextmanager
def _explained_failure(target: epath.Path) -> Iterator[None]:
    """Removes what a save that failed has written, and raises an `OSError`."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):  # the next save removes it too
            (target.parent / f"{target.name}{_UNFINISHED}").rmtree()
        if isinstance(error, OSError):
            raise
        raise OSError(
            f"{target} could not be written, and what was there before still is: "
            f"{error}"
        ) from error
