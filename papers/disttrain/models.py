"""The models of DistTrain's evaluation (Table 1, section 8) on its cluster: shapes, FLOPs, and what the closed form is
given. What the paper does not print is `Assumed`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from motet.cluster import CATALOGUE, DEVICES
from motet.costs.analytic import layer_flops
from motet.costs.cost_model import Load
from motet.costs.memory import RESERVE
from motet.planner.disttrain.orchestration import OrchestrationProblem, Unit
from motet.shapes.diffusion import generator_workload
from motet.shapes.module_shape import ModuleWorkload
from papers.shapes import module_workload

SEQUENCE = 8192
PEAK_FLOPS = DEVICES["a800"].peak("bfloat16")
BACKBONES: Mapping[str, tuple[int, int, int, int, int]] = {
    "9B": (32, 4096, 11008, 32, 32),
    "15B": (40, 5120, 13824, 40, 40),
    "72B": (80, 8192, 28672, 64, 8),
}
"""Table 1: layers, hidden size, MLP size, heads, groups."""
IMAGE_SIDE: Mapping[str, int] = {"9B": 512, "15B": 512, "72B": 1024}
"""That the generator makes."""
Passes = tuple[int, int, int]
"""Numbers of passes of encoder, language model and generator: forward, input gradient, weight gradient."""
TRAINED: Passes = (3, 3, 3)
FROZEN_SETTINGS: Mapping[str, Passes] = {
    "everything frozen": (1, 2, 2),
    "encoder trained": (3, 2, 2),
    "language model trained": (1, 3, 2),
    "generator trained": (1, 2, 3),
}
"""Passes that encoder, language model and generator compute: forward, input gradient, weight gradient. Projectors are
always trained, so gradients go back to the encoder's projector."""


@dataclass(frozen=True)
class Assumed:
    """Assumptions where the paper prints nothing."""

    matrix_efficiency: float = 0.635
    """Efficiency of the language model's kernels; the one calibrated constant."""
    vit_efficiency: float = 0.39
    """Efficiency of ViT-g/14 with its text tower in NVIDIA NeMo's training of CLIP: 559 pairs a second on eight
    A100."""
    unet_efficiency: float = 0.28
    """Efficiency of Stable Diffusion 2 in MosaicML's training: 290 images of 512 x 512 a second on eight A100, latents
    at hand."""
    latents: float = 0.0
    """Share that encoding images into latents adds to the generator's time; 0 because preprocessing does it."""
    images: int = 10
    """In each sequence of 8192 tokens. Ten with 256 words (about 350 tokens) is what section 4.2 calls typical: 784
    tokens an image. LAION-400M's published statistics of sizes agree (more than half a side of 256, a quarter one of
    512): about 800 patches of 16 x 16 in the mean."""
    encoded_side: int = 448
    """Side of an image at the encoder: a square of 784 patches."""
    exposed: float = 0.1
    """Share of the tensor-parallel communication that StepCCL does not hide."""
    nvlink_bytes_per_s: float = CATALOGUE["links"]["nvlink-a800"]["bytes_per_s"]
    """Printed as 300 GB/s "bidirectional"; the A800's are 400, so 200 in one direction. Figure 22 lies between what 150
    and 300 in one direction would give."""
    network_bytes_per_s: float = 4 * CATALOGUE["links"]["roce200"]["bytes_per_s"] / 8
    """Four cards for eight devices."""
    vpp_sizes: tuple[int, ...] = (1, 2, 4)
    equal_stages: bool = True
    """Whether the language model's stages have equally many layers, as in Megatron-LM, which DistTrain extends."""
    spared: float = 0.01
    """Devices that shorten the iteration by less than this are not taken: 1172 of 1296 were. From 1% to 3% MLLM-72B
    gets as many; at none it gets 1264."""
    vocabulary: int = 32000


ASSUMED = Assumed()


@cache
def backbone(size: str) -> ModuleWorkload:
    layers, hidden, mlp, heads, groups = BACKBONES[size]
    return module_workload(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "vocab_size": ASSUMED.vocabulary,
        }
    )


@cache
def vit_huge() -> ModuleWorkload:
    """0.63B parameters."""
    return module_workload(
        {
            "model_type": "clip_vision_model",
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "image_size": ASSUMED.encoded_side,
            "patch_size": 16,
        }
    )


@cache
def unet() -> ModuleWorkload:
    """Stable Diffusion 2.1's (866M parameters). Encoding images into latents, which are an eighth as wide, is left to
    preprocessing."""
    return generator_workload(
        {
            "_class_name": "UNet2DConditionModel",
            "cross_attention_dim": 1024,
            "attention_head_dim": [5, 10, 20, 20],
            "layers_per_block": 2,
        }
    )


def _forward_flops(workload: ModuleWorkload, tokens: int, incoming: int = 0) -> float:
    load = Load(
        tokens=tokens,
        pairs=tokens**2,
        sequences=1,
        incoming=incoming,
        incoming_pairs=incoming * tokens,
        outputs=tokens,
        tokens_squared=tokens**2,
    )
    return sum(layer_flops(layer).forward.seconds(load) for layer in workload.layers)


@cache
def sample_flops(size: str, assumed: Assumed = ASSUMED) -> tuple[float, float, float]:
    """FLOPs of one pass of one sample through encoder, language model and generator."""
    encoded, generated = _image_flops(size, image_tokens(assumed))
    return assumed.images * encoded, _sequence_flops(size), assumed.images * generated


@cache
def _image_flops(size: str, tokens: int) -> tuple[float, float]:
    latents = (IMAGE_SIDE[size] // 8) ** 2
    return _forward_flops(vit_huge(), tokens), _forward_flops(unet(), latents, incoming=77)


@cache
def _sequence_flops(size: str) -> float:
    return _forward_flops(backbone(size), SEQUENCE)


def image_tokens(assumed: Assumed) -> int:
    return (assumed.encoded_side // 16) ** 2


UNET_ACTIVATION_BYTES: Mapping[int, float] = {512: 4e9, 1024: 16e9}


def mllm(
    size: str,
    num_devices: int,
    global_batch_size: int,
    *,
    passes: Passes = TRAINED,
    assumed: Assumed = ASSUMED,
    overlapped: bool = True,
) -> OrchestrationProblem:
    """MLLM-9B, 15B or 72B on A800s. `overlapped`: tensor-parallel communication is hidden by StepCCL."""
    layers, hidden, *_ = BACKBONES[size]
    flops = sample_flops(size, assumed)
    network = assumed.network_bytes_per_s

    def unit(index: int, num_parameters: float, **values: object) -> Unit:
        trained = passes[index] == 3
        # bfloat16 weights, float32 gradients, float32 weights and two moments.
        return Unit(
            state_bytes=(6 if trained else 2) * num_parameters,
            optimizer_bytes=12 * num_parameters if trained else 0.0,
            reduce_s=2 * num_parameters / network if trained else 0.0,
            **values,  # type: ignore[arg-type]
        )

    generator_s = passes[2] * flops[2] / (PEAK_FLOPS * assumed.unet_efficiency) * (1 + assumed.latents)
    return OrchestrationProblem(
        units={
            "encoder": unit(
                0,
                vit_huge().num_parameters,
                role="encoder",
                layer_costs=(1.0,) * 32,
                seconds={1: passes[0] * flops[0] / (PEAK_FLOPS * assumed.vit_efficiency)},
                items_per_sample=assumed.images,
                activation_bytes={1: 34 * assumed.images * image_tokens(assumed) * 1280 * 32},
            ),
            "language_model": unit(
                1,
                backbone(size).num_parameters,
                role="language_model",
                layer_costs=(1.0,) * layers,
                seconds={tp: backbone_s(size, tp, passes[1], assumed, overlapped) for tp in (1, 2, 4, 8)},
                activation_bytes={tp: 34 * SEQUENCE * hidden * layers / tp for tp in (1, 2, 4, 8)},
                boundary_s=dict.fromkeys((1, 2, 4, 8), 2 * 2 * SEQUENCE * hidden / network),
                vpp_sizes=assumed.vpp_sizes,
                equal_stages=assumed.equal_stages,
            ),
            "generator": unit(
                2,
                unet().num_parameters,
                role="generator",
                layer_costs=(1.0,),
                seconds={1: generator_s},
                items_per_sample=assumed.images,
                activation_bytes={1: assumed.images * UNET_ACTIVATION_BYTES[IMAGE_SIDE[size]]},
            ),
        },
        num_devices=num_devices,
        global_batch_size=global_batch_size,
        device_bytes=(1 - RESERVE) * DEVICES["a800"].memory_bytes,
    )


def backbone_s(size: str, tp: int, passes: int, assumed: Assumed, overlapped: bool) -> float:
    """One sequence through the language model: FLOPs, and two all-reduces a layer in each of forward and backward."""
    layers, hidden, *_ = BACKBONES[size]
    flops = sample_flops(size, assumed)[1]
    message = 2 * SEQUENCE * hidden * 2 * (tp - 1) / tp
    communication = 2 * 2 * layers * message / assumed.nvlink_bytes_per_s
    exposed = assumed.exposed if overlapped else 1.0
    return passes * flops / (tp * PEAK_FLOPS * assumed.matrix_efficiency) + exposed * communication
