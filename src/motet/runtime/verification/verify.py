"""Compares every parameter's gradient with the same model run in one process by plain transformers (`motet verify`).

The reference is built by the HuggingFace classes themselves, filled with the weights that the ranks hold, and run
sample by sample, without padding or packing, with no code of motet's after the batch is made: merging reads the
placeholder ids, not the layouts. The check cannot pass by accident: it fails if no parameter was compared, if one is
missing on either side, or if a gradient is all zero where the reference is not. Every rank's copy of a gradient is
compared, and their weights must be alike. What counts as an error is in `motet.runtime.verification.comparison`.

Limits: the first rank holds the whole model, in float64 at last, and one copy of each gradient (more where ranks
differ). Dropout must be off.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from motet.devices import barrier, communication_device
from motet.families.classes import compute_experts_in
from motet.models.composite import CompositeNode
from motet.models.graph import LanguageModelNode, ModuleNode
from motet.models.materialize import float64_throughout
from motet.models.reference import reference_loss
from motet.models.stages.stage import Batch
from motet.parallel.adapters import is_second_matrix
from motet.parallel.main_gradients import keep_main_gradients, zero_gradient
from motet.runtime.communication.agreement import gather_values
from motet.runtime.engine import Engine
from motet.runtime.local_model import LocalModel
from motet.runtime.next_batch import NextBatch
from motet.runtime.verification.comparison import Comparison, LossAndGradients, References, compare
from motet.runtime.verification.routing import Choices, collect_routing, recorded_routing, replayed_routing

Versions = dict[str, list[Tensor]]
"""Versions of each parameter's tensor that ranks hold, by name; one version if all ranks agree."""

BuildReference = Callable[[], Mapping[str, ModuleNode]]
"""Builds the model's modules plainly, in the dtype of the run's parameters; what the run froze is frozen in them."""


DRAW_KEY = (0, 0)
"""Seed and step of the noise of generators."""


@torch.no_grad()
def collect_gradients(model: LocalModel) -> Versions | None:
    """The whole gradient of every trainable parameter, on rank 0 (None elsewhere). Collective.

    A parameter without gradient on any rank has no versions."""
    mine, missing = [], set()
    for p in model.parameters:
        if p.reduce is not None and p.is_kept:
            gradient = p.parameter.grad
            if gradient is None:
                missing.add(p.name)
            mine.append((p.name, p.gather(zero_gradient(p.parameter) if gradient is None else gradient)))
    return collect_versions(mine, missing)


@torch.no_grad()
def collect_weights(model: LocalModel) -> Versions | None:
    """Every parameter, whole, on rank 0 (None elsewhere). Collective."""
    return collect_versions([(p.name, p.gather(p.parameter)) for p in model.parameters if p.is_kept], set())


def collect_versions(mine: list[tuple[str, Tensor]], missing: set[str]) -> Versions | None:
    """Equal tensors travel once, from the lowest rank that holds them."""
    rank, device = dist.get_rank(), communication_device()
    tensors = {(name, _digest(tensor)): tensor for name, tensor in mine}
    described = [(name, digest, str(t.dtype), tuple(t.shape)) for (name, digest), t in tensors.items()]
    everyone = gather_values(list[tuple[str, str, str, tuple[int, ...]]], described)
    without = {name for names in gather_values(list[str], sorted(missing)) for name in names}
    versions: Versions = {}
    seen: set[tuple[str, str]] = set()
    for source, of_rank in enumerate(everyone):
        for name, digest, dtype, shape in of_rank:
            if (name, digest) in seen:
                continue
            seen.add((name, digest))
            if source == rank == 0:
                versions.setdefault(name, []).append(tensors[name, digest].cpu())
            elif rank == 0:
                received = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
                dist.recv(received, source)
                versions.setdefault(name, []).append(received.cpu())
            elif source == rank:
                dist.send(tensors[name, digest].detach().contiguous(), 0)
    return versions | {name: [] for name in without} if rank == 0 else None


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(
        tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def verify_batch(
    engine: Engine,
    batch: Batch,
    build_reference: BuildReference,
    *,
    dtype: str,
    contrastive_batch_size: int | None = None,
    before: Batch | None = None,
) -> Comparison | None:
    """One iteration of the engine against the references. Collective; returns the comparison on rank 0, else None.

    Args:
        build_reference: called on rank 0 alone.
        dtype: the run's `train.dtype`. In float64 the whole call should be within `float64_throughout`.
        contrastive_batch_size: the samples that a contrastive loss compares; None: the whole batch.
        before: a batch whose iteration comes first, and in which encoders run ahead of `batch`, if the plan says so.
    """
    if before is not None:
        engine.run(before, seed=(*DRAW_KEY[:-1], DRAW_KEY[-1] + 1), following=NextBatch(batch, DRAW_KEY))
    engine.model.zero_gradients()
    weights = collect_weights(engine.model)
    with recorded_routing(engine.model.modules(), batch) as records:
        result = engine.run(batch, seed=DRAW_KEY)
    routing = collect_routing(records)
    gradients = collect_gradients(engine.model)
    comparison = None
    if gradients is not None and weights is not None:
        differing = sorted(name for name, versions in weights.items() if len(versions) > 1)
        assert not differing, f"ranks hold different weights of {', '.join(differing)}"
        references = run_references(
            build_reference(),
            {name: versions[0] for name, versions in weights.items()},
            batch,
            dtype=dtype,
            contrastive_batch_size=contrastive_batch_size,
            routing={} if routing is None else routing.choices,
        )
        comparison = compare(result.loss, gradients, references, dtype=dtype, world_size=dist.get_world_size())
        if routing is not None and routing.disagreements:
            comparison = replace(comparison, passed=False, failures=[*comparison.failures, *routing.disagreements])
    barrier()
    return comparison


def run_references(
    nodes: Mapping[str, ModuleNode],
    weights: Mapping[str, Tensor],
    batch: Batch,
    *,
    dtype: str,
    contrastive_batch_size: int | None = None,
    routing: Choices | None = None,
) -> References:
    """Fills plainly built modules with `weights` (names as in the whole model) and takes loss and gradients of the
    batch, in the run's dtype and in float64. `routing`: of mixtures of experts, which the references take over.

    Raises `ValueError` if the weights are not exactly theirs."""
    modules: dict[str, nn.Module] = {name: nn.ModuleDict(node.parts) for name, node in nodes.items()}
    load_weights(modules, weights)
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    keep_main_gradients(parameters)
    held = HeldBatch(batch, modules)
    if dtype == "bfloat16":
        held = held.to(torch.bfloat16)

    models = list({id(model): model for node in nodes.values() if (model := plain_model(node)) is not None}.values())

    def run(batch: Batch) -> LossAndGradients:
        with replayed_routing(models, routing or {}) as flips:
            loss = reference_loss(nodes, batch, contrastive_batch_size=contrastive_batch_size, draw_key=DRAW_KEY)
        if loss.requires_grad:
            loss.backward()
        return LossAndGradients(loss.item(), *take_gradients(modules, weights), flips)

    plain = run(held)
    if dtype == "float64":
        return References(plain, plain)
    for parameter in parameters:
        parameter.grad_dtype = None
    for module in modules.values():
        module.double()
        for part in module.modules():
            config = getattr(part, "config", None)
            if hasattr(config, "_experts_implementation"):
                compute_experts_in(config, torch.float64)
    for node in nodes.values():
        if isinstance(node, CompositeNode):
            node.double()  # Its parts are views of the parameters; the model has buffers besides.
    with float64_throughout():
        return References(plain, run(held.to(torch.float64)))


def plain_model(node: ModuleNode) -> nn.Module | None:
    """The transformers model that a language model is, or is in."""
    if isinstance(node, CompositeNode):
        model: nn.Module = node.model
        return model
    return node.parts["module"] if isinstance(node, LanguageModelNode) else None


def load_weights(modules: Mapping[str, nn.Module], weights: Mapping[str, Tensor]) -> None:
    for name, module in modules.items():
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in weights.items() if key.startswith(f"{name}.")}
        missing, unexpected = module.load_state_dict(own, strict=False)
        absent = sorted(key for key in missing if not _is_tied_or_buffer(module, key, own))
        if unexpected or absent:
            raise ValueError(f"{name}: weights do not fit: missing {absent}, unexpected {sorted(unexpected)}")


def _is_tied_or_buffer(module: nn.Module, key: str, own: Mapping[str, Tensor]) -> bool:
    """Whether a missing entry is a parameter that another name brought, or no parameter at all."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return key not in parameters or any(
        other in own and parameters[other] is parameters[key] for other in parameters if other != key
    )


def take_gradients(modules: Mapping[str, nn.Module], names: Collection[str]) -> tuple[dict[str, Tensor], set[str]]:
    """Returns the gradients, and the names of parameters that have none, for which zeros stand there.

    Of a tied parameter under the name that is among `names`: models register their heads before or behind."""
    gradients, unreached = {}, set()
    for name, module in modules.items():
        own = {id(p): key for key, p in reversed(list(module.named_parameters(remove_duplicate=False)))}
        own |= {id(p): key for key, p in module.named_parameters(remove_duplicate=False) if f"{name}.{key}" in names}
        for parameter in module.parameters():
            key = own[id(parameter)]
            if parameter.requires_grad:
                taken = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients[f"{name}.{key}"] = taken.detach().cpu()
                if parameter.grad is None:
                    unreached.add(f"{name}.{key}")
                parameter.grad = None
    return gradients, unreached


class HeldBatch:
    """A batch whose features are all there: processors that compute when asked must not do it in the model's dtype."""

    def __init__(self, batch: Batch, modules: Iterable[str]) -> None:
        self.samples = batch.samples
        self._features = {
            (name, i): batch.features(name, i)
            for name in modules
            for i, sample in enumerate(batch.samples)
            if sample.has(name)
        }

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        return self._features[module, sample]

    def to(self, dtype: torch.dtype) -> "HeldBatch":
        """Turns the features into another dtype."""
        self._features = {
            key: {name: value.to(dtype) if value.is_floating_point() else value for name, value in features.items()}
            for key, features in self._features.items()
        }
        return self


@torch.no_grad()
def fill_adapters(model: LocalModel) -> None:
    """Draws the second matrices of adapters, alike on all ranks: they are zeros at first, and then gradients of the
    first matrices are zeros, which show nothing."""
    for p in model.parameters:
        if p.is_kept and is_second_matrix(p.name):
            generator = torch.Generator().manual_seed(int(hashlib.sha256(p.name.encode()).hexdigest()[:15], 16))
            drawn = 0.1 * torch.randn(p.full_shape, generator=generator, dtype=torch.float64)
            p.parameter.copy_(p.cut(drawn.to(p.parameter)))
