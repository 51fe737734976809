"""Examples for a model of several modalities, prepared by its own processor.

The processor writes the conversation by its chat template, decodes pixels and sounds and puts as many placeholders into
the text as its encoders return rows. Metadata are those of a blank image, or a silent sound, of the same size, because
what a processor makes of a medium depends on its size alone; that is compared when the medium itself is processed.

The loss is on the answers: their places in the text are found before placeholders are put in (`motet.data.chat`), and
follow from what the processor says that it put in where.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from motet.assignment.sample import IGNORED_LABEL, Segment
from motet.config import PartConfig, VideoConfig
from motet.data.chat import answer_spans, end_of_turn, render
from motet.data.encoder_layout import frame_times
from motet.data.example import PLACEHOLDERS, Example, Media, Message
from motet.data.formats.media import resample
from motet.data.stored_layouts import ExampleKey, LaidOut, PartLayout
from motet.data.voxtral import VoxtralText, is_voxtral
from motet.errors import UserError, one_line
from motet.families.discovery.composite import Composite, FeatureFunction
from motet.optional_packages import missing_package
from motet.plan import LANGUAGE_MODEL

OF_TEXT = ("input_ids", "attention_mask", "offset_mapping", "text_replacement_offsets")
"""Outputs of processors that the model does not take, or that are made here."""


@dataclass(frozen=True)
class Prepared(LaidOut):
    """An example as its processor returns it."""

    features: Mapping[str, Mapping[str, Tensor]]
    """Features by module; {} if made from blank media."""
    input_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CompositeProcessor:
    """The processor of a model of several modalities. Raises `UserError` if its tokenizer cannot be used."""

    processor: Any
    """The model's processor of transformers."""
    composite: Composite
    video: VideoConfig

    def __post_init__(self) -> None:
        if self.video.max_tokens is not None:
            raise UserError("data.video.max_tokens: is not read for whole models; give max_frames, frames or fps")
        tokenizer = self.processor.tokenizer
        if not getattr(tokenizer, "is_fast", False):
            raise UserError("model: it has a slow tokenizer; give a folder with tokenizer.json")
        if getattr(self.processor, "chat_template", None) is None:
            raise UserError("model: its processor has no chat template; give a folder with chat_template.jinja")

    def apply_chat_template(self, turns: Sequence[Mapping[str, str]], **options: Any) -> str:
        """Writes turns whose content holds `PLACEHOLDERS`."""
        structured = [{"role": turn["role"], "content": list(turn_parts(turn["content"]))} for turn in turns]
        return str(self.processor.apply_chat_template(structured, **options))

    @lru_cache(maxsize=4096)  # noqa: B019 (metadata are asked for on every rank, and again in every epoch)
    def lay_out(self, key: ExampleKey) -> Prepared:
        """Layouts without features."""
        media = {kind: [self._blank(kind, size) for size in sizes] for kind, sizes in key.sizes}
        return self._prepare(key.messages, media, keeps_features=False)

    @lru_cache(maxsize=8)  # noqa: B019 (the modules of a sample are asked for one after the other)
    def prepare(self, example: "_Identity") -> Prepared:
        own = example.example
        media = {kind: [self._loaded(kind, item) for item in items] for kind, items in own.media.items() if items}
        prepared = self._prepare(own.messages, media, keeps_features=True)
        if prepared.input_ids != self.lay_out(ExampleKey.of(own)).input_ids:
            raise UserError("its media do not have the sizes that their files state; convert them again")
        return prepared

    def prompt(self, example: Example) -> list[int]:
        """The token ids up to the beginning of the last answer."""
        media = {kind: [self._loaded(kind, item) for item in items] for kind, items in example.media.items() if items}
        text = render(self, example.messages[:-1], generation_prompt=True)
        ids: list[int] = self._run(text, media, return_mm_token_type_ids=False)["input_ids"][0].tolist()
        return ids

    def _blank(self, kind: str, size: Any) -> Any:
        """Returns a black medium, in the form of `_loaded`."""
        if kind == "audio":
            return np.zeros(size[0], dtype=np.float32), size[1]
        if kind == "video":
            times = frame_times(size, self.video)
            return [Image.new("RGB", (size.width, size.height))] * len(times), times
        return Image.new("RGB", size[::-1])

    def _loaded(self, kind: str, item: Media) -> Any:
        """An image; a wave and its rate; the frames of a video and their times."""
        if kind == "audio":
            return item.load(), item.size()[1]
        if kind == "video":
            times = frame_times(item.size(), self.video)
            return item.load(times), times
        return item.load()

    def _run(self, text: str, media: Mapping[str, Sequence[Any]], *, return_mm_token_type_ids: bool) -> Any:
        names = {"image": "images", "audio": "audio", "video": "videos"}
        given: dict[str, Any] = {names[kind]: list(items) for kind, items in media.items()}
        if "audio" in given:
            extractor = self.processor._audio_processor
            given["audio"] = [resample(wave, rate, extractor.sampling_rate) for wave, rate in given["audio"]]
            given["sampling_rate"] = extractor.sampling_rate
        if "videos" in given:
            shown = given["videos"]
            given["videos"] = [np.stack([np.asarray(frame) for frame in frames]) for frames, _ in shown]
            given["video_metadata"] = [_video_metadata(times) for _, times in shown]
            given["do_sample_frames"] = False
        try:
            return self.processor(
                text=[text],
                return_tensors="pt",
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_text_replacement_offsets=True,
                return_mm_token_type_ids=return_mm_token_type_ids,
                **given,
            )
        except (ImportError, ValueError, TypeError, RuntimeError, IndexError) as error:
            missing = missing_package(error)
            raise UserError(
                f"the processor {missing}" if missing else f"the processor rejects it: {one_line(error)}"
            ) from None

    def _prepare(
        self, messages: tuple[Message, ...], media: Mapping[str, Sequence[Any]], *, keeps_features: bool
    ) -> Prepared:
        text = render(self, messages)
        made = self._run(text, media, return_mm_token_type_ids=keeps_features)
        ids: list[int] = made["input_ids"][0].tolist()
        offsets = [(int(a), int(b)) for a, b in made["offset_mapping"][0].tolist()]
        replaced = (made["text_replacement_offsets"] or [[]])[0] if media else []
        num_media = sum(map(len, media.values()))
        if len(replaced) != num_media:
            raise UserError(
                f"its chat template and processor take {len(replaced)} of its {num_media} media "
                f"({', '.join(media)}); leave the others out"
            )
        expanded = _expanded(text, replaced)
        labels = self._labels(messages, text, expanded, ids, offsets, replaced)
        layouts = self._layouts(ids, offsets, replaced, made)
        features: dict[str, dict[str, Tensor]] = {}
        if keeps_features:
            tensors = {key: torch.as_tensor(value) for key, value in made.items() if key not in OF_TEXT}
            for name, module in self.composite.encoders.items():
                keys = {key for function in module.functions for key in function.inputs}
                features[name] = {key: tensors[key] for key in tensors if key in keys}
                if not all(function.name for function in module.functions):
                    features[name]["input_ids"] = torch.tensor(ids)
            raw = {function.raw for function in self.composite.functions}
            features[LANGUAGE_MODEL] = {
                key: value[0] if key.endswith("token_type_ids") else value
                for key, value in tensors.items()
                if key not in raw
            }
            features[LANGUAGE_MODEL] |= {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}
        num_loss_tokens = sum(label != IGNORED_LABEL for label in labels[1:])
        return Prepared(layouts, num_loss_tokens, features, tuple(ids))

    def _labels(
        self,
        messages: tuple[Message, ...],
        text: str,
        expanded: str,
        ids: list[int],
        offsets: list[tuple[int, int]],
        replaced: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        labels = [IGNORED_LABEL] * len(ids)
        for first, last in answer_spans(self, messages, text):
            shift = sum(len(r["replacement"]) - len(r["text"]) for r in replaced if r["span"][1] <= first)
            first, last = first + shift, last + shift
            own = [t for t, (start, end) in enumerate(offsets) if first < end and start < last]
            for t in range(own[0], end_of_turn(self.processor.tokenizer, ids, offsets, expanded, after=own[-1] + 1)):
                labels[t] = ids[t]
        return labels

    def _layouts(
        self,
        ids: list[int],
        offsets: list[tuple[int, int]],
        replaced: Sequence[Mapping[str, Any]],
        made: Mapping[str, Any],
    ) -> dict[str, tuple[Segment, ...]]:
        """Each placeholder belongs to the medium within whose text it stands; every function's items follow those of
        the function before."""
        of_token = {f.token_id: (name, i) for name, m in self.composite.encoders.items() for i, f in _numbered(m)}
        medium_at = _media_at(offsets, replaced)
        # By encoder and function: for every medium, its placeholders.
        places: dict[tuple[str, int], dict[int, list[int]]] = {}
        for place, token in enumerate(ids):
            if token in of_token:
                places.setdefault(of_token[token], {}).setdefault(medium_at[place], []).append(place)
        layouts: dict[str, list[Segment]] = {}
        owner: dict[int, tuple[str, int]] = {}
        for (name, index), media in sorted(places.items()):
            function = self.composite.modules[name].functions[index]
            tokens = _inner_tokens(function, made, [len(own) for own in media.values()])
            for num_tokens, own in zip(tokens, media.values(), strict=True):
                segments = layouts.setdefault(name, [])
                owner |= {place: (name, len(segments)) for place in own}
                segments.append(Segment(num_tokens, item=len(segments), num_outputs=len(own), grid=(index,)))
        text: list[Segment] = []
        first = 0
        for place in range(1, len(ids) + 1):
            if place == len(ids) or owner.get(place) != owner.get(first):
                source, item = owner.get(first, (None, 0))
                text.append(Segment(place - first, source=source, item=item))
                first = place
        return {**{name: tuple(own) for name, own in layouts.items()}, LANGUAGE_MODEL: tuple(text)}


@dataclass(frozen=True)
class _Identity:
    """An example, compared by the object: media are not compared."""

    key: int
    example: Example = field(compare=False)


@dataclass(frozen=True, eq=False)
class CompositePartLayout(PartLayout):
    """Layouts of examples for one part of the model, and its tensors."""

    whole: CompositeProcessor

    def features(self, example: Example) -> dict[str, Tensor]:
        return dict(self.whole.prepare(_Identity(id(example), example)).features[self.name])


def load_processor(part: PartConfig, given: str | None) -> Any:
    """The processor of the model, or the one that `data.tokenizer` names. Raises `UserError`."""
    from transformers import AutoProcessor

    source = given or part.path or part.hub
    if source is None:
        raise UserError("data.tokenizer: is missing, and the model has random weights; give the folder of a processor")
    try:
        processor = AutoProcessor.from_pretrained(source, trust_remote_code=False)
        if is_voxtral(processor):
            return VoxtralText.of(processor, source)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        missing = missing_package(error)
        reason = str(missing) if missing else f"cannot be loaded: {one_line(error)[:200]}"
        raise UserError(f"model: the processor in {source} {reason}") from None
    if not hasattr(processor, "tokenizer"):
        raise UserError(f"model: {source} has no processor of several modalities; save it with save_pretrained")
    return processor


def turn_parts(content: str) -> list[dict[str, str]]:
    """Text and media of a turn, in the form of transformers' chat templates."""
    parts: list[dict[str, str]] = []
    kinds = {placeholder: kind for kind, placeholder in PLACEHOLDERS.items()}
    while content:
        found = [(content.find(placeholder), placeholder) for placeholder in kinds if placeholder in content]
        at, placeholder = min(found, default=(len(content), ""))
        if at:
            parts.append({"type": "text", "text": content[:at]})
        if placeholder:
            parts.append({"type": kinds[placeholder]})
        content = content[at + len(placeholder) :]
    return parts


def _video_metadata(times: Sequence[float]) -> dict[str, Any]:
    """Metadata of frames that are already sampled: the video has no others."""
    fps = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 1.0
    return {
        "fps": fps,
        "total_num_frames": len(times),
        "frames_indices": list(range(len(times))),
        "duration": len(times) / fps,
    }


def _expanded(text: str, replaced: Sequence[Mapping[str, Any]]) -> str:
    """The text with what the processor put in."""
    pieces, last = [], 0
    for r in replaced:
        pieces += [text[last : r["span"][0]], r["replacement"]]
        last = r["span"][1]
    return "".join([*pieces, text[last:]])


def _media_at(offsets: Sequence[tuple[int, int]], replaced: Sequence[Mapping[str, Any]]) -> list[int]:
    """For each token, the number of the medium in whose text it is; -1 elsewhere."""
    found, medium = [], 0
    for start, end in offsets:
        while medium < len(replaced) and start >= replaced[medium]["new_span"][1]:
            medium += 1
        inside = medium < len(replaced) and end > replaced[medium]["new_span"][0]
        found.append(medium if inside else -1)
    return found


def _numbered(module: Any) -> list[tuple[int, FeatureFunction]]:
    return list(enumerate(module.functions))


def _inner_tokens(function: FeatureFunction, made: Mapping[str, Any], outputs: list[int]) -> list[int]:
    """The tokens of each medium inside the encoder: those of the raw tensor, in proportion to output tokens. Costs
    are estimated by them."""
    raw = made.get(function.raw)
    if not isinstance(raw, Tensor):
        return outputs
    total = raw.shape[0] if raw.dim() == 2 else raw.shape[-1] * len(raw) // 2 if raw.dim() == 3 else None
    if total is None:
        # Pixels: patches of 14 x 14 are assumed, whatever the tower's own are.
        total = raw[..., 0, :, :].numel() // 196
    whole = sum(outputs)
    return [max(1, total * own // whole) for own in outputs]
