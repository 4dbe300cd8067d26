"""Options of functions: a TypedDict with a default and a text for each, which signatures and help() show."""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


REQUIRED = inspect.Parameter.empty


class Option(NamedTuple):
    """What is known of an option beside its type: typing.Annotated[TYPE, Option(...)]."""

    default: object  # REQUIRED: there is none
    text: str


class _Described(NamedTuple):
    name: str
    kind: str
    option: Option


def _described(options: type) -> list[_Described]:
    found = []
    for name, hint in typing.get_type_hints(options, include_extras=True).items():
        (annotated,) = typing.get_args(hint) if typing.get_origin(hint) is typing.Required else (hint,)
        kind, option = typing.get_args(annotated)
        found.append(_Described(name, re.sub(r"\b(?:\w+\.)+", "", inspect.formatannotation(kind)), option))
    return found


def required(options: type) -> list[str]:
    return [name for name, _, option in _described(options) if option.default is REQUIRED]


def _text_of(name: str, option: Option) -> str:
    default = "required" if option.default is REQUIRED else repr(option.default)
    return textwrap.fill(f"{name} ({default}): {option.text}", 116, initial_indent=" " * 4, subsequent_indent=" " * 8)


def describe(options: type) -> None:
    """Adds the options to the text that help() shows of their class."""
    lines = [_text_of(name, option) for name, _, option in _described(options)]
    options.__doc__ = "\n".join([inspect.cleandoc(options.__doc__ or ""), "", *lines])


def shows(options: type) -> Callable[[F], F]:
    """Lists the options, which are described, in a function's signature and text, which help() and notebooks show."""
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=kind)
        for name, kind, option in _described(options)
    ]

    def show(function: F) -> F:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=named + more)  # type: ignore[attr-defined]
        text = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = f"{text}\n\nOptions, rapt.{options.__name__}:\n\n{options.__doc__}"
        return function

    return show


def unknown(name: str, known: Iterable[str]) -> TypeError:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {close[0]}? The" if close else "the"
    return TypeError(f"there is no option {name}; {hint} options are {', '.join(names)}")
