"""Encoder stages inside a tensor-parallel group equal the same stages alone."""

import pytest
import torch
from distributed import run_distributed
from sampling import in_campaigns
from test_encoder_stage import build_stages, compare_gradients, gradients, project_to_loss, run, setup
from tiny_encoders import BLOCKS, ENCODERS

from motet.parallel.tensor.tensor_collectives import gather_full
from motet.parallel.tensor.tensor_parallel import TensorParallel, apply_tensor_parallel, tp_reduce_gradients

CUT = (0, 3, BLOCKS + 2, BLOCKS + 3)


def compare(rank: int, sequence_parallel: bool, recompute: bool) -> None:
    tp = TensorParallel(None, rank, 2, sequence_parallel)
    for family in ENCODERS:
        module, features, samples = setup(family)
        alone, grouped = build_stages(module, CUT), build_stages(module, CUT, recompute=recompute)
        for stage in grouped:
            apply_tensor_parallel(stage, tp)
        outputs = [run(stages, features, samples) for stages in (alone, grouped)]
        for output in outputs:
            project_to_loss(output).backward()
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-10, atol=1e-10)
        found = {}
        for stage in grouped:
            tp_reduce_gradients(stage)
            for name, parameter in stage.named_parameters():
                shard = stage.tensor_parallel_layout.shards.get(name)
                found[name] = None if parameter.grad is None else gather_full(parameter.grad, shard, tp)
        compare_gradients(found, gradients(*alone), 1e-11)


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute"), [(False, False), (True, True), *in_campaigns([(False, True), (True, False)])]
)
def test_tensor_parallel_stages_equal_one_process(sequence_parallel, recompute):
    run_distributed(compare, 2, sequence_parallel, recompute)
