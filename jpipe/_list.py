"""A list of layers: its user decided the stages."""

from collections.abc import Sequence
from typing import Any

import chex

from ._check._report import CheckReport
from ._fitting import Fitting
from ._functions._batch import Axes
from ._layers._skip import label
from ._run._pipe import Pipe
from ._slices._built import Built
from ._slices._division import ByLayer, Shapes
from ._slices._model import Model
from ._subject import Subject
from .planning._describe import Known, of_function

PyTree = Any


class LayerList(Subject):
    """A list of layers.

    Args:
      pipe: its stages.
      axes: where the examples are.
      planned_shapes: those of the parameters that a plan is of, if it has any.
    """

    by_layer = True

    def __init__(
        self, pipe: Pipe, axes: Axes, planned_shapes: Shapes | None = None
    ) -> None:
        self._pipe = pipe
        self._listed = Model(pipe.layers, axes, pipe.stage_of_layer)
        division = ByLayer(pipe, planned_shapes)
        self._fits = Fitting(pipe, self._listed, division)
        super().__init__(self._listed, division, self._fits)

    def __str__(self) -> str:
        return str(self._listed)

    def known(self, last: Built | None) -> Known:
        """What is known of the pipeline.

        Args:
          last: the last mini-batch with a loss.
        """
        names = [[layer.name for layer in stage.layers] for stage in self.pipe.stages]
        skips = [(label(r.key), r.source, r.target) for r in self._listed.routes]
        if last is not None:
            return of_function(last)._replace(names=names, skips=skips)
        layout = self._fits.layout
        owners = layout.owner_stages if layout else []
        reads = [
            [i for i, owner in enumerate(owners) if owner == s]
            for s in range(len(names))
        ]
        return Known(self._pipe, names, layout, reads, skips=skips)

    def init(
        self,
        key: chex.PRNGKey | None,
        x: PyTree,
        given: Sequence[PyTree] | None = None,
    ) -> PyTree:
        """Makes the variables of all layers, or of those where ``None`` is given."""
        variables = super().init(key, x, given)
        self._fits.note(variables, x)
        return variables

    def _fitting(self, key: chex.PRNGKey, variables: PyTree, x: PyTree) -> PyTree:
        """Variables, each in the entry that `init` gives it to."""
        if any(entry is None for entry in self._listed.entries(variables)):
            variables = self.init(key, x, variables)
        self.look_again()
        return self._fits.by_owner(variables, x)

    def check(self, variables: PyTree, *given: Any) -> CheckReport:
        """Runs each layer and the loss at once and in micro-batches."""
        from ._checking import checked  # which a step does not need

        return checked(self._pipe, self._fits, variables, *given)
