"""A microbatch as the ranks of a context-parallel group share it: samples of a language model, items of an encoder.

Everything follows from the samples' layouts and the plan, so all ranks and all stages of a module find the same
distribution (`motet.attention.masks.distribution`). Layers may have masks of their own (Gemma3: global and sliding
windows).
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from motet.attention.kernels.backends import backend_for, check_backend
from motet.attention.masks.distribution import FULL, Distribution, check_ulysses, rule_of_text, share_out
from motet.attention.masks.rules import Rule, mask_of_documents, rule_named
from motet.attention.masks.token_layout import Document
from motet.devices import to_device
from motet.errors import UserError
from motet.parallel.context.context_attention import ContextParallel, SharedAttention, gather_rows

ATTENTION, ITEM_ATTENTION = "motet_context", "motet_item_context"
"""The names under which transformers finds `shared_attention` and `shared_item_attention`."""


def attention_rules(config: Any, media_attention: str) -> tuple[Rule, ...]:
    """Returns the attention rule of every block of the model, with the windows and chunks of its configuration.

    Raises `UserError` for a kind of attention that is not known."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    chunk = getattr(config, "attention_chunk_size", None)
    return tuple(
        rule_named(
            media_attention,
            window if kind == "sliding_attention" else None,
            chunk if kind == "chunked_attention" else None,
        )
        for kind in kinds
    )


Reach = tuple[int | None, int | None]
"""How far back a block's queries see: sliding window and chunk; None: neither."""


def reach_of(rule: Rule) -> Reach:
    return rule.window, getattr(rule, "chunk", None)


class ContextSequence:
    """One microbatch on one rank of the group.

    `documents`: what stands one after the other and does not see each other. `rules`: of every block of the module."""

    def __init__(
        self,
        documents: tuple[Document, ...],
        rules: tuple[Rule, ...],
        cp: ContextParallel,
        device: torch.device,
    ) -> None:
        self._cp, self._device = cp, device
        self._rules = {reach_of(rule): rule for rule in rules}
        self._documents = documents
        self._distribution = _distribution(documents, rules, cp)
        self._attention: dict[Reach, SharedAttention] = {}
        self.num_calls = 0
        """Counts calls of this attention: a block that used another one saw this rank's tokens only."""

    @property
    def num_held(self) -> int:
        """Number of tokens that this rank holds, possibly 0."""
        return int(self._distribution.token_counts[self._cp.rank])

    @property
    def num_rows(self) -> int:
        """Rows of this rank's tensors: the tokens that it holds. If it holds none, one row stands in that no token sees
        and that has no loss, because models cannot run on empty tensors."""
        return _num_rows(self._distribution, self._cp)

    @cached_property
    def host_tokens(self) -> Tensor:
        """Positions [num_rows] of this rank's rows in the packed sequence, on the host."""
        held = self._distribution.tokens_of(self._cp.rank) if self.num_held else np.zeros(1, np.int64)
        return torch.from_numpy(held)

    @cached_property
    def _tokens(self) -> Tensor:
        return to_device(self.host_tokens, self._device)

    @property
    def host_held(self) -> Tensor:
        """Bool array [num_rows] on the host, false for the placeholder row of a rank without tokens."""
        return torch.arange(self.num_rows) < self.num_held

    @cached_property
    def _own_place(self) -> Tensor:
        """For each position [T] of the sequence, the index among this rank's tokens; -1 if another rank holds it."""
        places = torch.full((self._distribution.num_tokens,), -1)
        places[self.host_tokens[: self.num_held]] = torch.arange(self.num_held)
        return places

    def own(self, places: Tensor) -> Tensor:
        """Maps positions in the packed sequence to indices among this rank's tokens, without those held elsewhere. Both
        on the host."""
        at = self._own_place[places]
        return at[at >= 0]

    def take(self, rows: Tensor) -> Tensor:
        """Takes this rank's rows [num_rows, H] of a tensor [T, H] that is equal on all ranks."""
        return rows.index_select(0, self._tokens)

    def gather(self, rows: Tensor) -> Tensor:
        """Gathers [num_rows, H] to [T, H] on every rank; the backward sums the gradients of all ranks."""
        return gather_rows(rows[: self.num_held], self._distribution, self._cp)

    def prepare(self, reaches: Iterable[Reach]) -> None:
        """Derives all that attention of these kinds will need."""
        for reach in reaches:
            self.attention(reach).prepare()

    def attention(self, reach: Reach) -> SharedAttention:
        if reach not in self._attention:
            mask = mask_of_documents(self._documents, self._rules[reach])
            backend = backend_for(self._device, self._cp.options.backend)
            self._attention[reach] = SharedAttention(mask, self._distribution, self._cp, backend, self._device)
        return self._attention[reach]

    @cached_property
    def places_in_documents(self) -> Tensor:
        """Of each of this rank's tokens [num_held], its place in its document."""
        starts = np.cumsum([0, *(document.num_tokens for document in self._documents)])
        held = self.host_tokens[: self.num_held].numpy()
        places = held - starts[np.searchsorted(starts, held, side="right") - 1]
        return to_device(torch.from_numpy(places), self._device)


def _distribution(documents: tuple[Document, ...], rules: tuple[Rule, ...], cp: ContextParallel) -> Distribution:
    balanced = FULL if rules[0] == FULL else rule_of_text(cp.options)
    return share_out(documents, balanced, cp.options, cp.size)


def _num_rows(distribution: Distribution, cp: ContextParallel) -> int:
    return max(1, int(distribution.token_counts[cp.rank]))


def num_rows(documents: tuple[Document, ...], rules: tuple[Rule, ...], cp: ContextParallel) -> int:
    """Computes `ContextSequence.num_rows` without making a `ContextSequence`."""
    return _num_rows(_distribution(documents, rules, cp), cp)


def shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    *,
    context: ContextSequence,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query [1, heads, n, dim] -> output [1, n, heads, dim].

    `s_aux`: sinks [heads] (gpt-oss), logits of a key without value that every query sees.
    `context` travels from the stage's call through the model's keyword arguments."""
    assert attention_mask is None
    assert dropout == 0.0
    assert all(others.get(name) is None for name in CHANGES_OF_ATTENTION), others.keys()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor[:, :, : context.num_held] for tensor in (query, key, value))
    query = _by_own_places(module, query, context)
    out = context.attention((sliding_window, _chunk_of(module)))(query, key, value, scale, s_aux)
    context.num_calls += 1
    if context.num_rows > context.num_held:
        out = pad(out, (0, 0, 0, context.num_rows - context.num_held))
    return out.transpose(1, 2).contiguous(), None


def _chunk_of(module: nn.Module) -> int | None:
    """The chunk of a block's attention, of which transformers' interface says nothing."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" in kinds and kinds[cast(int, module.layer_idx)] == "chunked_attention":
        return cast(int, config.attention_chunk_size)
    return None


def _by_own_places(module: Any, query: Tensor, context: ContextSequence) -> Tensor:
    """Llama 4 scales the queries of blocks without rotary positions by their places, which it counts along the tensor:
    here by those in their documents."""
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query

    def scales(places: Tensor) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        return torch.log1p(torch.floor((places.to(wide) + 1) / module.floor_scale)) * module.attn_scale + 1

    assumed = torch.arange(query.shape[2], device=query.device)
    factor = scales(context.places_in_documents) / scales(assumed)
    return (query * factor[:, None]).to(query.dtype)


_alive: WeakValueDictionary[Any, ContextSequence] = WeakValueDictionary()


def context_sequence(
    documents: tuple[Document, ...], rules: tuple[Rule, ...], cp: ContextParallel, device: torch.device
) -> ContextSequence:
    """One for all stages, layers and passes of a microbatch, as long as somebody holds it (the engine does, from before
    the batch is computed until after): what its masks need is derived once."""
    key = (documents, rules, cp, device)
    context = _alive.get(key)
    if context is None:
        context = _alive[key] = ContextSequence(documents, rules, cp, device)
    return context


DROPOUTS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "dropout",
    "activation_dropout",
    "hidden_dropout_prob",
    "resid_pdrop",
    "embd_pdrop",
    "drop_path_rate",
)
"""Keys of transformers' configurations for dropout, which is refused: all ranks would draw the same numbers for
different tokens."""

CHANGES_OF_ATTENTION = ("softcap", "position_bias", "head_mask")
"""Arguments of the attention interface that change its result and are not supported: caps on logits
(Gemma2), biases (T5)."""


def check_shared(name: str, module: nn.Module, config: Any, cp: ContextParallel, num_heads: int, head_dim: int) -> None:
    """Raises `UserError` for models that motet's attention, or context parallelism, does not support."""
    for key in DROPOUTS:
        if getattr(config, key, 0.0):
            raise UserError(
                f"parallel: {name} has {key} {getattr(config, key)}, which context parallelism and media_attention do "
                "not support; set it to 0, or use cp 1 and media_attention causal"
            )
    if (cap := getattr(config, "attn_logit_softcapping", None)) is not None:
        raise UserError(
            f"parallel: {name} has attn_logit_softcapping {cap}, which context parallelism and media_attention do not "
            "support; use cp 1 and media_attention causal"
        )
    num_key_heads = getattr(config, "num_key_value_heads", None) or num_heads
    check_ulysses(num_heads // cp.tp_size, num_key_heads // cp.tp_size, cp.options.num_traders(cp.size))
    has_sinks = any(path.rpartition(".")[2] == "sinks" for path, _ in module.named_parameters())
    if (cp.options.method in ("ring", "hybrid") or has_sinks) and cp.options.backend == "flex":
        raise UserError(
            "parallel: context.backend: flex cannot merge attention to parts of the keys, as method ring and sinks "
            "need it; give auto, triton or dense"
        )
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    check_backend(device, cp.options.backend, block_size=cp.options.block_size, head_dim=head_dim)


class Holder:
    """Hands the microbatch to an encoder's attention: SigLIP does not pass keyword arguments on."""

    context: ContextSequence


def shared_item_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention interface like `shared_attention`, for modules that have a `Holder` as an attribute."""
    return shared_attention(module, *args, **kwargs, context=cast(Holder, module.motet_holder).context)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Makes all layers of a model use this attention interface, those with a configuration of their own too: tensor
    parallelism gives Phi3's attention one, which `set_attn_implementation` does not visit."""
    model.set_attn_implementation(name)
    for part in model.modules():
        config = getattr(part, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = name


AttentionInterface.register(ATTENTION, shared_attention)
AttentionInterface.register(ITEM_ATTENTION, shared_item_attention)
