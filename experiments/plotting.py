"""Line plots as SVG text, without a plotting library."""

import math
from html import escape

from leanbayes.report.figure import Figure, Series

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 36, 54  # margins of the frame, for axes and title
# A palette that color-blind readers can distinguish (Okabe and Ito 2008).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
TICKS = 6  # approximate number per axis
LINE = 18  # height of one legend line


def draw(figure: Figure) -> str:
    """Return the SVG of a figure with numeric x: one line per series, with its band if it has one."""
    xs = [float(x) for series in figure.series for x in series.x]
    ys = [y for series in figure.series for of in (series.y, series.low, series.high) for y in of if math.isfinite(y)]
    if not ys:
        raise ValueError(f"the figure {figure.title!r} has no finite value to draw")
    height = HEIGHT + LINE * len(figure.series) + 4
    x_axis = (_LogAxis if "x" in figure.log else _Axis)(xs, LEFT, WIDTH - RIGHT)
    y_axis = (_LogAxis if "y" in figure.log else _Axis)(ys, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><title>{escape(figure.title)}</title><desc>{escape(figure.caption)}</desc>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(figure.title)}</text>',
        *_grid(figure, x_axis, y_axis),
    ]
    for number, series in enumerate(figure.series):
        parts += _line(series, COLORS[number % len(COLORS)], x_axis, y_axis)
    return "\n".join([*parts, *_legend(figure.series), "</svg>", ""])


class _Axis:
    """Map values to pixels, and choose round tick values."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        extent = (high - low) or abs(high) or 1.0
        size = 10 ** math.floor(math.log10(extent / TICKS))
        self.step = min((size * times for times in (1, 2, 5, 10)), key=lambda step: abs(extent / step - TICKS))
        self.low, self.high = math.floor(low / self.step) * self.step, math.ceil(high / self.step) * self.step
        if self.high == self.low:
            self.high += self.step
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self) -> list[float]:
        return [self.low + number * self.step for number in range(round((self.high - self.low) / self.step) + 1)]

    def step_at(self, tick: float) -> float:
        return self.step


class _LogAxis(_Axis):
    """A logarithmic axis, with ticks at 1, 2 and 5 times powers of ten."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        if min(values) <= 0:
            raise ValueError("a logarithmic axis needs positive values")
        first, last = (math.floor(math.log10(value)) for value in (min(values), max(values)))
        marks = [float(f"{times}e{power}") for power in range(first, last + 2) for times in (1, 2, 5)]
        below, above = [m for m in marks if m <= min(values)], [m for m in marks if m >= max(values)]
        self.marks = [mark for mark in marks if below[-1] <= mark <= above[0]]
        self.low, self.high = math.log10(below[-1]), math.log10(max(above[0], 2 * below[-1]))
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        return super().__call__(math.log10(value))

    def ticks(self) -> list[float]:
        return self.marks

    def step_at(self, tick: float) -> float:
        return 10.0 ** math.floor(math.log10(tick))


def _grid(figure: Figure, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in x_axis.ticks():
        x, text = x_axis(tick), _number(tick, x_axis.step_at(tick), "x" in figure.percent)
        parts.append(f'<path d="M{x} {TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{text}</text>')
    for tick in y_axis.ticks():
        y, text = y_axis(tick), _number(tick, y_axis.step_at(tick), "y" in figure.percent)
        parts.append(f'<path d="M{LEFT} {y}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{text}</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(figure.x)}</text>')
    turned = f'transform="rotate(-90 16 {middle})" text-anchor="middle"'
    return [*parts, f'<text x="16" y="{middle}" {turned}>{escape(figure.y)}</text>']


def _number(value: float, step: float, percent: bool) -> str:
    times = 100 if percent else 1
    digits = max(0, -math.floor(math.log10(step * times) + 1e-9))
    return f"{value * times + 0.0:.{digits}f}" + (" %" if percent else "")


def _line(series: Series, color: str, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    x = [x_axis(float(value)) for value in series.x]
    parts = []
    if series.low:
        outline = [*zip(x, series.high, strict=True), *reversed(list(zip(x, series.low, strict=True)))]
        corners = " ".join(f"{place},{y_axis(value)}" for place, value in outline if math.isfinite(value))
        parts.append(f'<polygon points="{corners}" fill="{color}" opacity="0.15"/>')
    points = [(place, y_axis(value)) for place, value in zip(x, series.y, strict=True) if math.isfinite(value)]
    path = " ".join(f"{place},{value}" for place, value in points)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
    return [*parts, *(f'<circle cx="{place}" cy="{value}" r="3" fill="{color}"/>' for place, value in points)]


def _legend(series: tuple[Series, ...]) -> list[str]:
    """Return the legend, below the axes so that no line crosses it."""
    parts = []
    for number, one in enumerate(series):
        y, color = HEIGHT + LINE * number + 6, COLORS[number % len(COLORS)]
        parts.append(f'<path d="M{LEFT} {y}h16" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{LEFT + 22}" y="{y + 4}">{escape(one.name)}</text>')
    return parts
