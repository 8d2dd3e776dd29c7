"""What users see in a terminal of 80 columns."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.terminal import Screen, shown
from tests.conftest import SMALL


def test_the_screen_of_these_tests() -> None:
    screen = Screen(5)
    screen.feed("abc\r\nlonger\x1b[1mx\x1b[0m\r\x1b[2K\x1b[1Afresh")
    assert screen.lines == ["abc", "fresh", ""]
    assert screen.wrapped == 1


def test_the_first_run(tmp_path: Path) -> None:
    """A bar drawn during compilation does not disturb the text, and compile time does not count as speed."""
    settings = ("--model", SMALL, "--max-new-tokens", "30", "--seed", "1")
    code, first, written = shown("generate", "A frog", *settings, environment={"WARPLINE_CACHE_DIR": str(tmp_path)})
    again, second, _ = shown("generate", "A frog", *settings, environment={"WARPLINE_CACHE_DIR": str(tmp_path)})
    assert (code, again) == (0, 0)
    assert "Compiling for this CPU (once)" in written
    *story, statistics = first.text.splitlines()
    assert story == second.text.splitlines()[:-1]
    assert story[0].startswith("A frog")
    assert "compiled in" in statistics
    assert "compiled in" not in second.text
    rates = [float(re.findall(r"([\d,.]+) tok/s", line)[0].replace(",", "")) for line in (statistics, second.lines[-2])]
    assert rates[0] > rates[1] / 5  # with the compiler's seconds it would be a tenth


@pytest.mark.parametrize("columns", [80, 40])
def test_statistics_fit_into_a_line(columns: int) -> None:
    _, screen, _ = shown(
        "generate", "A frog", "--model", SMALL, "--max-new-tokens", "9", "--seed", "1", columns=columns
    )
    assert len(screen.lines[-2]) <= columns
    assert "9 new, " in screen.lines[-2]
    assert "n/a" not in screen.lines[-2]


#: Takes a minute: greedy text does not end before its limit, a drawn one may.
MODEL = "random:n_layer=8,n_head=8,n_embd=256,n_positions=20000"
SLOW = ("generate", "Hi", "--model", MODEL, "--max-tokens", "19000", "--temperature", "0")


#: Prints a line once it handles interrupts: a busy machine may take seconds to start Python, which ends in its own way
#: until then.
LISTENING = """
from warpline.__main__ import main
from warpline.cli import interrupt
watch = interrupt.watch
def watch_and_say_so():
    watch()
    print(flush=True)
interrupt.watch = watch_and_say_so
main()
"""


@pytest.mark.parametrize("seconds", [0, 0.3, 0.6, 0.9, 1.2, 1.6, 2.5])
@pytest.mark.parametrize("arguments", [SLOW, ("profile", "torch", "--phase", "decode")], ids=["generate", "profile"])
def test_an_interrupt_at_any_moment(arguments: tuple[str, ...], seconds: float) -> None:
    """The interrupt comes while modules are imported, weights made, or tokens written."""
    command = [sys.executable, "-c", LISTENING, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said[-9:]) == (130, b"\nstopped\n"), said.decode()
    assert b"Traceback" not in said


CALLBACK = """
import os, signal, weakref
from warpline.cli import interrupt
interrupt.watch()
class Thing: pass
thing = Thing()
watched = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
del thing
print("went on")
"""


def test_an_interrupt_in_a_callback_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", CALLBACK], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (130, b"")


def test_a_second_interrupt_ends_at_once() -> None:
    words = (
        "import os, signal\nfrom warpline.cli import interrupt\ninterrupt.watch()\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    {answer}os.kill(os.getpid(), signal.SIGINT)\n"
    )
    for answer, caught in (("", False), ("interrupt.again(); ", True)):
        done = subprocess.run(
            [sys.executable, "-c", words.format(answer=answer)], capture_output=True, check=False, timeout=60
        )
        assert (b"KeyboardInterrupt" in done.stderr) is caught


NARROW = [
    ("models",),
    ("kernels",),
    ("ladder",),
    ("ladder", "matmul", "layernorm", "--from", "results"),
    ("tune", "--from", "results/nvidia-h200"),
    ("profile", "results/cpu/profile/naive-stories-fp32-1x64.json", "--shares", "--layers", "--gpu", "t4"),
    ("doctor",),
]


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("arguments", NARROW, ids=[" ".join(words)[:30] for words in NARROW])
def test_tables_fit(arguments: tuple[str, ...], columns: int) -> None:
    code, screen, _ = shown(*arguments, columns=columns)
    assert code == 0
    assert screen.wrapped == 0
    assert "…" not in screen.text


def test_a_run_of_the_benchmark_fits(tmp_path: Path) -> None:
    """The bar is removed before a table is printed, and no figure in a table is cut."""
    words = ["bench", "--method", "cpu,torch,naive", "-m", SMALL, "--new", "6,8", "--repetitions", "2"]
    code, screen, _ = shown(*words, "--md", str(tmp_path / "a.md"))
    assert code == 0
    assert "…" not in screen.text
    table = [line for line in screen.lines if line.startswith(("cpu ", "torch ", "naive ", "method "))]
    assert len(table) == 2 * 4
    assert all(line.startswith("reference, ") for line in screen.lines if "(16 + " in line)
    assert not any("━" in line for line in screen.lines)
