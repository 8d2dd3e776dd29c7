"""Runs commands in a terminal of a given width, and tells what is on its screen at any moment."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PARTS = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07]*\x07|(\r|\n|.)", re.DOTALL)


class Screen:
    """A screen of lines with `columns` cells, as many as needed. It handles text, line ends, carriage returns, cursor
    up and erased lines; colours are ignored."""

    def __init__(self, columns: int):
        self.columns, self._row, self._column = columns, 0, 0
        self._lines: list[list[str]] = [[]]
        self.wrapped = 0  # lines that were longer than the screen is wide

    @property
    def lines(self) -> list[str]:
        return ["".join(line).rstrip() for line in self._lines]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).strip("\n")

    def feed(self, text: str) -> None:
        for numbers, command, character in _PARTS.findall(text):
            if command:
                self._command(numbers, command)
            elif character == "\r":
                self._column = 0
            elif character == "\n":
                self._down()
            elif character and character.isprintable():
                self._put(character)

    def _command(self, numbers: str, command: str) -> None:
        if command == "A":
            self._row = max(0, self._row - int(numbers or 1))
        elif command == "K" and numbers == "2":
            self._lines[self._row] = []
        elif command == "K":
            del self._lines[self._row][self._column :]
        elif command not in "mhl":
            raise ValueError(f"this screen does not know ESC [ {numbers} {command}")

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append([])

    def _put(self, character: str) -> None:
        if self._column == self.columns:
            self._down()
            self._column = 0
            self.wrapped += 1
        line = self._lines[self._row]
        line += [" "] * (self._column + 1 - len(line))
        line[self._column] = character
        self._column += 1


def shown(
    *arguments: str, columns: int = 80, environment: Mapping[str, str] | None = None, python: bool = False
) -> tuple[int, Screen, str]:
    """Run `warpline ARGUMENTS`, or a Python script, in a terminal; return exit code, final screen and all output."""
    command = [sys.executable, *(() if python else ("-m", "warpline")), *arguments]
    pieces = list(written(command, columns, environment or {}))
    text = "".join(text for _, text in pieces)
    screen = Screen(columns)
    screen.feed(text)
    return pieces[-1][0], screen, text


def written(command: list[str], columns: int, environment: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Yield what a command writes to a terminal as it comes, and at the end, with an empty text, its exit code."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    # These variables would hide the width of the terminal.
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    told = {**inherited, "TERM": "xterm-256color", **environment}
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, cwd=ROOT, env=told) as process:
        os.close(inside)
        left = b""
        while True:
            try:
                piece = os.read(terminal, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            left += piece
            text = left.decode("utf-8", errors="ignore")  # a character may arrive in two pieces
            left = left[len(text.encode()) :]
            yield 0, text
    os.close(terminal)
    yield process.returncode, ""
