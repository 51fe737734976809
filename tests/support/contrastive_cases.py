"""Contrastive models of tiny towers under one layout, and their loss written plainly."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

import torch
import transformers
from tiny_encoders import AUDIO, BLOCKS, HEADS, HIDDEN, INNER, MEL_BINS, MEL_FRAMES, VIT
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from motet.assignment.sample import Sample, Segment
from motet.families.encoders.token_counts import encoder_segment
from motet.models.contrastive import ContrastiveModule
from motet.models.graph import ModalityModule
from motet.models.stages.contrastive import ContrastiveLoss
from motet.models.stages.encoder import EncoderStage, num_encoder_layers
from motet.parallel.tensor.tensor_parallel import TensorParallel, apply_tensor_parallel
from motet.plan import CONTRASTIVE, Edge, ModulePlan, Plan, Replica, Stage
from motet.runtime.engine import Engine

WIDTH, VOCABULARY, LONGEST_TEXT, END_OF_TEXT = 20, 50, 9, 49
TEXT = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "num_hidden_layers": BLOCKS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST_TEXT,
    "projection_size": HIDDEN + 4,
    "eos_token_id": END_OF_TEXT,
    "bos_token_id": 0,
    "pad_token_id": 1,
}
MODELS = {
    "clip": (transformers.CLIPVisionModel, transformers.CLIPVisionConfig, VIT),
    "siglip": (transformers.SiglipVisionModel, transformers.SiglipVisionConfig, VIT),
    "dinov2": (transformers.Dinov2Model, transformers.Dinov2Config, VIT),
    "clip_text": (transformers.CLIPTextModel, transformers.CLIPTextConfig, TEXT),
    "siglip_text": (transformers.SiglipTextModel, transformers.SiglipTextConfig, TEXT),
    "bert": (transformers.BertModel, transformers.BertConfig, TEXT),
    "whisper": (WhisperEncoder, transformers.WhisperConfig, AUDIO),
}
FROZEN_PARTS = ("module", "projector")
CPU = torch.device("cpu")
TEXTS = ("clip_text", "siglip_text", "bert")


@dataclass(frozen=True)
class Tower:
    family: str
    dp: int = 1
    pp: int = 1
    tp: int = 1
    num_microbatches: int = 1
    """Of a contrastive batch."""
    frozen: tuple[str, ...] = ()
    """Of "module" and "projector"."""
    lacking: tuple[int, ...] = ()
    """Samples without an item for it."""

    @property
    def num_ranks(self) -> int:
        return self.dp * self.pp * self.tp


@dataclass(frozen=True)
class Case:
    towers: Mapping[str, Tower]
    kind: str = "softmax"
    num_samples: int = 8
    num_batches: int = 1
    """Contrastive ones."""
    schedule: str = "gpipe"
    anchor: str | None = None
    colocated: bool = False
    """Towers begin at the same rank."""
    trains_loss: bool = True
    dtype: str = "float64"
    recompute_features: tuple[str, ...] = field(default=())

    @property
    def num_ranks(self) -> int:
        sizes = [tower.num_ranks for tower in self.towers.values()]
        return max(sizes) if self.colocated else sum(sizes)

    def build(self) -> ContrastiveModule:
        """Every parameter is drawn at random."""
        torch.manual_seed(0)
        dtype = getattr(torch, self.dtype)
        modules = {}
        for name, tower in self.towers.items():
            model_class, config_class, values = MODELS[tower.family]
            known = config_class().to_dict()
            config = config_class(**{key: value for key, value in values.items() if key in known})
            pooled = getattr(config, "projection_size", HIDDEN)
            modules[name] = ModalityModule(model_class(config), nn.Linear(pooled, WIDTH, bias=False))
        loss = ContrastiveLoss(self.kind, math.log(4.0))  # type: ignore[arg-type]
        model = ContrastiveModule(modules, loss, anchor=self.anchor).to(dtype)
        with torch.no_grad():
            for parameter in model.towers.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for name, tower in self.towers.items():
            for part in tower.frozen:
                model.parts()[f"{name}.{part}"].requires_grad_(False)
        model.loss.requires_grad_(self.trains_loss)
        return model.train()

    def plan(self, model: ContrastiveModule) -> Plan:
        """Ranks: tower after tower, replicas, stages, tensor parallelism fastest."""
        modules, first = {}, 0
        for name, tower in self.towers.items():
            held = model.modality_modules()[name]
            num_layers = num_encoder_layers(held.module, held.projector)
            cut = [i * num_layers // tower.pp for i in range(tower.pp + 1)]
            body = () if "module" in tower.frozen else ((0, num_layers - 1),)
            head = () if "projector" in tower.frozen else ((num_layers - 1, num_layers),)
            modules[name] = ModulePlan(
                kind="tower",
                num_layers=num_layers,
                replicas=tuple(
                    Replica(
                        stages=tuple(
                            Stage(
                                layers=(cut[s], cut[s + 1]),
                                ranks=tuple(
                                    range(
                                        first + (r * tower.pp + s) * tower.tp, first + (r * tower.pp + s + 1) * tower.tp
                                    )
                                ),
                                tp_size=tower.tp,
                            )
                            for s in range(tower.pp)
                        )
                    )
                    for r in range(tower.dp)
                ),
                trainable=(*body, *head),
                num_microbatches=tower.num_microbatches * self.num_batches,
            )
            first += 0 if self.colocated else tower.num_ranks
        ends = sorted({rank for m in modules.values() for r in m.replicas for rank in r.stages[-1].ranks})
        loss = ModulePlan(
            kind="loss",
            num_layers=1,
            replicas=(Replica(stages=(Stage(layers=(0, 1), ranks=tuple(ends), cp_size=len(ends)),)),),
            trainable=((0, 1),) if self.trains_loss else (),
            loss_weight=1.0,
            num_microbatches=self.num_batches,
        )
        return Plan(
            modules={**modules, CONTRASTIVE: loss},
            edges=tuple(Edge(source=name, target=CONTRASTIVE) for name in self.towers),
            num_microbatches=self.num_batches,
            schedule=self.schedule,
            recompute_features=self.recompute_features,
        )

    def batch(self, model: ContrastiveModule) -> "TowerBatch":
        torch.manual_seed(1)
        dtype = getattr(torch, self.dtype)
        samples, features = [], []
        for i in range(self.num_samples):
            layouts: dict[str, tuple[Segment, ...]] = {}
            tensors: dict[str, dict[str, Tensor]] = {}
            for name, tower in self.towers.items():
                if i in tower.lacking:
                    continue
                grid: tuple[int, ...] = ()
                if tower.family in TEXTS:
                    num_tokens = LONGEST_TEXT if tower.family == "siglip_text" else 3 + i % (LONGEST_TEXT - 2)
                    ids = torch.randint(1, END_OF_TEXT, (1, num_tokens))
                    end = num_tokens - 1 - i % 2
                    ids[0, end] = END_OF_TEXT
                    grid, tensors[name] = (num_tokens, end), {"input_ids": ids}
                    if tower.family != "bert" and i % 3:  # Padding on the left, or from the end of the text on.
                        first, stop = (1, num_tokens) if i % 3 == 1 else (0, end)
                        grid = (*grid, first, stop)
                        tensors[name]["attention_mask"] = torch.zeros_like(ids)
                        tensors[name]["attention_mask"][:, first:stop] = 1
                elif tower.family == "whisper":
                    grid = (MEL_FRAMES - i % 5,)
                    tensors[name] = {"input_features": torch.randn(1, MEL_BINS, MEL_FRAMES, dtype=dtype)}
                else:
                    tensors[name] = {"pixel_values": torch.randn(1, 3, 16, 16, dtype=dtype)}
                config = model.modality_modules()[name].module.config
                segment = encoder_segment(config, item=0, grid=grid)
                layouts[name] = (Segment(segment.num_tokens, num_outputs=1, grid=grid),)
            samples.append(
                Sample(f"s{i}", layouts, {CONTRASTIVE: sum(a in layouts and b in layouts for a, b in model.pairs)})
            )
            features.append(tensors)
        return TowerBatch(tuple(samples), features)

    def engine(self, model: ContrastiveModule, plan: Plan, device: torch.device = CPU) -> Engine:
        def make(name: str, module_plan: ModulePlan, stage: Stage, tp: TensorParallel) -> nn.Module:
            if module_plan.kind == "loss":
                return model.nodes[CONTRASTIVE].make_stage((0, 1)).to(device)
            module = model.modality_modules()[name]
            made = EncoderStage(name, module, stage.layers)
            if tp.size > 1:
                apply_tensor_parallel(made, tp)
            return made.train().to(device)

        return Engine(plan, make, device=device, boundary_dtype=getattr(torch, self.dtype))


@dataclass
class TowerBatch:
    samples: tuple[Sample, ...]
    tensors: list[dict[str, dict[str, Tensor]]]

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        return self.tensors[sample][module]


# The reference: transformers' own forward, the losses as their papers write them --------------------------------------


def plain_embeddings(
    family: str, model: nn.Module, projector: nn.Module, features: dict[str, Tensor], frames: int
) -> Tensor:
    """[width] of one sample."""
    output = model(**features)
    if family == "whisper":
        return projector(output.last_hidden_state[:, : (frames + 1) // 2].mean(1))[0]
    return projector(output.pooler_output)[0]


def plain_loss(case: Case, model: ContrastiveModule, batch: TowerBatch) -> Tensor:
    """The published loss of every contrastive batch and pair of towers, over the samples that have both, by hand: a
    loop over anchors. The mean over all anchors of all pairs and batches."""
    features: dict[tuple[str, int], Tensor] = {}
    for i, sample in enumerate(batch.samples):
        for name, tower in case.towers.items():
            if i in tower.lacking:
                continue
            module = model.modality_modules()[name]
            frames = (sample.layouts[name][0].grid or (0,))[0]
            row = plain_embeddings(tower.family, module.module, module.projector, batch.features(name, i), frames)
            features[name, i] = row / row.norm()
    names, size = list(case.towers), case.num_samples // case.num_batches
    pairs = [(case.anchor, n) for n in names if n != case.anchor] if case.anchor else list(combinations(names, 2))
    losses: list[Tensor] = []
    for first in range(0, case.num_samples, size):
        for a, b in pairs:
            both = [i for i in range(first, first + size) if (a, i) in features and (b, i) in features]
            losses += [_anchor_loss(case, model, features, a, b, i, both) for i in both]
    if not losses:
        return model.loss.logit_scale * 0.0
    return torch.stack(losses).mean()


def _anchor_loss(
    case: Case,
    model: ContrastiveModule,
    features: dict[tuple[str, int], Tensor],
    a: str,
    b: str,
    i: int,
    both: list[int],
) -> Tensor:
    scale = model.loss.logit_scale.exp()
    there = torch.stack([scale * features[a, i] @ features[b, j] for j in both])
    back = torch.stack([scale * features[b, i] @ features[a, j] for j in both])
    own = torch.tensor(both.index(i))
    if case.kind == "softmax":
        return (functional.cross_entropy(there, own) + functional.cross_entropy(back, own)) / 2
    signs = torch.tensor([1.0 if j == i else -1.0 for j in both], dtype=there.dtype)
    return -functional.logsigmoid(signs * (there + model.loss.logit_bias)).sum()


def plain_gradients(case: Case) -> tuple[float, dict[str, Tensor]]:
    """By the names that checkpoints have."""
    model = case.build()
    loss = plain_loss(case, model, case.batch(model))
    if loss.requires_grad:  # Not where nothing is compared.
        loss.backward()
    return loss.item(), {
        f"{part}.{name}": torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for part, module in model.parts().items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
