"""One vision-language model trained on two processes three ways: motet's pipeline, DistributedDataParallel, and FSDP2
(`fully_shard` of every block).

Same weights, same global batch, same size of microbatch (data parallelism accumulates over its own half of them and
communicates at the last), AdamW in all three. All take the same number of steps from the same weights on the same
batch, so their losses must agree at the end.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.layouts import chain_plan, describe
from benchmarks.measuring import measure_in_turn, ratio, seconds
from benchmarks.reporting import Report
from benchmarks.workloads import SyntheticBatch, vlm_config
from motet.cluster import cpu_cluster
from motet.config import RunConfig
from motet.models.from_run_file import build_node
from motet.plan import Plan
from motet.planner.from_run_file import planning_problem
from motet.runtime.assembly import build_engine, build_optimizer
from motet.runtime.launch import launch


class PlainVLM(nn.Module):
    """The model as one writes it without motet: image tokens, then words. The loss is the sum over the words."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        encoder = build_node(config, "vision", None, torch.float32).parts
        self.vision, self.projector = encoder["module"], encoder["projector"]
        self.llm = build_node(config, "language_model", None, torch.float32).parts["module"]

    def forward(self, pixel_values: Tensor, words: Tensor) -> Tensor:
        image = self.projector(self.vision(pixel_values).last_hidden_state)
        embeddings = torch.cat([image, self.llm.get_input_embeddings()(words)], dim=1)
        hidden = self.llm.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        # Token t predicts t + 1: the last of the image predicts the first word.
        logits = self.llm.lm_head(hidden[:, image.shape[1] - 1 : -1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="sum")

    def blocks(self) -> Iterator[nn.Module]:
        yield from self.vision.encoder.layers
        yield from self.llm.model.layers


class DataParallelTraining:
    """One rank: its half of the global batch."""

    def __init__(self, config: RunConfig, batch: SyntheticBatch, num_text_tokens: int, *, sharded: bool) -> None:
        self.sharded = sharded
        model = PlainVLM(config)
        if sharded:
            for block in model.blocks():
                fully_shard(block)
            fully_shard(model)
        self.model = model if sharded else DistributedDataParallel(model)
        # The wrappers average over ranks, the loss is a sum over the global batch.
        num_loss_tokens = sum(sample.num_loss_tokens["language_model"] for sample in batch.samples)
        self.scale = dist.get_world_size() / num_loss_tokens
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        train = config.train
        self.optimizer = torch.optim.AdamW(
            trainable, lr=train.learning_rate, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay
        )
        mine = range(len(batch.samples))[dist.get_rank() :: dist.get_world_size()]
        pixels = torch.cat([batch.features("vision", i)["pixel_values"] for i in mine])
        words = torch.stack([batch.features("language_model", i)["input_ids"][-num_text_tokens:] for i in mine])
        num_mine = config.parallel.num_microbatches // dist.get_world_size()
        self.microbatches = list(zip(pixels.chunk(num_mine), words.chunk(num_mine), strict=True))
        self.loss = 0.0

    def step(self) -> None:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for i, (pixels, words) in enumerate(self.microbatches):
            is_last = i == len(self.microbatches) - 1
            with self._synchronizing(is_last):
                loss = self.model(pixels, words) * self.scale
                loss.backward()
            total += loss.detach()
        self.optimizer.step()
        dist.all_reduce(total)
        self.loss = total.item() / dist.get_world_size()

    def _synchronizing(self, is_last: bool):  # type: ignore[no-untyped-def]
        if self.sharded:
            self.model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            return nullcontext()
        return nullcontext() if is_last else self.model.no_sync()  # type: ignore[operator]


def pipeline_step(config: RunConfig, plan: Plan, batch: SyntheticBatch) -> tuple[Callable[[], None], list[float]]:
    """The step, and where it writes its losses."""
    engine = build_engine(config, plan, torch.device("cpu"))
    optimizer = build_optimizer(config, engine.model)
    losses: list[float] = []

    def step() -> None:
        engine.model.zero_gradients()
        losses.append(engine.run(batch).loss)
        optimizer.step(0)

    return step, losses


def compare(
    config: RunConfig, plan: Plan, batch: SyntheticBatch, num_text_tokens: int, num_blocks: int, steps_per_block: int
) -> dict:
    """On each of the two ranks."""
    pipeline, losses = pipeline_step(config, plan, batch)
    ddp = DataParallelTraining(config, batch, num_text_tokens, sharded=False)
    fsdp = DataParallelTraining(config, batch, num_text_tokens, sharded=True)
    blocks = measure_in_turn(
        {"motet, pipeline": pipeline, "DDP": ddp.step, "FSDP2": fsdp.step},
        num_blocks=num_blocks,
        steps_per_block=steps_per_block,
    )
    last = {"motet, pipeline": losses[-1], "DDP": ddp.loss, "FSDP2": fsdp.loss}
    return {"blocks": blocks, "first loss": losses[0], "last losses": last}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6, help="measured blocks of each alternative")
    parser.add_argument("--steps", type=int, default=2, help="steps of one block")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--layers", type=int, default=12, help="blocks of the encoder, and of the language model")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=4, help="words of a sample")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse(arguments)
    report = Report("against-ddp-and-fsdp", "One model trained by motet's pipeline, by DDP and by FSDP2")
    report.add(
        f"SigLIP and Llama of {args.layers} blocks each, width {args.width}, MLP projector; {args.microbatches} "
        f"samples per step, microbatches of one sample, forward, backward and AdamW on two processes; "
        f"{args.blocks} blocks of {args.steps} steps of each, in turns. Median (quartiles)."
    )
    for trains, title in (("projector", "Encoder and language model frozen"), ("all", "Everything trainable")):
        config = vlm_config(
            num_vision_blocks=args.layers,
            num_llm_blocks=args.layers,
            width=args.width,
            image_size=args.image_size,
            num_samples=args.microbatches,
            num_microbatches=args.microbatches,
            trains=trains,
        )
        batch = SyntheticBatch(config, num_samples=args.microbatches, num_text_tokens=args.tokens)
        problem = replace(planning_problem(config, batch.samples), cluster=cpu_cluster(2))
        plan = chain_plan(problem, num_stages=2)
        measured = launch(compare, config, plan, batch, args.tokens, args.blocks, args.steps, num_processes=2)
        blocks = measured["blocks"]
        report.add(f"## {title}")
        report.add(f"The pipeline's stages (layers @ rank): {describe(plan)}.")
        report.table(
            ["", "step, ms", "samples/s", "step / motet's"],
            [
                [
                    name,
                    seconds(blocks, name).text(1e3),
                    f"{args.microbatches / seconds(blocks, name).median:.2f}",
                    ratio(blocks, name, "motet, pipeline").text(1, 3),
                ]
                for name in blocks
            ],
        )
        losses = ", ".join(f"{name} {loss:.6f}" for name, loss in measured["last losses"].items())
        report.add(f"Loss before the first step {measured['first loss']:.6f}; in the last one: {losses}.")
    return report


if __name__ == "__main__":
    main().write()
