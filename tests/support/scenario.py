"""A whole multimodal model under one layout, drawn from tiny families, as `motet verify` would see it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from tiny_encoders import ENCODERS, GRIDS, features_of
from tiny_language_models import MIXTURES, SIZES, TINY
from torch import Tensor, nn

from motet.assignment.sample import Sample, Segment
from motet.config import RunConfig
from motet.config.model_section import EncoderConfig, LanguageModelConfig
from motet.families.classes import Kind, model_class_of
from motet.families.discovery.language_model_parts import num_causal_layers
from motet.families.encoders.token_counts import encoder_segment
from motet.families.language_models import cross_attention_layers, is_tied
from motet.models.materialize import read_part_config
from motet.models.stages.encoder import num_encoder_layers
from motet.plan import ContextOptions, Edge, ModulePlan, Plan, Replica, Stage
from motet.recomputation import BLOCKS, with_kind

CONTEXT_BLOCK = 4
"""Tokens that context parallelism keeps together: samples here are short."""
PLACEHOLDERS = {"vision": 3, "audio": 4}
FROZEN = {
    "nothing": (),
    "all but projectors": ("vision", "audio", "language_model"),
    "all but language model": ("vision", "vision projector", "audio", "audio projector"),
    "all but encoders": ("vision projector", "audio projector", "language_model"),
    "audio": ("audio", "audio projector"),
}


def recomputed(how: bool | str, *modules: str) -> tuple[str, ...]:
    """`parallel.recompute` of these modules."""
    return tuple(with_kind(name, BLOCKS if how is True else how) for name in modules) if how else ()


@dataclass(frozen=True)
class Scenario:
    llm: str = "llama"
    vision: str = "siglip"
    audio: str = "whisper"
    feature_select: str = "patch"
    feature_layer: int | None = None
    """Of vision, as in a run file."""
    encoder_pp: int = 1
    llm_pp: int = 1
    llm_cuts: tuple[int, ...] = ()
    """The layers at which the language model's later stages begin; (): evenly."""
    llm_places: tuple[int, ...] = ()
    """The place of each of its stages, where some share one; (): each has its own."""
    tp: int = 1
    cp: int = 1
    """Of the language model."""
    llm_cps: tuple[int, ...] = ()
    """Of each of its stages, where they differ, on ranks of their own; (): `cp`."""
    encoder_cp: int = 1
    encoder_cps: tuple[int, ...] = ()
    """Of each of an encoder's stages, where they differ; (): `encoder_cp`."""
    encoder_cuts: tuple[int, ...] = ()
    """As the language model's, of both encoders."""
    cp_method: str = "all_gather"
    cp_policy: str = "lpt"
    context_block: int = CONTEXT_BLOCK
    media_attention: str = "causal"
    sequence_parallel: bool = False
    ep: int = 1
    """Of the language model."""
    router_aux_loss: float = 0.0
    router_bias_update_rate: float = 0.0
    dp: int = 1
    units: tuple[int, int, int] | None = None
    """Numbers of replicas of vision, audio and language model on ranks of their own, in the place of `dp`."""
    num_samples: int | None = None
    num_microbatches: int = 2
    placement: str = "parallel"
    """Encoders on ranks of their own (parallel), each other's (colocated), the language model's (shared; replicated:
    whole copies of them on all of its stages)."""
    merge: str = "placeholder"
    schedule: str = "1f1b"
    assignment: str = "contiguous"
    max_packed_tokens: int | None = None
    frozen: str = "nothing"
    lora: tuple[str, ...] = ()
    """Modules that train adapters in place of their own weights."""
    lora_targets: tuple[str, ...] | None = None
    items: str = "mixed"
    """mixed: none, one and three images and clips; none: no sample has any; half: the last half has none; one: only one
    sample has any; all but one."""
    packing: bool = False
    packed_attention: str = "auto"
    fully_sharded: bool = False
    sharded_replicas: int = 1
    whole_parameters: bool = False
    recompute: bool | str = False
    """Whether all blocks are recomputed, or a kind of recomputation."""
    recompute_features: bool = False
    """Of both encoders."""
    dtype: str = "float64"
    compiles: bool = False
    """Whether blocks are compiled, with a backend that computes as they do."""
    kernels: str = "torch"
    linears: str = "torch"

    @property
    def uses_cross_attention(self) -> bool:
        return self.merge == "cross_attention"

    def consistent(self) -> "Scenario":
        """Cross-attention is Mllama's, and Mllama's is cross-attention."""
        if self.uses_cross_attention:
            return replace(self, llm="mllama")
        return self

    def config(self) -> RunConfig:
        frozen = FROZEN[self.frozen]

        def encoder(name: str, family: str) -> dict:
            _, config_class, values = ENCODERS[family]
            train = {"projector": f"{name} projector" not in frozen, **self._trained(name)}
            part = {"config": config_class.__name__, "values": values, "projector": "mlp", "train": train}
            if name == "vision":
                part |= {"feature_select": self.feature_select, "feature_layer": self.feature_layer}
            return part

        _, llm_class, llm_values = (TINY | MIXTURES)[self.llm]
        config = RunConfig.model_validate(
            {
                "model": {
                    "encoders": {"vision": encoder("vision", self.vision), "audio": encoder("audio", self.audio)},
                    "language_model": {
                        "config": llm_class.__name__,
                        "values": {key: value for key, value in {**SIZES, **llm_values}.items() if value is not None},
                        "train": self._trained("language_model"),
                        "router_aux_loss": self.router_aux_loss,
                        "router_bias_update_rate": self.router_bias_update_rate,
                    },
                    "merge": self.merge,
                },
                "data": {"kind": "dial-a-digit"},
                "parallel": {"packing": self.packing, "packed_attention": self.packed_attention},
                "train": {
                    "dtype": self.dtype,
                    "step_timeout_s": 300.0,
                    "compile": "blocks" if self.compiles else "nothing",
                    "compile_backend": "aot_eager",
                    "kernels": self.kernels,
                    "linears": self.linears,
                },
            }
        )
        # Registered masks are no words of a run file.
        model = config.model.model_copy(update={"media_attention": self.media_attention})
        return config.model_copy(update={"model": model})

    def _trained(self, name: str) -> dict:
        if name in self.lora:
            return {"lora": {"rank": 2, "alpha": 3.0, "targets": self.lora_targets and [*self.lora_targets]}}
        return {"module": name not in FROZEN[self.frozen]}

    def plan(self, config: RunConfig) -> Plan:
        """Layers split evenly; ranks: each replica's encoders, then its language model, tensor parallelism fastest."""
        families = {"vision": self.vision, "audio": self.audio}
        models = {name: _on_meta(config.model.encoders[name].model_dump_json(), "encoder") for name in families}
        llm = _on_meta(config.model.language_model.model_dump_json(), "language_model")
        num_layers = {name: num_encoder_layers(model, nn.Identity()) for name, model in models.items()}
        num_layers["language_model"] = num_causal_layers(llm)

        def module(name: str) -> ModulePlan:
            is_llm = name == "language_model"
            bounds = even_bounds(num_layers[name], self.llm_pp if is_llm else self.encoder_pp)
            if cuts := self.llm_cuts if is_llm else self.encoder_cuts:
                bounds = list(pairwise((0, *cuts, num_layers[name])))
            places = (self.llm_places if is_llm else ()) or range(len(bounds))
            return ModulePlan(
                kind="language_model" if is_llm else "encoder",
                num_layers=num_layers[name],
                replicas=tuple(
                    Replica(
                        stages=tuple(
                            Stage(
                                layers=layers,
                                ranks=self._ranks(name, r, place),
                                tp_size=self.tp,
                                cp_size=(self._cps if is_llm else self._encoder_cps)[place],
                            )
                            for place, layers in zip(places, bounds, strict=True)
                        )
                    )
                    for r in range(self.num_replicas[name])
                ),
                trainable=self._trainable(name, num_layers[name]),
                tied=((0, num_layers[name] - 1),) if is_llm and is_tied(llm) else (),
                sequence_parallel=self.sequence_parallel and self.tp > 1,
                fully_sharded=self.fully_sharded,
                sharded_replicas=self.sharded_replicas if self.num_replicas[name] > 1 else 1,
                whole_parameters=self.whole_parameters and self.num_replicas[name] > 1,
                ep=self.ep if is_llm else 1,
                loss_weight=1.0 if is_llm else 0.0,
                context=ContextOptions(
                    block_size=self.context_block,
                    method=self.cp_method,  # type: ignore[arg-type]
                    policy=self.cp_policy,
                    media_attention=self.media_attention,
                ),
            )

        enters = cross_attention_layers(llm) if self.uses_cross_attention else (0,)
        plan = Plan(
            modules={name: module(name) for name in ("vision", "audio", "language_model")},
            edges=tuple(Edge(source=name, target="language_model", layers=enters) for name in families),
            num_microbatches=self.num_microbatches,
            schedule=self.schedule,
            assignment=self.assignment,
            max_packed_tokens=self.max_packed_tokens,
            recompute=recomputed(self.recompute, "vision", "audio", "language_model"),
            recompute_features=("vision", "audio") if self.recompute_features else (),
        )
        return _replicated(plan) if self.placement == "replicated" else plan

    @property
    def enough_samples(self) -> int:
        """One for every microbatch, and one more."""
        return max(4, max(self.num_replicas.values()) * self.num_microbatches + 1)

    @property
    def num_replicas(self) -> dict[str, int]:
        return dict(zip(("vision", "audio", "language_model"), self.units or (self.dp,) * 3, strict=True))

    @property
    def num_ranks(self) -> int:
        if self.units:
            return sum(self.num_replicas[name] * size for name, size in self._unit_sizes.items())
        return self.tp * self.dp * (self._places["language_model"] + sum(self._cps))

    @property
    def _cps(self) -> tuple[int, ...]:
        """Of each of the language model's places."""
        return self.llm_cps or (self.cp,) * (1 + max(self.llm_places, default=self.llm_pp - 1))

    @property
    def _encoder_cps(self) -> tuple[int, ...]:
        return self.encoder_cps or (self.encoder_cp,) * self.encoder_pp

    @property
    def _unit_sizes(self) -> dict[str, int]:
        """Ranks of one replica of each module, where they are its own."""
        assert self.placement == "parallel"
        encoder = self.tp * sum(self._encoder_cps)
        return {"vision": encoder, "audio": encoder, "language_model": self.tp * self.llm_pp * self.cp}

    @property
    def _places(self) -> dict[str, int]:
        """Each module's first stage among those of a replica of the whole model."""
        audio, llm = {
            "parallel": (sum(self._encoder_cps), 2 * sum(self._encoder_cps)),
            "colocated": (0, sum(self._encoder_cps)),
            "shared": (0, 0),
            "replicated": (0, 0),
        }[self.placement]
        return {"vision": 0, "audio": audio, "language_model": llm}

    def _ranks(self, name: str, replica: int, stage: int) -> tuple[int, ...]:
        cps = self._cps if name == "language_model" else self._encoder_cps
        cp, before_stage = cps[stage], sum(cps[:stage])
        if self.units:
            before = ("vision", "audio", "language_model").index(name)
            first = sum(self.units[i] * list(self._unit_sizes.values())[i] for i in range(before))
            first += replica * self._unit_sizes[name] + before_stage * self.tp
        else:
            first = replica * (self.num_ranks // self.dp) + (self._places[name] + before_stage) * self.tp
        return tuple(range(first, first + cp * self.tp))

    def _trainable(self, name: str, num_layers: int) -> tuple[tuple[int, int], ...]:
        frozen = FROZEN[self.frozen]
        if name == "language_model":
            blocks = ((1, num_layers - 1),) if name in self.lora else ((0, num_layers),)
            return () if name in frozen else blocks
        blocks = ((1, num_layers - 2),) if name in self.lora else ((0, num_layers - 1),)
        body = () if name in frozen else blocks
        return body if f"{name} projector" in frozen else (*body, (num_layers - 1, num_layers))


def _replicated(plan: Plan) -> Plan:
    """Copies of the encoders on every later stage of the language model; each feeds the layers of that stage."""
    llm = plan.modules["language_model"]
    modules: dict[str, ModulePlan] = {}
    edges = []
    for edge in plan.edges:
        original = plan.modules[edge.source]
        whole = (0, original.num_layers)
        for s, (first, last) in enumerate(stage.layers for stage in llm.replicas[0].stages):
            name = f"{edge.source}@{s}" if s else edge.source
            held_by = [replica.stages[s] for replica in llm.replicas]
            modules[name] = replace(
                original,
                replicas=tuple(Replica(stages=(replace(stage, layers=whole),)) for stage in held_by),
                copy_of=edge.source if s else None,
            )
            layers = tuple(layer for layer in edge.layers if first <= layer < last)
            if layers:
                edges.append(Edge(source=name, target="language_model", layers=layers))
    return replace(plan, modules={**modules, "language_model": llm}, edges=tuple(edges))


def even_bounds(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    bounds = [num_layers * s // num_stages for s in range(num_stages + 1)]
    return list(pairwise(bounds))


@cache
def _on_meta(part: str, kind: Kind) -> nn.Module:
    """`part`: of the run file's model, as JSON."""
    part_config = (EncoderConfig if kind == "encoder" else LanguageModelConfig).model_validate_json(part)
    config = read_part_config(part_config, kind, where="model")
    with torch.device("meta"):
        return model_class_of(config.model_type, kind)(config)


class ScenarioBatch:
    """Random pixels, sounds and words; different in every sample."""

    def __init__(self, scenario: Scenario, config: RunConfig) -> None:
        self._scenario = scenario
        self._dtype = torch.float64 if scenario.dtype == "float64" else torch.float32
        self._families = {"vision": scenario.vision, "audio": scenario.audio}
        configs = {
            name: read_part_config(config.model.encoders[name], "encoder", where="model") for name in self._families
        }
        num_samples = scenario.num_samples or scenario.enough_samples
        self.samples = tuple(self._sample(i, num_samples, configs) for i in range(num_samples))

    def _num_items(self, name: str, i: int, num_samples: int) -> int:
        kind = self._scenario.items
        if kind == "none" or (kind == "half" and i >= num_samples // 2):
            return 0
        if (kind == "one" and i != 1) or (kind == "all but one" and i == 1):
            return 0
        if kind in ("one", "all but one"):
            return 1 + i % 2
        return {"vision": (3, 0, 1, 2), "audio": (1, 0, 0, 3)}[name][i % 4]

    def _sample(self, i: int, num_samples: int, configs: Mapping[str, object]) -> Sample:
        layouts: dict[str, tuple[Segment, ...]] = {}
        own = [Segment(2 + i % 3)]
        inserted: list[Segment] = []
        for name, family in self._families.items():
            grids = [grid for sample in GRIDS[family] for grid in sample]
            count = self._num_items(name, i, num_samples)
            step = 0 if family == "dinov2" else 1  # its processor stacks a sample's images: they are of one size
            select = self._scenario.feature_select if name == "vision" else "patch"
            segments = [
                encoder_segment(configs[name], item=k, grid=grids[(i + k * step) % len(grids)], feature_select=select)
                for k in range(count)
            ]
            if segments:
                layouts[name] = tuple(segments)
            inserted += [Segment(segment.outputs, name, k) for k, segment in enumerate(segments)]
        merge = self._scenario.merge
        if merge == "placeholder":  # an image first, text between, the rest later
            sequence = [own[0], *inserted[:1], Segment(1), *inserted[1:], Segment(4)]
        elif merge == "prepend":
            sequence = [*inserted, Segment(5 + i % 3)]
        else:
            sequence = [Segment(7 + i % 3)]
        layouts["language_model"] = tuple(sequence)
        labels = self._features(layouts["language_model"], i)["labels"]
        return Sample(f"s{i}", layouts, {"language_model": int((labels[1:] != -100).sum())})

    def _features(self, sequence: Sequence[Segment], i: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(i)
        ids, labels = [], []
        for segment in sequence:
            if segment.source:
                ids.append(torch.full((segment.num_tokens,), PLACEHOLDERS[segment.source]))
                labels.append(torch.full((segment.num_tokens,), -100))
            else:
                words = torch.randint(5, SIZES["vocab_size"], (segment.num_tokens,), generator=generator)
                ids.append(words)
                labels.append(torch.where(torch.arange(len(words)) % 3 == 2, -100, words))
        return {"input_ids": torch.cat(ids), "labels": torch.cat(labels)}

    def features(self, module: str, sample: int) -> dict[str, Tensor]:
        layout = self.samples[sample].layouts[module]
        if module == "language_model":
            return self._features(layout, sample)
        return features_of(self._families[module], layout, seed=100 + sample, dtype=self._dtype)
