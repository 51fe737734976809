"""CoCa-like models: a contrastive and a captioning loss at once, over one image tower whose features enter a decoder.

The image tower hands on one vector of each image, for the contrastive loss, and then all of its features, which the
decoder (Mllama's text model) attends to. (Yu et al. 2022.)
"""

from dataclasses import replace

import pytest
import torch
from contrastive_cases import Case, Tower, TowerBatch
from distributed import run_distributed
from tiny_language_models import SIZES, TINY, tiny_language_model
from torch import Tensor, nn
from torch.nn import functional

from motet.data.sample import Sample, Segment
from motet.models.contrastive import ContrastiveModule
from motet.models.encoder_stage import EncoderStage
from motet.models.language_model_stage import LanguageModelStage, cross_attention_layers, num_language_model_layers
from motet.plan import CONTRASTIVE, Edge, ModulePlan, Plan, Replica, Stage
from motet.runtime.engine import Engine
from motet.runtime.float64 import float64_throughout
from motet.runtime.tensor_parallel import TensorParallel, apply_tensor_parallel
from motet.runtime.verify import collect_gradients

DECODER, CAPTION_WEIGHT = "decoder", 2.0


class Coca(Case):
    """The towers of a case, and a decoder on ranks after theirs."""

    def build(self) -> ContrastiveModule:
        model = super().build()
        width = SIZES["hidden_size"]
        torch.manual_seed(7)
        for tower in model.modality_modules().values():
            tower.projector = nn.Linear(tower.output_size, width, bias=False).double()
        model.width = width
        model.modality_modules()["image"].pooling = "first"
        return model

    def coca_plan(self, model: ContrastiveModule, decoder: nn.Module, *, dp: int, pp: int, per_batch: int) -> Plan:
        plan = self.plan(model)
        num_layers = num_language_model_layers(decoder)
        cut = [i * num_layers // pp for i in range(pp + 1)]
        first = plan.num_ranks
        replicas = tuple(
            Replica(stages=tuple(Stage(layers=(cut[s], cut[s + 1]), ranks=(first + r * pp + s,)) for s in range(pp)))
            for r in range(dp)
        )
        module = ModulePlan(
            kind="language_model",
            num_layers=num_layers,
            replicas=replicas,
            trainable=((0, num_layers),),
            loss_weight=CAPTION_WEIGHT,
            num_microbatches=per_batch * self.num_batches,
        )
        edge = Edge(source="image", target=DECODER, layers=cross_attention_layers(decoder))
        return replace(plan, modules={**plan.modules, DECODER: module}, edges=(*plan.edges, edge))

    def coca_batch(self, model: ContrastiveModule) -> TowerBatch:
        plain = self.batch(model)
        samples, tensors = [], []
        for i, sample in enumerate(plain.samples):
            image = sample.layouts["image"][0]
            ids = torch.randint(3, 40, (4 + i % 3,))
            labels = ids.clone()
            labels[:2] = -100
            layouts = {
                **sample.layouts,
                "image": (replace(image, num_outputs=1 + image.num_tokens),),
                DECODER: (Segment(len(ids)),),
            }
            count = int((labels[1:] != -100).sum())
            samples.append(Sample(sample.id, layouts, {CONTRASTIVE: 1, DECODER: count}))
            tensors.append({**plain.tensors[i], DECODER: {"input_ids": ids, "labels": labels}})
        return TowerBatch(tuple(samples), tensors)


def distributed(case: Coca, dp: int, pp: int, per_batch: int) -> tuple[float, dict[str, list[Tensor]]]:
    def worker(rank: int) -> tuple[float, dict[str, list[Tensor]] | None]:
        model, decoder = case.build(), tiny_language_model("mllama")
        plan = case.coca_plan(model, decoder, dp=dp, pp=pp, per_batch=per_batch)

        def make(name: str, module: ModulePlan, stage: Stage, tp: TensorParallel) -> nn.Module:
            if module.kind == "loss":
                return model.loss_stage()
            if name == DECODER:
                return LanguageModelStage(DECODER, decoder, stage.layers)
            tower = model.modality_modules()[name]
            made = EncoderStage(name, tower, stage.layers)
            if tp.size > 1:
                apply_tensor_parallel(made, tower.module.config.model_type, tp)
            return made.train()

        engine = Engine(plan, make, device=torch.device("cpu"), boundary_dtype=torch.float64)
        with float64_throughout():
            loss = engine.run(case.coca_batch(model)).loss
        return loss, collect_gradients(engine.model)

    results = run_distributed(worker, case.num_ranks + dp * pp)
    assert results[0][1] is not None
    return results[0][0], results[0][1]


def plain(case: Coca) -> tuple[float, dict[str, Tensor]]:
    """transformers' own forwards, the whole batch at once."""
    model, decoder = case.build(), tiny_language_model("mllama")
    batch = case.coca_batch(model)
    towers = model.modality_modules()
    pooled: dict[str, list[Tensor]] = {"image": [], "text": []}
    captions, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for i in range(len(batch.samples)):
        seen = towers["image"].module(**batch.features("image", i))
        pooled["image"].append(towers["image"].projector(seen.pooler_output))
        pooled["text"].append(
            towers["text"].projector(towers["text"].module(**batch.features("text", i)).pooler_output)
        )
        rows = torch.cat([seen.pooler_output, seen.last_hidden_state[0]])
        states = towers["image"].projector(rows)[None]
        text = batch.features(DECODER, i)
        logits = decoder(
            input_ids=text["input_ids"][None],
            cross_attention_states=states,
            cross_attention_mask=states.new_zeros(1, 1, len(text["input_ids"]), states.shape[1]),
            use_cache=False,
        ).logits[0]
        captions = captions + functional.cross_entropy(logits[:-1], text["labels"][1:], reduction="sum")
        num_tokens += int((text["labels"][1:] != -100).sum())
    features = {name: functional.normalize(torch.cat(rows), dim=1) for name, rows in pooled.items()}
    size = case.num_samples // case.num_batches
    contrasts = []
    for first in range(0, case.num_samples, size):
        part = slice(first, first + size)
        logits = model.loss.logit_scale.exp() * features["image"][part] @ features["text"][part].T
        own = torch.arange(size)
        contrasts.append((functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)) / 2)
    loss = torch.stack(contrasts).mean() + CAPTION_WEIGHT * captions / num_tokens
    loss.backward()
    parts = {**model.parts(), f"{DECODER}.module": decoder}
    return loss.item(), {
        f"{part}.{name}": torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for part, module in parts.items()
        for name, parameter in module.named_parameters()
    }


CASES = {
    "one of each": (Coca({"image": Tower("clip"), "text": Tower("clip_text")}), 1, 1, 1),
    "unequal replicas, microbatches and stages": (
        Coca(
            {"image": Tower("siglip", dp=2, num_microbatches=2), "text": Tower("bert", num_microbatches=3)},
            num_samples=12,
            num_batches=2,
        ),
        1,
        2,
        3,
    ),
    "tensor parallelism": (
        Coca({"image": Tower("clip", tp=2, num_microbatches=2), "text": Tower("bert")}, schedule="1f1b"),
        2,
        1,
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    case, dp, pp, per_batch = CASES[name]
    assert TINY["mllama"][2]["cross_attention_layers"]
    loss, gradients = distributed(case, dp, pp, per_batch)
    with float64_throughout():
        reference, expected = plain(case)
    assert loss == pytest.approx(reference, rel=1e-9)
    assert gradients.keys() == expected.keys()
    for key, versions in gradients.items():
        for version in versions:
            error = (version - expected[key]).norm() / max(expected[key].norm().item(), 1e-3)
            assert error < 1e-9, f"{key}: {error}"
