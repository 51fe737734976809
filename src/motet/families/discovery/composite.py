"""Finds the parts of a model of several modalities: its encoders, the language model, and what connects them.

Nothing is looked up by the model's name. transformers gives nearly every such model a function for each modality,
`get_image_features` and the like, which is the encoder with its projector. An encoder module is the tower that such
functions run and what stands beside it; the language model is the rest, and its forward is the model's own with the
functions' results given. Models on the meta device will do.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from motet.config import PartConfig
from motet.errors import UserError, one_line
from motet.families.classes import config_class_named
from motet.families.config_values import check_values
from motet.families.discovery.language_model_parts import CausalPaths, causal_paths
from motet.families.hf_config import config_file
from motet.families.language_models import is_tied
from motet.families.stored_weights import is_within
from motet.plan import LANGUAGE_MODEL, Edge

Modality = Literal["image", "video", "audio"]


@dataclass(frozen=True)
class FeatureFunction:
    """A model's function that encodes one modality."""

    modality: Modality
    name: str
    """Name of the function; "" if the model has none, and its own forward runs until it calls the text model."""
    inputs: tuple[str, ...]
    """Its parameters, which processors return; the first one holds pixels or sounds."""
    token_id: int
    """At the positions where the language model reads what the function returns."""

    @property
    def raw(self) -> str:
        return self.inputs[0]


@dataclass(frozen=True)
class CompositeModule:
    """A part of the model that is a module of the graph. Paths are of sub-modules, or of single parameters."""

    name: str
    functions: tuple[FeatureFunction, ...]
    """Functions of an encoder; () for the language model."""
    layers: tuple[tuple[str, ...], ...]
    """The paths of each layer: embedding, blocks, head and, of encoders, the projector."""
    blocks: str
    """The path of the list of blocks."""

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for layer in self.layers for path in layer)

    @property
    def projector(self) -> tuple[str, ...]:
        return self.layers[-1] if self.functions else ()

    def layer_of(self, parameter: str) -> int:
        """The layer to which a parameter of the whole model belongs. Raises `KeyError` if it is another module's."""
        for index, paths in enumerate(self.layers):
            if is_within(parameter, paths):
                return index
        raise KeyError(parameter)

    def part_of(self, parameter: str) -> str:
        """`module` or `projector`."""
        return "projector" if is_within(parameter, self.projector) else "module"


@dataclass(frozen=True)
class Composite:
    modules: Mapping[str, CompositeModule]
    """Modules by name, encoders first."""
    text: CausalPaths
    """The parts of the language model."""
    is_tied: bool
    """Whether embedding and head share their weight."""
    num_deep_features: int
    """How many further outputs of the vision encoder enter between the first blocks of the language model."""

    @property
    def encoders(self) -> dict[str, CompositeModule]:
        return {name: module for name, module in self.modules.items() if module.functions}

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Every encoder enters the language model at its embedding, and perhaps between its first blocks."""
        deep = self.entry_layers
        return tuple(
            Edge(source=name, target=LANGUAGE_MODEL, layers=deep if self.is_deep(name) else (0,))
            for name in self.encoders
        )

    @property
    def functions(self) -> tuple[FeatureFunction, ...]:
        return tuple(function for module in self.modules.values() for function in module.functions)

    def is_deep(self, name: str) -> bool:
        """Whether outputs of this encoder enter between the language model's first blocks too."""
        return self.num_deep_features > 0 and any(f.modality != "audio" for f in self.modules[name].functions)

    @property
    def entry_layers(self) -> tuple[int, ...]:
        """Layers of the language model at which outputs of the vision encoder enter. The first further output is added
        to what the first block returns, which is layer 2's input."""
        return (0, *range(2, 2 + self.num_deep_features))


MODULE_OF: Mapping[Modality, str] = {"image": "vision", "video": "vision", "audio": "audio"}
RAW: Mapping[Modality, str] = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
"""What a model's forward calls pixels and sounds."""
OF_TEXT = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "use_cache")
"""Parameters of a model's forward that are not of a modality."""
WORDS = {"vision": ("vision", "visual", "image", "video"), "audio": ("audio", "speech", "sound")}
"""In names of modules: which encoder they belong to."""


def find_parts(model: Any) -> Composite:
    """Raises `UserError` in one line for a model that is not made of encoders and a language model."""
    kind = type(model).__name__
    functions = feature_functions(model)
    if not functions:
        raise UserError(
            f"{kind}: has no function such as get_image_features; give a model of several modalities, or name its "
            "parts under model.encoders and model.language_model"
        )
    text = causal_paths(model)
    text_parts = (*text.embed_parts, text.blocks, *text.head_parts)
    towers: dict[str, str] = {}
    for function in functions:
        towers.setdefault(MODULE_OF[function.modality], _tower(model, function.modality))
    beside = _beside(model, (*text_parts, *towers.values()))
    modules = {}
    for name, tower in towers.items():
        own = [path for path in beside if len(towers) == 1 or _belongs(path, name)]
        modules[name] = _encoder(model, name, tower, own, tuple(f for f in functions if MODULE_OF[f.modality] == name))
    owned = {path for module in modules.values() for path in module.paths}
    loose = [path for path in beside if path not in owned]
    if loose:
        raise UserError(f"{kind}: cannot tell which encoder {loose[0]} belongs to")
    blocks = [f"{text.blocks}.{index}" for index in range(len(model.get_submodule(text.blocks)))]
    layers = (text.embed_parts, *((block,) for block in blocks), text.head_parts)
    modules[LANGUAGE_MODEL] = CompositeModule(LANGUAGE_MODEL, (), layers, text.blocks)
    _check_complete(model, modules)
    deep = getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None)
    return Composite(modules, text, is_tied(model), len(deep or ()))


def read_composite_config(part: PartConfig) -> PretrainedConfig:
    """The configuration of a model of several modalities. Raises `UserError` naming the key and what is wrong."""
    try:
        if part.config is not None:
            config_class = config_class_named(part.config)
            check_values(config_class, part.values)
            return config_class(**part.values)
        folder = config_file(part, "model").parent
        check_values(type(AutoConfig.from_pretrained(folder, trust_remote_code=False)), part.values)
        return AutoConfig.from_pretrained(folder, **part.values, trust_remote_code=False)
    except UserError as error:
        raise UserError(f"model{'' if str(error).startswith('.') else '.config: '}{error}") from None
    except (OSError, TypeError, ValueError, KeyError, StrictDataclassError) as error:
        key = "config" if part.config else "path" if part.path else "hub"
        raise UserError(f"model.{key}: {one_line(error)}") from None


def composite_class_of(config: Any) -> Any:
    """The class of transformers that a stored model is, or the one that a configuration stands for."""
    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if named is not None and hasattr(named, "get_output_embeddings"):
        return named
    try:
        return transformers.AutoModelForMultimodalLM._model_mapping[type(config)]
    except KeyError:
        kind = config.model_type
        raise UserError(f"model: {kind} is not a multimodal model of transformers") from None


def feature_functions(model: Any) -> tuple[FeatureFunction, ...]:
    found = []
    for modality in MODULE_OF:
        name = f"get_{modality}_features"
        token_id = next(
            (
                getattr(model.config, key)
                for key in (f"{modality}_token_id", f"{modality}_token_index")
                if getattr(model.config, key, None) is not None
            ),
            None,
        )
        function = getattr(model.base_model, name, None) or getattr(model, name, None)
        if token_id is None or (function is None and RAW[modality] not in inspect.signature(model.forward).parameters):
            continue
        parameters = inspect.signature(model.forward if function is None else function).parameters.items()
        inputs = [key for key, p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and key not in OF_TEXT]
        if function is None:
            inputs.sort(key=lambda key: key != RAW[modality])
        found.append(FeatureFunction(modality, "" if function is None else name, tuple(inputs), int(token_id)))
    return tuple(found)


def _tower(model: Any, modality: Modality) -> str:
    tower = model.get_encoder(modality=modality)
    path = next((path for path, module in model.named_modules() if module is tower), "")
    if not path or tower is model.base_model:
        raise UserError(f"{type(model).__name__}: its encoder of {modality} cannot be found")
    return path


def _belongs(path: str, name: str) -> bool:
    own = path.rpartition(".")[2]
    return any(word in own for word in WORDS[name])


def _beside(model: nn.Module, known: Sequence[str], root: str = "") -> list[str]:
    """The outermost modules with parameters, and single parameters, that are in none of the known ones."""
    found = []
    owner = model.get_submodule(root)
    prefix = f"{root}." if root else ""
    for name, parameter in owner.named_parameters(recurse=False):
        if parameter is not None and not any(f"{prefix}{name}" == path for path in known):
            found.append(f"{prefix}{name}")
    for name, child in owner.named_children():
        path = f"{prefix}{name}"
        if path in known or not any(True for _ in child.parameters()):
            continue
        if any(other.startswith(f"{path}.") for other in known):
            found += _beside(model, known, path)
        else:
            found.append(path)
    return found


def _encoder(
    model: nn.Module, name: str, tower: str, beside: Sequence[str], functions: tuple[FeatureFunction, ...]
) -> CompositeModule:
    """embed | blocks | head | projector. The projector stands beside the tower, or else is its last children: all with
    a matrix that are registered behind the blocks."""
    lists = list(_lists(model, tower))
    if not lists:
        raise UserError(f"{type(model).__name__}: {tower} has no list of blocks; its layers cannot be identified")
    blocks = max(lists, key=lambda path: len(list(model.get_submodule(path).children())))
    members = [f"{blocks}.{key}" for key, _ in model.get_submodule(blocks).named_children()]
    embed, head, inside = [], [], []
    is_behind = False

    def has_matrix(path: str) -> bool:
        return any(parameter.dim() >= 2 for parameter in model.get_submodule(path).parameters())

    for path in _in_order(model, tower, blocks):
        if path == blocks:
            is_behind = True
        elif not is_behind:
            embed.append(path)
        elif not beside and path.count(".") == tower.count(".") + 1 and has_matrix(path):
            inside.append(path)
        else:
            head.append(path)
    layers = (tuple(embed), *((member,) for member in members), tuple(head), tuple(beside or inside))
    return CompositeModule(name, functions, layers, blocks)


def _lists(model: nn.Module, root: str) -> Iterator[str]:
    for name, child in model.get_submodule(root).named_children():
        path = f"{root}.{name}"
        if isinstance(child, nn.ModuleList) and len(child) and any(True for _ in child.parameters()):
            yield path
        else:
            yield from _lists(model, path)


def _in_order(model: nn.Module, root: str, blocks: str) -> Iterator[str]:
    """`blocks`, and the outermost modules beside it with parameters, in the order in which they were registered."""
    owner = model.get_submodule(root)
    yield from (f"{root}.{name}" for name, _ in owner.named_parameters(recurse=False))
    for name, child in owner.named_children():
        path = f"{root}.{name}"
        if path == blocks:
            yield path
        elif blocks.startswith(f"{path}."):
            yield from _in_order(model, path, blocks)
        elif any(True for _ in child.parameters()):
            yield path


def _check_complete(model: nn.Module, modules: Mapping[str, CompositeModule]) -> None:
    for name, _ in model.named_parameters():
        owners = []
        for module in modules.values():
            try:
                module.layer_of(name)
            except KeyError:
                continue
            owners.append(module.name)
        if len(owners) != 1:
            raise UserError(f"{type(model).__name__}: parameter {name} belongs to {' and '.join(owners) or 'no part'}")
