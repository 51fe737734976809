"""DistTrain's Figures 15-20 and 22 beside ours: MFU and throughput of its orchestration against Megatron-LM.

The figures' bars carry no numbers; what is published are the ranges in the text of section 8. Ours come from the closed
form that the planner itself minimizes (`motet.planner.disttrain.orchestration`), fed with FLOPs that are counted layer
by layer. One constant is calibrated, the language model's matrix efficiency, on one number: 54.7% MFU of MLLM-72B.
Table 2, how long the search takes, is measured by benchmarks/planners.py.

What the paper leaves out, and what is assumed instead: `papers.disttrain.models.Assumed`; what each of these
assumptions does to the ratios: `papers.disttrain.alternatives`. Who is compared:
`papers.disttrain.systems`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from papers.disttrain.alternatives import alternatives_table
from papers.disttrain.models import ASSUMED, BACKBONES, FROZEN_SETTINGS, backbone_s
from papers.disttrain.problems import problems
from papers.disttrain.reordering import reordering_table
from papers.disttrain.systems import LARGE, SMALL, disttrain, megatron, proportional
from papers.tables import Row, Table

__all__ = ["problems", "tables"]

PUBLISHED_MFU_72B, PUBLISHED_LOWEST_MFU = 0.547, 0.518
PUBLISHED_RANGES: Mapping[str, tuple[float, float]] = {
    "MFU, 9B and 15B": (1.7, 2.8),
    "throughput, 9B and 15B": (1.7, 2.2),
    "MFU against both baselines": (1.3, 2.7),
    "throughput against both baselines": (1.4, 2.7),
    "frozen, MFU": (1.4, 2.9),
    "frozen, throughput": (1.2, 2.9),
    "StepCCL, TP 4": (1.10, 1.17),
    "StepCCL, TP 8": (1.15, 1.17),
}
PUBLISHED_GPUS = {"72B": 1172}
"""Section 1."""
PUBLISHED_72B = {"MFU": 1.2, "throughput": 1.3}
IMPLIED_SHARE_9B = PUBLISHED_RANGES["throughput, 9B and 15B"][1] / PUBLISHED_RANGES["MFU, 9B and 15B"][1]
"""Share of Megatron-LM's GPUs that DistTrain used, as the ratios of throughput and MFU imply: nothing else differs."""
ASSUMPTIONS = (
    f"{ASSUMED.images} images a sequence, ViT kernels at {ASSUMED.vit_efficiency:.0%} and U-Net kernels at "
    f"{ASSUMED.unet_efficiency:.0%} of peak, samples alike, Megatron-LM without StepCCL and interleaving, no devices "
    f"for less than {ASSUMED.spared:.0%}"
)
CALIBRATED = "matrix efficiency, on 54.7% MFU of MLLM-72B"


def tables() -> Sequence[Table]:
    return [_overall(), alternatives_table(), _deep_dive(), reordering_table(), _frozen(), _step_ccl()]


# The tables ------------------------------------------------------------------------------------------------------


def _row(what: str, published: float | None, ours: float, *, held_out: bool = True) -> Row:
    return Row(what, published, ours, CALIBRATED, held_out and published is not None, ASSUMPTIONS)


def _range_rows(what: str, key: str, ours: Sequence[float]) -> Iterator[Row]:
    low, high = PUBLISHED_RANGES[key]
    yield _row(f"{what}, least", low, min(ours))
    yield _row(f"{what}, most", high, max(ours))


def _overall() -> Table:
    num_devices, batches = LARGE
    ours = {size: disttrain(size, num_devices, batches[size]) for size in BACKBONES}
    theirs = {size: megatron(size, num_devices, batches[size]) for size in BACKBONES}
    mfu = {size: ours[size].mfu / theirs[size].mfu for size in BACKBONES}
    throughput = {size: theirs[size].iteration_s / ours[size].iteration_s for size in BACKBONES}
    rows = [
        _row("DistTrain's MFU, MLLM-72B", PUBLISHED_MFU_72B, ours["72B"].mfu, held_out=False),
        _row("DistTrain's MFU, least of three models", PUBLISHED_LOWEST_MFU, min(each.mfu for each in ours.values())),
        *_range_rows("MFU ratio, 9B and 15B", "MFU, 9B and 15B", (mfu["9B"], mfu["15B"])),
        *_range_rows("throughput ratio, 9B and 15B", "throughput, 9B and 15B", (throughput["9B"], throughput["15B"])),
        _row("MFU ratio, 72B", PUBLISHED_72B["MFU"], mfu["72B"]),
        _row("throughput ratio, 72B", PUBLISHED_72B["throughput"], throughput["72B"]),
    ]
    num_fewer = round(IMPLIED_SHARE_9B * theirs["9B"].num_devices)
    fewer = disttrain("9B", num_fewer, batches["9B"], assumed=replace(ASSUMED, spared=0.0))
    at = f"9B, DistTrain on {fewer.num_devices} GPUs"
    most_mfu, most_throughput = (PUBLISHED_RANGES[f"{what}, 9B and 15B"][1] for what in ("MFU", "throughput"))
    faster = theirs["9B"].iteration_s / fewer.iteration_s
    rows += [
        _row(f"MFU ratio, {at}", most_mfu, fewer.mfu / theirs["9B"].mfu),
        _row(f"throughput ratio, {at}", most_throughput, faster, held_out=False),
    ]
    for size in BACKBONES:
        rows += [
            _row(f"MFU of DistTrain, MLLM-{size}", None, ours[size].mfu),
            _row(f"MFU of Megatron-LM, MLLM-{size}", None, theirs[size].mfu),
            _row(f"GPUs of DistTrain, MLLM-{size}", PUBLISHED_GPUS.get(size), ours[size].num_devices),
            _row(f"GPUs of Megatron-LM, MLLM-{size}", None, theirs[size].num_devices),
        ]
    return Table(
        "Figures 15 and 16: MFU and throughput against Megatron-LM, up to 1296 GPUs, global batch 1920",
        tuple(rows),
        notes=(
            "Who wins, and that the gain falls with the model's size, holds. MFU and throughput of one comparison "
            "differ only by the numbers of GPUs: 2.8 and 2.2 mean that DistTrain ran 9B on 0.79 of Megatron-LM's. "
            "Nothing in its objective asks for so few; with as many as that our throughput is near the published. For "
            "72B the number is printed, 1172 of 1296, and ours is that: with stages of equal layers more devices bring "
            "less than 1%. Megatron-LM's 20% MFU (2.1) is ours for 9B. 15B is too good by a seventh whatever is "
            "assumed, and stands where the paper has it if Megatron-LM had StepCCL, of which nothing is said."
        ),
    )


def _deep_dive() -> Table:
    num_devices, batches = SMALL
    ours = {size: disttrain(size, num_devices, batches[size]) for size in BACKBONES}
    mfu, throughput, rows = [], [], []
    for size in BACKBONES:
        for name, baseline in (("Megatron-LM", megatron), ("by FLOPs", proportional)):
            other = baseline(size, num_devices, batches[size])
            mfu.append(ours[size].mfu / other.mfu)
            throughput.append(other.iteration_s / ours[size].iteration_s)
            rows.append(_row(f"MFU against {name}, MLLM-{size}", None, mfu[-1]))
            rows.append(_row(f"throughput against {name}, MLLM-{size}", None, throughput[-1]))
        other = proportional(size, num_devices, batches[size], by_time=True)
        rows.append(_row(f"throughput against by time, MLLM-{size}", None, other.iteration_s / ours[size].iteration_s))
    return Table(
        "Figure 17: orchestrations on up to 98 GPUs, global batch 128, 64 and 40",
        (
            *_range_rows("MFU ratio", "MFU against both baselines", mfu),
            *_range_rows("throughput ratio", "throughput against both baselines", throughput),
            *rows,
        ),
        notes=(
            "DistTrain is first everywhere. Ours gives the baseline by FLOPs the best degrees within its shares. The "
            "U-Net's kernels reach less of the peak, so that it gets too few devices, and this baseline loses to "
            "Megatron-LM for 72B, where the paper has it second; by time it is second everywhere."
        ),
    )


def _frozen() -> Table:
    num_devices, batches = SMALL
    mfu, throughput, rows = [], [], []
    for setting, passes in FROZEN_SETTINGS.items():
        for size in BACKBONES:
            ours = disttrain(size, num_devices, batches[size], passes)
            theirs = megatron(size, num_devices, batches[size], passes)
            mfu.append(ours.mfu / theirs.mfu)
            throughput.append(theirs.iteration_s / ours.iteration_s)
            rows.append(_row(f"MFU ratio, {setting}, MLLM-{size}", None, mfu[-1]))
    return Table(
        "Figures 19 and 20: frozen training against Megatron-LM, up to 98 GPUs",
        (
            *_range_rows("MFU ratio", "frozen, MFU", mfu),
            *_range_rows("throughput ratio", "frozen, throughput", throughput),
            *rows,
        ),
        notes=(
            "Published throughput begins below MFU (1.2 against 1.4), which a ratio of the same two runs can only do "
            "if DistTrain used fewer GPUs."
        ),
    )


def _step_ccl() -> Table:
    rows: list[Row] = []
    for tp in (4, 8):
        gains = [
            backbone_s(size, tp, 3, ASSUMED, overlapped=False) / backbone_s(size, tp, 3, ASSUMED, overlapped=True)
            for size in BACKBONES
        ]
        rows += _range_rows(f"gain with tensor parallelism of {tp}", f"StepCCL, TP {tp}", gains)
    return Table(
        "Figure 22: hiding tensor-parallel communication",
        tuple(rows),
        notes="The printed 300 GB/s of NVLink is neither the A800's 400 in both directions nor its 200 in one.",
    )
