"""Compares two sessions: before and after, per module and per kernel. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from warpline.errors import ConfigError
from warpline.profile import tree
from warpline.profile.launches import kernel_table
from warpline.profile.session import ModulePath, Phase, Session

#: A tree with at most this many nodes shows no modules: only the step and what runs it.
UNSEEN = 3


@dataclass(frozen=True, slots=True)
class Change:
    """µs per step of one module or kernel before and after; None where it was not there."""

    name: str
    depth: int
    before: float | None
    after: float | None

    @property
    def difference(self) -> float:
        """After minus before in µs: below zero is faster."""
        return (self.after or 0.0) - (self.before or 0.0)

    @property
    def ratio(self) -> float | None:
        """After over before, where both exist."""
        return self.after / self.before if self.before and self.after else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The changes of one phase between two sessions."""

    phase: str
    modules: tuple[Change, ...]
    kernels: tuple[Change, ...]
    notes: tuple[str, ...]


def compare(before: Session, after: Session) -> list[Comparison]:
    """Compare every phase that both have."""
    names = [p.name for p in before.phases if p.name in {q.name for q in after.phases}]
    if not names:
        raise ConfigError("the two profiles have no phase in common: record both with --phase both")
    notes = tuple(
        f"{what}: {a} before, {b} after"
        for what, a, b in (
            ("model", before.model, after.model),
            ("device", before.device, after.device),
            ("dtype", before.dtype, after.dtype),
            ("batch", before.batch, after.batch),
            ("context", before.context, after.context),
        )
        if a != b
    )
    found = []
    for name in names:
        seen = [sum(1 for _ in tree.build(one.phase(name)).walk()) for one in (before, after)]
        blind = tuple(
            f"modules of {one.method} are not seen, so those of the other are left out"
            for one, count in zip((before, after), seen, strict=True)
            if count <= UNSEEN < max(seen)
        )
        modules = tuple(_modules(before.phase(name), after.phase(name)))
        found.append(Comparison(name, modules, tuple(_kernels(before, after, name)), notes + blind))
    return found


def _modules(before: Phase, after: Phase) -> list[Change]:
    trees = [tree.build(phase) for phase in (before, after)]
    times: list[dict[ModulePath, float]] = [{node.path: node.us for _, node in root.walk()} for root in trees]
    order = _merged_order(*(list(one) for one in times))
    if min(map(len, times)) <= UNSEEN < max(map(len, times)):
        order = [path for path in order if all(path in one for one in times)]
    return [Change(path[-1] if path else "step", len(path), times[0].get(path), times[1].get(path)) for path in order]


def _merged_order(first: list[ModulePath], second: list[ModulePath]) -> list[ModulePath]:
    """Return the paths of both trees; those of the second alone are inserted after their siblings."""
    order = list(first)
    for path in second:
        if path not in first:
            behind = [i for i, other in enumerate(order) if other[: len(path) - 1] == path[:-1]]
            order.insert(behind[-1] + 1 if behind else len(order), path)
    return order


def _kernels(before: Session, after: Session, phase: str) -> list[Change]:
    sums: list[dict[str, float]] = []
    for session in (before, after):
        found: dict[str, float] = {}
        for line in kernel_table(session, session.phase(phase)):
            found[line.name] = found.get(line.name, 0.0) + line.us
        sums.append(found)
    names = dict.fromkeys([*sums[0], *sums[1]])
    changes = [Change(name, 0, sums[0].get(name), sums[1].get(name)) for name in names]
    return sorted(changes, key=lambda change: -abs(change.difference))
