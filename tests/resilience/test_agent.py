"""What agents make of what they see."""

from motet.resilience.agent import NodeAgent
from motet.resilience.membership import Change, Membership


class Store:
    """Of two nodes that have been registered, and nothing else."""

    def add(self, key: str, amount: int) -> int:
        assert (key, amount) == ("nodes", 0)
        return 2


def changes_of(
    membership: Membership, *, how: str | None = None, silent: tuple[int, ...] = ()
) -> list[tuple[str, int]]:
    agent = NodeAgent(0, Store(), (), lambda membership, changes: membership, 1.0)  # type: ignore[arg-type]
    changes: list[Change] = agent._changes(0, membership, how, silent)
    return [(change.kind, change.node) for change in changes]


BOTH = Membership(generation=1, nodes=(0, 1), num_known=2, plan="")
ALONE = Membership(generation=2, nodes=(0,), num_known=2, plan="")


def test_a_silent_node_is_lost_once() -> None:
    """Whoever hears of its loss between looking and telling does not tell it again."""
    assert changes_of(BOTH, silent=(1,)) == [("lost", 1)]
    assert changes_of(ALONE, silent=(1,)) == []


def test_own_losses_and_new_nodes_are_told() -> None:
    assert changes_of(BOTH, how="process 0 was ended by SIGKILL") == [("lost", 0)]
    assert changes_of(Membership(generation=1, nodes=(0,), num_known=1, plan="")) == [("joined", 1)]
    assert changes_of(BOTH) == []
