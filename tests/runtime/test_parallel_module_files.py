"""What a loop of one's own can take away from a parallelized model, and bring back: states, checkpoints, exports,
answers."""

import copy
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_distributed
from safetensors.torch import load_file
from tiny_mllm import tiny_batch, tiny_multimodal
from tiny_run import write_tiny_run
from torch import Tensor
from transformers import CLIPConfig, CLIPModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

import motet
from motet import (
    ContrastiveParallelModule,
    MultimodalModule,
    MultimodalParallelModule,
    MultimodalParallelSpec,
    ParallelSpec,
    TowerSpec,
    load_run_config,
)
from motet.errors import UserError
from motet.models.from_run_file import plain_nodes
from motet.models.hub.export import load_export
from motet.models.materialize import float64_throughout

ONE, TWO_STAGES, TWO_SHARDS = ParallelSpec(), ParallelSpec(pp_size=2), ParallelSpec(tp_size=2)
ITEMS = [(1, 1), (0, 1), (2, 0), (0, 0)]
BATCH = tiny_batch(ITEMS)


@pytest.fixture(autouse=True)
def _float64(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if "motet_train" in request.node.name else float64_throughout():
        yield


def parallelize(
    llm: ParallelSpec, model: MultimodalModule | None = None, placement: str = "colocated"
) -> MultimodalParallelModule:
    """Encoders on the first rank."""
    spec = MultimodalParallelSpec(
        {"vision": ONE, "audio": ONE}, llm, num_microbatches=2, microbatch_size=2, modality_parallelism=placement
    )
    return spec.apply(model or tiny_multimodal())


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """A loop as one writes it for any module of torch."""
    losses = []
    for _ in range(steps):
        loss = model(**BATCH).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)


def is_equal(states: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return states.keys() == others.keys() and all(torch.allclose(states[k], others[k], atol=1e-9) for k in states)


def test_a_training_goes_on_under_another_plan(tmp_path: Path) -> None:
    reference = tiny_multimodal()
    losses = train(reference, adamw(reference), 3)

    def begin(rank: int) -> tuple[list[float], str, dict[str, Tensor]]:
        model = parallelize(TWO_STAGES)
        optimizer = adamw(model)
        seen = train(model, optimizer, 1)
        return seen, str(model.save_checkpoint(tmp_path / "checkpoints", optimizer, step=1)), model.state_dict()

    results = run_distributed(begin, 3)
    assert results[0][0] == results[2][0] == pytest.approx(losses[:1], rel=1e-9)
    assert results[0][1].endswith("step_00000001")
    assert [bool(states) for _, _, states in results] == [True, False, False]

    def go_on(rank: int) -> tuple[int, list[float], dict[str, Tensor], dict[str, Tensor]]:
        model = parallelize(TWO_SHARDS)
        optimizer = adamw(model)
        step = model.load_checkpoint(results[0][1], optimizer)
        before = model.state_dict()
        return step, train(model, optimizer, 2), before, model.state_dict()

    for step, seen, *_ in (after := run_distributed(go_on, 3)):
        assert step == 1
        assert seen == pytest.approx(losses[1:], rel=1e-9)
    assert is_equal(after[0][2], results[0][2])
    assert is_equal(after[0][3], reference.state_dict())


def test_states_come_back_by_the_names_of_the_whole_model() -> None:
    other = tiny_multimodal()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)

    def work(rank: int) -> tuple[dict[str, Tensor], str]:
        model = parallelize(TWO_SHARDS)
        model.load_state_dict(other.state_dict() if rank == 0 else {})
        with pytest.raises(UserError) as caught:
            model.load_state_dict({"head": torch.zeros(1)})
        return model.state_dict(), str(caught.value)

    results = run_distributed(work, 3)
    assert is_equal(results[0][0], other.state_dict())
    assert all("state_dict: " in message and "\n" not in message for _, message in results)


def test_an_export_that_would_lack_weights_is_refused_before_they_are_gathered(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        # Two tensors have one name in files.
        renaming = WeightRenaming(r"^model\.norm\.", r"model.layers.0.input_layernorm.")
        register_checkpoint_conversion_mapping("LlamaForCausalLM", [renaming])
        model = parallelize(TWO_STAGES)
        model.whole_model = None  # Not called.
        with pytest.raises(UserError) as raised:
            model.save_pretrained(tmp_path / "exported")
        return str(raised.value)

    message = (
        r"export: transformers stores 1 of the tensors of a LlamaForCausalLM together with others \(.*save_checkpoint: "
    )
    assert all(re.match(message, each) for each in run_distributed(work, 3))
    assert not (tmp_path / "exported").exists()


def test_answers_and_exports_during_training(tmp_path: Path) -> None:
    prompts = {key: value for key, value in tiny_batch(ITEMS[:3]).items() if key != "labels"}

    def work(rank: int) -> tuple[list[list[int]], float]:
        model = parallelize(TWO_STAGES)
        train(model, adamw(model), 1)
        model.save_pretrained(tmp_path / "exported")
        answers = model.generate(prompts, max_new_tokens=5)
        assert model.training
        return answers, model(**BATCH).loss.item()

    results = run_distributed(work, 3)
    assert all(answers == results[0][0] for answers, _ in results)
    exported = load_export(tmp_path / "exported").double()
    assert exported(**BATCH).loss.item() == pytest.approx(results[0][1], rel=1e-9)
    for i, answer in enumerate(results[0][0]):
        assert answer == greedy(exported, i)


def greedy(model: MultimodalModule, index: int) -> list[int]:
    """The whole sequence anew for each token."""
    batch = tiny_batch(ITEMS[:3])
    mask = batch["attention_mask"][index].bool()
    images, clips = ([sum(counts[k] for counts in ITEMS[:n]) for n in (index, index + 1)] for k in (0, 1))
    ids, answer = batch["input_ids"][index][mask], []
    for _ in range(5):
        media = {}
        if images[1] > images[0]:
            media["pixel_values"] = batch["pixel_values"][slice(*images)]
        if clips[1] > clips[0]:
            media["input_features"] = batch["input_features"][slice(*clips)]
        with torch.no_grad():
            logits = model(input_ids=ids[None], **media).logits[0, -1]
        answer.append(int(logits.argmax()))
        ids = torch.cat([ids, torch.tensor(answer[-1:])])
    return answer


def frozen_model() -> MultimodalModule:
    model = tiny_multimodal()
    model.vision_encoder.module.eval()
    model.vision_encoder.projector.eval()
    return model


def test_a_rank_with_nothing_to_train_has_an_optimizer() -> None:
    def work(rank: int) -> tuple[int, list[float]]:
        model = parallelize(ONE, frozen_model(), "parallel")
        optimizer = adamw(model)
        return sum(p.numel() for p in model.parameters() if p.requires_grad), train(model, optimizer, 2)

    results = run_distributed(work, 3)
    assert [count > 0 for count, _ in results] == [False, True, True]
    reference = frozen_model()
    assert results[0][1] == pytest.approx(train(reference, adamw(reference), 2), rel=1e-9)


def test_the_loss_is_differentiated_as_torch_does_it() -> None:
    """Scaled, accumulated, and not at all in evaluation mode."""

    def work(rank: int) -> float:
        model = parallelize(ONE)
        model.execute(BATCH)
        expected = [2.5 * p.grad for p in model.parameters() if p.grad is not None]
        for p in model.parameters():
            p.grad = None
        (model(**BATCH).loss / 2).backward()
        kept = model(**BATCH).loss
        assert not model.eval()(**BATCH).loss.requires_grad
        (2 * kept).backward()
        return max(
            float((p.grad - e).norm() / e.norm().clamp(min=1e-9))
            for p, e in zip((p for p in model.parameters() if p.grad is not None), expected, strict=True)
        )

    assert max(run_distributed(work, 2)) < 1e-9


@pytest.mark.campaign
def test_a_clip_model_is_taken_away_as_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        text_config={**sizes, "vocab_size": 20, "max_position_embeddings": 8, "eos_token_id": 3},
        projection_dim=8,
    )
    torch.manual_seed(0)
    given = CLIPModel(config).double()
    changed = {
        name: 1.5 * tensor if tensor.is_floating_point() else tensor for name, tensor in given.state_dict().items()
    }

    def work(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = ContrastiveParallelModule(copy.deepcopy(given), {"image": TowerSpec(), "text": TowerSpec()})
        before = model.state_dict()
        model.load_state_dict(changed)
        model.save_pretrained(tmp_path / "clip")
        return before, model.state_dict()

    before, after = run_distributed(work, 2)[0]
    assert is_equal(before, given.state_dict())
    assert is_equal(after, changed)
    assert is_equal(CLIPModel.from_pretrained(tmp_path / "clip", dtype=torch.float64).state_dict(), changed)


@pytest.mark.campaign
def test_checkpoints_go_to_and_from_motet_train(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = write_tiny_run(tmp_path)
    layout = "{num_microbatches: 2, planner: explicit, explicit: {vision: {}, audio: {}, language_model: {}}}"
    options = ["train.checkpoint_every=2", "cluster.num_devices=3", f"parallel={layout}"]
    trained = motet.train(run, [*options, "train.steps=2"])["checkpoint"]
    config = load_run_config(run, options)

    def work(rank: int) -> tuple[int, str]:
        parts: Any = plain_nodes(config, {})
        model = MultimodalModule(
            {name: parts[name].module for name in ("vision", "audio")},
            parts["language_model"].module,
            placeholder_token_ids={"vision": 6, "audio": 7},
        )
        parallel = parallelize(TWO_SHARDS, model)
        optimizer = adamw(parallel)
        step = parallel.load_checkpoint(trained, optimizer)
        return step, str(parallel.save_checkpoint(tmp_path / "own", optimizer, step=step))

    (step, written), *_ = run_distributed(work, 3)
    assert step == 2
    before, after = (tensors_in(Path(folder)) for folder in (trained, written))
    assert {name.partition("/")[0] for name in before} == {"model", "optimizer"}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    goes_on = [*options, "train.steps=3", f"train.resume={written}", f"train.output={tmp_path / 'more'}"]
    assert motet.train(run, goes_on)["steps"] == 3
    assert "it does not say which data were seen, so they begin anew" in capfd.readouterr().err


def tensors_in(checkpoint: Path) -> dict[str, Tensor]:
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}
