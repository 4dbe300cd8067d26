"""Heat maps as PNG in HTML, without JavaScript, so that they stay in a saved notebook and on pages that run none."""

from __future__ import annotations

import base64
import html
import pathlib
import re
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _arrays
from ._arrays import Array

# Every tenth of matplotlib's viridis, as in `rapt plot`; linear between them.
_VIRIDIS = np.array(
    [
        (0x44, 0x01, 0x54),
        (0x48, 0x24, 0x75),
        (0x41, 0x44, 0x87),
        (0x35, 0x5F, 0x8D),
        (0x2A, 0x78, 0x8E),
        (0x21, 0x91, 0x8C),
        (0x22, 0xA8, 0x84),
        (0x44, 0xBF, 0x70),
        (0x7A, 0xD1, 0x51),
        (0xBD, 0xDF, 0x26),
        (0xFD, 0xE7, 0x25),
    ]
)
_LEVELS = 254  # of the palette, which ends with these two
_HIDDEN = (0xD0, 0xD0, 0xD0)
_NOT_FINITE = (0xD6, 0x27, 0x28)
_MOST_PIXELS = 512  # of a side; larger matrices are reduced
_LEAST_PIXELS = 160  # of a side; smaller ones are enlarged by the browser
_LINE = 13  # pixels of a label
_MOST_OF_A_SUM = 1.001  # of the weights of a row, which are rounded
_MOST_HEADS = 16  # of a result that a notebook shows by itself
_MOST_NUMBERS = 400  # of a table

Matrix = np.ndarray[Any, np.dtype[np.float64]]


def _colours(count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """From dark to bright, [count, 3]."""
    at = np.linspace(0, len(_VIRIDIS) - 1, count)
    channels = [np.interp(at, range(len(_VIRIDIS)), _VIRIDIS[:, c]).round().astype(np.uint8) for c in range(3)]
    return np.stack(channels, 1)


class _Scale:
    """The colours of numbers, one for all pictures of a figure."""

    def __init__(self, numbers: Matrix) -> None:
        finite = numbers[np.isfinite(numbers)]
        self.low, self.high = (min(0.0, float(finite.min())), float(finite.max())) if finite.size else (0.0, 1.0)
        # A mask makes scores -inf, and weights 0, which nothing else does but scores far below the largest and sparsemax.
        self._hides_zeros = finite.size == numbers.size and self.low >= 0 and bool((numbers.sum(-1) <= _MOST_OF_A_SUM).all())
        self.has_hidden = bool(self._is_hidden(numbers).any())
        self.has_errors = bool((np.isnan(numbers) | (numbers == np.inf)).any())

    def _is_hidden(self, numbers: Matrix) -> Any:
        return (numbers == -np.inf) | ((numbers == 0) & self._hides_zeros)

    def entries(self, numbers: Matrix) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Of the palette."""
        span = self.high - self.low if self.high > self.low else 1.0
        with np.errstate(invalid="ignore"):
            share = np.clip((numbers - self.low) / span, 0, 1)
        levels = np.where(np.isfinite(numbers), np.nan_to_num(share) * (_LEVELS - 1), _LEVELS + 1)
        return np.where(self._is_hidden(numbers), _LEVELS, levels).round().astype(np.uint8)

    def bar(self) -> str:
        """HTML that says which colours mean which numbers."""
        stops = ",".join(_css(colour) for colour in _colours(len(_VIRIDIS)))
        marks = [(_HIDDEN, "hidden, or 0" if self._hides_zeros else "hidden")] if self.has_hidden else []
        marks += [(_NOT_FINITE, "not finite")] if self.has_errors else []
        box = "display:inline-block;height:12px;vertical-align:middle;margin:0 4px"
        words = "".join(f'<span style="{box};width:12px;background:{_css(colour)}"></span>{text}' for colour, text in marks)
        bar = f'<span style="{box};width:160px;background:linear-gradient(to right,{stops})"></span>'
        return f"<p>{self.low:.3g}{bar}{self.high:.3g}{words}</p>"


def _css(colour: Sequence[int]) -> str:
    return "#" + bytes(map(int, colour)).hex()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(matrix: Matrix, scale: _Scale) -> bytes:
    """A pixel for each number."""
    pixels = scale.entries(matrix)
    height, width = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels], 1)  # each row begins with its filter, none
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits of a palette
    palette = _colours(_LEVELS).tobytes() + bytes(_HIDDEN) + bytes(_NOT_FINITE)
    chunks = (b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _reduced(matrix: Matrix) -> tuple[Matrix, list[int]]:
    """At most _MOST_PIXELS each way, and how many rows and columns a pixel stands for: it has their largest number."""
    steps = [-(-size // _MOST_PIXELS) for size in matrix.shape]
    for axis, step in enumerate(steps):
        if step > 1:
            matrix = np.maximum.reduceat(matrix, range(0, matrix.shape[axis], step), axis)  # NaN stays visible
    return matrix, steps


def _escaped(text: str) -> str:
    """In HTML and XML, which do not have all characters."""
    return html.escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))


def _number(x: float) -> str:
    return f"{x:.2f}" if np.isfinite(x) else "hidden" if x == -np.inf else str(x)


class Figure:
    """Heat maps of heads. A notebook shows it; save() writes it as a page."""

    def __init__(self, body: str, text: str) -> None:
        """`body`: HTML. `text`: what it shows, where no HTML is shown."""
        self._body, self._text = body, text

    def __repr__(self) -> str:
        return f"<{self._text}; a notebook shows it, save() writes a page>"

    def _repr_html_(self) -> str:
        return self._body

    def save(self, path: str | pathlib.Path) -> None:
        page = f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>rapt</title>\n{self._body}\n</html>\n'
        pathlib.Path(path).write_text(page, encoding="utf-8")


def _axis(labels: Sequence[str], count: int, step: int, cell: int, is_across: bool) -> str:
    """The labels beside `count` cells, each of `step` of them: where they are too close, every nth."""
    every = -(-_LINE // cell)
    shift = (cell - _LINE) / 2  # to the middle of the label's cell
    if is_across:
        axis, own = "column", f"justify-self:start;writing-mode:vertical-rl;max-height:9em;padding-top:4px;translate:{shift}px 0"
    else:
        axis, own = "row", f"justify-self:end;max-width:9em;padding-right:4px;translate:0 {shift}px"
    style = f"font-size:{_LINE - 2}px;line-height:{_LINE}px;white-space:nowrap;overflow:hidden;align-self:start;{own}"
    spans = "".join(
        f'<span style="grid-{axis}:{n + 1} / span {min(every, count - n)};{style}">{_escaped(labels[n * step])}</span>'
        for n in range(0, count, every)
    )
    return f'<div style="display:grid;grid-template-{axis}s:repeat({count},{cell}px)">{spans}</div>'


def _image(matrix: Matrix, scale: _Scale, caption: str, queries: Sequence[str], keys: Sequence[str]) -> str:
    reduced, steps = _reduced(matrix)
    if max(steps) > 1:
        caption += f"; a pixel is the largest of {steps[0]} x {steps[1]}"
    longest = max(reduced.shape)
    cell = max(1, -(-_LEAST_PIXELS // longest), min(_LINE, _MOST_PIXELS // longest))
    data = base64.b64encode(png(reduced, scale)).decode()
    text = f"{caption}: {matrix.shape[0]} queries down, {matrix.shape[1]} keys across"
    rows, columns = reduced.shape
    picture = (
        f'<img alt="{_escaped(text)}" src="data:image/png;base64,{data}" width="{columns * cell}" height="{rows * cell}"'
        ' style="image-rendering:pixelated;max-width:none;margin:0">'
    )
    return (
        f'<figure style="margin:4px"><figcaption>{_escaped(caption)}; queries down, keys across</figcaption>'
        '<div style="display:grid;grid-template-columns:auto auto;justify-content:start">'
        f"{_axis(queries, rows, steps[0], cell, False)}{picture}<span></span>{_axis(keys, columns, steps[1], cell, True)}"
        "</div></figure>"
    )


def _table(matrix: Matrix, queries: Sequence[str], keys: Sequence[str], caption: str) -> str:
    head = "".join(f'<th scope="col">{_escaped(key)}</th>' for key in keys)
    rows = [
        f'<tr><th scope="row">{_escaped(query)}</th>' + "".join(f"<td>{_number(x)}</td>" for x in row) + "</tr>"
        for query, row in zip(queries, matrix)
    ]
    return f"<table><caption>{_escaped(caption)}</caption><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _labels(name: str, labels: Sequence[str] | None, count: int) -> list[str]:
    if labels is None:
        return [str(n) for n in range(count)]
    if isinstance(labels, str):
        raise TypeError(f"{name} is {labels!r}; it must be a sequence of labels, such as those of split()")
    if len(labels) != count:
        raise ValueError(f"{name} has {len(labels)} labels; there are {count}")
    return [str(label) for label in labels]


def plot(
    weights: Array,
    *,
    heads: Sequence[int] | None = None,
    batch: int = 0,
    query_labels: Sequence[str] | None = None,
    key_labels: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Heat maps of weights or scores, [B, H, Sq, T], [H, Sq, T] or [Sq, T]: a picture with labels for each head, all on one
    scale, and a table of numbers where there are at most 400. Hidden pairs are grey: scores of -inf, weights of 0."""
    numbers = _arrays.as_floats("weights", weights).astype(np.float64)
    if not 2 <= numbers.ndim <= 4 or 0 in numbers.shape:
        raise ValueError(f"weights has shape {list(numbers.shape)}; it must be [B, H, Sq, T] with 2 axes at least, not empty")
    numbers = numbers.reshape((1,) * (4 - numbers.ndim) + numbers.shape)
    if not 0 <= batch < numbers.shape[0]:
        raise ValueError(f"batch is {batch}; it must be from 0 to {numbers.shape[0] - 1}")
    chosen = range(numbers.shape[1]) if heads is None else heads
    for head in chosen:
        if not 0 <= head < numbers.shape[1]:
            raise ValueError(f"heads has {head}; it must be from 0 to {numbers.shape[1] - 1}")
    shown = numbers[batch][list(chosen)]
    queries = _labels("query_labels", query_labels, shown.shape[1])
    keys = _labels("key_labels", key_labels, shown.shape[2])
    scale = _Scale(shown)
    pictures = "".join(_image(matrix, scale, f"head {head}", queries, keys) for head, matrix in zip(chosen, shown))
    tables = "".join(
        _table(matrix, queries, keys, f"head {head}") for head, matrix in zip(chosen, shown) if shown.size <= _MOST_NUMBERS
    )
    begin = f"<p><strong>{_escaped(title)}</strong></p>" if title else ""
    text = f"heat maps of {len(shown)} heads, {shown.shape[1]} queries x {shown.shape[2]} keys"
    return Figure(f'{begin}<div style="display:flex;flex-wrap:wrap">{pictures}</div>{scale.bar()}{tables}', text)


def summary(outputs: dict[str, Any], plan: str) -> str:
    """What a notebook shows of a result: a row for each output, and pictures of its scores."""
    rows = []
    for name, x in outputs.items():
        if x is None:
            continue
        layout = _arrays.kind_of(name, x).read(name, x)[1]
        shape = " x ".join(map(str, layout.shape))
        rows.append(f'<tr><th scope="row">{name}</th><td>{shape}</td><td>{_arrays.NAMES[layout.dtype]}</td></tr>')
    table = f"<table><caption>{_escaped(plan)}</caption>{''.join(rows)}</table>"
    scores = outputs.get("scores")
    if scores is None or 0 in _arrays.kind_of("scores", scores).read("scores", scores)[1].shape:
        return table
    heads = _arrays.kind_of("scores", scores).read("scores", scores)[1].shape[1]
    shown = range(min(heads, _MOST_HEADS))
    title = None if heads == len(shown) else f"the first {len(shown)} of {heads} heads; rapt.plot() shows others"
    return table + plot(scores, heads=shown, title=title)._repr_html_()
