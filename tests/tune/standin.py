"""A worker without a GPU: some candidates of `layernorm` hang, crash, poison the process or compute nonsense."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

#: Behaviour by (block, row_warps).
HANGS, CRASHES, POISONS, IS_WRONG = (512, 1), (512, 2), (512, 4), (256, 1)
BEST = (1024, 4)


def microseconds(tunables: dict[str, int]) -> float:
    block, row_warps = tunables["block"], tunables["row_warps"]
    return 10.0 if (block, row_warps) == BEST else 20.0 + block / 1024 + row_warps


def serve(connection: Connection) -> None:
    """Answer as `serve_gpu` does, and record the requests in a file."""
    while True:
        try:
            verb, case, about = connection.recv()
        except EOFError:
            return
        note(f"{verb} {case[0]} {about}")
        if verb == "check":
            values = about["block"], about["row_warps"]
            if values == HANGS:
                time.sleep(1000)
            if values == CRASHES:
                os._exit(3)
            if values in (POISONS, IS_WRONG):
                connection.send(("poisoned" if values == POISONS else "fault", "an illegal address"))
                continue
        timed = [(us, us - 0.1, us + 0.1) for us in map(microseconds, about)] if verb == "time" else None
        connection.send(("ok", timed))


def log() -> Path:
    return Path(os.environ["WARPLINE_CACHE_DIR"]) / "requests"


def note(line: str) -> None:
    with log().open("a") as file:
        file.write(f"{os.getpid()} {line}\n")


def serve_and_fail_the_default(connection: Connection) -> None:
    """Fail every candidate, the default included."""
    while True:
        try:
            verb, _, _ = connection.recv()
        except EOFError:
            return
        connection.send(("ok", None) if verb == "open" else ("fault", "y is off by 3"))
