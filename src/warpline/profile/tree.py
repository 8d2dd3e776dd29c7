"""The tree of modules: model → block → attention or MLP → step. What a module does outside its parts is a leaf called
[self], so that children always sum to their parent. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from warpline.profile.names import ATTENTION, BLOCKS, MLP, merged
from warpline.profile.session import ModulePath, Phase

SELF = "[self]"
#: Row names in the four tables, for steps that are named as in the checkpoint.
ROW_NAMES = {
    "embedding": "token embedding",
    "position": "position embedding",
    "ln_f": "final LN",
    "ln_1": "LN1",
    "ln_2": "LN2",
}


@dataclass(slots=True)
class Node:
    """A module: µs per step, computing and waiting, of it and all its parts."""

    name: str
    path: ModulePath
    busy_us: float = 0.0
    gap_us: float = 0.0
    calls: float = 0.0
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def us(self) -> float:
        """Computing and waiting together, in µs."""
        return self.busy_us + self.gap_us

    def share_of(self, whole: Node) -> float:
        """Return its share of another node's time."""
        return self.us / whole.us if whole.us else 0.0

    def find(self, *names: str) -> Node | None:
        """Return the node at this path below, or None."""
        node: Node | None = self
        for name in names:
            node = None if node is None else node.children.get(name)
        return node

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Node]]:
        """Yield this node and all below, each with its depth, in the order in which they ran."""
        yield depth, self
        for child in self.children.values():
            yield from child.walk(depth + 1)


def build(phase: Phase, *, merge: bool = True) -> Node:
    """Return the tree of a phase; `merge` combines all layers."""
    root = Node("step", ())
    own: dict[ModulePath, tuple[float, float]] = {}
    for row in phase.spans:
        path = merged(row.path) if merge else row.path
        busy, gap = own.get(path, (0.0, 0.0))
        own[path] = busy + row.busy_us, gap + row.gap_us
        node = root
        _add(node, row.busy_us, row.gap_us)
        for i, name in enumerate(path):
            node = node.children.setdefault(name, Node(name, path[: i + 1]))
            _add(node, row.busy_us, row.gap_us)
        node.calls += row.calls
    for path, (busy, gap) in own.items():
        node = root
        for name in path:
            node = node.children[name]
        if node.children:
            node.children[SELF] = Node(SELF, (*path, SELF), busy, gap)
    return root


def _add(node: Node, busy: float, gap: float) -> None:
    node.busy_us += busy
    node.gap_us += gap


@dataclass(frozen=True, slots=True)
class Table:
    """One level of the tree: rows of (name, µs, share of the level), the longest first."""

    title: str
    us: float
    rows: tuple[tuple[str, float, float], ...]


def tables(phase: Phase) -> list[Table]:
    """Return the four tables: model, block, attention, MLP. Levels that were not recorded are left out."""
    root = build(phase)
    levels = {
        "model": root,
        "block": root.find(BLOCKS),
        "attention": root.find(BLOCKS, ATTENTION),
        "MLP": root.find(BLOCKS, MLP),
    }
    return [_table(title, node) for title, node in levels.items() if node is not None and node.children]


def _table(title: str, node: Node) -> Table:
    rows = [(ROW_NAMES.get(c.name, c.name), c.us, c.share_of(node)) for c in node.children.values()]
    return Table(title, node.us, tuple(sorted(rows, key=lambda row: -row[1])))
