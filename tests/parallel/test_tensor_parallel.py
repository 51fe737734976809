import copy
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from sampling import in_campaigns
from tiny_configs import EVERY_MODEL
from tiny_language_models import MIXTURES
from torch import nn
from tp_cases import CASES, VISION, Case, llama, run_text, run_vision
from tp_compare import largest_error
from transformers import SiglipVisionConfig, SiglipVisionModel

from motet.assignment.sample import Sample, Segment
from motet.costs.cost_model import microbatch_load
from motet.costs.kernels import layer_kernels
from motet.families.capabilities import SHOWN_EQUAL, WITH_OTHER_MASKS
from motet.families.classes import MODEL_CLASSES
from motet.families.shape_reading.module_shapes import module_workload
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import StageInput
from motet.parallel.split_backward import make_splittable
from motet.parallel.tensor.tensor_collectives import gather_full
from motet.parallel.tensor.tensor_cuts import tensor_cuts
from motet.parallel.tensor.tensor_parallel import (
    RowLinear,
    TensorParallel,
    apply_tensor_parallel,
    partial_gradient_parameters,
    tensor_parallel_layout,
    tp_reduce_gradients,
)

MODES = (False, True)
"""Sequence parallelism off and on."""
SEQUENCE = Sample("a", {"m": (Segment(8),)})


def tolerance(case: Case, dtype: torch.dtype) -> float:
    if dtype == torch.float32:
        return 1e-5  # The gradient of a key's bias is zero but for rounding.
    return 1e-6 if case.family == "gemma3_text" else 1e-12  # Gemma's norms compute in float32 whatever they get.


def assert_equal(rank: int, size: int, cases: list[Case], dtype: torch.dtype = torch.float64, **options: Any) -> None:
    for case in cases:
        for sequence_parallel in MODES:
            error, where = largest_error(
                case, TensorParallel(None, rank, size, sequence_parallel), dtype=dtype, **options
            )
            assert error <= tolerance(case, dtype), (case.family, sequence_parallel, where, error)


def test_every_family_has_a_case() -> None:
    """Of language models, those that the project's tests show equal; mixtures have tests of their own (experts)."""
    known = {**MODEL_CLASSES, "language_model": set(SHOWN_EQUAL) - MIXTURES.keys() - WITH_OTHER_MASKS}
    assert {case.family for case in CASES} == {family for families in known.values() for family in families}


@pytest.mark.parametrize("dtype", [torch.float64, *in_campaigns([torch.float32])])
def test_families_equal_one_process(dtype: torch.dtype) -> None:
    run_distributed(assert_equal, 2, 2, CASES, dtype)


def test_four_ranks_equal_one_process() -> None:
    # Sequences of 5 and 9 over 4 ranks: some ranks hold nothing but padding.
    run_distributed(
        assert_equal,
        4,
        4,
        [
            Case("llama", lambda: llama(num_key_value_heads=4, attention_bias=True), run_text),
            *(case for case in CASES if case.family in ("qwen2_5_vl_vision", "whisper", "siglip_vision_model")),
        ],
    )


def test_single_token() -> None:
    run_distributed(assert_equal, 2, 2, [Case("llama", llama, lambda model: run_text(model, num_tokens=1))])


def freeze_linears(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.requires_grad_(False)


def freeze_first_layer(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".0." not in name and (".1." in name or "norm" in name))


def freeze_norms(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)


@pytest.mark.parametrize("freeze", [freeze_linears, freeze_norms, *in_campaigns([freeze_first_layer])])
def test_frozen_subsets(freeze: Any) -> None:
    families = ("llama", "qwen3", "siglip_vision_model", "mllama_text_model")
    cases = [case for case in CASES if case.family in families]
    run_distributed(lambda rank: assert_equal(rank, 2, cases, prepare=freeze), 2)


@pytest.mark.campaign
def test_checkpointing_equals() -> None:
    def checkpoint(model: nn.Module) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]

    run_distributed(lambda rank: assert_equal(rank, 2, CASES, prepare=checkpoint), 2)


def test_bfloat16_autocast() -> None:
    """Rounding to 8 bits explains a few percent; a wrong sum over the group would be a multiple."""

    def autocast() -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16)

    def compare(rank: int) -> None:
        for case in CASES:
            if case.family in ("llama", "phi3", "pixtral"):
                for sequence_parallel in MODES:
                    tp = TensorParallel(None, rank, 2, sequence_parallel)
                    error, where = largest_error(case, tp, dtype=torch.float32, context=autocast)
                    assert error < 0.1, (case.family, where, error)

    run_distributed(compare, 2)


def counted_bytes(sequence_parallel: bool, dtype: str, rank: int) -> dict[str, Counter[str]]:
    """Of a stage of two blocks, by pass and collective: bytes of one rank's whole tensors."""
    config, model_class = EVERY_MODEL["llama"]
    config = copy.deepcopy(config)
    config._attn_implementation = "sdpa"
    stage = LanguageModelStage("m", model_class(config), (1, 3))
    apply_tensor_parallel(stage, TensorParallel(None, rank, 2, sequence_parallel))
    make_splittable(stage)
    hidden = torch.randn(stage.input_shape([SEQUENCE]), requires_grad=True)
    counts: Counter[str] = Counter()

    def count(name: str, whole: int) -> Any:
        real = getattr(dist, name)

        def call(*tensors: Any, **options: Any) -> Any:
            counts[name.removesuffix("_single")] += tensors[whole].nbytes
            return real(*tensors, **options)

        return patch.object(dist, name, call)

    with count("all_reduce", 0), count("all_gather_single", 0), count("reduce_scatter_single", 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            output = stage(StageInput([SEQUENCE], [{}], hidden)).hidden
        forward, _ = counts.copy(), counts.clear()
        output.sum().backward()
    return {"forward": forward, "backward": counts}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_costs_count_the_bytes_that_are_sent(sequence_parallel: bool, dtype: str) -> None:
    """A stage's own gather at its end, and that of its input's gradient, are no layer's."""
    measured = run_distributed(lambda rank: counted_bytes(sequence_parallel, dtype, rank), 2)[0]
    workload = module_workload(EVERY_MODEL["llama"][0])
    load = microbatch_load(workload, "m", [SEQUENCE])
    element_bytes = {"float32": 4, "bfloat16": 2}[dtype]
    sizes = {"tp_size": 2, "sequence_parallel": sequence_parallel}
    for direction in ("forward", "backward"):
        expected: Counter[str] = Counter()
        for layer in workload.layers[1:3]:
            kernels = layer_kernels(layer, **sizes, element_bytes=element_bytes, residual_bytes=4)
            for shape in kernels.forward if direction == "forward" else kernels.input_gradient:
                if shape.collective is not None:
                    expected[shape.collective] += round(shape.at(load).num_bytes)
        if sequence_parallel:
            expected["all_gather"] += SEQUENCE.num_tokens("m") * 64 * 4
        assert measured[direction] == expected


class Stages(nn.Module):
    """Two halves of a SigLIP, each with the other's layers replaced by pass-throughs."""

    def __init__(self, tp: TensorParallel, family: str, case: Case) -> None:
        super().__init__()
        self.halves = nn.ModuleList()
        for mine in (0, 1):
            model: Any = case.model()
            model.encoder.layers[1 - mine] = nn.Identity()
            apply_tensor_parallel(model, tp)
            self.halves.append(model)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        first: Any = self.halves[0]
        last: Any = self.halves[1]
        hidden = first.encoder.layers[0](first.embeddings(pixels), None)
        assert hidden.shape[-2] == 9  # stages exchange whole sequences
        return last.post_layernorm(last.encoder.layers[1](hidden, None))


def test_stages_without_the_others_layers() -> None:
    case = Case("siglip_vision_model", lambda: SiglipVisionModel(SiglipVisionConfig(**VISION)), run_vision)

    def compare(rank: int, sequence_parallel: bool) -> None:
        tp = TensorParallel(None, rank, 2, sequence_parallel)
        stages = Stages(tp, case.family, case)
        pixels = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        whole: Any = case.model()
        weights = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (whole(pixel_values=pixels).last_hidden_state * weights).sum().backward()
        (stages(pixels) * weights).sum().backward()
        for index, half in enumerate(stages.halves):
            tp_reduce_gradients(half)
            layout = tensor_parallel_layout(half)
            assert layout is not None
            name = f"encoder.layers.{index}."
            assert all(key.startswith(name) for key in (*layout.shards, *layout.partial_gradients))
            for key, parameter in half.named_parameters():
                if key.startswith(name):
                    gradient = gather_full(parameter.grad, layout.shards.get(key), tp)
                    torch.testing.assert_close(gradient, whole.get_parameter(key).grad, rtol=1e-10, atol=1e-10)

    for sequence_parallel in MODES:
        run_distributed(compare, 2, sequence_parallel)


def test_partial_gradients_are_named() -> None:
    def names(rank: int) -> list[tuple[str, ...]]:
        result = []
        for family in ("llama", "qwen3", "whisper"):
            for sequence_parallel in MODES:
                case = next(case for case in CASES if case.family == family)
                model = case.model()
                apply_tensor_parallel(model, TensorParallel(None, rank, 2, sequence_parallel))
                result.append(partial_gradient_parameters(model))
        return result

    plain_llama, llama_shared, plain_qwen3, qwen3_shared, plain_whisper, whisper_shared = run_distributed(names, 1)[0]
    assert plain_llama == plain_whisper == ()
    assert "model.layers.1.input_layernorm.weight" in llama_shared
    assert "model.layers.0.self_attn.o_proj.bias" in llama_shared
    assert "model.layers.0.self_attn.q_proj.bias" not in llama_shared
    assert "model.norm.weight" not in llama_shared  # after the last layer the sequence is whole again
    assert plain_qwen3 == tuple(f"model.layers.{i}.self_attn.{n}_norm.weight" for i in (0, 1) for n in "qk")
    assert {*plain_qwen3, "model.layers.0.input_layernorm.weight"} < set(qwen3_shared)
    assert {name.rpartition(".")[0] for name in whisper_shared} == {
        f"layers.{i}.{part}"
        for i in (0, 1)
        for part in ("self_attn_layer_norm", "final_layer_norm", "self_attn.out_proj", "fc2")
    }


def test_missing_gradients_count_as_zero() -> None:
    def reduce(rank: int) -> float:
        model: Any = llama()
        apply_tensor_parallel(model, TensorParallel(None, rank, 2, sequence_parallel=True))
        norm = model.model.layers[0].input_layernorm.weight
        if rank == 1:  # Only one member has seen a gradient: the others still take part.
            norm.grad = torch.ones_like(norm)
        tp_reduce_gradients(model)
        return norm.grad.sum().item()

    assert run_distributed(reduce, 2) == [32.0, 32.0]


def test_every_linear_of_the_layers_is_cut() -> None:
    def cut(rank: int) -> None:
        for case in CASES:
            model = case.model()
            blocks = tensor_cuts(model).blocks
            whole = {name: parameter.shape for name, parameter in model.named_parameters()}
            layout = apply_tensor_parallel(model, TensorParallel(None, rank, 2))
            for name, module in model.named_modules():
                if isinstance(module, nn.Linear) and name.startswith(tuple(f"{block}." for block in blocks)):
                    assert module.weight.numel() * 2 == whole[f"{name}.weight"].numel(), (case.family, name)
                    assert isinstance(module, RowLinear) == (layout.shards[f"{name}.weight"].dim == 1)
                    assert module.weight.shape == (module.out_features, module.in_features)

    run_distributed(cut, 1)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="tp_size: 4 does not divide num_key_value_heads 2; use 1 or 2"):
        apply_tensor_parallel(llama(), TensorParallel(None, 0, 4))


def test_tied_embeddings_stay_tied_and_vocabulary_is_cut() -> None:
    model: Any = llama(tie_word_embeddings=True)
    layout = apply_tensor_parallel(model, TensorParallel(None, 1, 2))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (24, 32)
    assert {"model.embed_tokens.weight", "lm_head.weight"} < set(layout.shards)


def test_cut_on_meta() -> None:
    with torch.device("meta"):
        model: Any = llama()
    apply_tensor_parallel(model, TensorParallel(None, 1, 2))
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert weight.is_meta
    assert weight.shape == (16, 32)
