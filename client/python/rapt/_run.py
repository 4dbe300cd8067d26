"""Running problems: the context of the process, the plans of the latest problems, and calls."""

from __future__ import annotations

import array
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _arrays, capi
from ._arrays import Layout, Shape

_PLANS = 512  # kept
_MOST_THREADS = 1024


class Output(NamedTuple):
    name: str
    field: str  # of the arguments, or the name of the tensor
    shape: Shape
    dtype: int


class Prepared:
    """A plan, and arguments that lack nothing but addresses."""

    def __init__(self, plan: capi.Plan, arguments: capi.Arguments | None, inputs: list[str], outputs: list[Output]) -> None:
        """`arguments`: None for a plan of a call. `inputs`: the fields of its inputs, in their order."""
        self.plan = plan
        self.count: tuple[int, ...] = ()  # of tensors
        if arguments is None:
            names = inputs + [output.field for output in outputs]
            self._tensors = capi.tensors(dict.fromkeys(names))  # alive: the words hold addresses of their names
            self.words, self.count = array.array("q", bytes(self._tensors)), (len(names),)
            places = {name: 2 * n + 1 for n, name in enumerate(names)}
        else:
            self.words = array.array("q", bytes(arguments))  # all fields are words of 8 bytes
            places = {name: getattr(capi.Arguments, name).offset // 8 for name, *_ in capi.Arguments._fields_}
        self.places = [places[field] for field in inputs]
        self.outputs = [(output, places[output.field]) for output in outputs]


# Makes what a call needs from the context, the layouts of inputs, the options, the wanted outputs and the layouts of
# given outputs.
Prepare = Callable[[capi.Context, dict[str, Layout], dict[str, Any], tuple[str, ...], dict[str, Layout]], Prepared]


class _Engine:
    """A context and the plans made with it."""

    def __init__(self, threads: int) -> None:
        self.context = capi.Context(threads)
        self._plans: OrderedDict[Any, Prepared] = OrderedDict()

    def prepared(self, key: Any, prepare: Prepare, *arguments: Any) -> Prepared:
        try:
            found = self._plans[key]
            self._plans.move_to_end(key)
            return found
        except KeyError:
            pass
        with _lock:
            found = self._plans[key] = prepare(self.context, *arguments)
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        return found


# Held while contexts and plans are made, and by fork: a child never sees one half made.
_lock = threading.Lock()
_engine: _Engine | None = None
_threads: int | None = None


def _usual_threads() -> int:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(processors, _MOST_THREADS)


def _current() -> _Engine:
    global _engine
    engine = _engine
    if engine is None:
        with _lock:
            if _engine is None:
                _engine = _Engine(_threads or _usual_threads())
            engine = _engine
    return engine


def _after_fork_in_child() -> None:
    """The context's threads do not exist here: the next call makes a new one."""
    global _engine
    _engine = None
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork_in_child)


def set_num_threads(n: int) -> None:
    """Computes with n threads from the next call on, 1 to 1024, that of the caller included. Calls that run go on
    with theirs. The default is the number of processors that the process may use (sched_getaffinity)."""
    global _engine, _threads
    n = operator.index(n)
    if not 1 <= n <= _MOST_THREADS:
        raise ValueError(f"n is {n}; it must be from 1 to {_MOST_THREADS}")
    with _lock:
        _threads, _engine = n, None


def get_num_threads() -> int:
    return _threads or _usual_threads()


def _check_apart(name: str, address: int, out: Layout, addresses: list[int], layouts: dict[str, Layout]) -> None:
    first, end = _arrays.bounds(address, out)
    for at, (other, layout) in zip(addresses, layouts.items()):
        begin, last = _arrays.bounds(at, layout)
        if first < last and begin < end:
            raise ValueError(f"{name} overlaps {other}")


def run(
    prepare: Prepare,
    inputs: dict[str, Any],
    options: dict[str, Any],
    wanted: tuple[str, ...],
    out: dict[str, Any] | None = None,
) -> tuple[dict[str, Any], capi.Plan]:
    """Computes the wanted outputs, of the first input's kind. `options` have hashable values. `out`: outputs that exist
    already."""
    addresses, layouts, owners, kinds = [], {}, [], []
    for name, x in inputs.items():
        kind = _arrays.kind_of(name, x)
        address, layout, owner = kind.read(name, x)
        addresses.append(address)
        layouts[name] = layout
        owners.append(owner)
        kinds.append(kind)
    given: dict[str, int] = {}  # addresses
    given_layouts: dict[str, Layout] = {}
    for name, x in out.items() if out else ():
        kind = _arrays.kind_of(name, x)
        kind.check_writable(name, x)
        given[name], given_layouts[name], _ = kind.read(name, x)
        _check_apart(name, given[name], given_layouts[name], addresses, layouts)

    key = (prepare, *layouts.items(), *options.items(), wanted, *given_layouts.items())
    prepared = (_engine or _current()).prepared(key, prepare, layouts, options, wanted, given_layouts)
    words = prepared.words[:]
    for place, address in zip(prepared.places, addresses):
        words[place] = address
    results: dict[str, Any] = dict(out) if out else {}
    like, kind = next(iter(inputs.values())), kinds[0]
    for output, place in prepared.outputs:
        if output.name in given:
            words[place] = given[output.name]
            continue
        result = results[output.name] = kind.empty(like, output.shape, output.dtype)
        words[place] = kind.address(result)
    prepared.plan.run(words.buffer_info()[0], *prepared.count)
    if kind is _arrays.DLPack:
        results |= {name: kind.finish(like, result) for name, result in results.items() if name not in given}
    return results, prepared.plan
