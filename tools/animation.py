"""Records the animation in the README in a terminal: `python -m tools.animation` (takes a minute)."""

from __future__ import annotations

import html
import sys
import time
from pathlib import Path

from tests.cli.terminal import ROOT, Screen, written

IMAGE = ROOT / "docs" / "images" / "terminal.svg"
COLUMNS, ROWS = 84, 26
COMMANDS = (
    ("generate", "Once upon a time, a little robot", "--seed", "1", "--max-new-tokens", "110"),
    ("bench", "--method", "warpline,warpline-int8,hf-sdpa,onnxruntime", "--repetitions", "5"),
)
#: Seconds: the longest wait that is shown, the shortest frame, and the time of the last frame.
LONGEST, SHORTEST, LAST = 0.6, 0.08, 6.0
_LETTER, _LINE, _EDGE = 8.4, 18, 14


def recorded(arguments: tuple[str, ...]) -> list[tuple[float, str]]:
    """Yield what a command writes, and when, in seconds from its start."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "warpline", *arguments]
    return [(time.monotonic() - begun, text) for _, text in written(command, COLUMNS, {"PYTHONPATH": "src"}) if text]


def frames(commands: tuple[tuple[str, ...], ...]) -> list[tuple[float, list[str]]]:
    """Return the frames in order: seconds, and the lines on the screen."""
    screen, shown = Screen(COLUMNS), []
    for arguments in commands:
        typed = "$ warpline " + " ".join(f'"{word}"' if " " in word else word for word in arguments)
        screen.feed(f"{typed}\n\r")
        shown.append((1.0, screen.lines))
        before = 0.0
        for at, text in recorded(arguments):
            shown[-1] = (shown[-1][0] + min(LONGEST, at - before), shown[-1][1])
            before = at
            screen.feed(text)
            if shown[-1][0] < SHORTEST:
                shown[-1] = (shown[-1][0], screen.lines)
            else:
                shown.append((0.0, screen.lines))
        shown[-1] = (shown[-1][0] + 1.5, screen.lines)
        screen.feed("\n\r" if screen.lines[-1] else "")
    seconds, lines = shown[-1]
    return [*shown[:-1], (seconds + LAST, lines)]


def drawn(shown: list[tuple[float, list[str]]]) -> str:
    """Return all frames as one SVG, each visible for its time."""
    whole = sum(seconds for seconds, _ in shown)
    width, height = COLUMNS * _LETTER + 2 * _EDGE, ROWS * _LINE + 2 * _EDGE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        'aria-label="warpline in a terminal">',
        "<style>text { font: 14px ui-monospace, Menlo, Consolas, monospace; fill: #e2e8f0; white-space: pre; } "
        f"g {{ visibility: hidden; animation: {whole:.2f}s step-end infinite; }} .typed {{ fill: #fb923c; }}",
    ]
    at = 0.0
    for i, (seconds, _) in enumerate(shown):
        begin, end = 100 * at / whole, 100 * (at + seconds) / whole
        hidden = f"{end:.3f}% {{ visibility: hidden }}" if i + 1 < len(shown) else ""
        before = "" if i == 0 else "0% { visibility: hidden } "
        parts.append(f"@keyframes f{i} {{ {before}{begin:.3f}% {{ visibility: visible }} {hidden} }}")
        parts.append(f"#f{i} {{ animation-name: f{i}; }}")
        at += seconds
    # Without animation the last frame is shown.
    parts.append(f"#f{len(shown) - 1} {{ visibility: visible; }}")
    parts.append("@media (prefers-reduced-motion: reduce) { g { animation: none; } }")
    parts.append(f'</style><rect width="{width:.0f}" height="{height}" rx="8" fill="#0f172a"/>')
    for i, (_, lines) in enumerate(shown):
        parts.append(f'<g id="f{i}">')
        while lines and not lines[-1]:
            lines = lines[:-1]
        for row, line in enumerate(lines[-ROWS:]):
            if line:
                kind = ' class="typed"' if line.startswith("$ ") else ""
                y = _EDGE + _LINE * row + 14
                long = f' textLength="{len(line) * _LETTER:.1f}"'
                parts.append(f'<text{kind} x="{_EDGE}" y="{y}"{long} xml:space="preserve">{html.escape(line)}</text>')
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    picture = drawn(frames(COMMANDS))
    Path(IMAGE).write_text(picture, encoding="utf-8")
    print(f"{IMAGE.name}: {len(picture) / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
