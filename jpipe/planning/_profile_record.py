"""The costs of each layer of a model: seconds and bytes of one micro-batch.

A profile prints as a table, is saved as JSON, and gives the costs of stages. Its
*fingerprint* says of which model it is (`_traced_layers`), its *origin* how and where
it was made (`_origin`). No JAX is imported here.
"""

import dataclasses
import functools
import itertools
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..schedules import Costs
from ..schedules._costs import TIME_FIELDS
from ..schedules._formats import (
    format_bytes,
    format_count,
    format_seconds,
    format_table,
)
from ..schedules._json import decode, parse_json
from ._layer_profile import (
    LayerProfile,
    LinkOptions,
    MeasuredLink,
    SkipProfile,
    find_number_faults,
)
from ._origin import format_origin, is_measured_on_cpu
from ._stage_costs import StageCosts

# Field of a layer -> the head of its column, where that is another.
_COLUMN_NAMES = {"input_grad": "I", "weight_grad": "W"}
# Columns whose numbers have no sum.
_WITHOUT_SUM = ("output", "workspace")


@dataclass(frozen=True)
class Profile:
    """The costs of the layers of a model; made by `jpipe.profile`.

    Attributes:
      layers: one entry per layer, in order.
      input_bytes: the bytes of the input of the first layer.
      skips: the long skip connections.
      ties: groups of indices of layers that use the same parameters.
      microbatch_size: the number of examples of a micro-batch.
      fingerprint: the model, by name: the shapes of its inputs, and a digest of each
        layer.
      origin: how and where the profile was made, by name: measured or estimated, the
        device or its rates, and versions.
      action_seconds: seconds that any action takes, whatever it computes: to have a
        program run from Python.
      link: the measured speed of transfers between two devices; ``None`` if there was
        one device, or nothing was measured.
      larger: the profile of a larger micro-batch, if several sizes were profiled: from
        both follow the costs of other sizes.
    """

    layers: tuple[LayerProfile, ...]
    input_bytes: int = 0
    skips: tuple[SkipProfile, ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()
    microbatch_size: int = 1
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)
    action_seconds: float = 0.0
    link: MeasuredLink | None = None
    larger: "Profile | None" = None

    @property
    def sizes(self) -> list[int]:
        """The numbers of examples of the micro-batches that were profiled."""
        larger_sizes = [] if self.larger is None else self.larger.sizes
        return [self.microbatch_size, *larger_sizes]

    def __str__(self) -> str:
        return _format_profile(self)

    @functools.cached_property
    def _stage_costs(self) -> StageCosts:
        return StageCosts(
            self.layers,
            input_bytes=self.input_bytes,
            skips=self.skips,
            ties=self.ties,
            action_seconds=self.action_seconds,
        )

    def costs(
        self,
        balance: Sequence[int],
        *,
        remat: str | Sequence[str] = "min_cut",
        bandwidth: float | None = None,
        latency: float = 0.0,
        overlap: bool | None = None,
    ) -> Costs:
        """The costs of the stages of a cut, for the simulation of schedules.

        Each action of a stage takes the time of its layers and ``action_seconds``, and
        a stage stores what its layers store. With ``remat="full"`` it stores its input
        and what skip connections bring to it, and its backward computes the forward
        again; what other modes compute again is taken to cost nothing. Between the
        halves of a backward a stage is taken to store what ``"min_cut"`` stores, if the
        profile has that mode.

        Args:
          balance: the number of layers of each stage.
          remat: the residuals between forward and backward, one mode or one per stage:
            ``"full"``, or one that ``residual_bytes`` of the layers names.
          bandwidth: bytes per second between two ranks; ``None``: transfers take no
            time but ``latency``.
          latency: seconds that a transfer takes whatever its size.
          overlap: True if ranks compute while they send and receive; False if a
            transfer keeps both ranks from computing, each for half of its time.
            Default: False if the profile was measured on a CPU, else True.

        Returns:
          Costs with one entry per stage, in seconds and bytes of one micro-batch.

        Raises:
          ValueError: with every fault of the arguments.

        Example:
          >>> layers = (LayerProfile("a", 1.0, 2.0), LayerProfile("b", 2.0, 4.0))
          >>> Profile(layers).costs([1, 1], remat="full").backward
          [3.0, 6.0]
        """
        sizes = list(balance)
        modes = modes_of_stages(remat, len(sizes))
        link_options = LinkOptions(bandwidth, latency, overlap)
        link = link_options.choose_link(self.origin)
        stage_costs = self._stage_costs
        faults = [
            *link_options.find_faults(),
            *stage_costs.find_remat_faults(modes),
        ]
        num_layers = len(self.layers)
        if min(sizes, default=0) < 1 or sum(sizes) != num_layers:
            faults.append(
                f"balance={sizes}: its sum is {sum(sizes)}, there are {num_layers} "
                f"layers, of which every stage needs at least one"
            )
        if faults:
            raise ValueError(f"profile: {'; '.join(faults)}")

        ends = [0, *itertools.accumulate(sizes)]
        stages = list(itertools.pairwise(ends))

        def residual_bytes(modes: Iterable[str]) -> list[int]:
            pairs = zip(modes, stages, strict=True)
            return [
                int(stage_costs.residual_bytes[mode][stage]) for mode, stage in pairs
            ]

        param_bytes = [int(stage_costs.param_bytes[stage]) for stage in stages]
        state_bytes = [int(stage_costs.state_bytes[stage]) for stage in stages]
        return dataclasses.replace(
            stage_costs.times(ends, modes, link),
            residual_bytes=residual_bytes(modes),
            pending_bytes=residual_bytes(map(stage_costs.pending_mode, modes)),
            parameter_bytes=list(map(operator.add, param_bytes, state_bytes)),
            accumulator_bytes=param_bytes,
        )

    def to_json(self) -> str:
        """The profile as a JSON object; `from_json` reads it."""
        return json.dumps(dataclasses.asdict(self), indent=1, default=_plain)

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """Reads what `to_json` wrote.

        Raises:
          ValueError: if the text is something else.

        Example:
          >>> profile = Profile((LayerProfile("a", 1.0, 2.0),))
          >>> Profile.from_json(profile.to_json()) == profile
          True
        """
        with parse_json("no profile as Profile.to_json writes it", text) as fields:
            profile: Profile = decode(cls, fields)
            if faults := find_profile_faults(profile):
                raise ValueError("; ".join(faults))
            str(profile)  # it needs some entries of the origin
        return profile


def costs_of_stages(profile: Profile) -> StageCosts:
    """The costs of every stage of a profile, which are computed once."""
    return profile._stage_costs


def modes_of_stages(remat: Any, num_stages: int) -> tuple[Any, ...]:
    """One mode per stage, from one for all or a sequence of them.

    Raises:
      ValueError: if there are not as many.
    """
    is_sequence = isinstance(remat, Iterable) and not isinstance(remat, str)
    modes = tuple(remat) if is_sequence else (remat,) * num_stages
    if len(modes) != num_stages:
        raise ValueError(
            f"remat has {len(modes)} entries for {num_stages} stages; give one for "
            f"all or one per stage"
        )
    return modes


def find_profile_faults(profile: Profile) -> list[str]:
    """The faults in the numbers of a profile, one line each."""
    faults = [*_find_layer_faults(profile.layers)]
    for name in ("input_bytes", "microbatch_size", "action_seconds"):
        faults += find_number_faults(name, getattr(profile, name))
    if profile.microbatch_size == 0:
        faults.append("microbatch_size=0; needs at least one example")
    last = len(profile.layers) - 1
    for i, skip in enumerate(profile.skips):
        if not 0 <= skip.source < skip.target <= last:
            faults.append(
                f"skips[{i}] goes from layer {skip.source} to {skip.target}, needs "
                f"a later one; the last is {last}"
            )
        sizes = {"bytes": skip.bytes, "cotangent_bytes": skip.cotangent_bytes}
        for name, number in sizes.items():
            faults += find_number_faults(f"skips[{i}].{name}", number)
    for i, group in enumerate(profile.ties):
        if not group or not all(0 <= layer <= last for layer in group):
            faults.append(
                f"ties[{i}]={tuple(group)}: needs numbers of layers, 0 to {last}"
            )
    if profile.link is not None:
        options = LinkOptions(profile.link.bandwidth, profile.link.latency, None)
        faults += [f"link.{fault}" for fault in options.find_faults()]
    if profile.larger is not None:
        faults += [f"larger: {fault}" for fault in find_profile_faults(profile.larger)]
        faults += _find_larger_faults(profile, profile.larger)
    return faults


def _find_layer_faults(layers: Sequence[LayerProfile]) -> Iterator[str]:
    """The wrong numbers of layers, one line each."""
    if not layers:
        yield "layers is empty; needs at least one"
    for i, layer in enumerate(layers):
        prefix = f"layer {i} ({layer.name})"
        for layer_field in dataclasses.fields(layer)[1:]:
            name = layer_field.name
            value = getattr(layer, name)
            is_unknown = value is None and layer_field.default is None
            if name != "residual_bytes" and not is_unknown:
                yield from find_number_faults(f"{prefix}: {name}", value)
        for mode, value in layer.residual_bytes.items():
            yield from find_number_faults(f"{prefix}: residual_bytes[{mode!r}]", value)


def _find_larger_faults(profile: Profile, larger: Profile) -> Iterator[str]:
    """Faults of the profile of more examples, which is of the same model."""
    if larger.microbatch_size <= profile.microbatch_size:
        yield (
            f"larger.microbatch_size={larger.microbatch_size}: needs more than "
            f"{profile.microbatch_size}"
        )
    if _modes_of_layers(larger) != _modes_of_layers(profile):
        yield "larger has other layers or remat modes"


def _modes_of_layers(profile: Profile) -> list[tuple[str, set[str]]]:
    """The name and remat modes of each layer, as in profiles of any size."""
    return [(layer.name, set(layer.residual_bytes)) for layer in profile.layers]


def _plain(number: Any) -> int | float:
    """A number of NumPy as one of Python."""
    return operator.index(number) if hasattr(number, "__index__") else float(number)


def _format_profile(profile: Profile) -> str:
    """Formats a profile: what it was made on, a line for each layer, and sums."""
    layers = profile.layers
    num_layers = len(layers)
    columns = [
        ["", *map(str, range(num_layers)), ""],
        ["layer", *(layer.name for layer in layers), "sum"],
    ]
    for name, (write, numbers) in _number_columns(layers).items():
        cells = ["" if number is None else write(number) for number in numbers]
        total = ""
        if None not in numbers and name not in _WITHOUT_SUM:
            total = write(sum(numbers))
        columns.append([name, *cells, total])
    rows = [list(row) for row in zip(*columns, strict=True)]
    lines = [*_describe_measurement(profile), *_connections(profile)]
    return "\n".join([*lines, format_table(rows, left={1})])


def _number_columns(
    layers: Sequence[LayerProfile],
) -> dict[str, tuple[Callable[[Any], str], list[Any]]]:
    """The columns of numbers: name -> (how to write a number, one per layer)."""
    columns: dict[str, tuple[Callable[[Any], str], list[Any]]] = {}
    for name in TIME_FIELDS.values():
        seconds = [getattr(layer, name) for layer in layers]
        columns[_COLUMN_NAMES.get(name, name)] = (format_seconds, seconds)
    columns["parameters"] = ("{:,}".format, [layer.num_params for layer in layers])
    columns["output"] = (format_bytes, [layer.output_bytes for layer in layers])
    modes: dict[str, None] = {}  # in order
    for layer in layers:
        modes |= dict.fromkeys(layer.residual_bytes)
    for mode in modes:
        residuals = [layer.residual_bytes.get(mode) for layer in layers]
        columns[f"residuals by {mode}"] = (format_bytes, residuals)
    workspace = [layer.workspace_bytes for layer in layers]
    columns["workspace"] = (format_bytes, workspace)
    return columns


def _describe_measurement(profile: Profile) -> Iterator[str]:
    """Lines on how and where the profile was made, and the micro-batch."""
    if origin := format_origin(profile.origin):
        yield origin
    fingerprint = profile.fingerprint
    examples = f"a micro-batch of {format_count(profile.microbatch_size, 'example')}"
    if "input" in fingerprint:
        examples += f" ({fingerprint['input']})"
    if profile.larger is not None:
        sizes = " and ".join(map(str, profile.larger.sizes))
        examples += f"; the costs of {sizes} examples are stored too"
    yield examples
    if is_measured_on_cpu(profile.origin):
        yield (
            "cores: each layer had all of them to itself; devices that share them take "
            "longer than predicted, with halves of backwards above all"
        )
    if profile.link is not None:
        link = profile.link
        yield (
            f"transfers: {format_seconds(link.latency)} for each and "
            f"{format_bytes(int(link.bandwidth))} per second, as measured from "
            f"{link.source} to {link.target}"
        )


def _connections(profile: Profile) -> Iterator[str]:
    """A line for each group of tied layers and for each skip connection."""
    for group in profile.ties:
        owner, *readers = map(str, group)
        yield f"tied: parameters of layer {owner} are used by {', '.join(readers)}"
    for skip in profile.skips:
        yield (
            f"skip connection {skip.name}: layer {skip.source} to {skip.target}, "
            f"{format_bytes(skip.bytes)}"
        )
