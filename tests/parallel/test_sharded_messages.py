"""Messages between tensor-parallel stages: each rank sends its share of the rows, as many bytes as plans are told."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from distributed import run_distributed
from one_process import check, check_together
from sampling import in_campaigns
from scenario import Scenario, ScenarioBatch

from motet.planner.from_run_file import iteration_costs
from motet.runtime.assembly import build_engine
from motet.runtime.communication.messages import Mailbox
from motet.schedule.lower import Message
from motet.schedule.routes import derive_routes

TP2 = Scenario(llm_pp=2, tp=2, placement="shared", encoder_pp=2, items="half")
SEQUENCE_PARALLEL = replace(TP2, sequence_parallel=True, schedule="zero_bubble_h1")
CASES = {
    "whole sequences": TP2,
    "sequence parallel": SEQUENCE_PARALLEL,
    "packed, recomputed": replace(SEQUENCE_PARALLEL, schedule="1f1b", packing=True, recompute=True),
    "stages on one group": replace(SEQUENCE_PARALLEL, llm_pp=3, llm_places=(0, 0, 1), schedule="interleaved_1f1b"),
    "embedding and head alone": replace(SEQUENCE_PARALLEL, llm_pp=3, llm_cuts=(1, 5), llm_places=(0, 1, 0)),
    "context parallel": replace(TP2, placement="parallel", llm_pp=1, encoder_pp=1, cp=2, sequence_parallel=True),
    "cross-attention": replace(SEQUENCE_PARALLEL, merge="cross_attention").consistent(),
    "experts": replace(SEQUENCE_PARALLEL, llm="mixtral", router_aux_loss=0.1),
}
USUAL = ("whole sequences", "sequence parallel")


def test_equals_one_process() -> None:
    check_together([CASES[name] for name in USUAL])


@pytest.mark.parametrize("name", in_campaigns(name for name in CASES if name not in USUAL))
def test_other_layouts_equal_one_process(name: str) -> None:
    check(CASES[name])


def sent_and_predicted(rank: int, scenarios: list[Scenario]) -> list[dict[Message, tuple[int, int]]]:
    """For each scenario, the bytes of each message that this rank sends, and those that costs say."""
    result = []
    for scenario in scenarios:
        config = scenario.config()
        plan = scenario.plan(config)
        engine = build_engine(config, plan, torch.device("cpu"))
        batch = ScenarioBatch(scenario, config)
        sent: dict[Message, int] = {}
        send = Mailbox.send

        def count(mailbox, message, tensor, *, answered, send=send, sent=sent):
            sent[message] = tensor.numel() * tensor.element_size()
            send(mailbox, message, tensor, answered=answered)

        with patch.object(Mailbox, "send", count):
            engine.run(batch)
        routes = derive_routes(plan, engine.assignment(batch.samples), batch.samples)
        costs = iteration_costs(config, plan)(routes, batch.samples)
        result.append({message: (size, costs.message_bytes(message)) for message, size in sent.items()})
    return result


LAYOUTS = [
    replace(TP2, dtype="float32"),
    replace(SEQUENCE_PARALLEL, dtype="float32"),
    replace(SEQUENCE_PARALLEL, dtype="bfloat16", packing=True),
]


def test_as_many_bytes_are_sent_as_predicted() -> None:
    by_rank = run_distributed(sent_and_predicted, 4, LAYOUTS, timeout=300)
    totals = []
    for messages in zip(*by_rank, strict=True):
        of_all = [sizes for of_rank in messages for sizes in of_rank.values()]
        assert len(of_all) > 10
        assert all(sent == predicted for sent, predicted in of_all)
        totals.append(sum(sent for sent, _ in of_all))
    whole, shares, half = totals
    assert whole == shares
    assert half < 0.55 * shares
