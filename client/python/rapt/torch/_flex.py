"""flex_attention of PyTorch: what its mask_mod and score_mod say, computed by rapt without a number for each query and key.

Both are expressions of indices (see _expressions.py). What rapt makes of a part of them follows from the indices that the part
needs, and from its values for all of these: those of kv_idx alone are a row, those of q_idx - kv_idx a window or a table
of biases by distance, and so on. Nothing is inferred from some of the values."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask

from ._expressions import COMPARISONS, SCORE, B, Expression, H, K, Q, evaluated, is_bool, needs, traced
from ._operators import Problem, compute_with_lse

_ALL = (-math.inf, math.inf)
Bounds = tuple[float, float]  # the least and the largest q_idx - kv_idx


def _refusal(what: Any) -> NotImplementedError:
    return NotImplementedError(
        f"flex_attention: rapt does not compute {what}. It knows masks of q_idx - kv_idx, of kv_idx or q_idx alone, of equal documents,"
        " of blocks, and prefixes beside a window; scores that are scaled, capped by tanh, and biases. For other masks:"
        " rapt.torch.attention(..., mask=create_mask(mask_mod, B, H, Sq, T))"
    )


# ---- Expressions ----------------------------------------------------------------------------------


def _conjuncts(x: Any, negated: bool = False) -> list[Any]:
    """The parts of a condition that all have to hold."""
    if isinstance(x, Expression) and x.is_bool():
        if x.operation == "not":
            return _conjuncts(x.arguments[0], not negated)
        if x.operation in COMPARISONS and negated and _has_opposite(x):
            operation = COMPARISONS[x.operation]
            return [Expression(operation, getattr(torch, operation), x.arguments)]
        if x.operation == ("or" if negated else "and"):
            return [part for argument in x.arguments for part in _conjuncts(argument, negated)]
        if x.operation == "and":  # negated
            first, second = (_all(_conjuncts(part, True)) for part in x.arguments)
            return _conjuncts(_either(first, second))
    if isinstance(x, Expression):
        return [Expression("not", torch.logical_not, (x,))] if negated else [x]
    return [] if bool(x) != negated else [False]


def _all(parts: list[Any]) -> Any:
    whole: Any = True
    for part in parts:
        if part is False:
            return False
        whole = part if whole is True else Expression("and", torch.logical_and, (whole, part))
    return whole


def _either(first: Any, second: Any) -> Any:
    for x, other in ((first, second), (second, first)):
        if isinstance(x, bool):
            return x or other
    return Expression("or", torch.logical_or, (first, second))


def _has_opposite(x: Expression) -> bool:
    """Whether one of a comparison and its opposite holds: neither does for NaN."""
    return all(_is_of_integers(side) for side in x.arguments)


def _is_of_integers(x: Any) -> bool:
    """Whether it is known to be, or bool."""
    if isinstance(x, Tensor):
        return not x.is_floating_point()
    if not isinstance(x, Expression):
        return isinstance(x, int)
    if x in (B, H, Q, K) or x.is_bool():
        return True
    if x.operation == "gather":
        return _is_of_integers(x.arguments[0])
    return x.operation in ("add", "sub", "mul", "neg", "floor_divide") and all(_is_of_integers(side) for side in x.arguments)


def _terms(x: Any, sign: int = 1) -> list[tuple[int, Any]]:
    """Of a sum."""
    if isinstance(x, Expression) and x.operation in ("add", "sub"):
        first, second = x.arguments
        return _terms(first, sign) + _terms(second, sign if x.operation == "add" else -sign)
    if isinstance(x, Expression) and x.operation == "neg":
        return _terms(x.arguments[0], -sign)
    return [(sign, x)]


def _difference(x: Expression) -> list[tuple[int, Any]]:
    """Of the sides of a comparison."""
    return _terms(x.arguments[0]) + _terms(x.arguments[1], -1)


def _is_of_distance(x: Any) -> bool:
    """Whether q_idx and kv_idx matter by their difference alone."""
    if not needs(x) & {Q, K}:
        return True
    if x.operation in ("add", "sub", "neg", *COMPARISONS):
        terms = _difference(x) if x.operation in COMPARISONS else _terms(x)
        balance = sum(sign for sign, term in terms if term is Q or term is K)
        return balance == 0 and all(_is_of_distance(term) for _, term in terms if term is not Q and term is not K)
    return x.function is not None and all(_is_of_distance(argument) for argument in x.arguments)


def _grain(x: Any, index: Expression) -> int:
    """n if `index` matters by index // n alone; 0 if it does not matter."""
    if index not in needs(x):
        return 0
    if x.operation == "floor_divide" and x.arguments[0] is index and type(x.arguments[1]) is int and x.arguments[1] > 0:
        return int(x.arguments[1])
    return math.gcd(*(_grain(argument, index) for argument in x.arguments)) if x.function else 1


# ---- Parts of a problem ---------------------------------------------------------------------------


class _Part(NamedTuple):
    """Some rows of a batch, some queries and some keys."""

    rows: range
    heads: int
    queries: range
    keys: range

    def at(self, q: Tensor | None = None, k: Tensor | None = None) -> dict[Expression, Any]:
        """The values of the indices, as [b, h, q, k]."""
        return {
            B: torch.arange(self.rows.start, self.rows.stop).reshape(-1, 1, 1, 1),
            H: torch.arange(self.heads).reshape(-1, 1, 1),
            Q: (torch.arange(self.queries.start, self.queries.stop) if q is None else q).reshape(-1, 1),
            K: torch.arange(self.keys.start, self.keys.stop) if k is None else k,
        }

    def distances(self) -> Tensor:
        return torch.arange(self.queries.start - self.keys.stop + 1, self.queries.stop - self.keys.start)

    def shift(self) -> int:
        return self.queries.start - self.keys.start

    def of_distances(self, x: Expression, bounds: Bounds = _ALL) -> Tensor:
        """[b, h, 1, distance], the values of what is of distance; beyond the bounds those of the bounds."""
        low, high = self.queries.start - self.keys.stop + 1, self.queries.stop - self.keys.start - 1
        distances = self.distances().clamp(int(max(low, bounds[0])), int(min(high, bounds[1])))
        at = self.at() | {Q: distances.clamp(min=0), K: (-distances).clamp(min=0)}
        return _four_axes(evaluated(x, at))


def _four_axes(x: Any) -> Tensor:
    values: Tensor = torch.as_tensor(x)
    return values.reshape((1,) * (4 - values.dim()) + values.shape)


def _mask_values(x: Any, at: dict[Expression, Any]) -> Tensor:
    values = _four_axes(evaluated(x, at))
    if values.dtype != torch.bool:
        raise ValueError(f"flex_attention: {x} of a mask has type {values.dtype}; it must be torch.bool")
    return values


def _sides(x: Expression, at: dict[Expression, Any]) -> tuple[Tensor, Tensor] | None:
    """f and g, which are integers, of a comparison of a difference f(b, h, q) - g(b, h, kv) with 0."""
    sides = [torch.zeros((1, 1, 1, 1), dtype=torch.int64)] * 2
    terms = _difference(x)
    types = (torch.int32, torch.int64, torch.bool) if len(terms) == 2 else (torch.int32, torch.int64)
    for sign, term in terms:
        if needs(term) >= {Q, K}:
            return None
        values = _four_axes(evaluated(term, at))
        if values.dtype not in types:
            return None
        side = K in needs(term)
        sides[side] = sides[side] + (-sign if side else sign) * values.to(torch.int64)
    return sides[0], sides[1]


def _line(x: Tensor, length: int) -> Tensor | None:
    """Of values that are the same for all rows and heads."""
    return x.reshape(-1).expand(length) if x.shape[0] == x.shape[1] == 1 else None


def _is_constant(x: Tensor) -> bool:
    return bool((x == x[0]).all())


def _rises(x: Tensor) -> bool:
    """Whether each number is one more than the one before."""
    return bool((x[1:] - x[:-1] == 1).all())


# ---- What queries see -----------------------------------------------------------------------------


class _Sight(NamedTuple):
    bounds: Bounds = _ALL
    keys: Tensor | None = None  # [b, h, 1, k], bool
    queries: Tensor | None = None  # [b, h, q, 1], bool
    window: Bounds | None = None  # of keys from `prefix` on, within the bounds
    prefix: int = 0
    blocks: tuple[Tensor, int, int] | None = None  # as block_mask of rapt, with the sizes of a block

    def within(self, bounds: Bounds) -> _Sight:
        return self._replace(bounds=_both(self.bounds, bounds))

    def with_keys(self, keys: Tensor) -> _Sight:
        return self._replace(keys=keys if self.keys is None else self.keys & keys)

    def with_queries(self, queries: Tensor) -> _Sight:
        return self._replace(queries=queries if self.queries is None else self.queries & queries)

    def with_blocks(self, seen: Tensor, block_q: int, block_k: int) -> _Sight:
        if self.blocks is None:
            return self._replace(blocks=(seen, block_q, block_k))
        other, other_q, other_k = self.blocks
        q, k = math.gcd(block_q, other_q), math.gcd(block_k, other_k)
        seen, other = _refined(seen, block_q // q, block_k // k), _refined(other, other_q // q, other_k // k)
        rows, columns = min(seen.shape[2], other.shape[2]), min(seen.shape[3], other.shape[3])
        return self._replace(blocks=(seen[:, :, :rows, :columns] & other[:, :, :rows, :columns], q, k))


def _both(a: Bounds, b: Bounds) -> Bounds:
    return max(a[0], b[0]), min(a[1], b[1])


def _refined(x: Tensor, q: int, k: int) -> Tensor:
    return x.repeat_interleave(q, 2).repeat_interleave(k, 3)


def _bounds(x: Expression, part: _Part) -> Bounds | None:
    """Those of the distances that x shows, if it shows all between them."""
    if not _is_of_distance(x):
        return None
    distances, shown = part.distances(), part.of_distances(x)
    line = _line(_mask_values(x, {x: shown}), len(distances))
    if line is None:
        return None
    places = line.nonzero()[:, 0]
    if len(places) == 0:
        return math.inf, -math.inf
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 != len(places):
        return None
    low, high = int(distances[first]), int(distances[last])
    return -math.inf if first == 0 else low, math.inf if last == len(line) - 1 else high


def _see_comparison(sight: _Sight, x: Expression, part: _Part) -> _Sight | None:
    """With a comparison of a function of q_idx with one of kv_idx."""
    sides = _sides(x, part.at())
    if sides is None:
        return None
    f, g = _line(sides[0], len(part.queries)), _line(sides[1], len(part.keys))
    if f is None or g is None:
        return None
    if _rises(f) and _rises(g):  # f - g = distance + more
        more = int(f[0] - g[0]) - part.shift()
        bounds = {
            "ge": (-more, math.inf),
            "gt": (1 - more, math.inf),
            "le": (-math.inf, -more),
            "lt": (-math.inf, -more - 1),
            "eq": (-more, -more),
        }.get(x.operation)
        return None if bounds is None else sight.within(bounds)
    if _is_constant(f):
        return sight.with_keys(x.function(f[0], g)[None, None, None])
    if _is_constant(g):
        return sight.with_queries(x.function(f, g[0])[None, None, :, None])
    return None


def _see_either(sight: _Sight, x: Expression, part: _Part) -> _Sight | None:
    """With a window or the keys of a prefix, each within more bounds."""
    first, second = (_see(_conjuncts(argument), part) for argument in x.arguments)
    if first.keys is not None:
        first, second = second, first
    if second.keys is None or first != _Sight(first.bounds) or second != _Sight(second.bounds, second.keys):
        return None
    if first.bounds[0] > first.bounds[1]:  # the window shows nothing
        return sight.within(second.bounds).with_keys(second.keys)
    line = _line(second.keys, len(part.keys))
    if line is None or bool((line[1:] > line[:-1]).any()) or sight.window is not None:
        return None
    if _both(first.bounds, second.bounds) != first.bounds:
        return None
    return sight.within(second.bounds)._replace(window=first.bounds, prefix=int(line.sum()))


def _see_blocks(sight: _Sight, x: Expression, part: _Part) -> _Sight | None:
    block_q, block_k = _grain(x, Q), _grain(x, K)
    if min(block_q, block_k) < 2 or part.queries.start or part.keys.start:
        return None
    at = part.at(torch.arange(0, len(part.queries), block_q), torch.arange(0, len(part.keys), block_k))
    seen = _mask_values(x, at)
    return sight.with_blocks(seen.expand(-1, -1, len(at[Q]), len(at[K])), block_q, block_k)


def _see(conjuncts: list[Any], part: _Part) -> _Sight:
    sight = _Sight()
    for x in conjuncts:
        if Q not in needs(x):
            sight = sight.with_keys(_mask_values(x, part.at()).expand(-1, -1, 1, len(part.keys)))
            continue
        if K not in needs(x):
            sight = sight.with_queries(_mask_values(x, part.at()).expand(-1, -1, len(part.queries), 1))
            continue
        bounds = _bounds(x, part)
        seen = sight.within(bounds) if bounds else None
        if seen is None:
            seen = _see_blocks(sight, x, part)
        if seen is None and x.operation in COMPARISONS:
            seen = _see_comparison(sight, x, part)
        if seen is None and x.operation == "or":
            seen = _see_either(sight, x, part)
        if seen is None:
            raise _refusal(f"the mask {x}")
        sight = seen
    return sight


# ---- BlockMask ------------------------------------------------------------------------------------


def _of_blocks(x: Tensor, axis: int, size: int, maximum: bool) -> Tensor:
    """The largest or the least number of each block."""
    length = x.shape[axis]
    if length == 1:
        return x
    places = torch.arange(-(-length // size) * size).clamp(max=length - 1)
    blocks = x.index_select(axis, places).reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return blocks.amax(axis + 1) if maximum else blocks.amin(axis + 1)


def _shown_of_blocks(x: Any, part: _Part, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Whether x may show any of the pairs of a block, and whether it shows all: [b, h, block of queries, block of keys]."""
    if is_bool(x) and getattr(x, "operation", "") in ("and", "or", "not"):
        parts = [_shown_of_blocks(argument, part, sizes) for argument in x.arguments]
        if x.operation == "not":
            return ~parts[0][1], ~parts[0][0]
        join = torch.logical_and if x.operation == "and" else torch.logical_or
        return join(parts[0][0], parts[1][0]), join(parts[0][1], parts[1][1])
    if {Q, K} <= needs(x) and _is_of_distance(x):
        return _shown_of_distances(part.of_distances(x), part, sizes)
    sides = _sides(x, part.at()) if {Q, K} <= needs(x) and x.operation in COMPARISONS else None
    if sides is None:
        if {Q, K} <= needs(x) and min(_grain(x, Q), _grain(x, K)) < 2:  # which has a number for each query and key
            raise _refusal(f"the mask {x}")
        grain_q, grain_k = math.gcd(_grain(x, Q), sizes[0]), math.gcd(_grain(x, K), sizes[1])
        at = part.at(torch.arange(0, len(part.queries), grain_q), torch.arange(0, len(part.keys), grain_k))
        values = _mask_values(x, at)
        block = sizes[0] // grain_q, sizes[1] // grain_k
        some, all_of_them = (_of_blocks(_of_blocks(values, 2, block[0], most), 3, block[1], most) for most in (True, False))
        return some, all_of_them
    (f_least, f_most), (g_least, g_most) = (
        (_of_blocks(side, axis, sizes[axis - 2], False), _of_blocks(side, axis, sizes[axis - 2], True))
        for axis, side in zip((2, 3), sides)
    )
    equal = (f_least <= g_most) & (g_least <= f_most), (f_least == g_most) & (f_most == g_least)
    return {
        "ge": (f_most >= g_least, f_least >= g_most),
        "gt": (f_most > g_least, f_least > g_most),
        "le": (f_least <= g_most, f_most <= g_least),
        "lt": (f_least < g_most, f_most < g_least),
        "eq": equal,
        "ne": (~equal[1], ~equal[0]),
    }[x.operation]


def _shown_of_distances(shown: Tensor, part: _Part, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """By the number of those that are shown of the distances of a block's pairs."""
    queries, keys = len(part.queries), len(part.keys)
    shown = shown.expand(-1, -1, -1, queries + keys - 1)
    before = torch.nn.functional.pad(shown.long().cumsum(3), (1, 0))[:, :, 0]
    q, k = torch.arange(0, queries, sizes[0])[:, None], torch.arange(0, keys, sizes[1])
    first = q - (k + sizes[1] - 1).clamp(max=keys - 1) + keys - 1  # a place among the distances
    end = (q + sizes[0] - 1).clamp(max=queries - 1) - k + keys
    count = before[:, :, end] - before[:, :, first]
    return count > 0, count == end - first


def _check_blocks(block_mask: Any, mask: Any, part: _Part) -> tuple[Tensor, int, int] | None:
    """The listed blocks, if the mask does not hide all others. The blocks that are listed as full must be."""
    sizes = min(block_mask.BLOCK_SIZE[0], len(part.queries)), min(block_mask.BLOCK_SIZE[1], len(part.keys))
    rows, columns = -(-len(part.queries) // sizes[0]), -(-len(part.keys) // sizes[1])
    full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
    listed = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    listed = listed if full is None else listed | full
    some, all_of_them = _shown_of_blocks(mask, part, sizes)
    if full is not None and bool((full & ~all_of_them).any()):
        raise _refusal("a BlockMask whose full blocks have pairs that its mask_mod hides")
    if _hides(mask, part, (some & ~listed).nonzero(), sizes):
        return None
    return listed.expand(-1, -1, rows, columns), *sizes


def _hides(mask: Any, part: _Part, places: Tensor, sizes: tuple[int, int]) -> bool:
    """Whether a mask hides all pairs of the blocks at these places, which are [b, h, block of queries, block of keys]."""
    for chunk in torch.split(places, 64):
        b, h, q, k = chunk[:, :, None, None].unbind(1)
        q = (q * sizes[0] + torch.arange(sizes[0])[:, None]).clamp(max=len(part.queries) - 1)
        k = (k * sizes[1] + torch.arange(sizes[1])).clamp(max=len(part.keys) - 1)
        if bool(torch.as_tensor(evaluated(mask, {B: b, H: h, Q: q, K: k})).any()):
            return False
    return True


def _listed(counts: Tensor | None, indices: Tensor | None, columns: int) -> Any:
    """[b, h, block of queries, block of keys], bool, of the blocks of a BlockMask."""
    if counts is None or indices is None:
        return None
    places = torch.where(torch.arange(indices.shape[-1]) < counts[..., None], indices, columns).long()
    listed = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool)
    return _four_axes(listed.scatter_(-1, places, True)[..., :columns])


# ---- Scores ---------------------------------------------------------------------------------------


class _Score(NamedTuple):
    """factor * score, or cap * tanh(factor * score), plus the terms; -inf unless the conjuncts hold."""

    factor: float = 1.0
    cap: float | None = None
    terms: tuple[tuple[float, Any], ...] = ()
    conjuncts: tuple[Any, ...] = ()

    def times(self, number: float) -> _Score:
        if not math.isfinite(number) or number == 0 or (number < 0 and self.conjuncts):
            raise _refusal(f"scores that are multiplied by {number}")
        terms = tuple((number * factor, term) for factor, term in self.terms)
        if self.cap is None:
            return self._replace(factor=number * self.factor, terms=terms)
        return self._replace(cap=number * self.cap, terms=terms)

    def plus(self, factor: float, term: Any) -> _Score:
        for condition, shown in _masked(term) if factor > 0 else ():
            return self.where(condition).plus(factor, shown)
        return self._replace(terms=(*self.terms, (factor, term)))

    def where(self, condition: Any) -> _Score:
        return self._replace(conjuncts=(*self.conjuncts, *_conjuncts(condition)))


def _masked(x: Any) -> list[tuple[Any, Any]]:
    """Of where() with -inf on one side, the condition of the other, and that one."""
    if not isinstance(x, Expression) or x.operation != "where":
        return []
    condition, first, second = x.arguments
    if _is_minus_infinity(second):
        return [(condition, first)]
    return [(Expression("not", torch.logical_not, (condition,)), second)] if _is_minus_infinity(first) else []


def _is_minus_infinity(x: Any) -> bool:
    return not isinstance(x, Expression) and float(x) == -math.inf


def _constant(x: Any) -> float | None:
    """A number that no gradient is wanted of."""
    if needs(x):
        return None
    number = evaluated(x, {})
    return None if isinstance(number, Tensor) and number.requires_grad else float(number)


def _score(x: Any) -> _Score:
    if x is SCORE:
        return _Score()
    if SCORE not in needs(x):
        raise _refusal(f"{x} as a score, which does not depend on the score")
    if x.operation == "neg":
        return _score(x.arguments[0]).times(-1)
    if x.operation == "tanh":
        inner = _score(x.arguments[0])
        if inner == _Score(inner.factor):
            return inner._replace(cap=1.0)
    if x.operation == "where" and SCORE not in needs(x.arguments[0]):
        return _chosen(x)
    if x.operation in ("add", "sub", "mul", "div"):
        first, second = x.arguments
        swapped = SCORE not in needs(first)
        if swapped:
            first, second = second, first
        if SCORE not in needs(second):
            return _combined(x, _score(first), second, swapped)
    raise _refusal(f"the score {x}")


def _combined(x: Expression, score: _Score, other: Any, swapped: bool) -> _Score:
    if x.operation == "add":
        return score.plus(1, other)
    if x.operation == "sub":
        return score.times(-1).plus(1, other) if swapped else score.plus(-1, other)
    number = _constant(other)
    if number is None or (x.operation == "div" and (swapped or number == 0)):
        raise _refusal(f"the score {x}")
    return score.times(number if x.operation == "mul" else 1 / number)


def _chosen(x: Expression) -> _Score:
    for condition, score in _masked(x):
        return _score(score).where(condition)
    condition, *scores = x.arguments
    first, second = (_score(score) for score in scores)
    if first._replace(terms=()) != second._replace(terms=()):
        raise _refusal(f"the score {x}")
    term = Expression("where", torch.where, (condition, _sum(first.terms), _sum(second.terms)))
    return first._replace(terms=((1.0, term),))


def _sum(terms: tuple[tuple[float, Any], ...]) -> Any:
    whole: Any = 0.0
    for factor, term in terms:
        product = Expression("mul", operator.mul, (term, factor))
        whole = Expression("add", operator.add, (whole, product))
    return whole


def _is_held(x: Any) -> bool:
    """Whether the caller holds a number for each query and key of it."""
    if not isinstance(x, Expression):
        return False
    if x.operation == "gather" and any(Q in needs(i) for i in x.arguments) and any(K in needs(i) for i in x.arguments):
        return not any({Q, K} <= needs(i) for i in x.arguments)
    return any(_is_held(argument) for argument in x.arguments)


def _indexed(x: Any, part: _Part) -> Tensor | None:
    """Of a tensor with the indices themselves, in order: a view, [b, h, q, k]."""
    if not isinstance(x, Expression) or x.operation != "gather":
        return None
    tensor, *indices = x.arguments
    ranges = {B: part.rows, H: range(part.heads), Q: part.queries, K: part.keys}
    if [id(index) for index in indices] != [id(index) for index in ranges if index in indices]:
        return None
    for axis, index in enumerate(indices):
        if ranges[index].stop > tensor.shape[axis]:
            raise IndexError(f"flex_attention: {x} has a tensor of shape {list(tensor.shape)}, {index} {ranges[index].stop - 1}")
        tensor = tensor.narrow(axis, ranges[index].start, len(ranges[index]))
    view: Tensor = tensor[tuple(slice(None) if index in indices else None for index in ranges)]
    return view


def _biases(terms: tuple[tuple[float, Any], ...], part: _Part, bounds: Bounds, dtype: torch.dtype) -> list[Tensor | None]:
    """relative_bias and attention_bias."""
    table: Any = None
    added: list[Tensor] = []
    for factor, x in terms:
        if needs(x) & {Q, K} and _is_of_distance(x):
            values = factor * part.of_distances(x, bounds).to(dtype)
            table = values if table is None else table + values
            continue
        if {Q, K} <= needs(x) and not _is_held(x):
            raise _refusal(f"the bias {x}")
        numbers = _indexed(x, part)
        numbers = _four_axes(evaluated(x, part.at())) if numbers is None else numbers
        numbers = numbers if numbers.is_floating_point() else numbers.to(dtype)
        added.append(numbers if factor == 1 else factor * numbers)
    whole = None
    if table is not None:
        if not bool(table.isfinite().all()):
            raise _refusal("a bias of q_idx - kv_idx that is not finite")
        most, queries, keys = max(len(part.queries), len(part.keys)), len(part.queries), len(part.keys)
        table = table.expand(1, -1, 1, queries + keys - 1)[0, :, 0].flip(1)  # by kv_idx - q_idx
        table = torch.nn.functional.pad(table, (most - queries, most - keys))
    if added:
        whole = functools.reduce(operator.add, added)
        if whole.numel() > max(x.numel() for x in added):
            raise _refusal("biases of q_idx and of kv_idx that are added")
    return [table, whole]


# ---- Computation ----------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """What holds for all parts of a call."""

    conjuncts: list[Any]
    score: _Score
    scale: float
    blocks: tuple[Tensor, int, int] | None  # of the BlockMask


def _compute(rule: _Rule, part: _Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """y and lse of a part."""
    sight = _see(rule.conjuncts, part)
    low, high = sight.bounds if sight.window is None else sight.window
    first_query, first_key = 0.0, 0.0
    if sight.window is None and low <= high:  # a window of rapt has its query's position
        first_query, first_key = max(low - part.shift(), 0.0), max(part.shift() - high, 0.0)
    if low > high or first_query >= len(part.queries) or first_key >= len(part.keys):
        return _nothing(q, k, v)
    if first_query or first_key:
        part = part._replace(queries=part.queries[int(first_query) :], keys=part.keys[int(first_key) :])
        y, lse = _compute(rule, part, *(x[:, :, -len(r) :] for x, r in ((q, part.queries), (k, part.keys), (v, part.keys))))
        pad = torch.nn.functional.pad
        return pad(y, (0, 0, int(first_query), 0)), pad(lse, (int(first_query), 0), value=-math.inf)
    if rule.blocks is not None:
        if part.queries.start or part.keys.start or len(part.rows) < len(rule.blocks[0]):
            raise _refusal("a BlockMask that hides more than a mask_mod of documents, or of rows of a batch")
        sight = sight.with_blocks(*rule.blocks)
    y, lse = compute_with_lse(_problem(rule, part, sight, q, k, v))
    if sight.queries is not None:
        y, lse = y.masked_fill(~sight.queries, 0), lse.masked_fill(~sight.queries[..., 0], -math.inf)
    return y, lse


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries that see no key."""
    return compute_with_lse(Problem(q, k, v, key_lengths=torch.zeros(len(q), dtype=torch.int64)))


def _problem(rule: _Rule, part: _Part, sight: _Sight, q: Tensor, k: Tensor, v: Tensor) -> Problem:
    shift, score = part.shift(), rule.score
    low, high = sight.bounds
    causal = low == shift
    if sight.window is not None:
        if high != math.inf or low not in (shift, -math.inf):
            raise _refusal("a prefix within other bounds than causality")
        low, high = sight.window
    left, right = high - shift, shift - low
    if min(left, right) < 0:
        raise _refusal("a prefix beside a window that leaves out its query's position")
    lengths, mask = None, sight.keys
    if mask is not None and len(mask) in (1, len(q)) and mask.shape[1] == 1 and bool((mask[..., 1:] <= mask[..., :-1]).all()):
        lengths, mask = mask[:, 0, 0].sum(1).expand(len(q)), None
    seen = block_q = block_k = None
    if sight.blocks is not None:
        seen, block_q, block_k = sight.blocks
        seen = seen[:, :, : -(-len(part.queries) // block_q), : -(-len(part.keys) // block_k)]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    table, bias = _biases(score.terms, part, sight.bounds, dtype)
    return Problem(
        q,
        k,
        v,
        mask=mask,
        key_lengths=lengths,
        block_mask=seen,
        block_q=block_q,
        block_k=block_k,
        prefix_keys=sight.prefix,
        causal=causal,
        window_left=None if left >= len(part.queries) - 1 else int(left),
        window_right=None if right >= len(part.keys) - 1 or (causal and sight.window is None) else int(right),
        scale=rule.scale * score.factor * (score.cap or 1),
        softcap=abs(score.cap or 0),
        relative_bias=table,
        attention_bias=bias,
    )


def _documents(conjuncts: list[Any], part: _Part) -> list[tuple[Tensor, Tensor]]:
    """The documents of queries and of keys that have to be equal."""
    found = []
    for x in conjuncts:
        if not {Q, K} <= needs(x) or x.operation != "eq" or min(_grain(x, Q), _grain(x, K)) > 1 or _is_of_distance(x):
            continue
        sides = _sides(x, part.at())
        if sides is not None:
            f, g = _line(sides[0], len(part.queries)), _line(sides[1], len(part.keys))
            if f is not None and g is not None and not (_rises(f) and _rises(g)):
                found.append((f, g))
    return found


def _compute_documents(rule: _Rule, part: _Part, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """y and lse of some rows: each run of queries of a document with the keys of that document."""
    documents = _documents(rule.conjuncts, part)
    if not documents:
        return _compute(rule, part, q, k, v)
    of_queries, of_keys = (torch.unique_consecutive(torch.stack(lines, 1), return_counts=True, dim=0) for lines in zip(*documents))
    places = {tuple(name): place for place, name in enumerate(of_keys[0].tolist())}
    if len(places) < len(of_keys[0]):
        raise _refusal("documents whose keys are not together")
    counts = of_keys[1].tolist()
    ends, runs = of_keys[1].cumsum(0).tolist(), list(zip(torch.split(k, counts, 2), torch.split(v, counts, 2)))
    results, first = [], 0
    for name, queries in zip(of_queries[0].tolist(), torch.split(q, of_queries[1].tolist(), 2)):
        place, end = places.get(tuple(name)), first + queries.shape[2]
        if place is None:
            results.append(_nothing(queries, k, v))
        else:
            keys = range(ends[place] - counts[place], ends[place])
            results.append(_compute(rule, part._replace(queries=range(first, end), keys=keys), queries, *runs[place]))
        first = end
    return _joined(results, 2)


def _joined(results: list[tuple[Tensor, Tensor]], axis: int) -> tuple[Tensor, Tensor]:
    if len(results) == 1:
        return results[0]
    return torch.cat([y for y, _ in results], axis), torch.cat([lse for _, lse in results], axis)


def _needs_rows(rule: _Rule) -> bool:
    """Whether what queries see of keys, or a bias by distance, differs between the rows of a batch."""
    masks = [x for x in rule.conjuncts if {Q, K} <= needs(x) and min(_grain(x, Q), _grain(x, K)) < 2]
    biases = [x for _, x in rule.score.terms if needs(x) & {Q, K} and _is_of_distance(x)]
    return any(B in needs(x) for x in masks + biases)


def _check_block_mask(block_mask: Any, q: Tensor, k: Tensor) -> None:
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask is {block_mask!r}; it must be a BlockMask, which create_block_mask() makes of a mask_mod")
    batch, heads = block_mask.kv_num_blocks.shape[:-1] if block_mask.kv_num_blocks.dim() == 3 else (1, 1)
    if batch not in (1, len(q)) or heads not in (1, q.shape[1]):
        raise ValueError(f"block_mask is for a batch of {batch} and {heads} heads; query has {len(q)} and {q.shape[1]}")
    if 0 in (q.shape[2], k.shape[2]):
        raise ValueError(f"block_mask is given, and there are {q.shape[2]} queries and {k.shape[2]} keys; it needs both")
    lengths = tuple(block_mask.seq_lengths)
    if min(block_mask.BLOCK_SIZE) < 1 << 30 and lengths != (q.shape[2], k.shape[2]):
        raise ValueError(f"block_mask is for {lengths[0]} queries and {lengths[1]} keys; there are {q.shape[2]} and {k.shape[2]}")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention on the CPU, with its arguments, and gradients: of query, key, value and
    the tensors in the biases of score_mod. kernel_options are not read.

    Masks and scores that rapt computes without a number for each query and key are recognised by what they compute; any
    other raises NotImplementedError. docs/python.md lists them. A query that sees no key gets 0."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} axes; it must have 4, [B, H, S, D]")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[1]} heads, key {key.shape[1]}; enable_gqa=True permits groups of query heads"
        )
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux are given; they exclude each other")
    if getattr(return_aux, "max_scores", False):
        raise NotImplementedError("flex_attention: rapt does not compute max_scores")
    key, value = (x.expand(len(query), -1, -1, -1) if len(x) == 1 else x for x in (key, value))
    whole = _Part(range(len(query)), query.shape[1], range(query.shape[2]), range(key.shape[2]))
    score, mask, blocks = _Score(), True, None
    if score_mod is not None:
        dtype = torch.promote_types(query.dtype, torch.float32)
        score = _score(traced(score_mod, SCORE, B, H, Q, K, dtype=dtype))
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)
        mask = traced(block_mask.mask_mod, B, H, Q, K)
        blocks = _check_blocks(block_mask, mask, whole)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    rule = _Rule([*_conjuncts(mask), *score.conjuncts], score, scale, blocks)
    if len(query) > 1 and _needs_rows(rule):
        rows = zip(*(torch.split(x, 1) for x in (query, key, value)))
        y, lse = _joined([_compute_documents(rule, whole._replace(rows=range(b, b + 1)), *row) for b, row in enumerate(rows)], 0)
    else:
        y, lse = _compute_documents(rule, whole, query, key, value)
    if return_aux is not None:
        return y, _aux(return_aux, lse)
    return (y, lse) if return_lse else y


def _aux(request: Any, lse: Tensor) -> Any:
    return AuxOutput(lse=lse if request.lse else None)
