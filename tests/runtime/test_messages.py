"""The mailbox: what stays here, what is sent and when its buffer goes, and that nothing is lost."""

from collections.abc import Mapping
from datetime import timedelta

import pytest
import torch
from distributed import run_distributed
from torch import Tensor

from motet.errors import UserError
from motet.runtime.communication import messages
from motet.runtime.communication.deadline import Deadline
from motet.runtime.communication.messages import Carried, Mailbox, addresses_of
from motet.schedule.communicators import Link
from motet.schedule.dependencies import Activation, Gradient
from motet.schedule.lower import Message
from motet.schedule.routes import Cell

CPU = torch.device("cpu")
LINKS = {Link(*pair, gradient): None for pair in ((0, 1), (1, 0)) for gradient in (False, True)}
HERE, THERE = Cell("llm", 0, 0, 0), Cell("llm", 0, 1, 0)


def mailbox(
    uses: Mapping[Carried, int] | None = None, tags: Mapping[Message, int] | None = None, rank: int = 0
) -> Mailbox:
    deadline = Deadline(timedelta(seconds=10))
    deadline.start()
    return Mailbox(addresses_of(rank, tags or {}, LINKS), uses or {}, deadline)


def test_keeps_a_value_until_its_last_use() -> None:
    value, tensor = Activation(HERE, THERE), torch.ones(2)
    box = mailbox({value: 2})
    box.put(value, tensor)
    assert box.awaited(value) == []
    assert box.use(value) is tensor
    assert box.is_needed(value)
    assert box.use(value) is tensor
    assert not box.is_needed(value)
    box.finish()


def test_does_not_keep_what_nobody_here_needs() -> None:
    """An activation and the gradient that comes back on its route are two values."""
    box = mailbox({Gradient(HERE, THERE): 1})
    box.put(Activation(HERE, THERE), torch.ones(2))
    box.finish()


def test_what_is_left_over_is_a_mistake_of_ours() -> None:
    value = Activation(HERE, THERE)
    box = mailbox({value: 1})
    box.put(value, torch.ones(2))
    with pytest.raises(AssertionError, match="made but never used"):
        box.finish()


def message(microbatch: int, *, gradient: bool = False) -> Message:
    """From rank 0 to rank 1, or the gradient back."""
    source, target = Cell("llm", 0, 0, microbatch), Cell("llm", 0, 1, microbatch)
    return Message(source, target, gradient, *((1, 0) if gradient else (0, 1)))


def test_messages_are_told_apart_by_their_tags() -> None:
    """Received in another order than sent."""
    sent = [message(i) for i in range(3)]

    def work(rank: int) -> list[float]:
        tags = {message: tag for tag, message in enumerate(sent)}
        box = mailbox({m.value: 1 for m in sent} if rank == 0 else {}, tags, rank)
        got: list[Tensor] = []
        if rank == 0:
            for i, m in enumerate(sent):
                box.put(m.value, torch.full((2,), float(i)))
                box.send(m, box.use(m.value), answered=False)
        else:
            for m in reversed(sent):
                box.receive(m, m.value, (2,), torch.float32, CPU)
            assert [box.awaited(m.value) for m in sent] == [[m] for m in sent]
            got = [tensor for m in sent for tensor in box.take(m.value)]
            assert not any(box.awaited(m.value) for m in sent)
        box.finish()
        return [tensor[0].item() for tensor in got]

    assert run_distributed(work, 2) == [[], [0.0, 1.0, 2.0]]


def test_few_unanswered_sends_keep_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_UNANSWERED_SENDS", 2)
    sent = [message(i) for i in range(6)]

    def work(rank: int) -> int:
        tags = {message: tag for tag, message in enumerate(sent)}
        box = mailbox({m.value: 1 for m in sent} if rank == 0 else {}, tags, rank)
        most = 0
        for i, m in enumerate(sent):
            if rank == 0:
                box.put(m.value, torch.full((2,), float(i)))
                box.send(m, box.use(m.value), answered=False)
                most = max(most, len(box._unanswered))
            else:
                box.receive(m, m.value, (2,), torch.float32, CPU)
                assert box.take(m.value)[0][0].item() == i
        box.finish()
        return most

    assert run_distributed(work, 2)[0] == 2


def test_an_answered_send_is_let_go_after_its_backward() -> None:
    there, back = message(0), message(0, gradient=True)

    def work(rank: int) -> bool:
        tags = {there: 0, back: 1}
        box = mailbox({(there if rank == 0 else back).value: 1}, tags, rank)
        if rank == 0:
            box.put(there.value, torch.ones(2))
            box.send(there, box.use(there.value), answered=True)
            box.receive(back, back.value, (2,), torch.float32, CPU)
            assert box.take(back.value)[0].tolist() == [5.0, 5.0]
            kept = bool(box._answered)
            box.release(there.source)
            assert not box._answered
        else:
            box.receive(there, there.value, (2,), torch.float32, CPU)
            box.put(back.value, 5 * box.take(there.value)[0])
            box.send(back, box.use(back.value), answered=False)
            kept = True
        box.finish()
        return kept

    assert run_distributed(work, 2) == [True, True]


def test_addresses_name_peer_communicator_and_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    there, back = message(0), message(0, gradient=True)
    monkeypatch.setattr(messages, "pairs_by_tag", lambda: False)
    assert addresses_of(0, {there: 4, back: 7}, LINKS) == {there: ((1,), None, 4), back: ((1,), None, 7)}
    with pytest.raises(UserError, match="rank 0 would send to rank 1, which have different shares"):
        addresses_of(0, {there: 4}, {})
