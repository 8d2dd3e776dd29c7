"""Runs a server in a process of its own while it is measured."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from warpline.errors import ConfigError

#: Seconds that a server gets to shut down.
PATIENCE = 10.0


def free_port() -> int:
    """Return a port that no process listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def resident_mb(process: int) -> float:
    """Return the resident memory of a process in MB."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _end_with_parent() -> None:
    """Ask Linux for a SIGTERM when the process that started this one ends, however it ends."""
    prctl_set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(prctl_set_parent_death_signal, signal.SIGTERM)


class Server:
    """`with Server(["-m", "warpline", "serve"]) as server:` runs this Python, or another one, on a free port."""

    def __init__(self, arguments: Sequence[str], python: str = sys.executable, *, patience: float = PATIENCE):
        self.port, self._patience = free_port(), patience
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = [python, *arguments, "--host", "127.0.0.1", "--port", str(self.port)]

    def __enter__(self) -> Server:
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._arguments, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends it
            preexec_fn=_end_with_parent,
        )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self._patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def require_alive(self) -> None:
        """Raise with the last line of its log if it has ended."""
        if self._process.poll() is not None:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            last = lines[-1].removeprefix("error: ") if lines else f"exit code {self._process.returncode}"
            raise ConfigError(f"the server did not start: {last}")

    def resident_mb(self) -> float:
        """Return the resident memory of the server in MB."""
        return resident_mb(self._process.pid)

    def cpu_seconds(self) -> float:
        """Return the CPU time of all its threads in seconds."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
