"""Messages that share network cards: what one transfer costs does not grow with those elsewhere."""

import pytest

from motet.simulator.event_loop import SharedCards, _Transfers


def rates_asked(monkeypatch, num_pairs):
    """Each of these pairs of nodes passes ten messages, two at a time; none shares a card with another pair."""
    asked = 0
    rate = _Transfers._rate

    def counted(self, transfer):
        nonlocal asked
        asked += 1
        return rate(self, transfer)

    monkeypatch.setattr(_Transfers, "_rate", counted)
    transfers = _Transfers(SharedCards(lambda rank: rank, 1))
    for pair in range(num_pairs):
        for i in range(2):
            transfers.start(0.0, 1.0 + pair / num_pairs, 2 * pair, 2 * pair + 1, 10 * pair + i)
    ends = []
    while transfers.next_end_s < float("inf"):
        now_s, i = transfers.pop()
        ends.append(now_s)
        if i % 10 + 2 < 10:
            transfers.start(now_s, 1.0 + (i // 10) / num_pairs, *(2 * (i // 10) + side for side in (0, 1)), i + 2)
    monkeypatch.undo()
    assert ends == sorted(ends)
    assert len(ends) == 10 * num_pairs
    # Two at a time at half the speed: ten messages take as long as one after the other.
    assert ends[-1] == pytest.approx(10 * (2 - 1 / num_pairs))
    return asked


def test_a_transfer_looks_only_at_those_that_share_an_end_with_it(monkeypatch):
    few, many = rates_asked(monkeypatch, 4), rates_asked(monkeypatch, 64)
    assert many == 16 * few


def test_of_transfers_that_end_together_the_first_in_the_program_comes_out_first():
    transfers = _Transfers(SharedCards(lambda rank: rank, 2))
    for i in (5, 3, 4):
        transfers.start(0.0, 1.0, 2 * i, 2 * i + 1, i)
    assert [transfers.pop() for _ in range(3)] == [(1.0, 3), (1.0, 4), (1.0, 5)]


def test_who_is_left_alone_goes_faster():
    transfers = _Transfers(SharedCards(lambda rank: rank, 1))
    transfers.start(0.0, 1.0, 0, 2, 0)
    transfers.start(0.0, 3.0, 1, 2, 1)  # Both enter node 2.
    transfers.start(1.0, 1.0, 3, 4, 2)
    assert transfers.pop() == (2.0, 0)
    assert transfers.pop() == (2.0, 2)
    assert transfers.pop() == (4.0, 1)
    assert transfers.next_end_s == float("inf")
