"""What is frozen, as the papers' listings say it, and that it stays so; the papers' names of things."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from recomputing import recomputing
from tiny_encoders import tiny_encoder
from tiny_language_models import tiny_language_model
from torch import nn

from motet.errors import UserError
from motet.models.graph import EncoderModule, ModalityModule
from motet.models.multimodal import MultimodalModule
from motet.models.stages.encoder import EncoderStage
from motet.models.stages.language_model import LanguageModelStage
from motet.parallel.adapters import Adapters
from motet.parallel.tensor.tensor_collectives import TensorParallel
from motet.runtime.assembly import make_stage


def make(**options) -> MultimodalModule:
    return MultimodalModule(
        encoders={
            "vision": ModalityModule(tiny_encoder("siglip").eval(), proj="mlp"),
            "audio": EncoderModule(tiny_encoder("whisper").eval(), "linear"),
        },
        language_model=tiny_language_model("llama").eval(),
        **options,
    )


def trainable_parts(model: MultimodalModule) -> set[str]:
    return set(model.parts()) - model.frozen_parts()


def test_everything_is_trainable_at_first() -> None:
    """Although `from_pretrained` returns models in evaluation mode."""
    model = make()
    assert trainable_parts(model) == {
        "vision.module",
        "vision.projector",
        "audio.module",
        "audio.projector",
        "language_model.module",
    }
    assert all(part.training for part in model.parts().values())


def test_the_listings_way_of_freezing() -> None:
    model = make()
    model.vision_encoder.module.train(mode=False)
    model.vision_encoder.projector.train(mode=True)
    model.language_model.module.train(mode=False)
    model.freeze_eval_parts()
    assert trainable_parts(model) == {"vision.projector", "audio.module", "audio.projector"}


def test_frozen_parts_stay_so_through_evaluation() -> None:
    model = make()
    model.vision_encoder.module.eval()
    model.audio_encoder.projector.requires_grad_(False)
    model.train()
    frozen = {"vision.module", "audio.projector"}
    assert model.frozen_parts() == frozen
    for _ in range(2):
        model.eval()
        assert not any(part.training for part in model.parts().values())
        assert model.frozen_parts() == frozen
        model.train()
        assert {name for name, part in model.parts().items() if not part.training} == frozen
    model.vision_encoder.module.requires_grad_(True).train()
    model.eval()
    model.train()
    assert model.frozen_parts() == {"audio.projector"}


def test_a_part_without_trainable_parameters_has_no_dropout() -> None:
    frozen = tiny_encoder("siglip").requires_grad_(False)
    model = MultimodalModule(
        encoders={"vision": ModalityModule(frozen, "mlp")}, language_model=tiny_language_model("llama")
    )
    assert not frozen.training
    assert model.vision_encoder.projector.training


def test_partly_frozen_is_not_frozen() -> None:
    model = make()
    model.language_model.module.model.embed_tokens.requires_grad_(False)
    model.eval()
    model.train()
    assert "language_model.module" not in model.frozen_parts()
    assert model.language_model.module.training


def test_stages_keep_frozen_parts_in_evaluation_mode() -> None:
    model = make()
    model.vision_encoder.module.eval()
    model.language_model.eval()
    model.freeze_eval_parts()
    vision = EncoderStage("vision", model.vision_encoder, (0, 7))
    language = recomputing(LanguageModelStage("language_model", model.language_model.module, (2, 6)), True)
    for stage in (vision, language):
        stage.eval()
        stage.train()
        inner = [m for m in stage.module.modules() if isinstance(m, nn.Linear)]
        assert inner
        assert not any(m.training for m in inner)
    assert vision.projector is not None
    assert vision.projector.training


def test_dropout_is_off_in_recomputed_frozen_blocks() -> None:
    model = tiny_language_model("phi3")
    for block in model.model.layers:
        block.resid_attn_dropout.p = block.resid_mlp_dropout.p = 0.9
    model.requires_grad_(False).eval()
    stage = recomputing(LanguageModelStage("llm", model, (1, 6)), True)
    stage.train()
    hidden = torch.randn(1, 4, 32, dtype=torch.float64, requires_grad=True)
    ids = torch.arange(4)[None]
    plain = model.model(inputs_embeds=hidden, position_ids=ids, use_cache=False).last_hidden_state
    again = model.model(inputs_embeds=hidden, position_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(plain, again)


def test_projectors_have_the_encoders_width_and_dtype() -> None:
    projector = make().vision_encoder.projector
    assert projector.linear_1.weight.shape == (32, 32)
    assert projector.linear_1.weight.dtype == torch.float64
    own = nn.Linear(32, 32)
    model = MultimodalModule(
        encoders={"vision": ModalityModule(tiny_encoder("siglip"), own)}, language_model=tiny_language_model("llama")
    )
    assert model.vision_encoder.projector is own


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(UserError, match="two names for the same argument"):
        ModalityModule(tiny_encoder("siglip"), "mlp", proj="mlp")
    with pytest.raises(UserError, match="'add' is not known; give one of placeholder"):
        make(merge="add")
    with pytest.raises(UserError, match="LlamaForCausalLM has no cross-attention layers"):
        make(merge="cross_attention")
    with pytest.raises(UserError, match="SiglipVisionModel is not a causal language model"):
        MultimodalModule(encoders={}, language_model=tiny_encoder("siglip"))
    with pytest.raises(UserError, match="projector: 'conv' is not known"):
        MultimodalModule(
            encoders={"vision": ModalityModule(tiny_encoder("siglip"), "conv")},
            language_model=tiny_language_model("llama"),
        )
    with pytest.raises(AttributeError, match="sound_encoder"):
        make().sound_encoder  # noqa: B018


def test_a_projector_of_the_users_own_is_registered_once() -> None:
    projector = nn.Linear(32, 32, dtype=torch.float64)
    module = ModalityModule(tiny_encoder("siglip"), projector)
    names = [name for name in module.state_dict() if name.endswith("weight") and module.state_dict()[name] is not None]
    assert [name for name in names if "projector" in name] == ["projector.weight"]
    assert module.projector is projector


@pytest.mark.parametrize("trained", ["nothing", "blocks", "adapters"])
def test_dropout_does_not_depend_on_where_a_module_is_cut(trained: str) -> None:
    """A stage of the embedding alone, of which nothing is trained, is in training mode if the module is."""
    node = make().nodes["language_model"]
    node.parts["module"].requires_grad_(False)
    if trained == "blocks":
        node.parts["module"].get_submodule("model.layers").requires_grad_(True)
    if trained == "adapters":
        node = replace(node, adapters=Adapters(rank=2, alpha=2.0, dropout=0.0, targets=None, seed=0))
    alone = TensorParallel(group=None, rank=0, size=1)
    for layers in ((0, 1), (0, node.num_layers)):
        stage = make_stage(deepcopy(node), layers, alone, torch.device("cpu"), packing=False, recompute=None)
        stage.train()
        assert stage.module.training == (trained != "nothing")
        stage.eval()
        assert not stage.module.training
