"""Heat maps as PNG in HTML, without JavaScript, so that they stay in a saved notebook and on pages that run none."""

from __future__ import annotations

import base64
import html
import pathlib
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
_LEVELS = 255  # of the palette; the last entry is grey, for what is hidden or not a number
_HIDDEN = (0xD0, 0xD0, 0xD0)
_MOST_PIXELS = 512  # of a side; larger matrices are reduced
_LEAST_PIXELS = 160  # of a side; smaller ones are enlarged by the browser
_MOST_HEADS = 16  # of a result that a notebook shows by itself
_MOST_NUMBERS = 400  # of a table

Matrix = np.ndarray[Any, np.dtype[np.float64]]


def _palette() -> bytes:
    at = np.linspace(0, len(_VIRIDIS) - 1, _LEVELS)
    channels = [np.interp(at, range(len(_VIRIDIS)), _VIRIDIS[:, c]).round().astype(np.uint8) for c in range(3)]
    return np.stack(channels, 1).tobytes() + bytes(_HIDDEN)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(matrix: Matrix, low: float, high: float) -> bytes:
    """A pixel for each number, from `low`, dark, to `high`; grey for what is not finite."""
    span = high - low if high > low else 1.0
    with np.errstate(invalid="ignore"):
        share = np.clip((matrix - low) / span, 0, 1)
    pixels = np.where(np.isfinite(matrix), np.nan_to_num(share) * (_LEVELS - 1), _LEVELS).round().astype(np.uint8)
    height, width = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels], 1)  # each row begins with its filter, none
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits of a palette
    chunks = (b"IHDR", header), (b"PLTE", _palette()), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _reduced(matrix: Matrix) -> tuple[Matrix, list[int]]:
    """At most _MOST_PIXELS each way, and how many rows and columns a pixel stands for: it has their largest number."""
    steps = [-(-size // _MOST_PIXELS) for size in matrix.shape]
    for axis, step in enumerate(steps):
        if step > 1:
            matrix = np.fmax.reduceat(matrix, range(0, matrix.shape[axis], step), axis)
    return matrix, steps


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


def _image(matrix: Matrix, low: float, high: float, caption: str) -> str:
    reduced, steps = _reduced(matrix)
    if max(steps) > 1:
        caption += f"; a pixel is the largest of {steps[0]} x {steps[1]}"
    enlarge = max(1, -(-_LEAST_PIXELS // max(reduced.shape)))
    data = base64.b64encode(png(reduced, low, high)).decode()
    text = f"{caption}: {matrix.shape[0]} queries down, {matrix.shape[1]} keys across"
    return (
        f'<figure style="margin:4px"><img alt="{html.escape(text)}" src="data:image/png;base64,{data}"'
        f' width="{reduced.shape[1] * enlarge}" height="{reduced.shape[0] * enlarge}"'
        f' style="image-rendering:pixelated"><figcaption>{html.escape(caption)}</figcaption></figure>'
    )


def _table(matrix: Matrix, queries: Sequence[str], keys: Sequence[str], caption: str) -> str:
    head = "".join(f'<th scope="col">{html.escape(key)}</th>' for key in keys)
    rows = [
        f'<tr><th scope="row">{html.escape(query)}</th>' + "".join(f"<td>{_number(x)}</td>" for x in row) + "</tr>"
        for query, row in zip(queries, matrix)
    ]
    return f"<table><caption>{html.escape(caption)}</caption><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _labels(name: str, labels: Sequence[str] | None, count: int) -> list[str]:
    if labels is None:
        return [str(n) for n in range(count)]
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
    """Heat maps of weights or scores, [B, H, Sq, T], [H, Sq, T] or [Sq, T]: a picture for each head, all on one scale, and
    a table of numbers with the labels where there are at most 400. Hidden pairs, of -inf, are grey."""
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
    finite = shown[np.isfinite(shown)]
    low, high = (min(0.0, float(finite.min())), float(finite.max())) if finite.size else (0.0, 1.0)
    pictures = "".join(_image(matrix, low, high, f"head {head}") for head, matrix in zip(chosen, shown))
    tables = "".join(
        _table(matrix, queries, keys, f"head {head}") for head, matrix in zip(chosen, shown) if shown.size <= _MOST_NUMBERS
    )
    begin = f"<p><strong>{html.escape(title)}</strong></p>" if title else ""
    scale = f"<p>dark {_number(low)} to bright {_number(high)}</p>"
    text = f"heat maps of {len(shown)} heads, {shown.shape[1]} queries x {shown.shape[2]} keys"
    return Figure(f'{begin}<div style="display:flex;flex-wrap:wrap">{pictures}</div>{scale}{tables}', text)


def summary(outputs: dict[str, Any], plan: str) -> str:
    """What a notebook shows of a result: a row for each output, and pictures of its scores."""
    rows = []
    for name, x in outputs.items():
        if x is None:
            continue
        layout = _arrays.kind_of(name, x).read(name, x)[1]
        shape = " x ".join(map(str, layout.shape))
        rows.append(f'<tr><th scope="row">{name}</th><td>{shape}</td><td>{_arrays.NAMES[layout.dtype]}</td></tr>')
    table = f"<table><caption>{html.escape(plan)}</caption>{''.join(rows)}</table>"
    scores = outputs.get("scores")
    if scores is None or 0 in _arrays.kind_of("scores", scores).read("scores", scores)[1].shape:
        return table
    heads = _arrays.kind_of("scores", scores).read("scores", scores)[1].shape[1]
    shown = range(min(heads, _MOST_HEADS))
    title = None if heads == len(shown) else f"the first {len(shown)} of {heads} heads; rapt.plot() shows others"
    return table + plot(scores, heads=shown, title=title)._repr_html_()
