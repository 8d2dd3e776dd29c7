"""Which prompts of a call begin alike."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from warpline.engine.scheduler import Prefix, Sequence

#: Tokens that prompts of one call must share to be run once.
LEAST_PREFIX = 64


def share_prefixes(sequences: Iterable[Sequence]) -> None:
    """Mark prompts of one call that begin alike, so that what they share is run once: equal prompts, such as those of
    several completions, and of the others what they have in common if that is long enough."""
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
    """By the first tokens of their prompts, or by all."""
    groups: dict[bytes, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(np.asarray(sequence.request.prompt[:tokens], np.int64).tobytes(), []).append(sequence)
    return list(groups.values())


def _share(group: list[Sequence], length: int, *, whole: bool) -> None:
    prefix = Prefix(length, whole)
    for sequence in group:
        sequence.prefixes.append(prefix)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """With how many equal tokens both begin."""
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size
