"""Optimus' published tables beside ours (Feng et al. 2025). Kernels and constants: `papers.optimus.model`;
Tables 4 and 10: `papers.optimus.alpa_comparison`; Figures 15 and 16: `papers.optimus.figures`."""

from collections.abc import Sequence

from motet.planner.optimus.bubbles import schedule_bubbles
from papers.optimus import published as paper
from papers.optimus.alpa_comparison import table_10, table_10_alpa, table_10_interleaved
from papers.optimus.figures import figures
from papers.optimus.model import (
    ALL_GATHER_SHARE,
    BALANCED,
    KERNELS,
    WITHOUT_COLLECTIVES,
    balanced,
    balanced_s,
    coarse_efficiency,
    encoder_layouts,
    encoder_pipelines,
    first_stage_s,
    fit_bubble_width,
    fit_constants,
    layers_moved_s,
    optimus,
    optimus_llm,
    parameters,
    strong_scaling,
)
from papers.optimus.problems import problems
from papers.tables import Row, Table

__all__ = ["problems", "tables"]


def tables() -> Sequence[Table]:
    """All tables. Which encoder layout Table 7's narrow rows are for, and how Table 5 and Figures 15 and 16 are to be
    read, was chosen after ours had been held against the published numbers."""
    return [
        table_1(),
        table_7(),
        table_7_narrow().informed(),
        table_5().informed(),
        table_5_megatron().informed(),
        *(figure.informed() for figure in figures()),
        table_10(),
        table_10_interleaved(),
        table_10_alpa(),
    ]


# Table 1 --------------------------------------------------------------------------------------------------------------


def table_1() -> Table:
    constants, case = fit_constants(), strong_scaling(paper.TABLE_5[-1].num_microbatches)
    timeline = balanced(case, constants)
    count = len(timeline.slots)
    reduction_s = constants.reduction_s_per_parameter * parameters((*case.encoders, case.llm)) / (case.pp * case.tp)
    gather_s = reduction_s * case.reduced_share * ALL_GATHER_SHARE
    scatter_s = reduction_s * case.reduced_share - gather_s
    inside = [slot for slots in timeline.slots for slot in slots[1:-1]]
    ours = {
        "DP all-gather": gather_s,
        "DP reduce-scatter": scatter_s,
        "PP warm-up": sum(slots[0].end_s - gather_s for slots in timeline.slots) / count,
        "PP cool-down": sum(slots[-1].end_s - slots[-1].start_s - scatter_s for slots in timeline.slots) / count,
        "PP other": sum(slot.end_s - slot.start_s for slot in inside if not slot.is_tensor_parallel) / count,
        "TP": sum(slot.end_s - slot.start_s for slot in inside if slot.is_tensor_parallel) / count,
    }
    return Table(
        "Table 1: idle time of a step (% of the step)",
        tuple(
            Row(
                f"{cause} bubbles",
                percent,
                100 * ours[cause] / timeline.iteration_s,
                f"all-gather against reduce-scatter: this table; {BALANCED}",
                # What data parallelism takes is divided between the two as these cells are.
                not cause.startswith("DP "),
                f"ViT-22B + GPT-175B on {paper.TABLE_5[-1].gpus} GPUs, Megatron-LM balanced; mean over the stages",
            )
            for cause, (percent, _) in paper.TABLE_1.items()
        ),
        "The paper measured an internal task with more optimizations; its percentages and seconds disagree (0.291 s of "
        "5.12 s are 5.7%, not 5.0%). Ours has the same causes in other shares: all that Table 5's balanced rows take "
        "beside their microbatches counts as data parallelism, and its first virtual stages, of ViT layers alone, are "
        "soon filled and drained.",
    )


# Table 7 --------------------------------------------------------------------------------------------------------------


def table_7() -> Table:
    constants = fit_constants()
    width_s = fit_bubble_width(constants)
    measured_s = paper.ALL_GATHER_S + paper.REDUCE_SCATTER_S
    rows = []
    for row in paper.TABLE_7:
        case = strong_scaling(row.num_microbatches)
        fitted = f"width of the big bubbles: Eff_coarse with {paper.TABLE_7[0].num_microbatches} microbatches"
        rows.append(
            Row(
                f"Eff_coarse, {row.num_microbatches} microbatches",
                row.coarse,
                coarse_efficiency(case, constants, width_s),
                f"{fitted}; {BALANCED}",
                row is not paper.TABLE_7[0],
                f"encoder PP 1, TP 8; {KERNELS}",
            )
        )
        found = optimus(case, constants, optimus_llm(case, constants, reduction_s=width_s))
        rows.append(
            Row(
                f"Eff_fine, {row.num_microbatches} microbatches",
                row.fine,
                found.schedule.efficiency,
                f"{fitted}; {BALANCED}",
                True,
                f"best of {len(encoder_layouts(case))} encoder layouts that fit: PP {found.pp}, TP {found.tp}",
            )
        )
    return Table(
        "Table 7: share of the encoder's computation inside the language model's bubbles",
        tuple(rows),
        "Eff_fine is an efficiency, not a prediction: ours should be at least the published one, and the error counts "
        "what is better. Eff_coarse is 11 / microbatches, cut after one decimal. The width that this takes, "
        f"{width_s:.3f} s of all-gather and reduce-scatter, contradicts Table 1's {measured_s:.3f} s, with which "
        f"Eff_coarse at 32 microbatches is {coarse_efficiency(strong_scaling(32), constants, measured_s):.0%} for the "
        "kernel times of section 2.3. The paper's run times are 322, 90 and 15 s; benchmarks/planners.py has ours.",
    )


def table_7_narrow() -> Table:
    """The paper does not say which encoder layout its rows are for."""
    constants = fit_constants()
    width_s = fit_bubble_width(constants)
    rows = []
    for row in paper.TABLE_7:
        case = strong_scaling(row.num_microbatches)
        timeline = optimus_llm(case, constants, reduction_s=width_s)
        schedule = schedule_bubbles(timeline, encoder_pipelines(case, 1, 4, constants, reduces=False))
        rows.append(
            Row(
                f"Eff_fine, {row.num_microbatches} microbatches",
                row.fine,
                schedule.efficiency,
                "as above",
                True,
                "encoder PP 1, TP 4: picked because it comes closest",
            )
        )
    return Table(
        "Table 7 again, the encoder at half the tensor parallelism",
        tuple(rows),
        "Kernels of twice the length leave more of each 300 us bubble empty: that alone brings Eff_fine to about the "
        "published.",
    )


# Table 5 --------------------------------------------------------------------------------------------------------------


def table_5() -> Table:
    constants = fit_constants()
    rows = []
    for row in paper.TABLE_5:
        case = strong_scaling(row.num_microbatches)
        rows.append(
            Row(
                f"Megatron-LM balanced, {row.gpus} GPUs (s)",
                row.balanced_s,
                balanced_s(case, constants),
                BALANCED,
                False,
                f"stages cut by FLOPs, of equally good cuts the first that appendix B's recursion meets; {KERNELS}",
            )
        )
        found = optimus(case, constants)
        rows.append(
            Row(
                f"Optimus, {row.gpus} GPUs (s)",
                row.optimus_s,
                found.schedule.iteration_s,
                BALANCED,
                True,
                f"encoder PP {found.pp}, TP {found.tp}, {found.schedule.efficiency:.0%} of it in bubbles; "
                f"{WITHOUT_COLLECTIVES}",
            )
        )
    return Table(
        "Table 5: iteration of ViT-22B + GPT-175B, global batch 1536",
        tuple(rows),
        "Optimus' rows are proportional to the microbatches (0.306, 0.304, 0.304 s each), 8% steeper than the balanced "
        "ones (0.285 s), with nothing left over for data parallelism; filling bubbles can only make both smaller. So "
        "ours is too low with many microbatches and too high with few. What it saves over balanced grows from 0.63 to "
        "1.00 s while the share of the encoder in bubbles times microbatches (Table 7) falls from 18.4 to 13.6. "
        "The TFLOP/s count recomputation (Megatron-LM's formula with 2048 tokens in each model gives them within 1%).",
    )


def table_5_megatron() -> Table:
    constants = fit_constants()
    readings = (
        ("all encoders in the first of 8 stages, GPT evenly (section 5.1)", first_stage_s),
        ("as many GPT layers moved to later stages as balances 8 stages", layers_moved_s),
    )
    return Table(
        "Table 5: Megatron-LM, two readings",
        tuple(
            Row(
                f"Megatron-LM, {row.gpus} GPUs (s)",
                row.megatron_s,
                of_case(strong_scaling(row.num_microbatches), constants),
                BALANCED,
                True,
                f"{reading}; 1F1B without interleaving (Table 12 gives no V)",
            )
            for reading, of_case in readings
            for row in paper.TABLE_5
        ),
        "No reading of the text gives these rows, 0.7 to 2.5% above the balanced ones: 48 ViT layers weigh as much "
        "as 8 GPT layers, and without interleaving seven stage fills alone exceed what the rows leave beside "
        "0.296 s a microbatch (1.17 s). GPT on seven of the eight stages, encoders alone on the first, would make "
        "0.295 s a microbatch (14 layers), but fills just as long.",
    )
