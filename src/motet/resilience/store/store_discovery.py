"""Where a node agent looks for the store of a training whose store may move: at the addresses of the other nodes.

Each node names an address at which its machine would keep a store (standby.py). Whoever has lost the store for longer
than it takes to be started again looks for another one, in the order of the newest membership: the first node of it
that lives opens one, the others come there. If that does not happen within `TURN_S`, it is the next one's turn.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from motet.addresses import address_text
from motet.resilience.membership import Address, Store, standby_key
from motet.resilience.store.quorum import Term

TURN_S = 5.0
"""For a node to notice that the store is lost, a little later than another one does, and to open a new one."""
SILENT_GRACES = 3
"""Times `grace_s`."""


class Standby(Protocol):
    """The process on this machine that would keep a store."""

    @property
    def address(self) -> Address: ...

    @property
    def is_free(self) -> bool:
        """Nothing has been asked of it, or it has given up."""

    def begin(self, term: Term, run: bytes) -> None:
        """Opens a store, if enough nodes come to it."""


@dataclass
class Whereabouts:
    own: Standby | None
    grace_s: float
    """For a lost store to be started again where it was."""
    addresses: dict[int, Address] = field(default_factory=dict)
    """Of the nodes' standbys."""
    _silent_until: dict[Address, float] = field(default_factory=dict)
    """By `time.monotonic()`: where somebody listens, and does not answer, as on a machine that is stopped, is not asked
    again before."""
    _searching_since: float | None = None
    """By `time.monotonic()`."""

    def learn(self, store: Store, nodes: Sequence[int]) -> None:
        for node in nodes:
            if node not in self.addresses and store.check([standby_key(node)]):
                host, _, port = store.get(standby_key(node)).decode().rpartition(":")
                self.addresses[node] = host, int(port)

    def tell(self, store: Store, node: int) -> None:
        if self.own is not None:
            store.set(standby_key(node), address_text(self.own.address))

    def open_here(self, node: int, after: Term, run: bytes) -> None:
        """Has this machine's standby open a store of a later term, unless it is busy."""
        if self.own is not None and self.own.is_free:
            self.own.begin((after[0] + 1, node, address_text(self.own.address)), run)

    def note_silent(self, address: Address, waited_s: float) -> None:
        """`waited_s`: for an answer, in vain. Where nobody listens that is told at once."""
        if waited_s > 0.4 * self.grace_s:
            self._silent_until[address] = time.monotonic() + SILENT_GRACES * self.grace_s

    def _is_silent(self, address: Address) -> bool:
        return time.monotonic() < self._silent_until.get(address, 0.0)

    def found(self) -> None:
        """A store. The next search begins anew."""
        self._searching_since = None

    def others(self) -> list[Address]:
        own = None if self.own is None else self.own.address
        return [address for address in self.addresses.values() if address != own and not self._is_silent(address)]

    def places(self, nodes: Sequence[int], before: Address, away_s: float) -> Iterator[tuple[int | None, Address]]:
        """To look at, in their order, with the node whose standby is there (None: where the store was `before`), and
        only once it is its turn.

        `nodes`: of the newest membership. `away_s`: for how long there has been no store."""
        if not nodes or not self._is_silent(before):  # Without nodes there is nobody else to ask.
            yield None, before
        if away_s <= self.grace_s:
            return
        now = time.monotonic()
        if self._searching_since is None:
            self._searching_since = now
        addresses = {node: self.addresses[node] for node in nodes if node in self.addresses}
        known = [node for node, address in addresses.items() if address != before and not self._is_silent(address)]
        # The store's machine is probably lost.
        known.sort(key=lambda node: self.addresses[node][0] == before[0])
        for place, node in enumerate(known):
            if now - self._searching_since >= place * TURN_S:
                yield node, self.addresses[node]
