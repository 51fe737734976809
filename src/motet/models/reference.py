"""The reference: every model's loss by plain transformers, as a user would write it. `motet verify` compares with it.

It runs sample by sample, without padding or packing, and calls nothing but the modules themselves: the models' own
forwards, callbacks and projectors. Encoder outputs go where the placeholder ids stand, not where layouts say; of
layouts it reads `Segment.grid`, `num_tokens` and `num_outputs`, by code of its own. Contrastive losses are written as
in their papers, over the whole similarity matrix. So an error in the stages cannot repeat itself here.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import cross_entropy
from transformers.masking_utils import create_bidirectional_mask

from motet.assignment.sample import IGNORED_LABEL, Sample, Segment
from motet.attention.masks.rules import OwnRule, mask_of_documents, rule_named
from motet.attention.masks.token_layout import Document
from motet.families.encoders.own_encoders import own_config
from motet.families.rotary import forget_sequences
from motet.models.composite import CompositeNode
from motet.models.draws import Key, draw_latents, draw_noise, draw_normal, draw_uniform, has_null_condition
from motet.models.generation import CodeNode, DiffusionNode, GeneratorNode, QueryNode
from motet.models.graph import DecoderNode, EncoderNode, LanguageModelNode, LossNode, ModuleNode, TowerNode
from motet.models.stages.stage import Batch


def reference_loss(
    nodes: Mapping[str, ModuleNode], batch: Batch, *, contrastive_batch_size: int | None = None, draw_key: Key = None
) -> Tensor:
    """The weighted sum of the losses of all modules, with its graph.

    Args:
        contrastive_batch_size: the samples that a contrastive loss compares; None: all.
        draw_key: on which noise and time steps of generators depend.
    """
    total: Any = 0.0
    states: list[Tensor] = []
    placeholder_ids: Mapping[str, int] = {}
    for node in nodes.values():
        if isinstance(node, LanguageModelNode):
            loss = plain_loss(
                {name: source.module for name, source in nodes.items() if isinstance(source, EncoderNode)},
                node.module.module,
                batch,
                merge=node.merge,
                placeholder_token_ids=node.placeholder_token_ids,
                media_attention=node.media_attention,
                language_model_name=node.name,
                queries={name: other.queries.weight for name, other in nodes.items() if isinstance(other, QueryNode)},
                states=states if any(isinstance(other, GeneratorNode) for other in nodes.values()) else None,
                router_aux_loss=node.router_aux_loss,
            )
            placeholder_ids = node.placeholder_token_ids
        elif isinstance(node, DiffusionNode):
            loss = plain_generation_loss(node, states, batch, placeholder_ids[node.queries or node.name], draw_key)
        elif isinstance(node, CodeNode):
            loss = plain_code_loss(node, states, batch, placeholder_ids[node.queries or node.name], draw_key)
        elif isinstance(node, LossNode):
            towers = {name: tower.module for name, tower in nodes.items() if isinstance(tower, TowerNode)}
            size = contrastive_batch_size or len(batch.samples)
            loss = plain_contrastive_loss(towers, node.loss, batch, pairs=node.pairs, batch_size=size)
        elif isinstance(node, DecoderNode):
            tower = nodes[node.reads]
            assert isinstance(tower, TowerNode)
            loss = plain_caption_loss(tower.module, node.decoder, batch, reads=node.reads, name=node.name)
        elif isinstance(node, CompositeNode) and not node.part.functions:
            loss = plain_composite_loss(node.model, batch, list(nodes))
        else:
            continue
        total = total + node.loss_weight * loss
    return torch.as_tensor(total)


def plain_encoder_output(modality_module: Any, features: Mapping[str, Tensor], segments: Sequence[Segment]) -> Tensor:
    """Encodes one sample's items: [sum of num_outputs, output size].

    Args:
        modality_module: has `module` (the transformers encoder), `projector` and the three callbacks (or None each);
            maybe `feature_layer`, the index into `hidden_states` of the features that are meant.
        features: the sample's tensors for this encoder.
        segments: the sample's layout in this encoder.
    """
    inputs = dict(features)
    if modality_module.preprocess_callback is not None:
        inputs = modality_module.preprocess_callback(inputs)
    output = _encode(modality_module.module, inputs, segments, getattr(modality_module, "feature_layer", None))
    if modality_module.postprocess_module_callback is not None:
        output = _tensor(modality_module.postprocess_module_callback(inputs, (output,)))
    if modality_module.projector is not None:
        output = _tensor(modality_module.projector(output))
    if modality_module.postprocess_projector_callback is not None:
        output = _tensor(modality_module.postprocess_projector_callback(inputs, (output,)))
    return output


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _encode(model: Any, inputs: Mapping[str, Tensor], segments: Sequence[Segment], feature_layer: int | None) -> Tensor:
    """The features that the layout asks for, items one after the other."""
    own = own_config(model)
    if own is not None:
        return torch.cat([plain_own_output(model, item) for item in inputs[own.encoder.feature]])
    family = model.config.model_type
    if family == "qwen2_5_vl_vision":
        grid_thw = torch.tensor([segment.grid for segment in segments], device=inputs["pixel_values"].device)
        return model(inputs["pixel_values"], grid_thw=grid_thw).pooler_output
    if family == "qwen2_audio_encoder":
        return _leading(_encode_qwen2_audio(model, inputs["input_features"], segments), segments)
    if family == "whisper":
        return _leading(model(inputs["input_features"]).last_hidden_state, segments)

    def features(*args: Any, **kwargs: Any) -> Tensor:
        if feature_layer is None:
            return model(*args, **kwargs).last_hidden_state
        return model(*args, **kwargs, output_hidden_states=True).hidden_states[feature_layer]

    if family == "pixtral":
        return features(inputs["pixel_values"], image_sizes=_pixtral_sizes(model, segments))[0]
    if family == "dinov2":
        hidden = features(inputs["pixel_values"])
    else:
        hidden = features(inputs["pixel_values"], interpolate_pos_encoding=True)
    has_class_token = any(name.endswith((".class_embedding", ".cls_token")) for name, _ in model.named_parameters())
    if has_class_token and any(segment.outputs != segment.num_tokens for segment in segments):
        hidden = hidden[:, 1:]
    return hidden.flatten(0, 1)


def plain_own_output(model: Any, item: Tensor) -> Tensor:
    """Encodes one item by an encoder of the user's own: [tokens, width]."""
    output = model(item[None])
    output = getattr(output, "last_hidden_state", output)
    return output.reshape(-1, output.shape[-1])


def _leading(hidden: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Returns the part of every clip before its padding."""
    return torch.cat([clip[: segment.outputs] for clip, segment in zip(hidden, segments, strict=True)])


def _pixtral_sizes(model: Any, segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """(height, width) in pixels of every image; several in a row for an item that a callback cuts into tiles."""
    patch = model.config.patch_size
    sizes = []
    for segment in segments:
        rows, columns = segment.grid
        sizes += [(rows * patch, columns * patch)] * (segment.num_tokens // (rows * columns))
    return sizes


def _encode_qwen2_audio(model: Any, mel: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Encodes clips with padding masked, as `Qwen2AudioModel` calls its audio tower."""
    num_tokens = (mel.shape[-1] - 2) // 2 + 1
    frames = torch.tensor([segment.grid[0] if segment.grid else mel.shape[-1] for segment in segments])
    lengths = ((frames - 1) // 2 + 1).to(mel.device)
    valid = torch.arange(num_tokens, device=mel.device)[None, :] < lengths[:, None]
    mask = create_bidirectional_mask(
        config=model.config,
        inputs_embeds=mel.new_zeros(len(segments), num_tokens, 1),
        attention_mask=valid.long(),
    )
    return model(mel, attention_mask=mask).last_hidden_state


def plain_loss(
    encoders: Mapping[str, Any],
    language_model: Any,
    batch: Batch,
    *,
    merge: str,
    placeholder_token_ids: Mapping[str, int],
    media_attention: str = "causal",
    language_model_name: str = "language_model",
    queries: Mapping[str, Tensor] | None = None,
    states: list[Tensor] | None = None,
    router_aux_loss: float = 0.0,
) -> Tensor:
    """Mean loss over all tokens of the batch that have a label and a token before them, with its graph.

    Args:
        encoders: by name: has `module`, `projector` and the callbacks (or None).
        language_model: a plain `...ForCausalLM`.
        merge: "placeholder", "prepend" or "cross_attention".
        placeholder_token_ids: by encoder, for "placeholder".
        media_attention: as in a run file, but not "family", or a registered mask's name; anything but "causal" is given
            to the model as a matrix.
        queries: by module, the query tokens of one item of a generator.
        states: gets the last hidden states of each sample.
        router_aux_loss: weight of the auxiliary loss of a mixture of experts.
    """
    total: Any = 0.0
    num_tokens = 0
    routed: list[Tensor] = []
    hooks = _record_router_logits(language_model, routed) if router_aux_loss else []
    for i, sample in enumerate(batch.samples):
        routed.clear()
        features = batch.features(language_model_name, i)
        ids, labels = features["input_ids"], features["labels"]
        tokens = {
            name: plain_encoder_output(encoder, batch.features(name, i), sample.layouts[name])
            for name, encoder in encoders.items()
            if sample.layouts.get(name)
        }
        for name, rows in (queries or {}).items():
            if sample.layouts.get(name):
                tokens[name] = torch.cat([rows] * len(sample.layouts[name]))
        extra: dict[str, Any] = {} if states is None else {"output_hidden_states": True}
        if merge == "cross_attention" and tokens:
            extra |= _cross_attention(ids, torch.cat(list(tokens.values())))
        if media_attention != "causal":
            items = _items_of_tokens(sample, ids, merge, placeholder_token_ids)
            segments = tuple(sample.layouts[language_model_name])
            masks = _attention_masks(language_model.config, items, media_attention, segments)
            dtype = next(language_model.parameters()).dtype
            lowest = torch.finfo(dtype).min
            added = {
                kind: torch.zeros_like(sees, dtype=dtype).masked_fill(~sees, lowest) for kind, sees in masks.items()
            }
            extra["attention_mask"] = added.get("", added)
        merged = partial(_merged, ids=ids, tokens=tokens, merge=merge, placeholder_token_ids=placeholder_token_ids)
        # Not inputs_embeds: some models scale what they embed themselves only, or embed the ids again (Gemma 3n).
        hook = language_model.get_input_embeddings().register_forward_hook(
            lambda module, args, words, merged=merged: merged(words[0])[None]
        )
        forget_sequences(language_model)
        try:
            output = language_model(input_ids=ids[None], use_cache=False, **extra)
        finally:
            hook.remove()
        logits = output.logits[0]
        if states is not None:
            states.append(output.hidden_states[-1][0])
        wide = logits if logits.dtype == torch.float64 else logits.float()
        total = total + cross_entropy(wide[:-1], labels[1:], ignore_index=IGNORED_LABEL, reduction="sum")
        own_tokens = int((labels[1:] != IGNORED_LABEL).sum())
        num_tokens += own_tokens
        if router_aux_loss:
            total = total + router_aux_loss * own_tokens * _balance(routed, language_model.config.num_experts_per_tok)
    for hook in hooks:
        hook.remove()
    return total / num_tokens


def plain_generation_loss(
    node: DiffusionNode, states: Sequence[Tensor], batch: Batch, placeholder_id: int, key: Key
) -> Tensor:
    """Mean over images (or over their places) of the mean squared error, with its graph. Images are made one by one.

    Args:
        states: of each sample of the batch, the language model's last hidden states.
        key: on which noise and time steps depend.
    """
    total: Any = 0.0
    count = 0.0
    model: Any = node.model
    channels, patch = _latent_channels(model), _side_of_a_place(model)
    for i, sample in enumerate(batch.samples):
        segments = sample.layouts.get(node.name, ())
        if not segments:
            continue
        conditions = _conditions(node, states[i], batch, i, placeholder_id).chunk(len(segments))
        features = batch.features(node.name, i)
        latents = features["latents"]
        first = 0
        for segment, own in zip(segments, conditions, strict=True):
            shape = (channels, segment.grid[0] * patch, segment.grid[1] * patch)
            size = shape[0] * shape[1] * shape[2]
            drawn = (key, node.name, sample.id, segment.item)
            clean = latents[first : first + size].view(1, *shape).to(own.dtype)
            if "deviations" in features:
                deviation = features["deviations"][first : first + size].view(1, *shape).to(own.dtype)
                clean = clean + deviation * torch.from_numpy(draw_latents(*drawn, shape))[None].to(clean)
            first += size
            noise = torch.from_numpy(draw_noise(*drawn, shape))[None].to(clean)
            noised, timestep, target = _noised(node.loss.objective, clean, noise, drawn)
            context = node.connector.projector(node.connector.norm(own))
            if has_null_condition(*drawn, node.loss.null_condition):
                context = node.connector.null.repeat(len(own), 1)
            pooled = None if node.connector.pooled is None else node.connector.pooled(context[None].mean(1))
            made = denoise(model, noised, timestep, context[None], pooled, node.guidance)
            error = (made - target).square().mean()
            weight = segment.num_tokens if node.loss.per == "place" else 1
            total, count = total + weight * error, count + weight
    return torch.as_tensor(total) / max(count, 1)


def plain_code_loss(node: CodeNode, states: Sequence[Tensor], batch: Batch, placeholder_id: int, key: Key) -> Tensor:
    """Mean over sounds (or over their tokens) of the cross-entropy of each next token. Sounds go through the decoder
    one by one.

    Args:
        states: of each sample of the batch, the language model's last hidden states.
        key: on which the choice of null conditions depends.
    """
    total: Any = 0.0
    count = 0.0
    decoder: Any = node.model
    for i, sample in enumerate(batch.samples):
        segments = sample.layouts.get(node.name, ())
        if not segments:
            continue
        conditions = _conditions(node, states[i], batch, i, placeholder_id).chunk(len(segments))
        codes = batch.features(node.name, i)["codes"].tolist()
        for segment, own in zip(segments, conditions, strict=True):
            taken, codes = codes[: segment.num_tokens - 1], codes[segment.num_tokens - 1 :]
            context = node.connector.projector(node.connector.norm(own))
            if has_null_condition(key, node.name, sample.id, segment.item, node.loss.null_condition):
                context = node.connector.null.repeat(len(own), 1)
            # Token 0 stands before the codes and behind them.
            tokens = torch.tensor([[0, *taken, 0]])
            logits = decoder(tokens[:, :-1], encoder_hidden_states=context[None]).logits[0]
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = functional.cross_entropy(wide, tokens[0, 1:])
            weight = segment.num_tokens if node.loss.per == "place" else 1
            total, count = total + weight * loss, count + weight
    return torch.as_tensor(total) / max(count, 1)


def _conditions(node: GeneratorNode, states: Tensor, batch: Batch, sample: int, placeholder_id: int) -> Tensor:
    """The hidden states of a sample that condition what is to be generated in it."""
    here = batch.features(node.reads, sample)["input_ids"] == placeholder_id
    if not node.queries:  # It reads everything up to the placeholder.
        here = torch.arange(len(here)) <= here.nonzero().item()
    return states[here]


def _noised(objective: str, clean: Tensor, noise: Tensor, drawn: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The noised latents, the time step [1], and what is to be predicted."""
    if objective == "flow":
        sigma = 1 / (1 + math.exp(-draw_normal(*drawn)))
        timestep = torch.tensor([1000 * sigma], dtype=torch.float32)
        sigma = timestep.item() / 1000
        return (1 - sigma) * clean + sigma * noise, timestep, noise - clean
    place = math.floor(1000 * draw_uniform(*drawn))
    kept = math.prod(1 - (1e-4 + (0.02 - 1e-4) * step / 999) for step in range(place + 1))
    signal, amount = math.sqrt(kept), math.sqrt(1 - kept)
    target = noise if objective == "epsilon" else signal * noise - amount * clean
    return signal * clean + amount * noise, torch.tensor([float(place)], dtype=torch.float32), target


def _is_packed(model: Any) -> bool:
    return type(model).__name__ in ("FluxTransformer2DModel", "QwenImageTransformer2DModel")


def _latent_channels(model: Any) -> int:
    return int(model.config.in_channels) // (4 if _is_packed(model) else 1)


def _side_of_a_place(model: Any) -> int:
    if _is_packed(model):
        return 2
    return int(getattr(model.config, "patch_size", 1))


def denoise(
    model: Any, noised: Tensor, timestep: Tensor, context: Tensor, pooled: Tensor | None, guidance: float | None
) -> Tensor:
    """Runs diffusers' own forward on one image [1, channels, height, width], as its pipelines do."""
    if type(model).__name__ == "UNet2DConditionModel":
        return model(noised, timestep, context).sample
    if not _is_packed(model):
        given: dict[str, Any] = {"hidden_states": noised, "timestep": timestep, "encoder_hidden_states": context}
        return model(**given, **({} if pooled is None else {"pooled_projections": pooled})).sample
    _, channels, height, width = noised.shape
    rows, columns = height // 2, width // 2
    patches = noised.view(1, channels, rows, 2, columns, 2).permute(0, 2, 4, 1, 3, 5)
    given = {
        "hidden_states": patches.reshape(1, rows * columns, 4 * channels),
        "timestep": timestep / 1000,
        "encoder_hidden_states": context,
    }
    if type(model).__name__ == "FluxTransformer2DModel":
        ids = torch.zeros(rows, columns, 3, device=noised.device)
        ids[..., 1] += torch.arange(rows, device=noised.device)[:, None]
        ids[..., 2] += torch.arange(columns, device=noised.device)[None, :]
        given |= {"pooled_projections": pooled, "img_ids": ids.reshape(-1, 3)}
        given |= {"txt_ids": torch.zeros(context.shape[1], 3, device=noised.device)}
        given |= {} if guidance is None else {"guidance": torch.full_like(timestep, guidance)}
    else:
        given["img_shapes"] = [[(1, rows, columns)]]
    made = model(**given).sample.view(1, rows, columns, channels, 2, 2)
    return made.permute(0, 3, 1, 4, 2, 5).reshape(noised.shape)


def _record_router_logits(model: Any, routed: list[Tensor]) -> list[Any]:
    """Hooks on the modules between a mixture's experts and its input, which transformers calls routers."""
    routers = [part for part in model.modules() if type(part).__name__.lower().endswith("router")]
    return [part.register_forward_hook(lambda module, args, output: routed.append(output[0])) for part in routers]


def _balance(routed: list[Tensor], num_chosen: int) -> Any:
    """The mean over a sample's mixtures of E * sum of (share of the tokens that choose an expert) * (its mean
    probability)."""
    losses = []
    for logits in routed:
        chances = functional.softmax(logits.double(), dim=-1)
        chosen = functional.one_hot(chances.topk(num_chosen).indices, chances.shape[-1]).sum(1).double()
        losses.append(chances.shape[-1] * (chosen.mean(0) * chances.mean(0)).sum())
    return sum(losses) / len(losses)


def _merged(
    embeddings: Tensor, ids: Tensor, tokens: Mapping[str, Tensor], merge: str, placeholder_token_ids: Mapping[str, int]
) -> Tensor:
    """[T, H]: a sample's embedded tokens with the encoders' outputs, `tokens`, in their places."""
    if merge == "placeholder":
        for name, outputs in tokens.items():
            here = (ids == placeholder_token_ids[name]).nonzero().squeeze(-1)
            embeddings = embeddings.index_put((here,), outputs.to(embeddings.dtype))
    elif merge == "prepend" and tokens:
        media = torch.cat(list(tokens.values()))
        embeddings = torch.cat([media.to(embeddings.dtype), embeddings[len(media) :]])
    return embeddings


def _cross_attention(ids: Tensor, media: Tensor) -> dict[str, Any]:
    # Without a mask, transformers' attention would take the keys for a causal sequence.
    everything = media.new_zeros(1, 1, len(ids), len(media))
    return {"cross_attention_states": media[None], "cross_attention_mask": everything}


def _items_of_tokens(
    sample: Sample, ids: Tensor, merge: str, placeholder_token_ids: Mapping[str, int]
) -> list[tuple[str, int] | None]:
    """Returns, for each token, the encoder and item whose output it is; None for text."""
    items: list[tuple[str, int] | None] = [None] * len(ids)
    front = 0
    for name in placeholder_token_ids:
        outputs = [(name, segment.item) for segment in sample.layouts.get(name, ()) for _ in range(segment.outputs)]
        if merge == "placeholder":
            places = (ids == placeholder_token_ids[name]).nonzero().squeeze(-1).tolist()
        else:
            places = list(range(front, front + len(outputs)))
            front += len(outputs)
        for place, item in zip(places, outputs, strict=True):
            items[place] = item
    return items


def _attention_masks(
    config: Any, items: list[tuple[str, int] | None], media_attention: str, segments: tuple[Segment, ...]
) -> dict[str, Tensor]:
    """Returns boolean masks [1, 1, T, T], by kind of layer where the model has several, else by "".

    A sliding window cuts what a text token and a token of `block_causal` or `prefix` media sees, as in transformers'
    Gemma3."""
    place = torch.arange(len(items))
    same_item = torch.tensor([[item is not None and other == item for other in items] for item in items])
    same_modality = torch.tensor([[bool(item and other and other[0] == item[0]) for other in items] for item in items])
    is_media = torch.tensor([item is not None for item in items])[:, None]
    last_media = max((place for place, item in enumerate(items) if item is not None), default=-1)

    def matrix(window: int | None) -> Tensor:
        rule = rule_named(media_attention, window)
        if isinstance(rule, OwnRule):
            return torch.from_numpy(mask_of_documents((Document(segments),), rule).dense())[None, None]
        sees = place[None] <= place[:, None]
        if media_attention == "block_causal":
            sees = sees | same_item
        if media_attention == "prefix":
            sees = sees | ((place[None] <= last_media) & (place[:, None] <= last_media))
        if window is not None:
            sees = sees & (place[:, None] - place[None] < window)
        if media_attention in ("own_item", "own_modality"):
            sees = torch.where(is_media, same_item if media_attention == "own_item" else same_modality, sees)
        return sees[None, None]

    window = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None):
        return {"full_attention": matrix(None), "sliding_attention": matrix(window)}
    return {"": matrix(window)}


def plain_composite_loss(model: Any, batch: Batch, modules: Sequence[str]) -> Tensor:
    """Mean loss over all tokens that have a label and a token before them, with its graph.

    Args:
        model: of several modalities; its own forward runs for every sample, with all that its processor returned.
        modules: names of its parts, under which the batch has their features.
    """
    total: Any = 0.0
    num_tokens = 0
    takes = inspect.signature(model.forward).parameters
    for i, sample in enumerate(batch.samples):
        given: dict[str, Tensor] = {}
        for name in modules:
            if sample.has(name):
                given |= batch.features(name, i)
        labels = given.pop("labels")
        inputs = {key: value for key, value in given.items() if key in takes}
        for key, value in inputs.items():
            if key == "input_ids" or key.endswith("token_type_ids"):
                inputs[key] = value[None]
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        forget_sequences(model)
        logits = model(**inputs, use_cache=False).logits[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        total = total + cross_entropy(wide[:-1], labels[1:], ignore_index=IGNORED_LABEL, reduction="sum")
        num_tokens += int((labels[1:] != IGNORED_LABEL).sum())
    return torch.as_tensor(total) / max(1, num_tokens)


def plain_contrastive_loss(
    towers: Mapping[str, Any], loss: Any, batch: Batch, *, pairs: Sequence[tuple[str, str]], batch_size: int
) -> Tensor:
    """The mean over all comparisons: of each contrastive batch, each pair of towers, and each sample that has both.
    With its graph.

    Args:
        towers: by name: has `module`, the transformers encoder, and `projector`, or None.
        loss: has `kind`, "softmax" or "sigmoid", `logit_scale` (a logarithm) and `logit_bias`, or None.
        batch_size: of a contrastive batch.
    """
    normalized: dict[str, dict[int, Tensor]] = {name: {} for name in towers}
    for name, tower in towers.items():
        for i, sample in enumerate(batch.samples):
            if sample.has(name):
                embedding = _embedding(tower, batch, name, i)
                normalized[name][i] = embedding / embedding.norm(dim=-1, keepdim=True)
    total, count = loss.logit_scale * 0.0, 0
    for first in range(0, len(batch.samples), batch_size):
        for a, b in pairs:
            both = [i for i in range(first, first + batch_size) if i in normalized[a] and i in normalized[b]]
            if not both:
                continue
            left, right = (torch.cat([normalized[name][i] for i in both]) for name in (a, b))
            logits = loss.logit_scale.exp() * left @ right.T
            mean = _clip(logits) if loss.kind == "softmax" else _siglip(logits + loss.logit_bias)
            total, count = total + mean * len(both), count + len(both)
    return total / max(1, count)


def plain_caption_loss(tower: Any, decoder: Any, batch: Batch, *, reads: str, name: str) -> Tensor:
    """The mean over all captions' tokens, caption by caption.

    Args:
        tower: as above; the decoder attends to its `last_hidden_state`, through its projector.
        decoder: a causal model of transformers with cross-attention.
        reads: the tower's name, `name` the decoder's.
    """
    total: Any = 0.0
    count = 0
    for i, sample in enumerate(batch.samples):
        if not sample.has(name):
            continue
        states = tower.module(**batch.features(reads, i)).last_hidden_state
        if tower.projector is not None:
            states = tower.projector(states)
        text = batch.features(name, i)
        logits = decoder(input_ids=text["input_ids"][None], encoder_hidden_states=states, use_cache=False).logits[0]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        total = total + functional.cross_entropy(
            wide[:-1], text["labels"][1:], ignore_index=IGNORED_LABEL, reduction="sum"
        )
        count += int((text["labels"][1:] != IGNORED_LABEL).sum())
    return torch.as_tensor(total) / max(1, count)


def _clip(logits: Tensor) -> Tensor:
    own = torch.arange(len(logits), device=logits.device)
    return (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)) / 2


def _siglip(logits: Tensor) -> Tensor:
    signs = 2 * torch.eye(len(logits), dtype=logits.dtype, device=logits.device) - 1
    return -functional.logsigmoid(signs * logits).sum(dim=-1).mean()


def _embedding(tower: Any, batch: Batch, name: str, sample: int) -> Tensor:
    """[1, width]"""
    features = batch.features(name, sample)
    output = tower.module(**features)
    pooled = getattr(output, "pooler_output", None)
    if pooled is None:  # Whisper: the mean over what is no padding.
        grid = batch.samples[sample].layouts[name][0].grid
        frames = output.last_hidden_state
        pooled = (frames[:, : (grid[0] + 1) // 2] if grid else frames).mean(dim=1)
    return pooled if tower.projector is None else tower.projector(pooled)
