"""A new store gathers nodes that have lost the one before, until enough have come to go on from what they know.

Each node writes which memberships it knows, and that it has come (`vote`). Whoever keeps the new store takes those of
the newest line (`Gathering`): a line is what stood in one opened store, so it begins with all that was valid in older
ones. votes.py says how many it takes.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from motet.resilience.membership import FIRST_GENERATION, Membership, Store, read_key

# How many nodes it takes to go on, and to go on elsewhere: so that no two stores of one training both say who trains.
#
# Nodes on machines of their own may find the store's machine gone, and go on with a store on another machine. Or the
# network is cut, the store lives on, and so do nodes on its side. Of N nodes of a membership some number k is enough
# to go on where the store is; it takes more than N - k to go on with another store. Two such sets have a node in
# common, and a node that has come to a newer store never heeds an older one again. docs/decisions/failures.md has the
# whole argument.
#
# k is half of the nodes, or as many as are left when as many were lost as the run is to survive, if these are fewer.


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


MOVES = "moves"
"""There if the training's store may move to another machine."""
TERM = "term"
"""JSON; absent: the first store."""
GATHERING = "gathering"
"""There if a store began by gathering nodes; they wait for `OPEN`."""


class OtherLineError(RuntimeError):
    """Another node knows other memberships of the same line: one that was lost with its store."""


@dataclass(frozen=True)
class Vote:
    node: int
    line: Term
    """The newest store in which it has read all memberships."""
    generation: int
    """The newest membership that it knows."""
    settled: int
    """The newest generation that it knows to be valid for certain."""


@dataclass(frozen=True)
class Gathered:
    line: tuple[Membership, ...]
    """From the first on."""
    settled: int
    nodes: frozenset[int]
    """That have come, and have their numbers in this line."""

    @property
    def tail(self) -> tuple[Membership, ...]:
        return self.line[self.settled - FIRST_GENERATION :]


def term_text(term: Term) -> str:
    return json.dumps(term)


def term_of(store: Store) -> Term:
    if not store.check([TERM]):
        return FIRST_TERM
    number, node, address = json.loads(store.get(TERM))
    return number, node, address


def vote(store: Store, own: Vote, known: Sequence[Membership]) -> None:
    """`known`: from the first on. Raises `OtherLineError`."""
    for membership in known:
        key = _line_key(own.line, membership.generation)
        if Membership.from_json(store.compare_set(key, "", membership.to_json())) != membership:
            raise OtherLineError(f"another membership {membership.generation} is known")
    store.set(f"vote/{store.add('votes', 1)}", json.dumps(asdict(own)))


def gathered(store: Store, tolerate: int) -> Gathered | None:
    """What those that have come know; None: nobody has."""
    votes = _votes(store)
    if not votes:
        return None
    term, newest = max((each.line, each.generation) for each in votes)
    line = [_known(store, term, generation) for generation in range(FIRST_GENERATION, newest + 1)]
    settled = max(each.settled for each in votes if each.line == term)
    nodes = frozenset(each.node for each in votes if _has_number(store, each, line))
    while len(line) > 1 and line[-1].generation > settled:
        knowing = [each for each in votes if each.generation >= line[-1].generation]
        have = {each.node for each in knowing if _known(store, each.line, line[-1].generation) == line[-1]}
        if may_be_valid(line[-2], nodes - have, tolerate):
            break
        line.pop()  # Somebody proposed it who did not reach the others.
    return Gathered(tuple(line), settled, nodes)


def may_go_on(found: Gathered, tolerate: int) -> bool:
    return may_open(found.tail, found.nodes, tolerate)


def _has_number(store: Store, own: Vote, line: Sequence[Membership]) -> bool:
    """Whether it is the node that has its number in that line. A number that no membership of a lost store knew is
    given again by the next: two nodes may come with it, and must not be taken for one another."""
    first = next((membership for membership in line if own.node < membership.num_known), None)
    if first is None or own.generation < first.generation:
        return False
    return _known(store, own.line, first.generation) == first


def _line_key(line: Term, generation: int) -> str:
    return f"line/{line}/{generation}"


def _known(store: Store, line: Term, generation: int) -> Membership:
    return Membership.from_json(store.get(_line_key(line, generation)))


def _votes(store: Store) -> list[Vote]:
    votes = []
    for number in range(1, store.add("votes", 0) + 1):
        if store.check([f"vote/{number}"]):  # Its writer may have died in between.
            values = json.loads(store.get(f"vote/{number}"))
            votes.append(Vote(**{**values, "line": tuple(values["line"])}))
    return votes
