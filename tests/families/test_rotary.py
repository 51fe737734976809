"""Every kind of rotary positions that transformers has, where a microbatch is not one sample."""

import copy

import pytest
import torch
from sampling import in_campaigns
from stage_chain import LossAndGradients, largest_difference, run_chain, run_whole, text_samples
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from motet.errors import UserError
from motet.families.rotary import SequenceRotary, depends_on_length
from motet.families.tiny import HEAD_DIM, THRESHOLD, perturb, tiny_config
from motet.models.materialize import float64_throughout
from motet.models.stages.language_model import LanguageModelStage
from motet.runtime.verification.family_probe import LENGTHS, TRIALS, probe

OTHER_VALUES = {
    "longrope": {"short_factor": [1.0] * (HEAD_DIM // 2), "long_factor": [2.0] * (HEAD_DIM // 2)},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
}
KINDS = ["default", *ROPE_INIT_FUNCTIONS]
OF_LENGTH = ["dynamic", "longrope"]


def tiny_rope_config(kind, model_type="llama"):
    rope = {"rope_type": kind, "rope_theta": 10000.0}
    if kind != "default":
        rope |= {"factor": 4.0, "original_max_position_embeddings": THRESHOLD, **OTHER_VALUES.get(kind, {})}
    return tiny_config(CONFIG_MAPPING[model_type](rope_parameters=rope))


def tiny_model(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_rope_config(kind)).eval()
    perturb(model)
    return model.double()


@pytest.mark.parametrize(
    ("kind", "packing"),
    [
        *((kind, packing) for kind in OF_LENGTH for packing in (False, True)),
        ("llama3", True),
        *in_campaigns((kind, False) for kind in KINDS if kind not in OF_LENGTH),
        *in_campaigns((kind, True) for kind in KINDS if kind not in (*OF_LENGTH, "llama3")),
    ],
)
def test_each_sample_has_the_frequencies_of_its_own_length(kind, packing):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 100, (length,), generator=generator) for length in LENGTHS]
    assert min(LENGTHS) < THRESHOLD < max(LENGTHS)
    features = [{"input_ids": own, "labels": own} for own in ids]
    with float64_throughout():
        model = tiny_model(kind)
        stages = [
            LanguageModelStage("language_model", copy.deepcopy(model), layers, packing=packing)
            for layers in [(0, 3), (3, 6)]
        ]
        for order in ([0, 1, 2, 3], [3, 1], [1, 0]):
            given = [features[i] for i in order]
            ours = run_chain(stages, text_samples([ids[i] for i in order]), given)
            # A sample at a time, each by a model that has seen no other.
            alone = [run_whole(copy.deepcopy(model), [own]) for own in given]
            total = {name: sum(one.gradients[name] for one in alone) for name in alone[0].gradients}
            expected = LossAndGradients(sum(one.loss for one in alone), total)
            assert largest_difference(ours, expected) < 1e-9
            for stage in stages:
                stage.zero_grad()


def test_the_length_matters_for_these_kinds_and_no_others():
    with float64_throughout():
        for kind in KINDS:
            model = tiny_model(kind)
            rotary = model.model.rotary_emb
            assert depends_on_length(rotary) == (kind in OF_LENGTH)
            few, many = (rotary(torch.zeros(1), torch.arange(n)[None])[0][0, 5] for n in (8, 20))
            assert torch.equal(few, many) == (kind not in OF_LENGTH)


@pytest.mark.parametrize("kind", ["longrope", *(pytest.param(k, marks=pytest.mark.campaign) for k in KINDS)])
def test_ranks_that_share_a_sequence_have_its_frequencies(kind):
    trials = {name: TRIALS[name] for name in ("context_parallel", "ulysses")}

    assert probe(tiny_rope_config(kind), trials).reasons == dict.fromkeys(trials)


def test_such_positions_inside_of_blocks_are_refused():
    model = tiny_model("dynamic")
    model.model.layers[1].rotary_emb = model.model.rotary_emb
    del model.model.rotary_emb

    with pytest.raises(UserError, match=r"model.layers.1.rotary_emb has dynamic rotary positions in a block"):
        SequenceRotary(model, "model.layers")
