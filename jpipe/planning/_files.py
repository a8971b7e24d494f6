"""Profiles in files: JSON of our own, and the text of PipeDream and DAPPLE."""

import dataclasses
import heapq
import json
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._json import differing
from ._layer import LayerProfile, SkipProfile

_FORMAT = "jpipe profile"
_VERSION = 1
_KEYS = (
    "layers",
    "input_bytes",
    "skips",
    "ties",
    "microbatch_size",
    "made",
    "action_seconds",
)
_COLUMNS = (
    "forward_compute_time",
    "backward_compute_time",
    "activation_size",
    "parameter_size",
)


def write(path: str | os.PathLike[str], fields: Mapping[str, Any]) -> None:
    """Writes the fields of a profile as JSON."""
    whole = {"format": _FORMAT, "version": _VERSION, **fields}
    text = json.dumps(whole, indent=1, default=float)
    Path(path).write_text(text + "\n", encoding="utf-8")


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a profile that `write` wrote, or what is wrong with the file."""
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    # A number of thousands of digits is a ValueError, as is what is no JSON or text.
    except (ValueError, RecursionError) as error:
        return {}, [f"no JSON: {error}"]
    if not isinstance(fields, dict):
        return {}, [f"a {type(fields).__name__}; needs an object"]
    if fields.pop("format", None) != _FORMAT:
        return {}, [f'"format" is not {_FORMAT!r}']
    if (version := fields.pop("version", None)) != _VERSION:
        return {}, [f"version {version!r}; this jpipe reads version {_VERSION}"]
    faults = differing(fields, _KEYS)
    for key in ("layers", "skips", "ties"):
        if not isinstance(fields.get(key, []), list):
            faults.append(f"{key} is a {type(fields[key]).__name__}; needs a list")
            fields[key] = []
    made = fields.get("made", {})
    if not isinstance(made, dict) or any(not isinstance(v, str) for v in made.values()):
        faults.append("made: needs an object of texts")
    for i, group in enumerate(fields.get("ties", [])):
        if not isinstance(group, list):
            faults.append(f"ties[{i}] is a {type(group).__name__}; needs a list")
    layers = _entries(LayerProfile, "layers", fields, faults)
    skips = _entries(SkipProfile, "skips", fields, faults)
    if not faults:
        ties = tuple(map(tuple, fields["ties"]))
        fields = {**fields, "layers": layers, "skips": skips, "ties": ties}
    return fields, faults


def _entries(
    kind: Any, key: str, fields: Mapping[str, Any], faults: list[str]
) -> tuple[Any, ...]:
    """Layers or skip connections; faults are added to those that there are."""
    names = [field.name for field in dataclasses.fields(kind)]
    needed = [f.name for f in dataclasses.fields(kind) if _required(f)]
    found = []
    for i, entry in enumerate(fields.get(key, [])):
        where = f"{key}[{i}]"
        if not isinstance(entry, dict):
            faults.append(f"{where} is a {type(entry).__name__}; needs an object")
            continue
        wrong = [f"{where}: {says}" for says in differing(entry, needed, names)]
        if not isinstance(entry.get("name", ""), str):
            wrong.append(f"{where}: name is not a text")
        if not isinstance(entry.get("kept_bytes", {}), dict):
            wrong.append(f"{where}: kept_bytes: needs an object")
        if not isinstance(entry.get("is_output", False), bool):
            wrong.append(f"{where}: is_output: needs true or false")
        faults += wrong
        found += [] if wrong else [kind(**entry)]
    return tuple(found)


def _required(field: "dataclasses.Field[Any]") -> bool:
    none = dataclasses.MISSING
    return field.default is none and field.default_factory is none


@dataclasses.dataclass
class _Node:
    """A line of the text, and its edges."""

    name: str
    description: str
    numbers: dict[str, list[float]]
    readers: list[str] = dataclasses.field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        """The bytes on each edge; one array goes to all of them, or one to each."""
        given = [round(size) for size in self.numbers["activation_size"]]
        if len(given) > 1 and len(given) == len(self.readers):
            return given
        return [sum(given)] * len(self.readers)

    @property
    def is_one(self) -> bool:
        """Whether all edges carry the same array."""
        given = self.numbers["activation_size"]
        return len(given) == 1 or len(given) != len(self.readers)


def parse(text: str) -> tuple[dict[str, Any], list[str]]:
    """The fields of a profile in PipeDream's text, or what is wrong with it."""
    nodes, edges, faults = {}, [], []
    for number, line in enumerate(text.splitlines(), start=1):
        parts = [part.strip() for part in line.split(" -- ")]
        if not line.strip():
            continue
        if line[0].isspace():
            edges.append((number, parts))
            continue
        node, wrong = _node(parts)
        if node.name in nodes:
            wrong.append(f"{node.name} was there before")
        faults += [f"line {number}: {fault}" for fault in wrong]
        nodes[node.name] = node
    for number, parts in edges:
        if len(parts) != 2 or any(part not in nodes for part in parts):
            says = "needs two nodes of the text, such as 'node1 -- node2'"
            faults.append(f"line {number}: {' -- '.join(parts)!r}: {says}")
        elif parts[1] not in nodes[parts[0]].readers:
            nodes[parts[0]].readers.append(parts[1])
    order = [] if faults else _ordered(nodes)
    if not faults and len(order) < len(nodes):
        ring = sorted(set(nodes) - set(order))
        faults.append(f"the edges make a ring: {reprlib.repr(ring)}")
    return ({}, faults) if faults else (_chain(nodes, order), [])


def _node(parts: list[str]) -> tuple[_Node, list[str]]:
    """A node, and what is wrong with its line."""
    if len(parts) not in (3, 4):
        says = "needs 'name -- description -- forward_compute_time=..., ...'"
        return _Node(parts[0], "", {}), [f"{reprlib.repr(parts)}: {says}"]
    numbers, faults = {}, []
    for column in _COLUMNS:
        match = re.search(rf"\b{column}=(\[[^\]]*\]|[^,\s]*)", parts[2])
        given = match.group(1).strip("[]") if match else ""
        try:
            numbers[column] = [float(part) for part in re.split("[;,]", given)]
        except ValueError:
            says = f"{column}={given}" if match else f"no {column}"
            faults.append(f"{parts[0]}: {says}; needs a number")
            continue
        if not all(0 <= value < float("inf") for value in numbers[column]):
            faults.append(f"{parts[0]}: {column}={given}; needs a number, 0 or more")
    return _Node(parts[0], parts[1], numbers), faults


def _ordered(nodes: Mapping[str, _Node]) -> list[str]:
    """Nodes after all that they read; of several, that with the smallest number."""

    def key(name: str) -> tuple[int, str]:
        digits = re.search(r"\d+\Z", name)
        return int(digits.group()) if digits else 0, name

    waits = dict.fromkeys(nodes, 0)
    for node in nodes.values():
        for reader in node.readers:
            waits[reader] += 1
    ready = [key(name) for name, count in waits.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        name = heapq.heappop(ready)[1]
        order.append(name)
        for reader in nodes[name].readers:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, key(reader))
    return order


def _chain(nodes: Mapping[str, _Node], order: Sequence[str]) -> dict[str, Any]:
    """Layers in a row, and skip connections for the edges that pass by."""
    read = {reader for node in nodes.values() for reader in node.readers}
    inputs = [
        name
        for name in order
        if name not in read and nodes[name].description.startswith("Input")
    ]
    names = [name for name in order if name not in inputs]
    place = {name: i for i, name in enumerate(names)}
    layers, skips = [], []
    for i, name in enumerate(names):
        node, output = nodes[name], 0
        for reader, size in zip(node.readers, node.sizes, strict=True):
            if place[reader] == i + 1:
                output = size
        for k, (reader, size) in enumerate(zip(node.readers, node.sizes, strict=True)):
            if place[reader] > i + 1:
                label = name if node.is_one else f"{name}[{k}]"
                same = node.is_one and output > 0
                skips.append(SkipProfile(label, i, place[reader], size, size, same))
        params = round(node.numbers["parameter_size"][0])
        layers.append(
            LayerProfile(
                f"{name} {node.description}",
                node.numbers["forward_compute_time"][0] / 1e3,
                node.numbers["backward_compute_time"][0] / 1e3,
                num_params=params // 4,
                param_bytes=params,
                output_bytes=output,
                cotangent_bytes=output,
                kept_bytes={"none": sum(map(round, node.numbers["activation_size"]))},
            )
        )
    given = sum(
        size
        for name in inputs
        for reader, size in zip(nodes[name].readers, nodes[name].sizes, strict=True)
        if place.get(reader) == 0
    )
    return {
        "layers": tuple(layers),
        "input_bytes": given,
        "skips": tuple(skips),
        "made": {"read from": "text"},
    }
