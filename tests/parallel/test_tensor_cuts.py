"""Cuts derived from models: of every mechanism that transformers' plans know, and of models without a plan."""

import copy
from typing import Any

import pytest
import torch
from distributed import run_distributed
from torch import Tensor, nn
from tp_cases import TEXT, Case
from tp_compare import largest_error
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BertConfig, BertModel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from motet.errors import UserError
from motet.families.tiny import perturb, tiny_config
from motet.models.from_run_file import remove_dropout
from motet.models.materialize import float64_throughout
from motet.parallel.tensor import tensor_cuts as cuts
from motet.parallel.tensor.tensor_cuts import LinearCut, TensorCuts, tensor_cuts
from motet.parallel.tensor.tensor_parallel import TensorParallel, apply_tensor_parallel
from motet.parallel.tensor.tensor_plans import Shard, check_tp
from motet.parallel.tensor.vocab_parallel import cross_entropy_sum, vocabulary_group

LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2, "experts_implementation": "eager"}
DEEPSEEK = {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
GROUPS = {"n_group": 1, "topk_group": 1}
LONGCAT = {"num_layers": 2, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 12, "zero_expert_num": 2, "moe_topk": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5, "tie_word_embeddings": True},  # tied, and multiplied after the head
    "apertus": {},  # an activation with weights of its own
    "olmo2": {},  # norms over all heads: outputs are gathered
    "deepseek_v2": LATENT | EXPERTS | DEEPSEEK | GROUPS,  # compressed queries and keys, experts, shared experts
    "longcat_flash": LATENT | EXPERTS | LONGCAT | {"num_key_value_heads": 4, "n_routed_experts": 4},  # lists in blocks
    "gpt_oss": EXPERTS | {"num_local_experts": 4, "head_dim": 8},  # a sink for each head; no plan for blocks
    "qwen3_next": EXPERTS | DELTA | {"num_experts": 4, "head_dim": 8, "shared_expert_intermediate_size": 12},
    "gpt_neox": {"hidden_dropout": 0.0},  # queries, keys and values of each head side by side
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0},  # a residual goes into the MLP; no plan
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 32, "dropout": 0.0},  # no plan; the MLP stands in the block itself
    "gemma2": {"head_dim": 8, "tie_word_embeddings": True, "sliding_window": 4},
}
SHARE_THE_SEQUENCE = ("cohere", "apertus", "olmo2", "deepseek_v2", "qwen3_next", "gpt_neox", "gemma2")


def build(family: str) -> nn.Module:
    config_class = CONFIG_MAPPING[family]
    config = config_class(**TEXT | FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def run(model: Any) -> Tensor:
    ids = torch.randint(4, 48, (2, 9), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)  # Some routers draw noise.
    logits = model(input_ids=ids, use_cache=False).logits
    group = vocabulary_group(model.get_output_embeddings())
    return cross_entropy_sum(logits[:, :-1], ids[:, 1:], group)


def test_families_equal_one_process() -> None:
    def compare(rank: int) -> None:
        with float64_throughout():
            for family in FAMILIES:
                case = Case(family, lambda family=family: build(family), run)
                for sequence_parallel in (False, True) if family in SHARE_THE_SEQUENCE else (False,):
                    error, where = largest_error(case, TensorParallel(None, rank, 2, sequence_parallel))
                    assert error <= 1e-11, (family, sequence_parallel, where, error)

    run_distributed(compare, 2)


def cuts_of(family: str) -> TensorCuts:
    with torch.device("meta"):
        return tensor_cuts(build(family))


def test_every_style_of_transformers_is_known() -> None:
    known = {*cuts.COLUMN_STYLES, *cuts.ROW_STYLES, *cuts.IMPLIED_STYLES, *cuts.SUMMED_STYLES}
    of_expert_plans = {"grouped_gemm", "ep_dispatch_experts", "ep_router", "megamoe_router", "megamoe_experts"}
    assert set(ALL_PARALLEL_STYLES.keys()) - known - of_expert_plans == {cuts.IDENTITY_EXPERT_STYLE}


def test_numbers_that_the_size_must_divide() -> None:
    assert cuts_of("cohere").must_divide == {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
    }
    assert cuts_of("deepseek_v2").must_divide == {
        "num_attention_heads": 4,
        "moe_intermediate_size": 12,
        "intermediate_size": 24,
    }
    assert cuts_of("olmo2").must_divide == {"intermediate_size": 24}
    with pytest.raises(UserError, match="4 does not divide num_key_value_heads 2; use 1 or 2"):
        check_tp(cuts_of("cohere").must_divide, 4)


def test_cuts_of_linears_and_parameters() -> None:
    found = cuts_of("deepseek_v2")
    layer = "model.layers.1."
    assert found.cut_of(f"{layer}self_attn.kv_b_proj") == "column"
    assert found.cut_of(f"{layer}self_attn.o_proj") == "row"
    assert found.cut_of(f"{layer}self_attn.q_a_proj") is None
    assert found.parameters[f"{layer}mlp.experts.gate_up_proj"] == Shard(1, (1, 1))
    assert found.vocabulary == ("model.embed_tokens", "lm_head")
    assert cuts_of("olmo2").linears["model.layers.0.self_attn.q_proj"] == LinearCut("column", is_outside=True)
    assert cuts_of("gpt_oss").parameters["model.layers.0.self_attn.sinks"] == Shard(0)


def test_a_style_that_is_not_known_is_refused() -> None:
    model: Any = build("cohere")
    model.tp_plan = model.tp_plan | {"model.layers.*.mlp": "grouped_gemm"}
    with pytest.raises(UserError, match=r"gives model.layers.0.mlp the style grouped_gemm, which is not supported"):
        apply_tensor_parallel(model, TensorParallel(None, 0, 2))


def test_a_table_that_norms_what_it_looks_up_stays_whole() -> None:
    model: Any = build("cohere")
    model.model.embed_tokens.norm = nn.LayerNorm(32)
    assert tensor_cuts(model).vocabulary == ()
    untied = copy.deepcopy(model)
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())
    assert tensor_cuts(untied).vocabulary == ("lm_head",)


def test_an_encoder_whose_embeddings_are_on_another_stage() -> None:
    config = BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=16)
    model = BertModel(config)
    whole = tensor_cuts(model)
    model.embeddings = nn.Identity()
    assert tensor_cuts(model).linears == whole.linears


def test_a_model_of_which_nothing_can_be_cut_is_refused() -> None:
    config = CONFIG_MAPPING["falcon_mamba"](hidden_size=16, num_hidden_layers=2, vocab_size=48, state_size=4)
    with pytest.raises(UserError, match=r"nothing in the layers of FalconMambaForCausalLM can be cut: .* use 1"):
        apply_tensor_parallel(AutoModelForCausalLM.from_config(config), TensorParallel(None, 0, 2))


def outcome(model_type: str, rank: int, *, sequence_parallel: bool = False) -> str:
    """ "equal", "different: where", or why the type does not run cut over two ranks."""

    def build() -> nn.Module:
        model = AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING[model_type]())).double()
        perturb(model)
        remove_dropout(model)
        return model.eval()

    try:
        build()
        case = Case(model_type, build, run)
        error, where = largest_error(case, TensorParallel(None, rank, 2, sequence_parallel))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return "equal" if error < 1e-9 else f"different: {where} {error}"


@pytest.mark.campaign
def test_every_causal_type_is_equal_or_does_not_run() -> None:
    def outcomes(rank: int) -> dict[str, str]:
        with float64_throughout():
            return {name: outcome(name, rank) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}

    found = run_distributed(outcomes, 2, timeout=1800.0)
    different = {name: why for of_rank in found for name, why in of_rank.items() if why.startswith("different")}
    assert not different
    assert sum(why == "equal" for why in found[0].values()) >= 120
