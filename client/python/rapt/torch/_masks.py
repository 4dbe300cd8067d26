"""Masks of transformers as descriptions: what a query sees, by a few numbers instead of a number for each query and key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TENSORS = ("lengths", "padding", "dense")


class Rule(NamedTuple):
    """A query at position p sees the keys from p - left to p + right; None: without bound."""

    left: int | None
    right: int | None

    def __and__(self, other: Rule) -> Rule:
        return Rule(_least(self.left, other.left), _least(self.right, other.right))


def _least(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def rule_of(function: Callable[..., Any]) -> Rule | None:
    """That of a mask function of transformers, which is known by its identity, or made by an overlay of masking_utils and
    known by its closure; None: another function."""
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return Rule(None, 0)
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return Rule(None, None)
    if getattr(function, "__module__", None) != masking_utils.__name__ or not function.__closure__:
        return None
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__)))
    match function.__qualname__:
        case "and_masks.<locals>.and_mask":
            rules = [rule_of(part) for part in held["mask_functions"]]
            common = Rule(None, None)
            for rule in rules:
                if rule is None:
                    return None
                common &= rule
            return common
        case "sliding_window_overlay.<locals>.inner_mask":
            return Rule(held["sliding_window"] - 1, None)
        case "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            return Rule(held["sliding_window"], held["sliding_window"])
    return None


class Mask(Tensor):
    """The additive mask [B, 1, Sq, T] that models with attention of their own expect, not computed yet. rapt reads the
    description; any other operation computes the mask and goes on with that.

    lengths: [B], int64, the keys up to the last query's position, that one included. padding: [B, 1, 1, T], bool, true =
    visible. dense: [B, 1, Sq, T], bool, in place of a rule."""

    lengths: Tensor
    padding: Tensor | None
    dense: Tensor | None
    rule: Rule

    @staticmethod
    def __new__(
        cls: type[Mask],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rule: Rule,
        lengths: Tensor,
        padding: Tensor | None = None,
        dense: Tensor | None = None,
    ) -> Mask:
        mask: Mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=lengths.device)
        mask.rule, mask.lengths, mask.padding, mask.dense = rule, lengths, padding, dense
        return mask

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [name for name in _TENSORS if getattr(self, name) is not None], (self.dtype, self.rule)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, shape: Any, _stride: Any) -> Mask:
        dtype, rule = context
        return Mask(shape, dtype, rule, **inner)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Mask({tuple(self.shape)}, {self.rule}, lengths={self.lengths}, padding={self.padding is not None})"

    def __setitem__(self, place: Any, value: Any) -> None:
        raise NotImplementedError("a mask of rapt cannot be changed in place; clone() gives one that can")

    def visible(self) -> Tensor:
        """[B, 1, Sq, T], bool."""
        if self.dense is not None:
            return self.dense
        batch, _, queries, keys = self.shape
        position = self.lengths[:, None, None, None] - queries + torch.arange(queries)[:, None]
        key = torch.arange(keys)
        seen = torch.ones((batch, 1, queries, keys), dtype=torch.bool)
        if self.rule.left is not None:
            seen = seen & (key >= position - self.rule.left)
        if self.rule.right is not None:
            seen = seen & (key <= position + self.rule.right)
        return seen if self.padding is None else seen & self.padding

    def additive(self) -> Tensor:
        """0 for keys that are seen and the least number for the others, as transformers' own masks."""
        zero = torch.zeros((), dtype=self.dtype)
        return torch.where(self.visible(), zero, torch.finfo(self.dtype).min)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _keeps(func, *args, **(kwargs or {})):
            mask = args[0]
            return Mask(mask.shape, mask.dtype, mask.rule, mask.lengths, mask.padding, mask.dense)
        if func._schema.is_mutable and isinstance(args[0], Mask):
            raise NotImplementedError(f"{func} would change a mask of rapt in place; use an operation that returns a new one")
        if func is torch.ops.aten.logical_not.default:
            raise NotImplementedError("attn_implementation='rapt': a mask that is added to scores has no logical_not")
        plain = torch.utils._pytree.tree_map_only(Mask, Mask.additive, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def _keeps(func: Any, mask: Any = None, *more: Any, **named: Any) -> bool:
    """Whether the result is the mask as it is: models cut it to the keys that there are."""
    if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        return True
    if func is not torch.ops.aten.slice.Tensor or named:
        return False
    axis, start, end, step = more + (0, None, None, 1)[len(more) :]
    return not start and step == 1 and (end is None or end >= mask.shape[axis])
