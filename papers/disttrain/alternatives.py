"""How DistTrain's comparison with Megatron-LM (Figures 15 and 16) depends on each assumption about its evaluation.

One assumption at a time is exchanged for another that the paper's text allows; the language model's matrix efficiency
is calibrated anew each time, on 54.7% MFU of MLLM-72B. Nothing here is chosen by its result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from papers.disttrain.models import ASSUMED, BACKBONES, TRAINED, Assumed
from papers.disttrain.systems import LARGE, disttrain, megatron
from papers.tables import Row, Table

MFU_72B = 0.547
ROUNDS, NEAR_ENOUGH = 6, 0.002
PUBLISHED = {"9B": 2.8, "15B": 1.7, "72B": 1.2}
"""MFU ratios (section 8.1); 2.8 and 1.7 are the ends of a range for both of the smaller models."""


@dataclass(frozen=True)
class Alternative:
    what: str
    assumed: Assumed
    overlapped: bool = False
    """Megatron-LM has StepCCL too."""


ALTERNATIVES: Sequence[Alternative] = (
    Alternative("as assumed", ASSUMED),
    Alternative("4 images of 704 x 704", replace(ASSUMED, images=4, encoded_side=704)),
    Alternative("7 images of 512 x 512", replace(ASSUMED, images=7, encoded_side=512)),
    Alternative("16 images of 352 x 352", replace(ASSUMED, images=16, encoded_side=352)),
    Alternative("ViT and U-Net kernels at 40% of peak", replace(ASSUMED, vit_efficiency=0.4, unet_efficiency=0.4)),
    Alternative("generator encodes images itself", replace(ASSUMED, latents=0.4)),
    Alternative("language model's stages unequal", replace(ASSUMED, equal_stages=False)),
    Alternative("no interleaving", replace(ASSUMED, vpp_sizes=(1,))),
    Alternative("every device that helps", replace(ASSUMED, spared=0.0)),
    Alternative("Megatron-LM with StepCCL", ASSUMED, overlapped=True),
)
"""MosaicML expects 1.4 times the U-Net's time if latents are computed while training."""


def alternatives_table() -> Table:
    return Table(
        "Figures 15 and 16: what each assumption does",
        tuple(row for alternative in ALTERNATIVES for row in _rows(alternative)),
        notes=(
            "No alternative brings 15B to 1.7 and leaves 9B near 2.8. Of Megatron-LM's stages of equal numbers of GPUs "
            "one of three holds 9B's language model and two of four hold 15B's, so what encoder and generator waste "
            "differs by 3 / 2 at the most, while 2.8 / 1.7 is 1.65. MLLM-72B turns on whether the generator's stage "
            "takes longer than one of the language model's, as section 8.1 says and as it is at ten images of 1024 x "
            "1024 over eight GPUs, which need two rounds."
        ),
    )


def calibrated(assumed: Assumed) -> Assumed:
    """Calibrates the matrix efficiency to come nearest to the published MFU: MFU jumps where the best layout
    changes."""
    num_devices, batches = LARGE
    tried = []
    for _ in range(ROUNDS):
        mfu = disttrain("72B", num_devices, batches["72B"], TRAINED, assumed).mfu
        tried.append((abs(mfu / MFU_72B - 1), assumed))
        if tried[-1][0] < NEAR_ENOUGH:
            break
        efficiency = round(assumed.matrix_efficiency * MFU_72B / mfu, 3)
        assumed = replace(assumed, matrix_efficiency=efficiency)
    return min(tried, key=lambda each: each[0])[1]


def _rows(alternative: Alternative) -> Iterator[Row]:
    num_devices, batches = LARGE
    assumed = calibrated(alternative.assumed)
    for size in BACKBONES:
        ours = disttrain(size, num_devices, batches[size], TRAINED, assumed)
        theirs = megatron(size, num_devices, batches[size], TRAINED, assumed, overlapped=alternative.overlapped)
        yield Row(
            f"MFU ratio, {size}: {alternative.what}",
            PUBLISHED[size],
            ours.mfu / theirs.mfu,
            "matrix efficiency, on 54.7% MFU of MLLM-72B",
            False,
            f"matrix efficiency {assumed.matrix_efficiency:.1%}; DistTrain {ours.mfu:.1%} on {ours.num_devices}, "
            f"Megatron-LM {theirs.mfu:.1%} on {theirs.num_devices} GPUs",
        )
