"""Language models in stages: loss and gradients equal the plain model run sample by sample."""

import copy

import pytest
import torch
from recomputing import recomputing
from sampling import in_campaigns
from tiny_language_models import SIZES, TINY, tiny_language_model
from torch import Tensor
from torch.nn.functional import cross_entropy

from motet.assignment.sample import Sample, Segment
from motet.models.materialize import float64_throughout
from motet.models.stages.language_model import LanguageModelStage
from motet.models.stages.stage import StageInput

H = SIZES["hidden_size"]
FAMILIES = [name for name in TINY if name != "mllama"]

SAMPLES = [
    Sample(
        "two images and a clip",
        {
            "llm": (
                Segment(2),
                Segment(3, "vision", 1),
                Segment(1),
                Segment(2, "audio"),
                Segment(3, "vision", 0),
                Segment(3),
            ),
            "vision": (Segment(4, item=0, num_outputs=3), Segment(4, item=1, num_outputs=3)),
            "audio": (Segment(2),),
        },
    ),
    Sample("text", {"llm": (Segment(5),)}),
    Sample("prepended", {"llm": (Segment(4, "vision", 0), Segment(7)), "vision": (Segment(4),)}),
]


@pytest.fixture(autouse=True)
def _float64():
    with float64_throughout():
        yield


def features_of(sample: Sample, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, SIZES["vocab_size"], (sample.num_tokens("llm"),), generator=generator)
    labels = ids.clone()
    labels[: len(ids) // 2] = -100
    return {"input_ids": ids, "labels": labels}


def incoming_of(samples: list[Sample]) -> dict[str, Tensor]:
    torch.manual_seed(5)
    counts = {source: sum(s.num_outputs(source) for s in samples) for source in ("vision", "audio")}
    return {source: torch.randn(n, H, dtype=torch.float64) for source, n in counts.items() if n}


def run_in_stages(model, bounds, samples, incoming, *, packing, recompute=False, enters=(0,)):
    """Loss, and the gradients by canonical name and of the incoming tokens."""
    stages = [
        recomputing(LanguageModelStage("llm", copy.deepcopy(model), layers, packing=packing), recompute)
        for layers in zip([0, *bounds], bounds, strict=False)
    ]
    leaves = {source: tokens.clone().requires_grad_() for source, tokens in incoming.items()}
    features = [features_of(sample, i) for i, sample in enumerate(samples)]
    hidden = None
    for stage in stages:
        entering = leaves if any(stage.layers[0] <= layer < stage.layers[1] for layer in enters) else {}
        if hidden is not None:
            assert tuple(hidden.shape) == stage.input_shape(samples)
        read = features if stage.needs_features else [{}] * len(samples)
        hidden, loss = stage(StageInput(samples, read, hidden, entering))
    loss.backward()
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                canonical = stage.canonical_name(name)
                gradients[canonical] = gradients.get(canonical, 0) + parameter.grad
    return loss.detach(), gradients, {source: leaf.grad for source, leaf in leaves.items()}


def run_plainly(model, samples, incoming, *, cross_attention=False):
    leaves = {source: tokens.clone().requires_grad_() for source, tokens in incoming.items()}
    position = dict.fromkeys(leaves, 0)
    total = torch.zeros((), dtype=torch.float64)
    for i, sample in enumerate(samples):
        features = features_of(sample, i)
        embeddings = model.get_input_embeddings()(features["input_ids"])
        tokens = {}
        for source in leaves:
            n = sample.num_outputs(source)
            tokens[source] = leaves[source][position[source] : position[source] + n]
            position[source] += n
        extra = {}
        if cross_attention:
            if any(len(t) for t in tokens.values()):
                states = torch.cat(list(tokens.values()))[None]
                # Without a mask, transformers' attention would take the keys for a causal sequence.
                extra["cross_attention_states"] = states
                extra["cross_attention_mask"] = states.new_zeros(1, 1, len(embeddings), states.shape[1])
        else:
            pieces, at = [], 0
            for segment in sample.layouts["llm"]:
                piece = embeddings[at : at + segment.num_tokens]
                if segment.source:
                    before = [s for s in sample.layouts[segment.source] if s.item < segment.item]
                    start = sum(s.outputs for s in before)
                    piece = tokens[segment.source][start : start + segment.num_tokens]
                pieces.append(piece)
                at += segment.num_tokens
            embeddings = torch.cat(pieces)
        logits = model(inputs_embeds=embeddings[None], **extra).logits[0]
        total = total + cross_entropy(logits[:-1], features["labels"][1:], ignore_index=-100, reduction="sum")
    total.backward()
    gradients = {f"module.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return total.detach(), gradients, {source: leaf.grad for source, leaf in leaves.items()}


def assert_alike(ours, reference):
    torch.testing.assert_close(ours[0], reference[0], rtol=1e-11, atol=0)
    assert set(ours[1]) == set(reference[1])
    for name in reference[1]:
        torch.testing.assert_close(ours[1][name], reference[1][name], rtol=1e-8, atol=1e-11, msg=name)
    for source in reference[2]:
        torch.testing.assert_close(ours[2][source], reference[2][source], rtol=1e-8, atol=1e-11, msg=source)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_equal_the_plain_model(family: str, packing: bool) -> None:
    incoming = incoming_of(SAMPLES)
    reference = run_plainly(tiny_language_model(family), SAMPLES, incoming)
    for bounds in ([6], [3, 6], [1, 4, 5, 6])[0 if family == "llama" else 2 :]:
        assert_alike(run_in_stages(tiny_language_model(family), bounds, SAMPLES, incoming, packing=packing), reference)


@pytest.mark.parametrize("family", [*FAMILIES[:2], *in_campaigns(FAMILIES[2:])])
def test_recomputation_changes_nothing(family: str) -> None:
    incoming = incoming_of(SAMPLES)
    kept = run_in_stages(tiny_language_model(family), [3, 6], SAMPLES, incoming, packing=False)
    again = run_in_stages(tiny_language_model(family).eval(), [3, 6], SAMPLES, incoming, packing=False, recompute=True)
    assert_alike(again, kept)


@pytest.mark.parametrize(
    ("packing", "recompute"), [(False, True), (True, False), *in_campaigns([(False, False), (True, True)])]
)
def test_cross_attention(packing: bool, recompute: bool) -> None:
    samples = [Sample(s.id, {**s.layouts, "llm": (Segment(6 + i),)}) for i, s in enumerate(SAMPLES)]
    incoming = incoming_of(samples)
    reference = run_plainly(tiny_language_model("mllama"), samples, incoming, cross_attention=True)
    for bounds in ([6], [1, 2, 5, 6]):
        ours = run_in_stages(
            tiny_language_model("mllama"),
            bounds,
            samples,
            incoming,
            packing=packing,
            recompute=recompute,
            enters=(2, 4),
        )
        assert_alike(ours, reference)
    only_text = [samples[1]]
    reference = run_plainly(tiny_language_model("mllama"), only_text, {}, cross_attention=True)
    ours = run_in_stages(tiny_language_model("mllama"), [3, 6], only_text, {}, packing=packing, enters=(2, 4))
    assert_alike(ours, reference)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_last_hidden_states_of_every_token_are_handed_on_beside_the_loss(packing: bool) -> None:
    model = tiny_language_model("llama")
    stage = LanguageModelStage("llm", copy.deepcopy(model), (0, 6), packing=packing)
    incoming = incoming_of(SAMPLES)
    features = [features_of(sample, i) for i, sample in enumerate(SAMPLES)]
    hidden, loss = stage(StageInput(SAMPLES, features, incoming=incoming, hands_on=True))
    alone = []
    for i, sample in enumerate(SAMPLES):
        entering = incoming_of(SAMPLES)
        starts = {source: sum(s.num_outputs(source) for s in SAMPLES[:i]) for source in entering}
        own = {s: rows[starts[s] : starts[s] + sample.num_outputs(s)] for s, rows in entering.items()}
        alone.append(stage(StageInput([sample], [features[i]], incoming=own, hands_on=True)).hidden)
    torch.testing.assert_close(hidden, torch.cat(alone), rtol=1e-12, atol=1e-12)
    without, same_loss = stage(StageInput(SAMPLES, features, incoming=incoming))
    assert without is None
    assert torch.equal(loss, same_loss)
