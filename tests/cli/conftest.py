"""The command, called in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from warpline.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that calls the command in this process and returns exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    return call
