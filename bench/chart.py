"""Charts of measurements as SVG, drawn by the benchmarks. Both axes are logarithmic."""

import dataclasses
import html
import math

WIDTH, HEIGHT = 360, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 44
COLOURS = ("#1f6f8b", "#c8553d", "#6a8532")


@dataclasses.dataclass
class Panel:
    """Curves over the same x. curves: name -> a positive value for each x."""

    title: str
    x_label: str
    x: list
    curves: dict


def _ticks(low, high):
    """1, 2 and 5 times powers of ten that cover [low, high]."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    first = max(tick for tick in ticks if tick <= low * 1.001)
    last = min(tick for tick in ticks if tick >= high * 0.999)
    return [tick for tick in ticks if first <= tick <= last]


def _draw(panel, left):
    values = [value for curve in panel.curves.values() for value in curve]
    ticks = _ticks(min(values), max(values))

    def place(value, low, high, begin, end):
        return begin + (end - begin) * math.log(value / low) / math.log(high / low)

    def x_of(value):
        return place(value, panel.x[0], panel.x[-1], left + LEFT, left + WIDTH - RIGHT)

    def y_of(value):
        return place(value, ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)

    parts = [f'<text x="{left + LEFT}" y="16" class="title">{html.escape(panel.title)}</text>']
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<path d="M{left + LEFT} {y:.1f}H{left + WIDTH - RIGHT}" class="grid"/>')
        parts.append(f'<text x="{left + LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for x in panel.x:
        parts.append(f'<text x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    middle = left + (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{html.escape(panel.x_label)}</text>')
    for n, (name, curve) in enumerate(panel.curves.items()):
        points = " ".join(f"{x_of(x):.1f},{y_of(value):.1f}" for x, value in zip(panel.x, curve, strict=True))
        colour = COLOURS[n % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{colour}"/>' for p in points.split()]
        parts.append(f'<text x="{left + LEFT + 8 + 60 * n}" y="30" fill="{colour}">{html.escape(name)}</text>')
    return parts


def render(panels):
    """Returns an SVG with the panels side by side."""
    parts = [part for n, panel in enumerate(panels) for part in _draw(panel, n * WIDTH)]
    width = WIDTH * len(panels)
    style = "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}.grid{stroke:#ddd}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}">',
            f"<style>{style}</style>",
            f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )
