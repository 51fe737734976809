"""CoCa-like models of tiny towers and a tiny decoder under one layout, and their loss written plainly."""

from dataclasses import dataclass, field, replace

import torch
import transformers
from contrastive_cases import Case, TowerBatch, plain_loss
from recomputing import recomputing
from torch import Tensor, nn
from torch.nn import functional

from motet.assignment.sample import Sample, Segment
from motet.families.discovery.language_model_parts import num_causal_layers
from motet.models.contrastive import CaptionDecoder, ContrastiveModule
from motet.models.stages.caption_decoder import CaptionDecoderStage
from motet.models.stages.encoder import EncoderStage
from motet.parallel.tensor.tensor_parallel import TensorParallel, apply_tensor_parallel
from motet.plan import CONTRASTIVE, DECODER, Edge, ModulePlan, Plan, Replica, Stage
from motet.runtime.engine import Engine

CAPTION_WEIGHT, CONTRASTIVE_WEIGHT = 2.0, 0.7
WIDTH, WORDS = 20, 40


def tiny_decoder(family: str, *, tied: bool = True) -> nn.Module:
    """Every parameter is drawn at random. Two blocks."""
    torch.manual_seed(7)
    common = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": WORDS}
    positions = {"max_position_embeddings": 10, "add_cross_attention": True, "tie_word_embeddings": tied}
    if family == "gpt2":
        config = transformers.GPT2Config(
            **common, **positions, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, scale_attn_by_inverse_layer_idx=True
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(
            **common,
            **positions,
            intermediate_size=24,
            is_decoder=True,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model = transformers.BertLMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().train()


@dataclass(frozen=True)
class Coca(Case):
    """The towers of a case, and a decoder on ranks after theirs."""

    family: str = "gpt2"
    reads: str = "image"
    tied: bool = True
    dp: int = 1
    pp: int = 1
    tp: int = 1
    per_batch: int = 1
    """The decoder's microbatches of a contrastive batch."""
    frozen: bool = False
    silent: tuple[int, ...] = field(default=())
    """Samples without a caption."""
    recompute: bool = False

    @property
    def all_ranks(self) -> int:
        return self.num_ranks + self.dp * self.pp * self.tp

    def build(self) -> ContrastiveModule:
        model = super().build()
        decoder = tiny_decoder(self.family, tied=self.tied).requires_grad_(not self.frozen)
        towers = model.modality_modules()
        return ContrastiveModule(
            towers,
            model.loss,
            anchor=self.anchor,
            decoder=CaptionDecoder(decoder, self.reads, CAPTION_WEIGHT),
            loss_weight=CONTRASTIVE_WEIGHT,
        )

    def plan(self, model: ContrastiveModule) -> Plan:
        plan = super().plan(model)
        assert model.decoder is not None
        num_layers = num_causal_layers(model.decoder)
        cut = [i * num_layers // self.pp for i in range(self.pp + 1)]
        first = plan.num_ranks
        replicas = tuple(
            Replica(
                stages=tuple(
                    Stage(layers=(cut[s], cut[s + 1]), ranks=tuple(range(at, at + self.tp)), tp_size=self.tp)
                    for s in range(self.pp)
                    for at in [first + (r * self.pp + s) * self.tp]
                )
            )
            for r in range(self.dp)
        )
        module = ModulePlan(
            kind="language_model",
            num_layers=num_layers,
            replicas=replicas,
            trainable=() if self.frozen else ((0, num_layers),),
            tied=((0, num_layers - 1),) if self.tied else (),
            loss_weight=CAPTION_WEIGHT,
            num_microbatches=self.per_batch * self.num_batches,
        )
        edge = Edge(source=self.reads, target=DECODER, layers=tuple(range(1, num_layers - 1)))
        loss = replace(plan.modules[CONTRASTIVE], loss_weight=CONTRASTIVE_WEIGHT)
        return replace(
            plan,
            modules={**plan.modules, CONTRASTIVE: loss, DECODER: module},
            edges=(*plan.edges, edge),
            recompute=(DECODER,) if self.recompute else (),
        )

    def batch(self, model: ContrastiveModule) -> TowerBatch:
        plain = super().batch(model)
        samples, tensors = [], []
        for i, sample in enumerate(plain.samples):
            layouts, counts, own = dict(sample.layouts), dict(sample.num_loss_tokens), dict(plain.tensors[i])
            if sample.has(self.reads):
                (segment,) = layouts[self.reads]
                layouts[self.reads] = (replace(segment, num_outputs=1 + segment.num_tokens),)
            if sample.has(self.reads) and i not in self.silent:
                ids = torch.randint(0, WORDS, (1 + i % 4,))
                labels = ids.clone()
                labels[: i % 3] = -100
                layouts[DECODER] = (Segment(len(ids)),)
                counts[DECODER] = int((labels[1:] != -100).sum())
                own[DECODER] = {"input_ids": ids, "labels": labels}
            samples.append(Sample(sample.id, layouts, counts))
            tensors.append(own)
        return TowerBatch(tuple(samples), tensors)

    def engine(self, model: ContrastiveModule, plan: Plan) -> Engine:
        def make(name: str, module_plan: ModulePlan, stage: Stage, tp: TensorParallel) -> nn.Module:
            if module_plan.kind == "loss":
                return model.nodes[CONTRASTIVE].make_stage((0, 1))
            if name == DECODER:
                made: nn.Module = recomputing(CaptionDecoderStage(name, model.decoder, stage.layers), self.recompute)
            else:
                tower = model.modality_modules()[name]
                made = EncoderStage(name, tower, stage.layers)
            if tp.size > 1:
                apply_tensor_parallel(made, tp)
            return made.train()

        return Engine(plan, make, device=torch.device("cpu"), boundary_dtype=torch.float64)


def plain(case: Coca) -> tuple[float, dict[str, Tensor]]:
    """transformers' own forwards, caption by caption."""
    model = case.build()
    batch = case.batch(model)
    tower, decoder = model.modality_modules()[case.reads], model.decoder
    assert decoder is not None
    captions, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for i, sample in enumerate(batch.samples):
        if not sample.has(DECODER):
            continue
        states = tower.projector(tower.module(**batch.features(case.reads, i)).last_hidden_state)
        text = batch.features(DECODER, i)
        logits = decoder(input_ids=text["input_ids"][None], encoder_hidden_states=states, use_cache=False).logits[0]
        captions = captions + functional.cross_entropy(logits[:-1], text["labels"][1:], reduction="sum")
        num_tokens += int((text["labels"][1:] != -100).sum())
    loss = CONTRASTIVE_WEIGHT * plain_loss(case, model, batch) + CAPTION_WEIGHT * captions / max(1, num_tokens)
    if loss.requires_grad:  # Not where nothing is compared and nothing captioned.
        loss.backward()
    return loss.item(), {
        f"{part}.{name}": torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for part, module in model.parts().items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
