"""Draws the roofline: TFLOP/s over FLOP per byte, both logarithmic. Modules are numbered and listed below: names beside
the dots would cover each other, because similar modules lie close together."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from warpline.profile.roofline import Point, points, roofs, whole
from warpline.profile.session import Phase, Session

WIDTH, HEIGHT = 900, 420
_LEFT, _BOTTOM, _EDGE = 64, 44, 10
#: Height of a number, and width of one of its digits.
_LETTER_HEIGHT, _LETTER_WIDTH = 12.0, 7.5
#: Distance of a number from the edge of its dot.
_NEAR = 9.0


@dataclass(frozen=True, slots=True)
class Box:
    """Place and size of a number."""

    x: float
    y: float
    width: float
    height: float = _LETTER_HEIGHT

    def meets(self, other: Box) -> bool:
        """Whether the two boxes overlap."""
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )

    @property
    def inside(self) -> bool:
        """Whether the whole box is on the drawing."""
        return (
            self.x >= _LEFT
            and self.x + self.width <= WIDTH - _EDGE
            and self.y >= _EDGE
            and self.y + self.height <= HEIGHT - _BOTTOM
        )


def roofline(session: Session, phase: Phase) -> str:
    """Return the drawing and its list: under the slope memory is the limit, under the flat roof the arithmetic."""
    limits = roofs(session)
    priced = [*points(session, phase), whole(session, phase)]
    drawn = sorted((point for point in priced if point.flops and point.bytes), key=lambda point: -point.us)
    knee = 1e3 * limits.tflop_s / limits.read_gb_s
    low = math.floor(math.log10(min(0.05, *(point.intensity for point in drawn))))
    high = math.ceil(math.log10(max(10 * knee, *(point.intensity for point in drawn))))
    top = math.ceil(math.log10(1.05 * max(limits.tflop_s, *(point.tflop_s for point in drawn))))
    bottom = math.floor(math.log10(min(point.tflop_s for point in drawn)))

    def x(intensity: float) -> float:
        return _LEFT + (math.log10(intensity) - low) / (high - low) * (WIDTH - _LEFT - _EDGE)

    def y(rate: float) -> float:
        return _EDGE + (top - math.log10(rate)) / (top - bottom) * (HEIGHT - _BOTTOM - _EDGE)

    parts = [f"<svg class='roof' viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='roofline of {phase.name}'>"]
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f"<path class='grid-line' d='M{at:.1f} {_EDGE}V{HEIGHT - _BOTTOM}'/>")
        parts.append(f"<text x='{at:.1f}' y='{HEIGHT - 26}' text-anchor='middle'>{10.0**power:g}</text>")
    for power in range(bottom, top + 1):
        at = y(10.0**power)
        parts.append(f"<path class='grid-line' d='M{_LEFT} {at:.1f}H{WIDTH - _EDGE}'/>")
        parts.append(f"<text x='{_LEFT - 6}' y='{at + 4:.1f}' text-anchor='end'>{10.0**power:g}</text>")
    least = max(10.0**low, 10.0**bottom * 1e3 / limits.read_gb_s)
    start = f"M{x(least):.1f} {y(least * limits.read_gb_s / 1e3):.1f}"
    parts.append(f"<path class='limit' d='{start}L{x(knee):.1f} {y(limits.tflop_s):.1f}H{WIDTH - _EDGE}'/>")
    dots = [(x(point.intensity), y(point.tflop_s), _radius(point, phase)) for point in drawn]
    for point, (at_x, at_y, radius) in zip(drawn, dots, strict=True):
        parts.append(f"<circle cx='{at_x:.1f}' cy='{at_y:.1f}' r='{radius:.1f}' data-tip='{_safe(_told(point))}'/>")
    for number, ((at_x, at_y, radius), box) in enumerate(zip(dots, place(dots), strict=True), 1):
        middle, height = box.x + box.width / 2, box.y + box.height / 2
        if math.hypot(middle - at_x, height - at_y) > radius + _NEAR + 1:  # a line connects the number with its dot
            parts.append(f"<path class='lead' d='M{at_x:.1f} {at_y:.1f}L{middle:.1f} {height:.1f}'/>")
        parts.append(f"<text class='number' x='{middle:.1f}' y='{box.y + 10:.1f}' text-anchor='middle'>{number}</text>")
    parts.append(f"<text x='{(WIDTH + _LEFT) / 2}' y='{HEIGHT - 6}' text-anchor='middle'>FLOP per byte</text>")
    parts.append(f"<text x='4' y='{HEIGHT / 2}' transform='rotate(-90 12 {HEIGHT / 2})'>TFLOP/s</text></svg>")
    listed = "".join(f"<li>{_safe(point.name)}</li>" for point in drawn)
    return "".join(parts) + f"<ol class='legend'>{listed}</ol>"


def place(dots: Sequence[tuple[float, float, float]]) -> list[Box]:
    """Return a box for the number of each dot (x, y, radius): the nearest place that covers no other number."""
    found: list[Box] = []
    for number, (x, y, radius) in enumerate(dots, 1):
        width = _LETTER_WIDTH * len(str(number)) + 3
        spiral = (
            Box(
                x + away * math.cos(turn * math.pi / 8) - width / 2,
                y + away * math.sin(turn * math.pi / 8) - _LETTER_HEIGHT / 2,
                width,
            )
            for away in (radius + _NEAR + 7 * ring for ring in range(WIDTH // 7))
            for turn in range(16)
        )
        found.append(next(box for box in spiral if box.inside and not any(box.meets(other) for other in found)))
    return found


def _radius(point: Point, phase: Phase) -> float:
    return 4 + 10 * math.sqrt(min(1.0, point.us / phase.step_us))


def _told(point: Point) -> str:
    return (
        f"{point.name}\n{point.us:,.1f} µs, {point.gb_s:,.1f} GB/s, {point.tflop_s:,.3f} TFLOP/s\n"
        f"{point.bound}-bound, {100 * point.share:.0f} % of the roof"
    )


def _safe(text: str) -> str:
    return html.escape(text, quote=True)
