"""A model of linear layers over any DAG of modules, as stages for the engine and as a plain loop over samples.

The loop (`reference`) shares nothing with the stages but the initial weights. Incoming tokens are weighted by their
place, so that tokens in the wrong order give another loss.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from motet.assignment.sample import Sample
from motet.models.stages.stage import StageInput, StageOutput
from motet.parallel.split_backward import linear
from motet.parallel.tensor.tensor_parallel import TensorParallel
from motet.plan import ModulePlan, Plan, Stage

WIDTH = 5


def initial_weight(module: str, layer: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash_of(module) * 1000 + layer)
    return torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5


def hash_of(text: str) -> int:
    return sum((i + 1) * ord(c) for i, c in enumerate(text))


def read_out(module: str) -> Tensor:
    generator = torch.Generator().manual_seed(hash_of(module) + 7)
    return torch.randn(WIDTH, generator=generator, dtype=torch.float64)


class ToyBatch:
    """`seed`: with another one, other features."""

    def __init__(self, samples: Sequence[Sample], seed: int = 0) -> None:
        self.samples, self._seed = tuple(samples), seed

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(hash_of(module) * 31 + sample + 1000 * self._seed)
        num_tokens = self.samples[sample].num_tokens(module)
        return {"x": torch.randn(num_tokens, WIDTH, generator=generator, dtype=torch.float64)}


def influence(tokens: Tensor) -> Tensor:
    """What a sample's incoming tokens add to each of its rows: [n, WIDTH] -> [WIDTH]."""
    places = torch.arange(1, len(tokens) + 1, dtype=tokens.dtype)
    return (tokens * places[:, None].cos()).sum(0)


class ToyStage(nn.Module):
    hidden_size = output_size = WIDTH

    def __init__(self, plan: Plan, name: str, module: ModulePlan, stage: Stage) -> None:
        super().__init__()
        self.plan, self.data_name, self.module_plan = plan, module.data_module(name), module
        self.first, self.last = stage.layers
        self.needs_features = self.first == 0
        self.enters = {edge.source: edge.layers for edge in plan.edges if edge.target == name}
        self.weights = nn.ParameterDict()
        for layer in range(self.first, self.last):
            trainable = plan.modules[self.data_name].is_trainable((layer, layer + 1))
            self.weights[str(layer)] = nn.Parameter(initial_weight(self.data_name, layer), requires_grad=trainable)

    def after_update(self) -> None:
        """No parameter has a limit."""

    def canonical_name(self, local: str) -> str:
        return local

    def layers_of(self, local: str) -> tuple[int, ...]:
        return (int(local.rpartition(".")[2]),)

    def input_shape(self, samples: Sequence[Sample]) -> tuple[int, ...]:
        return (sum(sample.num_tokens(self.data_name) for sample in samples), WIDTH)

    output_shape = input_shape

    def forward(self, inputs: StageInput) -> StageOutput:
        x = torch.cat([f["x"] for f in inputs.features]) if inputs.hidden is None else inputs.hidden
        incoming, samples = inputs.incoming, inputs.samples
        lengths = [sample.num_tokens(self.data_name) for sample in samples]
        for layer in range(self.first, self.last):
            for source, layers in self.enters.items():
                if layer in layers and source_data(self.plan, source) in incoming:
                    x = x + self._spread(incoming[source_data(self.plan, source)], source, samples, lengths)
            x = torch.tanh(linear(x, self.weights[str(layer)]))
        if self.module_plan.loss_weight and self.last == self.module_plan.num_layers:
            return StageOutput(x if inputs.hands_on else None, (x @ read_out(self.data_name)).sin().sum())
        return StageOutput(x)

    def _spread(self, tokens: Tensor, source: str, samples: Sequence[Sample], lengths: Sequence[int]) -> Tensor:
        counts = [sample.num_outputs(source_data(self.plan, source)) for sample in samples]
        assert sum(counts) == len(tokens)
        parts = [influence(part).expand(n, WIDTH) for part, n in zip(tokens.split(counts), lengths, strict=True)]
        return torch.cat(parts)


def source_data(plan: Plan, source: str) -> str:
    return plan.modules[source].data_module(source)


def toy_stage_maker(plan: Plan):
    def make(name: str, module: ModulePlan, stage: Stage, tp: TensorParallel) -> ToyStage:
        return ToyStage(plan, name, module, stage)

    return make


def reference(plan: Plan, batch: ToyBatch) -> tuple[float, dict[str, Tensor]]:
    """Loss and the gradient of every trainable parameter, sample by sample in one process."""
    weights = {}
    for name, module in plan.modules.items():
        if module.copy_of is None:
            for layer in range(module.num_layers):
                weight = initial_weight(name, layer)
                weights[name, layer] = weight.requires_grad_(module.is_trainable((layer, layer + 1)))
    total = torch.zeros((), dtype=torch.float64)
    for i, sample in enumerate(batch.samples):
        outputs: dict[str, Tensor] = {}
        for name, module in plan.modules.items():  # drawn plans list modules in topological order
            data = module.data_module(name)
            if not sample.has(data):
                continue
            x = batch.features(data, i)["x"]
            for layer in range(module.num_layers):
                for edge in plan.edges:
                    if edge.target == name and layer in edge.layers and edge.source in outputs:
                        x = x + influence(outputs[edge.source])
                x = torch.tanh(x @ weights[data, layer].T)
            outputs[name] = x
            if module.loss_weight:
                tokens = sum(s.num_loss_tokens.get(data, 0) for s in batch.samples)
                total = total + module.loss_weight * (x @ read_out(data)).sin().sum() / tokens
    if total.requires_grad:
        total.backward()
    gradients = {
        f"{name}.weights.{layer}": torch.zeros_like(weight) if weight.grad is None else weight.grad
        for (name, layer), weight in weights.items()
        if weight.requires_grad
    }
    return total.item(), gradients
