"""Blocks as wide as a 7B model's under each kind of attention of packed samples, of recomputation, with fused kernels,
in float8, and compiled.

For each variant: seconds of a forward and a backward, bytes that the forward leaves on the device against what costs
predict, the host's bytes of what is offloaded, how much the gradients differ from the first variant's, and
compilations. Fails if a variant fails or its gradients differ by more than the noise of bfloat16 or float8. Rehearsals
on CPUs compute in float16: Triton's interpreter knows no products of matrices in bfloat16.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "cuda" not in sys.argv:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Read when Triton is imported.

import torch
from torch._dynamo.utils import counters

import motet  # noqa: F401 (before transformers: it makes torchvision's wheels importable without CUDA)
from benchmarks.gpu.models import TINY, WIDE
from motet.assignment.sample import Sample, Segment
from motet.costs.cost_model import microbatch_load
from motet.costs.memory import MemoryOptions, saved_layer_bytes
from motet.families.capabilities import packed_by_sample
from motet.models.multimodal import MultimodalModule
from motet.models.stages.stage import StageInput
from motet.parallel.main_gradients import keep_main_gradients
from motet.parallel.saved_tensors import save_less
from motet.parallel.split_backward import make_splittable
from motet.parallel.tensor.tensor_collectives import TensorParallel
from motet.plan import LANGUAGE_MODEL
from motet.runtime.assembly import make_stage

MEMORY = MemoryOptions(parameter_bytes=2, activation_bytes=2, gradient_bytes=4, optimizer_bytes=12, saves_less=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "sdpa": {"attention": "sdpa"},
    "varlen": {},
    "motet": {"attention": "motet"},
    "blocks": {"recompute": "blocks"},
    "attention": {"recompute": "attention"},
    "every_2": {"recompute": "every_2"},
    "offload": {"recompute": "offload"},
    "fused kernels": {"fuses": True},
    "float8": {"uses_float8": True},
    "float8, compiled": {"uses_float8": True, "compiles": True},
    "compiled": {"compiles": True},
    "compiled, blocks": {"compiles": True, "recompute": "blocks"},
}
REPETITIONS = 5
MOST_DIFFERENT = 0.03
"""Largest relative difference of gradients in bfloat16."""
MOST_DIFFERENT_IN_FLOAT8 = 0.2
"""Each factor is rounded by 2^-4 at most; the noise of a few blocks adds up."""


def lengths_of(tiny: bool, number: int) -> tuple[int, ...]:
    """Lengths of packed samples, others in each repetition."""
    base = (24, 7, 40, 13) if tiny else (1536, 420, 3072, 811, 1200, 1153)
    return tuple(length + 8 * number for length in base)


def measure(
    device: torch.device,
    tiny: bool,
    reference: list[torch.Tensor] | None,
    *,
    attention: str = "varlen",
    recompute: str | None = None,
    compiles: bool = False,
    fuses: bool = False,
    uses_float8: bool = False,
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float16
    config = LlamaConfig(**(TINY if tiny else WIDE)["language_model"])
    gc.collect()  # What was measured before holds its memory in cycles.
    if on_gpu:
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    torch.set_default_dtype(dtype)
    with device:
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    layers = (1, 1 + config.num_hidden_layers)
    stage: Any = make_stage(
        MultimodalModule({}, model).nodes[LANGUAGE_MODEL],
        layers,
        TensorParallel(None, 0, 1),
        device,
        packing=True,
        recompute=recompute,
        packed_attention=attention,
        compile_backend=("inductor" if on_gpu else "aot_eager") if compiles else None,
        fuses_kernels=fuses,
        uses_float8=uses_float8,
    )
    del model
    make_splittable(stage)
    keep_main_gradients(stage.parameters())
    stage.train()

    def run(number: int, after_forward: Callable[[], None] = lambda: None) -> float:
        samples = samples_of(number)
        generator = torch.Generator().manual_seed(number)
        hidden = torch.randn(stage.input_shape(samples), generator=generator).to(device, dtype)
        hidden.requires_grad_()
        synchronize(device)
        begin = time.perf_counter()
        with save_less(dtype):
            output = stage(StageInput(samples, [{} for _ in samples], hidden)).hidden
        after_forward()
        torch.autograd.backward([output], [torch.ones_like(output)])
        synchronize(device)
        return time.perf_counter() - begin

    def samples_of(number: int) -> list[Sample]:
        return [
            Sample(str(i), {LANGUAGE_MODEL: (Segment(length),)}) for i, length in enumerate(lengths_of(tiny, number))
        ]

    first_s = run(0)
    gradients = [parameter.grad.clone() for parameter in stage.parameters() if parameter.grad is not None][:9]
    graphs = counters["stats"]["unique_graphs"]
    run(1)
    begin = allocated(device)
    saved: list[int] = []
    run(1, lambda: saved.append(allocated(device) - begin))
    seconds = sorted(run(2 + i) for i in range(REPETITIONS))[REPETITIONS // 2]
    different = max(
        (float((a - b).norm() / b.norm()) for a, b in zip(gradients, reference or gradients, strict=True)), default=0.0
    )
    if not different <= (MOST_DIFFERENT_IN_FLOAT8 if uses_float8 else MOST_DIFFERENT):
        raise SystemExit(f"gradients differ by {different:.2%}")
    samples = samples_of(1)
    num_boundary_bytes = 2 * sum(lengths_of(tiny, 1)) * config.hidden_size
    result = {
        "seconds": seconds,
        "first_s": first_s,
        # Without the output; the input, which the first block saves, is there even where it is offloaded.
        "saved_bytes": saved[0] - num_boundary_bytes if on_gpu else None,
        "predicted_bytes": predicted_bytes(stage, samples, attention, recompute, layers)
        + num_boundary_bytes * (recompute == "offload"),
        "gradient_difference": different,
        "graphs": graphs,
        "graphs_of_more_lengths": counters["stats"]["unique_graphs"] - graphs,
    }
    return result, gradients


def predicted_bytes(
    stage: Any, samples: list[Sample], attention: str, recompute: str | None, layers: tuple[int, int]
) -> int:
    from motet.families.shape_reading.module_shapes import module_workload

    shape = module_workload(stage.module.config, role="language_model", packing=True)
    workload = packed_by_sample(shape, attention).treated(recompute)
    load = microbatch_load(workload, LANGUAGE_MODEL, samples)
    return sum(
        saved_layer_bytes(layer, load, input_gradient=True, weight_gradient=True, tp_size=1, options=MEMORY)
        for layer in workload.layers[slice(*layers)]
    )


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _interpret_kernels() -> None:
    sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
    from interpreted_liger import interpret_liger

    interpret_liger()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cpu":
        _interpret_kernels()
    results: dict[str, Any] = {}
    failed = False
    reference: list[torch.Tensor] | None = None
    for name in args.only:
        try:
            results[name], gradients = measure(device, args.tiny, reference, **VARIANTS[name])
            reference = reference or gradients
        except (Exception, SystemExit) as error:  # The other variants are measured, too.
            failed, results[name] = True, {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(results), flush=True)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
