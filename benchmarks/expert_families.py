"""How fast does each family of mixtures train, with experts whole, cut by width, in a tensor-parallel group and over
replicas, with sequence parallelism and in two stages, on two processes?

All layouts of a family take turns, each a whole training step with its optimizer; losses and gradient norms of the
first step are compared with those of whole replicas. `motet verify` compares every gradient, in float64 and also on
four processes: `tests/runtime/verification/test_verify_experts.py`.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.measuring import measure_in_turn, ratio, seconds
from benchmarks.reporting import Report
from benchmarks.workloads import SyntheticBatch, language_model_config
from motet.cluster import cpu_cluster
from motet.config import RunConfig
from motet.costs.analytic import analytic_table
from motet.plan import Plan
from motet.planner.from_run_file import planning_problem
from motet.planner.layouts.layout import explicit_plan
from motet.planner.problem import Degrees
from motet.runtime.assembly import build_engine, build_optimizer
from motet.runtime.launch import launch

LLM = "language_model"
NUM_EXPERTS = 8
LAYOUTS: Mapping[str, Degrees] = {
    "whole, two replicas": Degrees(dp=2),
    "over replicas (b)": Degrees(dp=2, ep=2),
    "cut by width": Degrees(tp=2),
    "in the group (a)": Degrees(tp=2, ep=2),
    "(a), sequence parallel": Degrees(tp=2, ep=2, sequence_parallel=True),
    "whole, two stages": Degrees(pp=2),
}
WHOLE = next(iter(LAYOUTS))
CUT_ONLY = {"llama4": "its experts read all tokens, so their widths alone can be cut"}
"""Families whose experts are not distributed whole, and why."""
MOST_DIFFERENCE = 1e-4
"""Of losses and gradient norms in float32, relative."""


def families(width: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """By family, the class of its configuration, and values."""
    inner = 2 * width
    experts = {"num_experts_per_tok": 2, "head_dim": 32}
    shared = {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}
    return {
        "mixtral": ("MixtralConfig", {"num_local_experts": NUM_EXPERTS, **experts}),
        "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": NUM_EXPERTS, "moe_intermediate_size": inner, **experts}),
        "gpt_oss": ("GptOssConfig", {"num_local_experts": NUM_EXPERTS, **experts}),
        "deepseek_v3": (
            "DeepseekV3Config",
            {
                "num_experts_per_tok": 2,
                **shared,
                "moe_intermediate_size": inner,
                "n_group": 2,
                "topk_group": 1,
                "q_lora_rank": width // 2,
                "kv_lora_rank": width // 2,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 16,
                "v_head_dim": 32,
            },
        ),
        "glm4_moe": ("Glm4MoeConfig", {**experts, **shared, "moe_intermediate_size": inner}),
        "llama4": (
            "Llama4TextConfig",
            {
                "num_local_experts": NUM_EXPERTS,
                "intermediate_size_mlp": inner,
                "interleave_moe_layer_step": 1,
                **experts,
                "num_experts_per_tok": 1,
            },
        ),
    }


def measure(
    config: RunConfig, plans: Mapping[str, Plan], batch: SyntheticBatch, num_blocks: int, steps_per_block: int
) -> tuple[dict[str, list[list[float]]], dict[str, tuple[float, float]]]:
    """Seconds of training steps, in turns; loss and gradient norm of each layout's first one. Collective."""
    steps, first = {}, {}
    for name, plan in plans.items():
        engine = build_engine(config, plan, torch.device("cpu"))
        optimizer = build_optimizer(config, engine.model)
        result = engine.run(batch)
        first[name] = result.loss, result.gradient_norm

        def step(engine=engine, optimizer=optimizer) -> None:  # type: ignore[no-untyped-def]
            engine.model.zero_gradients()
            engine.run(batch)
            optimizer.step(0)

        steps[name] = step
    return measure_in_turn(steps, num_blocks=num_blocks, steps_per_block=steps_per_block), first


def plans_of(family: str, config: RunConfig, batch: SyntheticBatch, num_microbatches: int) -> dict[str, Plan]:
    """The plans of all layouts that the family has."""
    cluster = cpu_cluster(2)
    problem = planning_problem(config, batch.samples)
    table = analytic_table({LLM: problem.modules[LLM].workload}, cluster, tp_sizes=(1, 2))
    problem = replace(problem, cluster=cluster, table=table)
    return {
        name: explicit_plan(replace(problem, num_microbatches=num_microbatches // degrees.dp), {LLM: degrees})
        for name, degrees in LAYOUTS.items()
        if degrees.ep == 1 or family not in CUT_ONLY
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5, help="measured blocks of each layout")
    parser.add_argument("--steps", type=int, default=1, help="steps of one block")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of one sample")
    parser.add_argument("--only", default="", help="families whose names begin so")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    report = Report("expert-families", "Families of mixtures of experts under every layout of two processes")
    num_tokens = args.samples * args.tokens
    speeds, ratios, differences = [], [], []
    worst = 0.0
    for family, (config_class, values) in families(args.width).items():
        if not family.startswith(args.only):
            continue
        config = language_model_config(
            config_class,
            {**values, "intermediate_size": 2 * args.width},
            num_blocks=args.layers,
            width=args.width,
            num_samples=args.samples,
            num_microbatches=4,
        )
        batch = SyntheticBatch(config, num_samples=args.samples, num_text_tokens=args.tokens)
        plans = plans_of(family, config, batch, num_microbatches=4)
        blocks, first = launch(measure, config, plans, batch, args.blocks, args.steps, num_processes=2)
        loss, norm = first[WHOLE]
        differs = {
            name: max(abs(own_loss / loss - 1), abs(own_norm / norm - 1))
            for name, (own_loss, own_norm) in first.items()
        }
        worst = max(worst, *differs.values())
        speeds.append(
            (family, *(f"{num_tokens / seconds(blocks, n).median:.0f}" if n in plans else "-" for n in LAYOUTS))
        )
        ratios.append(
            (
                family,
                *(ratio(blocks, WHOLE, n).text(1, 2) if n in plans else "-" for n in LAYOUTS if n != WHOLE),
            )
        )
        differences.append((family, *(f"{differs[n]:.1e}" if n in plans else "-" for n in LAYOUTS if n != WHOLE)))
    report.add(
        f"{args.layers} blocks of width {args.width}, {NUM_EXPERTS} experts, two for each token (llama4: one); "
        f"{args.samples} samples of {args.tokens} tokens, float32, AdamW. {args.blocks} blocks of {args.steps} steps, "
        "in turns."
    )
    report.add("## Tokens per second, median")
    report.table(("family", *LAYOUTS), speeds)
    report.add("## Speed over that of whole replicas, median (quartiles)")
    report.table(("family", *(name for name in LAYOUTS if name != WHOLE)), ratios)
    report.add("## Largest relative difference of loss and gradient norm to whole replicas")
    report.table(("family", *(name for name in LAYOUTS if name != WHOLE)), differences)
    report.goal(f"equal within {MOST_DIFFERENCE:.0e}", worst <= MOST_DIFFERENCE, f"{worst:.1e}")
    report.add("Not possible: " + "; ".join(f"{family}: {why}" for family, why in CUT_ONLY.items()) + ".")
    return report


if __name__ == "__main__":
    main().write()
