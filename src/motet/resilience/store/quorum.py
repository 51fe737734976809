"""How many nodes it takes to go on, and to go on elsewhere: so that no two stores of one training both say who trains.

Nodes on machines of their own may find the store's machine gone, and go on with a store on another machine. Or the
network is cut, the store lives on, and so do nodes on its side. Of N nodes of a membership some number k is enough to
go on where the store is; it takes more than N - k to go on with another store. Two such sets have a node in common, and
a node that has come to a newer store never heeds an older one again. docs/decisions/failures.md has the whole argument.

k is half of the nodes, or as many as are left when as many were lost as the run is to survive, if these are fewer.
"""

from collections.abc import Collection, Sequence

from motet.resilience.membership import Membership, Store, read_key

Term = tuple[int, int, str]
"""Which store it is: a later one of the same training is greater. Its round, the node on whose machine it is, and where
it is there: a number of a node may be given twice."""
FIRST_TERM: Term = (0, -1, "")
"""Of the store with which the training began."""


def to_go_on(num_nodes: int, tolerate: int) -> int:
    """How many of a membership's nodes are enough where the store is."""
    return max(min(1, num_nodes), min((num_nodes + 1) // 2, num_nodes - tolerate))


def to_open(num_nodes: int, tolerate: int) -> int:
    """How many it takes for another store."""
    return num_nodes - to_go_on(num_nodes, tolerate) + 1 if num_nodes else 0


def is_valid(line: Sequence[Membership], read: Collection[int], tolerate: int) -> bool:
    """Whether the last of these memberships may be trained under. `line`: from one that was to the one in question.
    `read`: nodes that have read it, so that no newer store is opened without it.

    A node that was out by its own word counts, as it goes to no other store."""
    for i, before in enumerate(line[:-1]):
        out = {change.node for m in line[i + 1 :] for change in m.changes if change.is_certain}
        if len({*read, *out} & {*before.everyone}) < to_go_on(len(before.everyone), tolerate):
            return False
    return True


def is_read_by_enough(store: Store, known: Sequence[Membership], settled: int, tolerate: int) -> bool:
    """`is_valid` of the last of all `known` memberships. `settled`: the generation of one that was."""
    line = [membership for membership in known if membership.generation >= settled]
    nodes = {node for membership in line[:-1] for node in membership.everyone}
    read = [node for node in nodes if store.check([read_key(line[-1].generation, node)])]
    return is_valid(line, read, tolerate)


def may_be_valid(before: Membership, have_not_read: Collection[int], tolerate: int) -> bool:
    """Whether what followed that membership may be valid, if these nodes never read it."""
    others = {*before.everyone} - {*have_not_read}
    return len(others) >= to_go_on(len(before.everyone), tolerate)


def may_open(line: Sequence[Membership], come: Collection[int], tolerate: int) -> bool:
    """Whether nodes that have come to a new store may go on from the last of these memberships. `line`: from the newest
    that is known to be valid for certain."""
    return all(len({*come} & {*m.everyone}) >= to_open(len(m.everyone), tolerate) for m in line)
