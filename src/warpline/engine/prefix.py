"""Which prompts of a call begin alike."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from warpline.engine.scheduler import Prefix, Sequence

#: Tokens that prompts of one call must share to be run once.
LEAST_PREFIX = 64


def share_prefixes(sequences: Iterable[Sequence]) -> None:
    """Mark prompts of one call that begin alike, so that what they share is run once: the prompt of several
    completions, and what prompts have in common if that is long enough."""
    groups: dict[bytes, list[Sequence]] = {}
    sequences = [s for s in sequences if s.prompt > LEAST_PREFIX or s.request.params.n > 1]
    for sequence in sequences:
        groups.setdefault(np.asarray(sequence.request.prompt[:LEAST_PREFIX], np.int64).tobytes(), []).append(sequence)
    for group in groups.values():
        if len(group) < 2 or group[0].prompt < 2:
            continue
        prompts = [np.asarray(sequence.request.prompt, np.int64) for sequence in group]
        shared = min(_common(prompts[0], other) for other in prompts)
        whole = all(len(prompt) == shared for prompt in prompts)
        length = min(shared, *(len(prompt) - 1 for prompt in prompts))
        if whole or length >= LEAST_PREFIX:
            prefix = Prefix(length, whole)
            for sequence in group:
                sequence.prefix = prefix


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """With how many equal tokens both begin."""
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size
