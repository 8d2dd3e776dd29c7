"""Pictures that explain and measure nothing: why one launch is fast, a request's way, a layer on a timeline.

`make readme` writes them to docs/images. They follow the reader's choice of light or dark.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 760
STYLE = """
  <style>
    text { fill: #24292f } .frame { fill: #ffffff } .note { fill: #57606a } .strong { font-weight: 600 }
    .read { fill: #b6daff; stroke: #0969da } .next { fill: #ddf4ff; stroke: #0969da }
    .work { fill: #ffd8b5; stroke: #bc4c00 } .idle { fill: #f6f8fa; stroke: #8c959f; stroke-dasharray: 3 3 }
    .box { fill: #f6f8fa; stroke: #57606a } .line { stroke: #57606a; fill: none }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 } .frame { fill: #0d1117 } .note { fill: #9198a1 }
      .read { fill: #0c3a75; stroke: #58a6ff } .next { fill: #0a2540; stroke: #58a6ff }
      .work { fill: #6b3208; stroke: #f0883e } .idle { fill: #161b22; stroke: #6e7681 }
      .box { fill: #161b22; stroke: #9198a1 } .line { stroke: #9198a1 }
    }
  </style>
  <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
    <path class="line" d="M0 0l8 4l-8 4"/></marker></defs>"""


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(words)}</text>'


def _labelled(x: float, y: float, width: float, height: float, kind: str, words: str) -> list[str]:
    return [_rect(x, y, width, height, kind), _text(x + width / 2, y + height / 2 + 4.5, words, anchor="middle")]


def _arrow(*points: tuple[float, float]) -> str:
    path = " L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path class="line" d="M{path}" marker-end="url(#tip)"/>'


def _document(title: str, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
    head += f'font-family="system-ui, sans-serif" font-size="13">\n  <title>{html.escape(title)}</title>{STYLE}'
    body = "\n".join(f"  {part}" for part in [_rect(0, 0, WIDTH, height, "frame"), *parts])
    return f"{head}\n{body}\n</svg>\n"


def _legend(y: int, entries: Sequence[tuple[int, str, str]]) -> list[str]:
    """Return what the kinds of boxes mean: where each entry begins, its kind, its words."""
    return [part for x, kind, words in entries for part in (_rect(x, y, 18, 14, kind), _text(x + 26, y + 12, words))]


def why() -> str:
    """One token as many kernels, and as a part of one launch."""
    left, parts = 16, [_text(16, 26, "A kernel for each operation", "strong")]
    parts += [_text(16, 46, "each begins, reads its weights, ends; between them memory is not read", "note")]
    x = float(left)
    for _ in range(12):
        parts += [_rect(x, 58, 34, 30, "read"), _rect(x + 34, 58, 26, 30, "idle")]
        x += 60
    parts += [_text(x - 2, 106, "one token", "note", "end"), _arrow((left, 101), (x - 80, 101))]
    parts += [_text(16, 142, "One launch for many tokens", "strong")]
    parts += [
        _text(16, 162, "the weights of the next steps are copied ahead while blocks compute and exchange", "note")
    ]
    parts += [_rect(left, 174, 408, 30, "read"), _rect(left + 408, 174, 312, 30, "next")]
    for i in range(34):
        parts.append(_rect(left + 6 + i * 21, 208, 14, 20, "work"))
    parts += [_arrow((left, 241), (left + 325, 241)), _text(left + 402, 246, "one token", "note", "end")]
    parts += [_arrow((left + 410, 241), (left + 625, 241)), _text(left + 720, 246, "the next one", "note", "end")]
    legend = (
        (16, "read", "weights on their way from memory"),
        (290, "work", "computing"),
        (410, "idle", "memory idle"),
    )
    parts += _legend(268, legend)
    parts.append(_text(WIDTH - 16, 280, "a drawing, not to scale", "note", "end"))
    return _document("Why one launch for many tokens is faster than a kernel for each operation", 296, parts)


def request() -> str:
    """From a call to its text: what the host does, and what the device."""
    parts = [_text(190, 26, "host", "strong", "middle"), _text(600, 26, "device", "strong", "middle")]
    parts.append('<path class="line" d="M425 12v446" stroke-dasharray="4 4"/>')
    host = (
        ("LLM.generate, stream, submit", "text to ids; settings are checked"),
        ("Scheduler", "plans a turn: new slots, spans of prompts, steps"),
        ("Slots.admit", "ids, settings and seeds into free slots"),
        ("Executor.prefill", "spans of prompts, packed into one pass"),
        ("Executor.decode", "n steps for all lanes, in one launch or n graphs"),
        ("Slots.report", "what is new, for all lanes at once"),
        ("Text and Completion", "ids to text while the next turn runs"),
    )
    device = {
        2: ("the record of each slot", "lengths, limits, temperatures, noise"),
        3: ("keys and values into the cache", "the last row becomes the first token"),
        4: ("newest token in, next token out", "n times, without the host"),
        5: ("new tokens to pinned memory", "the host waits once for all of them"),
    }
    for i, (title, note) in enumerate(host):
        y = 42 + i * 60
        parts += [_rect(16, y, 385, 42, "box"), _text(28, y + 18, title, "strong"), _text(28, y + 34, note, "note")]
        if i < len(host) - 1:
            parts.append(_arrow((200, y + 42), (200, y + 59)))
        if i in device:
            title, note = device[i]
            parts += [_rect(455, y, 289, 42, "read"), _text(467, y + 18, title), _text(467, y + 34, note, "note")]
            parts.append(_arrow((454, y + 21), (402, y + 21)) if i == 5 else _arrow((402, y + 21), (454, y + 21)))
    parts.append('<path class="line" d="M16 423h-8v-320h7" marker-end="url(#tip)"/>')
    return _document("The way of a request: host and device", 470, parts)


def layer() -> str:
    """A layer of the persistent kernel: the tape, a block that attends and one that does not, and the exchanges."""
    stages = (("QKV", 110), ("attention", 130), ("out", 80), ("FC", 130), ("proj", 110))
    left = 130
    parts = [_text(16, 26, "One layer, from left to right in time", "strong")]
    for y, title, note in (
        (48, "copying warp", "of every block"),
        (108, "block 0", "has a head"),
        (168, "block 100", "has none"),
    ):
        parts += [_text(16, y + 15, title), _text(16, y + 31, note, "note")]
    for at, width, words in (
        (130, 175, "weights of out"),
        (305, 130, "FC"),
        (435, 150, "proj"),
        (585, 159, "QKV of the next layer"),
    ):
        parts += _labelled(at, 48, width, 36, "read" if words[0] != "Q" else "next", words)
    x = left
    for name, width in stages:
        wait = 26
        for y, attends in ((108, True), (168, False)):
            if name == "attention" and not attends:
                parts += _labelled(x, y, width, 36, "idle", "nothing to do")
                continue
            parts += [_rect(x, y, wait, 36, "idle")]
            parts += _labelled(x + wait, y, width - wait, 36, "work", name)
        x += width
        parts.append(f'<path class="line" d="M{x} 100v116" stroke-dasharray="2 3"/>')
    for at, words in zip((240, 370, 450, 580, 690), ("q, k, v", "heads", "row", "hidden", "row"), strict=True):
        parts.append(_text(at, 232, words, "note", "middle"))
    parts += [_text(16, 232, "posted words:", "note")]
    legend = (
        (16, "read", "the tape, ahead of its use"),
        (226, "idle", "asking for words of others"),
        (436, "work", "computing, then posting"),
    )
    parts += _legend(254, legend)
    parts.append(_text(WIDTH - 16, 266, "not to scale", "note", "end"))
    return _document("A layer of the persistent decode kernel on a timeline", 282, parts)


DRAWINGS: dict[str, Callable[[], str]] = {"why.svg": why, "request.svg": request, "layer.svg": layer}


def draw() -> None:
    """Write all of them."""
    for name, make in DRAWINGS.items():
        (IMAGES / name).write_text(make(), encoding="utf-8")
