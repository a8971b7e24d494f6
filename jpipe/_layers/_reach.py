"""The modules and Variables that a callable reaches, without calling it.

A function reaches what its code names, in it and in the functions inside it: variables
of functions around it, globals, and of these the attributes or items that it takes. It
reaches what the functions reach that it names, if they are the user's own. An object
reaches what it holds.
"""

import collections
import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.core import FrozenDict

from . import _linen, _nnx
from ._libraries import LIBRARIES, is_of

# The code of libraries names nothing of a user's; what they were given is in closures.
# The tools of tests and notebooks hold all that there is, such as arguments of tests.
_LIBRARIES = LIBRARIES | {
    *("pytest", "_pytest", "pluggy", "hypothesis", "IPython", "ipykernel", "absl"),
}
_is_library = functools.partial(is_of, libraries=_LIBRARIES)
_ATOMS = (types.NoneType, bool, int, float, complex, str, bytes)
_ITEMS = (list, tuple, set, frozenset, collections.deque)
_MAPPINGS = (dict, FrozenDict, types.MappingProxyType)
# Of libraries, but what they hold is a user's.
_OPEN = (
    *(types.SimpleNamespace, collections.ChainMap),
    *(collections.UserDict, collections.UserList),
)
_NOTHING = object()

Place = tuple[str, Any]


class _Part(NamedTuple):
    """A module that is a layer or a part of it: what it holds as such is trained."""

    module: Any


class _Own(NamedTuple):
    """A function of a class of such a module, which is given that module."""

    function: Any
    module: Any


class _Read(NamedTuple):
    """What code loads: a name, then an attribute or, as a tuple, an item at a time."""

    name: str
    is_global: bool
    steps: tuple[Any, ...]


def reached(function: Any, module: Any = None, method: str = "") -> Iterator[Place]:
    """The bound modules and the Variables that a callable reaches.

    Args:
      function: what is called; ``None``: a method of the module.
      module: the layer, whose own parts are not meant.
      method: which of its methods is called.

    Yields:
      How each is called there, and what it is.
    """
    todo: collections.deque[Place] = collections.deque()
    if module is not None:
        todo.append(("self", _Part(module)))
        if member := getattr(type(module), method, None):
            todo.append(("", _Own(member, module)))
    if function is not None:
        todo.append(("", _called(function)))
    met: dict[Any, Any] = {}
    while todo:
        place, value = todo.popleft()
        key = id(value)
        if isinstance(value, types.MethodType):
            key = id(value.__func__), id(value.__self__)
        elif isinstance(value, _Part | _Own):
            key = type(value), *map(id, value)
        if type(value) in _ATOMS or key in met:
            continue
        met[key] = value  # so that no other object has its id
        if is_variable(value):
            yield place, value
        else:
            todo.extend(_inside(place, value))


def is_variable(value: Any) -> bool:
    """Whether an object has values that a layer trains."""
    if _linen.is_module(value):
        return value.scope is not None
    return _nnx.is_module(value) or isinstance(value, nnx.Variable)


def _called(function: Any) -> Any:
    """What of an object is used where it is called."""
    call = inspect.getattr_static(type(function), "__call__", None)
    if not isinstance(call, types.FunctionType) or is_variable(function):
        return function
    if _is_library(type(function).__module__):
        return function
    return types.MethodType(call, function)


# ------------------------------------------------------------- what is in an object


def _inside(place: str, value: Any) -> Iterable[Place]:
    """What an object leads to."""
    if isinstance(value, _Part):
        return _in_part(place, value.module)
    if isinstance(value, _Own):
        return _in_function(value.function, own=value.module)
    if isinstance(value, types.FunctionType):
        return _in_function(value)
    if isinstance(value, types.MethodType):
        if is_variable(value.__self__) and not _tells(value):
            return [(place, value.__self__)]
        return _in_function(value.__func__, value.__self__)
    if isinstance(value, functools.partial):
        given = (*value.args, *value.keywords.values())
        return [(place, value.func), *(("what a partial is given", v) for v in given)]
    if isinstance(value, type | types.ModuleType):
        return []
    if _linen.is_module(value):
        return _in_part(place, value)
    found = list(_elements(place, value))
    if isinstance(value, _OPEN) or not _is_library(type(value).__module__):
        found += [(f"{place or 'self'}.{n}", v) for n, v in _attributes(value).items()]
        found.append((place, _called(value)))
    elif hasattr(value, "__wrapped__"):  # by `jax.jit`, say
        found.append((place, value.__wrapped__))
    return [item for item in found if item[1] is not value]


def _tells(method: types.MethodType) -> bool:
    """Whether the code of a method says what it takes of its module."""
    names = getattr(method.__func__, "__globals__", {"__name__": "flax"})
    return _nnx.is_module(method.__self__) and not _is_library(names.get("__name__"))


def _elements(place: str, value: Any) -> Iterator[Place]:
    if isinstance(value, _MAPPINGS):
        for key, item in list(value.items()):
            yield f"{place}[{key!r}]", item
    elif isinstance(value, set | frozenset):
        yield from ((place, item) for item in value)
    elif isinstance(value, _ITEMS):
        yield from ((f"{place}[{i}]", item) for i, item in enumerate(value))


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType):
                found[name] = getattr(value, name, None)
    return found


def _in_part(place: str, module: Any) -> Iterator[Place]:
    """What the parts of a layer hold that is none, and what their calls reach."""
    if _linen.is_module(module):
        if is_dataclass(module):
            for field in fields(module):
                if field.name not in ("parent", "name"):
                    value = getattr(module, field.name, None)
                    yield from _given(f"{place}.{field.name}", value)
        nodes = [module]
    else:
        nodes = []
        for path, node in nnx.iter_graph(module, graph=True):
            if _nnx.is_module(node):
                nodes.append(node)
            elif type(node) in _ATOMS or is_variable(node):
                continue
            elif not _is_node(path, node):
                yield from _given(".".join((place, *map(str, path))), node)
    for node in nodes:
        for name in ("setup", "__call__"):
            if member := getattr(type(node), name, None):
                yield place, _Own(member, node)


def _is_node(path: tuple[Any, ...], node: Any) -> bool:
    """Whether what is in it is met by itself, or is a note of Flax's."""
    notes = bool(path) and str(path[-1]).startswith("_pytree__")
    return notes or isinstance(node, nnx.Pytree) or not jax.tree_util.all_leaves([node])


def _given(place: str, value: Any) -> Iterator[Place]:
    """What a module was given; the linen modules in it become parts."""
    if _linen.is_module(value):
        yield place, _Part(value)
    elif type(value) in (list, tuple, dict, FrozenDict):
        for inner, item in _elements(place, value):
            yield from _given(inner, item)
    else:
        yield place, value


# ------------------------------------------------------------ what code leads to


def _in_function(
    function: Any, bound: Any = _NOTHING, own: Any = None
) -> Iterator[Place]:
    """What a function leads to, given an object first; or a module of the layer."""
    if wrapped := getattr(function, "__wrapped__", None):
        if own is not None:
            yield "", _Own(wrapped, own)
        elif bound is _NOTHING:
            yield "", wrapped
        else:
            yield "", types.MethodType(wrapped, bound)
    if not isinstance(function, types.FunctionType):
        return
    code, outside = function.__code__, {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            outside[name] = cell.cell_contents
        except ValueError:  # nothing is in it yet
            continue
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    yield from (("a default", value) for value in defaults)
    if _is_library(function.__globals__.get("__name__")):
        yield from outside.items()
        return
    first = code.co_varnames[0] if code.co_varnames else ""
    for read in _reads(code, (*outside, first)):
        if not read.is_global and read.name == first and first not in outside:
            if own is not None and read.steps:
                member = inspect.getattr_static(type(own), str(read.steps[0]), None)
                if hasattr(member, "__code__") or hasattr(member, "__wrapped__"):
                    yield "", _Own(member, own)
            elif bound is not _NOTHING:
                yield from _follow("self", bound, read.steps)
            continue
        names = function.__globals__ if read.is_global else outside
        if read.name in names:
            yield from _follow(read.name, names[read.name], read.steps)
    given = own if own is not None else bound
    if given is not _NOTHING and "super" in code.co_names:
        for base in type(given).__mro__:
            for name in set(code.co_names) & set(vars(base)):
                member = vars(base)[name]
                if isinstance(member, types.FunctionType):
                    method = types.MethodType(member, given)
                    yield "", method if own is None else _Own(member, own)


def _follow(place: str, value: Any, steps: tuple[Any, ...]) -> Iterator[Place]:
    """What code comes to that takes attributes and items of an object."""
    for step in steps:
        if isinstance(step, tuple):
            try:
                inner = value[step[0]] if type(value) in (dict, list, tuple) else value
            except (LookupError, TypeError):
                return
            if inner is value:
                break
            place, value = f"{place}[{step[0]!r}]", inner
            continue
        if is_variable(value) and not _nnx.is_module(value):
            if type(getattr(value, "__dict__", {}).get(step, value)) in _ATOMS:
                return  # it takes a number, not what is trained
            break
        if isinstance(value, types.ModuleType) and _is_library(value.__name__):
            return
        inner = _attribute(value, step)
        if inner is _NOTHING:
            break
        place, value = f"{place}.{step}", inner
    yield place, value


def _attribute(value: Any, name: str) -> Any:
    """An attribute, as far as it can be had without running code of the object."""
    if isinstance(value, _ITEMS + _MAPPINGS) and not hasattr(value, "__dict__"):
        return _NOTHING
    if not isinstance(value, type) and name in getattr(value, "__dict__", {}):
        return vars(value)[name]
    cls = value if isinstance(value, type) else type(value)
    member = inspect.getattr_static(cls, name, _NOTHING)
    if isinstance(member, staticmethod):
        return member.__func__
    if isinstance(member, classmethod):
        return types.MethodType(member.__func__, cls)
    if cls is value:
        return member
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, functools.cached_property):
        member = member.func
    if isinstance(member, types.FunctionType):
        return types.MethodType(member, value)
    if isinstance(member, types.MemberDescriptorType):
        return getattr(value, name, None)
    return _NOTHING if hasattr(type(member), "__get__") else member


@lru_cache(maxsize=1024)
def _reads(code: types.CodeType, known: tuple[str, ...]) -> list[_Read]:
    """What code loads of globals, and of the variables that are known."""
    found = []
    instructions = [
        instruction
        for instruction in dis.get_instructions(code)
        if instruction.opname not in ("CACHE", "PUSH_NULL", "EXTENDED_ARG", "NOP")
    ]
    cells = {*code.co_cellvars, *code.co_freevars}
    for place, instruction in enumerate(instructions):
        name, op = instruction.argval, instruction.opname
        after = instructions[place + 1 : place + 2]
        if after and after[0].opname == "LOAD_SUPER_ATTR":
            continue  # all methods of that name are looked at
        if op in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.append(_Read(name, True, _steps(instructions, place + 1)))
        elif op == "LOAD_DEREF" and name in known:
            found.append(_Read(name, False, _steps(instructions, place + 1)))
        elif op.startswith("LOAD_FAST"):
            *firsts, last = name if isinstance(name, tuple) else (name,)
            # What is in a cell is loaded so only for a function inside.
            found += [_Read(n, False, ()) for n in firsts if n in known]
            if last in known and last not in cells:
                found.append(_Read(last, False, _steps(instructions, place + 1)))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = tuple(name for name in known if name in constant.co_freevars)
            found += _reads(constant, inner)
    return found


def _steps(instructions: list[dis.Instruction], place: int) -> tuple[Any, ...]:
    steps: list[Any] = []
    while place < len(instructions):
        instruction = instructions[place]
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            steps.append(instruction.argval)
            place += 1
            continue
        after = instructions[place + 1 : place + 2]
        constant = instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
        if constant and after and _is_subscript(after[0]):
            steps.append((instruction.argval,))
            place += 2
            continue
        break
    return tuple(steps)


def _is_subscript(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_SUBSCR" or (
        instruction.opname == "BINARY_OP" and instruction.argrepr == "[]"
    )
