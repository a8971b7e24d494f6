"""The workspace of stages: what their largest program needs beside what it is given.

Besides the workspace of a layer there is the input of the layer and its output, if they
stay within the stage, and the skip connections within the stage that are open there:

    workspace[i, j] = max over layers l in [i, j) of
                      workspace[l] + input[l] if l > i + output[l] if l + 1 < j
                      + sum of skips from s to t with i <= s <= l <= t < j
"""

import numpy as np

from ._profile_record import Profile
from ._sums import Matrix


def stage_workspaces(profile: Profile) -> Matrix:
    """The workspace of a program of each stage, at the layer that needs most.

    Args:
      profile: the layers; a workspace that is unknown counts as none.
    """
    layers = profile.layers
    num_layers = len(layers)
    workspace = np.array([layer.workspace_bytes or 0 for layer in layers], float)
    outputs = np.array([layer.output_bytes for layer in layers], float)
    inputs = np.concatenate([[0.0], outputs[:-1]])

    stage_bytes = np.zeros((num_layers + 1, num_layers + 1))
    # [end, layer]: the workspace in the stages that begin with a layer and end there,
    # and before that one without the inputs of layers.
    needed = np.tile(workspace, (num_layers + 1, 1))
    needed[np.triu_indices(num_layers + 1, 0, num_layers)] = -np.inf  # beyond the end
    for end in range(1, num_layers + 1):
        needed[end, : end - 1] += outputs[: end - 1]
    for begin in reversed(range(num_layers)):
        for skip in profile.skips:
            if skip.source == begin:
                needed[skip.target + 1 :, begin : skip.target + 1] += skip.bytes
        stage_bytes[begin, begin + 1 :] = needed[begin + 1 :, begin:].max(axis=1)
        # In stages that begin earlier, its input is within the stage.
        needed[:, begin] += inputs[begin]
    return stage_bytes
