"""A two-stage Llama stack, 1F1B: motet's engine against torch.distributed.pipelining's Schedule1F1B.

Same HuggingFace modules with the same weights, same microbatches, same loss (sum over the batch's tokens over their
number). Three alternatives take turns:

* `motet`: `Engine.run`, which also derives shapes and program, sums up the loss and computes the gradient's norm;
* `torch`: `Schedule1F1B.step` alone;
* `torch + loss and norm`: with the same loss and norm on all ranks afterwards.

Narrow stages show the time of the runtime itself. Where samples have unequal lengths torch gets all of them padded to
the longest, because its stages exchange tensors of one shape; motet pads each microbatch to its own longest.
"""

import argparse
import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.utils.rnn import pad_sequence

from benchmarks.layouts import language_model_plan
from benchmarks.measuring import measure_in_turn, ratio, seconds
from benchmarks.reporting import Report
from benchmarks.workloads import SyntheticBatch, llama_config
from motet.assignment.sample import IGNORED_LABEL
from motet.config import RunConfig
from motet.models.from_run_file import build_node
from motet.plan import Plan
from motet.runtime.assembly import build_engine
from motet.runtime.launch import launch

NAME = "language_model"
LIMIT = 1.02
"""Largest upper quartile of motet's step over torch's with loss and norm."""
UNEQUAL = (0.25, 1.0, 0.5, 0.75)
"""Lengths of samples, in turn, over the longest."""


class PlainStage(nn.Module):
    """Layers [first, last) of a Llama as a user of torch.distributed.pipelining cuts it. Takes over `model`."""

    def __init__(self, model: Any, layers: tuple[int, int]) -> None:
        super().__init__()
        num_blocks = model.config.num_hidden_layers
        self.is_first, self.is_last = layers[0] == 0, layers[1] == num_blocks + 2
        self.decoder = model.model
        blocks = range(max(layers[0], 1) - 1, min(layers[1], num_blocks + 1) - 1)
        self.decoder.layers = nn.ModuleList(self.decoder.layers[i] for i in blocks)
        if not self.is_first:
            self.decoder.embed_tokens = nn.Identity()
        if not self.is_last:
            self.decoder.norm = nn.Identity()
        self.head = model.lm_head if self.is_last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": x}
        return self.head(self.decoder(**inputs, use_cache=False).last_hidden_state)


class TorchPipeline:
    """One rank of the two."""

    def __init__(self, config: RunConfig, layers: tuple[int, int], batch: SyntheticBatch) -> None:
        rank = dist.get_rank()
        module = build_node(config, NAME, layers, torch.float32).parts["module"]
        self.module = PlainStage(module, layers)
        num_loss_tokens = sum(sample.num_loss_tokens[NAME] for sample in batch.samples)

        def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
            predicted = logits[:, :-1].flatten(0, 1)
            return nn.functional.cross_entropy(predicted, labels[:, 1:].flatten(), reduction="sum") / num_loss_tokens

        stage = PipelineStage(self.module, rank, 2, torch.device("cpu"))
        num_microbatches = config.parallel.num_microbatches
        self.schedule = Schedule1F1B(stage, num_microbatches, loss_fn=loss_of, scale_grads=False)
        features = [batch.features(NAME, i) for i in range(len(batch.samples))]
        self.input_ids = pad_sequence([f["input_ids"] for f in features], batch_first=True)
        self.labels = pad_sequence([f["labels"] for f in features], batch_first=True, padding_value=IGNORED_LABEL)
        self.loss = self.norm = 0.0

    def step(self) -> list[Tensor]:
        losses: list[Tensor] = []
        if self.module.is_first:
            self.schedule.step(self.input_ids)
        else:
            self.schedule.step(target=self.labels, losses=losses)
        return losses

    def step_with_loss_and_norm(self) -> None:
        losses = self.step()
        totals = torch.zeros(2, dtype=torch.float64)
        totals[0] = sum(loss.item() for loss in losses)
        norms = torch._foreach_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        totals[1] = torch.stack(norms).double().square().sum()
        dist.all_reduce(totals)
        self.loss, self.norm = totals[0].item(), totals[1].item() ** 0.5


def compare(config: RunConfig, plan: Plan, batch: SyntheticBatch, num_blocks: int, steps_per_block: int) -> dict:
    """On each of the two ranks."""
    engine = build_engine(config, plan, torch.device("cpu"))
    layers = plan.modules[NAME].replicas[0].stages[dist.get_rank()].layers
    torchs = TorchPipeline(config, layers, batch)

    def forget_gradients() -> None:
        engine.model.zero_gradients()
        torchs.module.zero_grad()

    blocks = measure_in_turn(
        {
            "motet": lambda: engine.run(batch),
            "torch": torchs.step,
            "torch + loss and norm": torchs.step_with_loss_and_norm,
        },
        num_blocks=num_blocks,
        steps_per_block=steps_per_block,
        between_steps=forget_gradients,
    )
    forget_gradients()
    result = engine.run(batch)
    torchs.step_with_loss_and_norm()
    return {"blocks": blocks, "motet": (result.loss, result.gradient_norm), "torch": (torchs.loss, torchs.norm)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12, help="measured blocks of each alternative")
    parser.add_argument("--steps", type=int, default=3, help="steps of one block")
    parser.add_argument("--layers", type=int, default=8, help="decoder layers")
    parser.add_argument("--width", type=int, nargs="+", default=[256, 32])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2, help="of one microbatch")
    parser.add_argument("--tokens", type=int, default=64, help="of one sample")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    num_samples = args.microbatches * args.samples
    num_layers = args.layers + 2
    plan = language_model_plan((0, num_layers // 2, num_layers), (0, 1), num_microbatches=args.microbatches)
    lengths = {"equal": (args.tokens,), "unequal": tuple(max(2, round(share * args.tokens)) for share in UNEQUAL)}
    report = Report("pipeline-against-torch", "Two-stage 1F1B: motet against torch.distributed.pipelining")
    report.add(
        f"Llama, {args.layers} decoder layers, 2 stages, {args.microbatches} microbatches of {args.samples} samples, "
        f"forward and backward, no optimizer; {args.blocks} blocks of {args.steps} steps of each, in turns. Median "
        "(quartiles); ratios are of the blocks of one round. Tokens of samples, in turn: "
        + "; ".join(f"{name}: {', '.join(map(str, own))}" for name, own in lengths.items())
        + "."
    )
    rows, sums, quartiles = [], [], {}
    for width in args.width:
        config = llama_config(
            num_blocks=args.layers, width=width, num_samples=num_samples, num_microbatches=args.microbatches
        )
        for name, own in lengths.items():
            batch = SyntheticBatch(config, num_samples=num_samples, num_text_tokens=own)
            result = launch(compare, config, plan, batch, args.blocks, args.steps, num_processes=2)
            blocks = result["blocks"]
            for other in blocks:
                taken, share = seconds(blocks, other).text(1e3), ratio(blocks, "motet", other).text(1, 3)
                rows.append([width, name, other, taken, share])
            sums.append([width, name, result["motet"], result["torch"]])
            quartiles[f"{width}, {name}"] = ratio(blocks, "motet", "torch + loss and norm").high
    report.table(["width", "lengths", "", "step, ms", "motet / this"], rows)
    report.add("Loss and norm of the gradient:")
    report.table(["width", "lengths", "motet", "torch"], sums)
    report.goal(
        f"motet's step takes at most {LIMIT} of Schedule1F1B's with loss and norm, in the upper quartile at every size",
        all(quartile <= LIMIT for quartile in quartiles.values()),
        "; ".join(f"{name}: {quartile:.3f}" for name, quartile in quartiles.items()),
    )
    return report


if __name__ == "__main__":
    main().write()
