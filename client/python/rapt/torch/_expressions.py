"""Functions of indices, such as the mask_mod and score_mod of flex_attention, as expressions.

A function is called once, with symbols in place of indices and scores. What it does with them is recorded, so the expression is
the function for all indices; a function that looks at a value, as `if` does, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# PyTorch's names of functions of numbers, whose results for tensors are those of their elements -> what is known of them here.
_KNOWN = {
    "add": "add",
    "__radd__": "add",
    "sub": "sub",
    "subtract": "sub",
    "__rsub__": "rsub",
    "mul": "mul",
    "multiply": "mul",
    "__rmul__": "mul",
    "div": "div",
    "divide": "div",
    "true_divide": "div",
    "__truediv__": "div",
    "neg": "neg",
    "negative": "neg",
    "floor_divide": "floor_divide",
    "__floordiv__": "floor_divide",
    "eq": "eq",
    "__eq__": "eq",
    "ne": "ne",
    "__ne__": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "__and__": "and",
    "__rand__": "and",
    "logical_and": "and",
    "bitwise_and": "and",
    "__or__": "or",
    "__ror__": "or",
    "logical_or": "or",
    "bitwise_or": "or",
    "__invert__": "not",
    "logical_not": "not",
    "bitwise_not": "not",
    "where": "where",
    "tanh": "tanh",
}
_KNOWN |= dict.fromkeys(
    "__rdiv__ __rtruediv__ __rfloordiv__ __mod__ __rmod__ remainder fmod __pow__ __rpow__ pow abs absolute square sqrt rsqrt exp"
    " exp2 expm1 log log2 log10 log1p sigmoid sin cos floor ceil round trunc sign minimum maximum clamp clip clamp_min clamp_max"
    " relu __xor__ logical_xor bitwise_xor __lshift__ __rshift__ to float double int long bool half bfloat16 ones_like zeros_like"
    " full_like".split(),
    "other",
)
COMPARISONS = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}  # and their opposites
_LOGIC = ("and", "or", "not")
_DTYPE, _DEVICE = Tensor.dtype.__get__, Tensor.device.__get__  # type: ignore[attr-defined]


def _refusal(what: str) -> NotImplementedError:
    return NotImplementedError(f"flex_attention: a mask_mod or score_mod uses {what}")


class Expression:
    """A variable, which has a name, or function(*arguments)."""

    def __init__(self, operation: str, function: Any = None, arguments: tuple[Any, ...] = (), named: Any = None) -> None:
        self.operation, self.function, self.arguments, self.named = operation, function, arguments, named or {}
        self.needs: frozenset[Expression] = frozenset() if function else frozenset((self,))
        self.needs = self.needs.union(*(x.needs for x in arguments if isinstance(x, Expression)))

    def __repr__(self) -> str:
        if not self.function:
            return self.operation
        texts = [repr(x) if isinstance(x, Expression) else "tensor" if isinstance(x, Tensor) else str(x) for x in self.arguments]
        if self.function is _gathered:
            return f"{texts[0]}[{', '.join(texts[1:])}]"
        return f"{self.function.__name__.strip('_')}({', '.join(texts)})"

    def is_bool(self) -> bool:
        """Whether it is known to be."""
        if self.operation in _LOGIC:
            return all(is_bool(x) for x in self.arguments)
        return self.operation in COMPARISONS or (self.operation == "gather" and is_bool(self.arguments[0]))


B, H, Q, K, SCORE = (Expression(name) for name in ("b", "h", "q_idx", "kv_idx", "score"))


def is_bool(x: Any) -> bool:
    return x.is_bool() if isinstance(x, Expression) else isinstance(x, bool) or (isinstance(x, Tensor) and x.dtype == torch.bool)


def needs(x: Any) -> frozenset[Expression]:
    return x.needs if isinstance(x, Expression) else frozenset()


def evaluated(x: Any, at: dict[Expression, Any]) -> Any:
    """`at`: the values of variables; those of other expressions are added."""
    if not isinstance(x, Expression):
        return x
    if x not in at:
        at[x] = x.function(*(evaluated(argument, at) for argument in x.arguments), **x.named)
    return at[x]


def _gathered(tensor: Tensor, *indices: Any) -> Tensor:
    for x in indices:
        if isinstance(x, Tensor) and x.dtype not in (torch.int32, torch.int64):  # PyTorch reads uint8 as a mask
            raise _refusal(f"an index of type {x.dtype}, which must be torch.int32 or torch.int64")
    return tensor[indices]


class Symbol(Tensor):
    """A number in place of which there is an expression."""

    expression: Expression
    known_dtype: torch.dtype | None

    @staticmethod
    def of(expression: Expression, dtype: torch.dtype | None = None) -> Symbol:
        symbol: Symbol = torch.Tensor._make_subclass(Symbol, torch.empty((), device="meta"))  # which has no value
        symbol.expression, symbol.known_dtype = expression, dtype
        return symbol

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = getattr(func, "__name__", ""), kwargs or {}
        own = func in (getattr(torch, name, None), getattr(Tensor, name, None))
        if own and name == "__getitem__":
            return cls.of(_gather(*args))
        if func == _DEVICE:
            return torch.device("cpu")
        if func == _DTYPE and args[0].known_dtype is not None:
            return args[0].known_dtype
        if own and name in ("new_ones", "new_zeros") and "dtype" in named:
            return func(torch.zeros(()), *args[1:], **named)
        if not own or name not in _KNOWN or any(isinstance(x, Symbol) for x in named.values()):
            raise _refusal(f"{name or func} of an index or a score")
        arguments = tuple(_expression(x) for x in args)
        operation = "other" if named else _KNOWN[name]
        if operation == "rsub":
            operation, arguments, func = "sub", arguments[::-1], torch.sub
        return cls.of(Expression(operation, func, arguments, named))


def _expression(x: Any) -> Any:
    """A symbol's expression, or a constant, which is one number."""
    if isinstance(x, Symbol):
        if x.expression.operation == "row":
            raise _refusal(f"{x.expression}, which is not one number")
        return x.expression
    if isinstance(x, Tensor) and x.dim() > 0:
        raise _refusal(f"all of a tensor of shape {list(x.shape)}")
    if isinstance(x, Tensor) and not x.is_cpu:  # as what PyTorch makes of a symbol without saying so
        raise _refusal(f"a tensor on {x.device}")
    return x


def _gather(tensor: Any, indices: Any) -> Expression:
    indices = indices if isinstance(indices, tuple) else (indices,)
    if isinstance(tensor, Symbol):
        if tensor.expression.operation != "row":
            raise _refusal("an index of what is one number")
        tensor, *first = tensor.expression.arguments
        indices = (*first, *indices)
    if not tensor.is_cpu:
        raise _refusal(f"a tensor on {tensor.device}")
    indices = tuple(_expression(x) for x in indices)
    for x in indices:
        if not isinstance(x, (Expression, int, Tensor)) or isinstance(x, bool) or is_bool(x):
            raise _refusal(f"{x} as an index, which must be one integer")
    if len(indices) > tensor.dim():
        raise IndexError(f"flex_attention: a tensor of shape {list(tensor.shape)} has {len(indices)} indices")
    return Expression("gather" if len(indices) == tensor.dim() else "row", _gathered, (tensor, *indices))


def traced(function: Callable[..., Any], *variables: Expression, dtype: torch.dtype = torch.float32) -> Any:
    """The expression of a function, or its constant result. `dtype`: of the score."""
    symbols = [Symbol.of(x, dtype if x is SCORE else torch.int64) for x in variables]
    result = _expression(function(*symbols))
    if not isinstance(result, (Expression, Tensor, bool, int, float)):
        raise TypeError(f"flex_attention: a mask_mod or score_mod returned {result!r}; it must return a tensor")
    return result
