"""Line charts as inline SVG, for pages that load nothing."""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

# The picture, and the plot inside of it. On a narrow phone it is shown at
# about this size, so that its letters can be read.
WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 404, 28, 212

# More points than these are drawn as a line alone.
MARKED = 60

STYLE = """
figure { margin: 0; }
figcaption { font-weight: 600; }
figure svg { display: block; width: 100%; height: auto; }
figure text { font-size: 13px; fill: var(--soft); }
@media (max-width: 500px) { figure text { font-size: 15px; } }
.grid { stroke: var(--line); }
.series { fill: none; stroke-width: 2; stroke-linejoin: round; }
.legend { list-style: none; margin: .3rem 0; padding: 0; display: flex;
  flex-wrap: wrap; gap: .1rem 1.2rem; font-size: .85rem; }
.legend svg { display: inline-block; width: 26px; height: 10px;
  margin-right: .4rem; }
.c0 { stroke: var(--c0); } circle.c0 { fill: var(--c0); }
.c1 { stroke: var(--c1); } circle.c1 { fill: var(--c1); }
.c2 { stroke: var(--c2); } circle.c2 { fill: var(--c2); }
.c3 { stroke: var(--c3); } circle.c3 { fill: var(--c3); }
.d1 { stroke-dasharray: 7 4; } .d2 { stroke-dasharray: 2 3; }
.d3 { stroke-dasharray: 9 3 2 3; }
"""


class Series(NamedTuple):
    """A line. Points that are not finite are left out."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]

    def points(self) -> list[tuple[float, float]]:
        pairs = zip(self.xs, self.ys, strict=True)
        return [pair for pair in pairs if all(map(math.isfinite, pair))]


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    log_x: bool = False,
    whole_x: bool = False,
    percent: bool = False,
    from_zero: bool = True,
    note: str = "",
) -> str:
    """A figure with title, legend, axes and lines.

    Args:
        title, x_label, y_label: plain text, with units.
        series: the lines, four at most, told apart by color and dashes.
        log_x: whether the x axis is logarithmic.
        whole_x: whether x stands for a count.
        percent: whether y is a fraction to be shown in percent.
        from_zero: whether the y axis begins at zero.
        note: plain text below the chart, or in its place if no line has a
            point.

    Returns:
        HTML.
    """
    drawn = [(s.name, points) for s in series if (points := s.points())]
    head = f"<figcaption>{html.escape(title)}</figcaption>"
    foot = f'<p class="note">{html.escape(note)}</p>' if note else ""
    if not drawn:
        return f"<figure>{head}{foot}</figure>"
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    to_x = math.log10 if log_x else float
    x_ticks = _decades(xs) if log_x else _ticks(min(xs), max(xs), whole_x)
    y_ticks = _ticks(0.0 if from_zero else min(ys), max(ys))
    x_at = _scale(map(to_x, [*x_ticks, *xs]), LEFT, RIGHT)
    y_at = _scale([*y_ticks, *ys], BOTTOM, TOP)
    body = [
        *(_y_tick(y_at(tick), _text(tick, percent)) for tick in y_ticks),
        *(
            _x_tick(x_at(to_x(tick)), _power(tick) if log_x else _text(tick))
            for tick in x_ticks
        ),
        f'<text x="6" y="14">{html.escape(y_label)}</text>',
        f'<text x="{(LEFT + RIGHT) / 2:g}" y="{HEIGHT - 8}" '
        f'text-anchor="middle">{html.escape(x_label)}</text>',
    ]
    for number, (name, points) in enumerate(drawn):
        placed = [(x_at(to_x(x)), y_at(y)) for x, y in points]
        body.append(_line(number, placed))
        if len(points) <= MARKED and not _is_level(points):
            body += [
                f'<circle class="c{number}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                f"<title>{html.escape(name)}: {_text(point[0])}, "
                f"{_text(point[1], percent)}</title></circle>"
                for point, (x, y) in zip(points, placed, strict=True)
            ]
    legend = "".join(
        f'<li><svg viewBox="0 0 26 10" aria-hidden="true">'
        f"{_line(number, [(0, 5), (26, 5)])}</svg>{html.escape(name)}</li>"
        for number, (name, _) in enumerate(drawn)
    )
    return (
        f'<figure>{head}<ul class="legend">{legend}</ul>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(body)}</svg>'
        f"{foot}</figure>"
    )


def _line(number, points):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    kind = f"series c{number} d{number}"
    return f'<polyline class="{kind}" points="{path}"></polyline>'


def _y_tick(y, text):
    return (
        f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" '
        f'y2="{y:.1f}"></line><text x="{LEFT - 6}" y="{y + 4:.1f}" '
        f'text-anchor="end">{text}</text>'
    )


def _x_tick(x, text):
    return (
        f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{BOTTOM}" '
        f'y2="{BOTTOM + 5}"></line><text x="{x:.1f}" y="{BOTTOM + 20}" '
        f'text-anchor="middle">{text}</text>'
    )


def _is_level(points):
    """A level line of two points is a mark to compare with."""
    return len(points) == 2 and points[0][1] == points[1][1]


def _scale(values, start, end):
    values = list(values)
    low, high = min(values), max(values)
    if low == high:
        return lambda value: (start + end) / 2
    return lambda value: start + (end - start) * (value - low) / (high - low)


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Some five round numbers, from at most `low` to at least `high`.

    Whole ones stay within.
    """
    if low == high:
        low, high = (low, low + 1) if low == 0 or whole else (0.0, high)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    sizes = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(k * power for k in sizes if k * power >= rough * 0.999)
    if whole:
        step = max(1, round(step))
        return [t for t in range(0, int(high) + 1, step) if t >= low]
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _decades(values: Sequence[float]) -> list[float]:
    low = math.floor(math.log10(min(values)) + 1e-9)
    high = math.ceil(math.log10(max(values)) - 1e-9)
    every = max(1, math.ceil((high - low) / 5))
    return [10.0**n for n in range(low, high + 1, every)]


def _power(decade: float) -> str:
    """10⁻⁵ and the like."""
    digits = str(round(math.log10(decade)))
    return "10" + digits.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _text(value: float, percent: bool = False) -> str:
    if percent:
        return f"{100 * value:.4g}%"
    return f"{value:.4g}"
