"""Finds the prompts of a call that begin with the same tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from warpline.engine.scheduler import Prefix, Sequence

#: Least number of shared tokens for which prompts of one call run them once.
LEAST_PREFIX = 64


def share_prefixes(sequences: Iterable[Sequence]) -> None:
    """Mark prompts of one call that share a prefix, so that it is run once: equal prompts, such as those of several
    completions, and prompts with a long enough common beginning."""
    for begin_alike in _grouped(sequences, LEAST_PREFIX):
        if len(begin_alike) == 1:
            continue
        groups = _grouped(begin_alike, None)
        for group in groups:
            if len(group) > 1 and group[0].prompt_length > 1:
                _share(group, group[0].prompt_length - 1, whole=True)
        longer = [group for group in groups if group[0].prompt_length > LEAST_PREFIX]
        if len(longer) > 1:
            prompts = [np.asarray(group[0].request.prompt, np.int64) for group in longer]
            common = min(_common(prompts[0], other) for other in prompts)
            members = [sequence for group in longer for sequence in group]
            _share(members, min(common, *(len(prompt) - 1 for prompt in prompts)), whole=False)


def _grouped(sequences: Iterable[Sequence], tokens: int | None) -> list[list[Sequence]]:
    """Group sequences by the first `tokens` tokens of their prompts; None: by the whole prompt."""
    groups: dict[bytes, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(np.asarray(sequence.request.prompt[:tokens], np.int64).tobytes(), []).append(sequence)
    return list(groups.values())


def _share(group: list[Sequence], length: int, *, whole: bool) -> None:
    prefix = Prefix(length, whole)
    for sequence in group:
        sequence.prefixes.append(prefix)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the common prefix."""
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size
