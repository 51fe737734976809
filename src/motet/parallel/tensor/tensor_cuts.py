"""Derives how a transformers model is cut for tensor parallelism from the model itself, on the meta device too.

Which linears are cut by their outputs ("column") and which by their inputs ("row") is transformers' own plan
(`tp_plan`) where the model has one, and follows from the linears' names in a block where it has none (encoders, GPT-2,
BERT). What neither names stays whole on every rank.

A *region* is a part of a block that each rank computes as one summand: its input is whole on every rank, its row
linears (or its own output, for experts) are summed over the group. Everything between these two ends gets partial
gradients: of the input, summed where it enters, and of the parameters that are whole, summed once a step. So norms on
queries and keys, compressed queries and keys (MLA), learned activations and attention sinks need no rules of their own.

A plan may instead gather a column's output and split a row's input (OLMo 2, whose norms span all heads): only these
linears are cut then, and all ranks compute alike between them.

Limits: key-value heads are never copied. Whether a model's computation allows the cut is not proved here, but by
comparison with one process (`motet verify`).
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from motet.errors import UserError
from motet.parallel.experts import can_be_distributed, expert_parameters
from motet.parallel.tensor.tensor_plans import Shard

Linear = nn.Linear | Conv1D
Kind = Literal["column", "row"]

COLUMN_STYLES = {
    "colwise": 1,
    "packed_colwise": 2,
    "colwise_gather_output": 1,
    "colwise_rep": 1,
}
"""transformers' names of styles that cut outputs, and how many equal sections lie there one after the other."""
ROW_STYLES = {"rowwise": 1, "packed_rowwise": 2, "rowwise_split_input": 1, "rowwise_rep": 1}
OUTSIDE_STYLES = {"colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"}
"""Styles whose linears have inputs and outputs that are whole on every rank."""
IMPLIED_STYLES = {
    "embedding_rowwise",
    "embedding_colwise",
    "replicate",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "local_params",
    "sequence_parallel",
}
"""Styles that need no action, because regions imply them or nothing is cut."""
SUMMED_STYLES = {"moe_tp_experts", "all_reduce"}
"""Styles of modules whose output on each rank is one summand of the whole."""
IDENTITY_EXPERT_STYLE = "moe_identity_expert"

COLUMN_NAMES = re.compile(
    r"(.*\.)?(q_proj|k_proj|v_proj|query|key|value|qkv|qkv_proj|query_key_value|c_attn|q_attn"
    r"|g_proj|gate_proj|up_proj|gate_up_proj|fc1|c_fc|dense_h_to_4h|intermediate\.dense)"
)
"""Linears of blocks without a plan that are cut by their outputs."""
ROW_NAMES = re.compile(
    r"(.*\.)?(o_proj|out_proj|proj|c_proj|fc2|down_proj|dense_4h_to_h|output\.dense|(self_attn|attention|self_attention)\.dense)"
)
FUSED = re.compile(r"qkv|qkv_proj|c_attn|gate_up_proj")
"""Linears whose output is several parts, one after the other."""
ATTENTION = re.compile(r"attn|attention")
WIDTH = re.compile(r"intermediate|inner|ffn|ff_dim|hidden|width|dim")
HEAD_COUNTS = (
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "n_heads",
    "n_head",
    "all_head_size",
    "split_size",
    "embed_dim",
)
"""Attributes that say how many heads, or columns of all heads, an attention has. What transformers has a plan for does
not read them."""
WHOLE_PARTS: Mapping[str, str] = {
    "gemma3n_text": "mlp",  # Its sparsity comes from the mean and deviation over the MLP's whole width.
    # Something whole is made for each head outside of the projections: slopes of ALiBi, masks, halves of heads.
    "bloom": "self_attention",
    "codegen": "attn",
    "diffllama": "self_attn",
    "doge": "self_attn",
    "mpt": "attn",
    # Takes the width of its output from that of its input.
    "trocr": "self_attn",
    "zaya": "self_attn",
    # Adapters, which are whole, add to what the columns give.
    "zamba2": "feed_forward",
}
"""By `model_type`: a part of blocks that stays whole although plan or names would cut it."""


@dataclass(frozen=True)
class LinearCut:
    """The cut of one linear."""

    kind: Kind
    sections: tuple[int, ...] = (1,)
    """Relative sizes of the parts that lie one after the other in its output (fused queries | keys | values)."""
    is_outside: bool = False
    """Whether inputs and outputs are whole: a column's output is gathered, and a row takes its part of the input."""


@dataclass(frozen=True)
class Region:
    """A part of a block whose result is a sum over the ranks."""

    entries: tuple[str, ...]
    """Modules whose input is the region's input, which is whole on every rank."""
    rows: tuple[str, ...]
    """Row linears whose outputs are summed."""
    summed: str | None = None
    """A module whose own output is summed (experts)."""


@dataclass(frozen=True, kw_only=True)
class TensorCuts:
    """The cuts of a module. All names are paths in it."""

    blocks: tuple[str, ...]
    """Transformer layers that hold weights."""
    linears: Mapping[str, LinearCut]
    """Linears that are cut; all others are whole on every rank."""
    parameters: Mapping[str, Shard]
    """Cuts of parameters that belong to no linear: experts' weights and attention sinks."""
    regions: tuple[Region, ...]
    counts: tuple[tuple[str, str], ...] = ()
    """(module, attribute) pairs with a number of heads that a forward reads; each rank needs its own number."""
    divided_inputs: tuple[str, ...] = ()
    """Modules of a region that pass their input on: every rank does, so each passes on its share."""
    experts: tuple[str, ...] = ()
    """Modules whose experts are distributed, each whole on one rank: their parameters are not among those above."""
    vocabulary: tuple[str, ...] = ()
    """The embedding and the output head, where present; cut if the tensor-parallel size divides the vocabulary."""
    must_divide: Mapping[str, int] = field(default_factory=dict)
    """Numbers that the tensor-parallel size must divide, by their names in the configuration where they have one."""
    is_whole_model: bool = True
    """Whether no block is on another stage."""

    @property
    def cuts_blocks(self) -> bool:
        """Whether anything in the blocks of this stage is cut."""
        return bool(self.linears or self.parameters or self.experts)

    def cut_of(self, linear: str) -> Kind | None:
        """Returns the cut of a linear; None if it is whole on every rank."""
        return self.linears[linear].kind if linear in self.linears else None

    def shard_of(self, module: nn.Module, name: str, shape: tuple[int, ...], tp_size: int) -> Shard | None:
        """Returns the cut of the parameter `name` of whole `shape`; None if it is whole on every rank."""
        if name in self.parameters:
            return self.parameters[name]
        path, _, kind = name.rpartition(".")
        if path in self.vocabulary:
            return Shard(0) if shape[0] % tp_size == 0 else None
        cut = self.linears.get(path)
        if cut is None or (cut.kind == "row" and kind != "weight"):
            return None
        is_transposed = isinstance(module.get_submodule(path), Conv1D) and kind == "weight"
        dim = int((cut.kind == "row") != is_transposed)
        return None if cut.is_outside and shape[dim] % tp_size else Shard(dim, cut.sections)


def tensor_cuts(module: nn.Module, *, distributes_experts: bool = False) -> TensorCuts:
    """The cuts of a model, or of a stage that holds one; blocks of other stages may be absent or empty.

    `distributes_experts`: experts stay whole and go to different ranks, instead of being cut by their widths.
    Raises `UserError` for a plan that cannot be followed, and where there are no experts to distribute."""
    return _Derivation(module, distributes_experts=distributes_experts).result()


class _Derivation:
    def __init__(self, module: nn.Module, *, distributes_experts: bool) -> None:
        named = module.named_modules()
        self.distributes_experts = distributes_experts
        self.modules = {name: part for name, part in named if not re.match(r"(.*\.)?projector(\.|$)", name)}
        self.block_of = {name: _block_of(name, self.modules) for name in self.modules}
        self.blocks = {block for block in self.block_of.values() if block is not None}
        self.linears: dict[str, LinearCut] = {}
        self.parameters: dict[str, Shard] = {}
        self.regions: list[Region] = []
        self.counts: list[tuple[str, str]] = []
        self.divided: list[str] = []
        self.must_divide: dict[str, int] = {}
        self.planned_lists: set[str] = set()
        """Lists of blocks that transformers' plan covers."""

    def result(self) -> TensorCuts:
        self._follow_plans()
        self._follow_names()
        whole = WHOLE_PARTS.get(getattr(self._config_of(""), "model_type", ""))
        if whole is not None:
            self.linears = {path: cut for path, cut in self.linears.items() if whole not in path.split(".")}
        self._find_regions()
        experts = self._distributed_experts() if self.distributes_experts else ()
        self._find_numbers()
        filled = {block for path, block in self.block_of.items() if isinstance(self.modules[path], Linear)}
        cuts = TensorCuts(
            blocks=tuple(path for path in self.modules if path in filled),
            linears=self.linears,
            parameters=self.parameters,
            regions=tuple(self.regions),
            counts=tuple(dict.fromkeys(self.counts)),
            divided_inputs=tuple(self.divided),
            experts=experts,
            vocabulary=self._vocabulary(),
            must_divide=self.must_divide,
            is_whole_model=all(
                any(True for _ in member.parameters())
                for path in {_list_of(block) for block in filled if block}
                for member in self.modules[path].children()
            ),
        )
        if self.distributes_experts and not experts and cuts.blocks and cuts.is_whole_model:
            raise UserError("ep: the model has no experts that can be distributed; use ep 1")
        return cuts

    def _follow_plans(self) -> None:
        outer = None
        for name, part in self.modules.items():
            if not isinstance(part, PreTrainedModel) or (outer is not None and name.startswith(outer)):
                continue
            outer = f"{name}." if name else ""
            for pattern, style in (part.tp_plan or {}).items():
                matches = re.compile(re.escape(outer + pattern).replace(r"\*", r"\d+")).fullmatch
                for path in filter(matches, self.modules):
                    self._apply_style(path, style)
                for path in filter(matches, self._parameter_names()):
                    self._cut_parameter(path, style)

    def _parameter_names(self) -> list[str]:
        return [
            f"{path}.{name}" if path else name
            for path, part in self.modules.items()
            for name, _ in part.named_parameters(recurse=False)
        ]

    def _apply_style(self, path: str, style: str) -> None:
        part, block = self.modules[path], self.block_of[path]
        if block is None or block == path:
            return  # Outside of blocks only the vocabulary is cut.
        self.planned_lists.add(_list_of(block))
        if style in IMPLIED_STYLES or isinstance(part, nn.Embedding):
            return
        if style in SUMMED_STYLES:
            self.regions.append(Region((path,), (), path))
        elif style == IDENTITY_EXPERT_STYLE:
            self.divided.append(path)
        elif isinstance(part, Linear) and style in COLUMN_STYLES:
            self.linears[path] = LinearCut("column", (1,) * COLUMN_STYLES[style], style in OUTSIDE_STYLES)
        elif isinstance(part, Linear) and style in ROW_STYLES:
            self.linears[path] = LinearCut("row", (1,) * ROW_STYLES[style], style in OUTSIDE_STYLES)
        else:
            raise _unsupported(path, style)

    def _cut_parameter(self, name: str, style: str) -> None:
        """Cuts a parameter that the plan names itself: experts' [E, m, n], or a sink or bias for each head."""
        owner, _, attribute = name.rpartition(".")
        block = self.block_of[owner]
        if block is None or style in IMPLIED_STYLES:
            return
        self.planned_lists.add(_list_of(block))
        num_dims = getattr(self.modules[owner], attribute).dim()
        if style in COLUMN_STYLES:  # Inkling's plan forgets that gates and ups lie one after the other.
            num_sections = 2 if attribute == "gate_up_proj" else COLUMN_STYLES[style]
            self.parameters[name] = Shard(max(num_dims - 2, 0), (1,) * num_sections)
        elif style in ROW_STYLES:
            self.parameters[name] = Shard(num_dims - 1, (1,) * ROW_STYLES[style])
        else:
            raise _unsupported(name, style)

    def _follow_names(self) -> None:
        """Cuts linears by their names: in lists of blocks without a plan, and fused ones that a plan gathers although
        their parts can be cut (Phi 3)."""
        for path, part in self.modules.items():
            block = self.block_of[path]
            if block is None or block == path:
                continue
            if _list_of(block) not in self.planned_lists:
                if isinstance(getattr(part, "sinks", None), nn.Parameter):
                    self.parameters[f"{path}.sinks"] = Shard(0)
                if not _is_plain(part):
                    continue
                if COLUMN_NAMES.fullmatch(path):
                    self.linears[path] = LinearCut("column", self._sections(path))
                elif ROW_NAMES.fullmatch(path):
                    self.linears[path] = LinearCut("row")
                continue
            around, _, name = path.rpartition(".")
            row = next((f"{around}.{r}" for r in ("o_proj", "down_proj") if f"{around}.{r}" in self.linears), None)
            if path in self.linears and self.linears[path].is_outside and row is not None and FUSED.fullmatch(name):
                self.linears |= {path: LinearCut("column", self._sections(path)), row: LinearCut("row")}
                self._count_heads(around)
                if name != "gate_up_proj" and hasattr(self.modules[around], "config"):
                    self.counts.append((around, "config.num_attention_heads"))

    def _sections(self, path: str) -> tuple[int, ...]:
        """Returns the relative sizes of the parts of a column linear's output."""
        name = path.rpartition(".")[2]
        if not FUSED.fullmatch(name):
            return (1,)
        if name == "gate_up_proj":
            return (1, 1)
        heads = _setting(self._config_of(path), "num_attention_heads")
        of_keys = _setting(self._config_of(path), "num_key_value_heads")
        if heads and of_keys:
            return (heads, of_keys, of_keys)
        inputs, outputs = _sizes(self.modules[path])
        return (1,) * (outputs // inputs if outputs % inputs == 0 else 3)

    def _config_of(self, path: str) -> Any:
        """The configuration of the module at `path`: its own, or that of the next module around it that has one."""
        around = path
        while around and not hasattr(self.modules.get(around), "config"):
            around = around.rpartition(".")[0]
        own = getattr(self.modules.get(around), "config", None)
        return own or next((part.config for part in self.modules.values() if hasattr(part, "config")), None)

    def _count_heads(self, path: str) -> None:
        own = vars(self.modules[path])
        self.counts += [(path, name) for name in HEAD_COUNTS if isinstance(own.get(name), int)]

    def _find_regions(self) -> None:
        """Pairs row linears with the columns in the smallest module around them that has any. What finds no partner
        stays whole."""
        inside = {path: cut.kind for path, cut in self.linears.items() if not cut.is_outside}
        columns: dict[str, list[str]] = {}
        rows: dict[str, list[str]] = {}
        for path in [path for path, kind in inside.items() if kind == "column"]:
            around = path
            while around != self.block_of[path]:
                around = around.rpartition(".")[0]
                columns.setdefault(around, []).append(path)
        for path in [path for path, kind in inside.items() if kind == "row"]:
            block, around = self.block_of[path], path.rpartition(".")[0]
            while around != block and around not in columns:
                around = around.rpartition(".")[0]
            rows.setdefault(around, []).append(path)
        paired: set[str] = set()
        seen: set[str] = set()
        for around in sorted(rows, key=lambda path: path.count("."), reverse=True):
            own = [path for path in columns.get(around, ()) if path not in seen]
            if not own:
                continue
            seen |= set(own)
            parts, width = self._parts(around, own), _sizes(self.modules[rows[around][0]])[0]
            if _list_of(self.block_of[own[0]]) not in self.planned_lists:
                outputs = {path: _sizes(self.modules[path])[1] for path in own if not ATTENTION.search(path)}
                if not {width, 2 * width} >= set(outputs.values()) or any(self._normalizes(p, width) for p in parts):
                    continue
                for path, size in outputs.items():  # Gate and up in one, whatever it is called.
                    self.linears[path] = LinearCut("column", (1,) * (size // width))
                for path in {*parts, around, *(column.rpartition(".")[0] for column in own)} - self.blocks:
                    self._count_heads(path)
            paired |= {*own, *rows[around]}
            # A residual may come into an MLP beside its input (Bloom): then only the columns' input is the region's.
            if not ATTENTION.search(own[0]) and any(_num_inputs(self.modules[part]) > 1 for part in parts):
                parts = tuple(own)
            self.regions.append(Region(parts, tuple(rows[around])))
        for path in inside.keys() - paired:
            del self.linears[path]

    def _distributed_experts(self) -> tuple[str, ...]:
        """The modules whose experts go to different ranks; their parameters are cut by expert and in no other way. Not
        every plan names them (gpt_oss)."""
        paths = [region.summed for region in self.regions if region.summed is not None]
        for path, part in self.modules.items():
            if self.block_of[path] is not None and path not in paths and can_be_distributed(part):
                self.regions.append(Region((path,), (), path))
                paths.append(path)
        for path in paths:
            if not can_be_distributed(self.modules[path]):
                raise UserError(
                    f"ep: {path} is a {type(self.modules[path]).__name__}, which is not told which tokens go to which "
                    "expert, so its experts cannot be distributed; use ep 1"
                )
            names = {f"{path}.{name}" for name in expert_parameters(self.modules[path])}
            self.parameters = {name: shard for name, shard in self.parameters.items() if name not in names}
        return tuple(paths)

    def _parts(self, around: str, columns: list[str]) -> tuple[str, ...]:
        """The smallest module that holds the columns, if it is less than a block; of a single column, the module around
        it and its row: attentions read the sequence's length from their input."""
        block = self.block_of[columns[0]]
        entry = _common_parent(columns) if len(columns) > 1 else around
        return tuple(columns) if entry == block else (entry,)

    def _normalizes(self, part: str, width: int) -> bool:
        """Whether a norm over the whole width lies in a part: of queries of all heads, or before a row linear."""
        norms = [m for m in self.modules[part].modules() if re.search("norm", type(m).__name__, re.IGNORECASE)]
        return any(parameter.shape == (width,) for norm in norms for parameter in norm.parameters())

    def _find_numbers(self) -> None:
        """Notes what the tensor-parallel size must divide: heads in attentions, widths elsewhere."""
        for path, cut in self.linears.items():
            if cut.kind == "column" and not cut.is_outside:
                unit = _sizes(self.modules[path])[1] // sum(cut.sections)
                sizes = {unit * section for section in cut.sections}
                is_attention = bool(ATTENTION.search(path))
                for size in sorted(sizes, reverse=True):
                    self._note(path, self._num_heads(path, size) if is_attention else size, is_attention)
        for name, shard in self.parameters.items():
            owner, _, attribute = name.rpartition(".")
            size = getattr(self.modules[owner], attribute).shape[shard.dim] // len(shard.sections)
            self._note(name, size, bool(ATTENTION.search(name)))

    def _num_heads(self, path: str, size: int) -> int:
        """Returns the number of heads that share `size` outputs."""
        heads = _heads(self._config_of(path))
        owner = self.modules[path.rpartition(".")[0]]
        widths = [vars(owner).get(name) for name in ("head_dim", "head_size", "attention_head_size")]
        for width in widths:
            if isinstance(width, int) and width and size % width == 0 and size // width in heads.values():
                return size // width
        return next((count for count in heads.values() if size % count == 0), size)

    def _note(self, path: str, number: int, is_attention: bool) -> None:
        values = _settings(self._config_of(path))
        names = list(_heads(self._config_of(path))) if is_attention else [n for n in values if WIDTH.search(n)]
        if re.search(r"(^|[._])(k|v|key|value)(_proj)?$", path):
            names.sort(key=lambda name: "key_value" not in name)
        name = next((name for name in names if values.get(name) == number), None)
        self.must_divide[name or f"{'heads' if is_attention else 'width'} of {_in_block(path)}"] = number

    def _vocabulary(self) -> tuple[str, ...]:
        """The paths of embedding and output head, if the model has both; either may be on another stage."""
        for part in self.modules.values():
            if isinstance(part, PreTrainedModel):
                head = part.get_output_embeddings()
                if head is None:  # Not asked for what an encoder looks up: it may be on another stage, or be nothing.
                    return ()
                words = part.get_input_embeddings()
                is_special = isinstance(words, nn.Embedding) and any(words.children())  # Norms what it looks up.
                if is_special and getattr(head, "weight", None) is words.weight:
                    return ()
                plain = [words] if isinstance(words, nn.Embedding) and not is_special else []
                plain += [head] if _is_plain(head) else []
                return tuple(path for path, found in self.modules.items() if any(found is part for part in plain))
        return ()


def _num_inputs(module: nn.Module) -> int:
    """Returns the number of required arguments of a forward."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def _unsupported(name: str, style: str) -> UserError:
    return UserError(f"tp_size: transformers' plan gives {name} the style {style}, which is not supported; use 1")


def _block_of(path: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Returns the transformer layer that a module is or belongs to: the first list member on its path."""
    parts = path.split(".")
    for length in range(2, len(parts) + 1):
        around = ".".join(parts[: length - 1])
        if isinstance(modules.get(around), nn.ModuleList):
            return ".".join(parts[:length])
    return None


def _list_of(block: str | None) -> str:
    assert block is not None
    return block.rpartition(".")[0]


def _in_block(path: str) -> str:
    return re.sub(r"^.*?\.\d+\.", "", path)


def _common_parent(paths: list[str]) -> str:
    first, *others = (path.split(".")[:-1] for path in paths)
    for other in others:
        first = [part for i, part in enumerate(first) if first[: i + 1] == other[: i + 1]]
    return ".".join(first)


def _sizes(linear: Any) -> tuple[int, int]:
    """Returns (number of inputs, number of outputs) of a linear."""
    rows, columns = linear.weight.shape
    return (rows, columns) if isinstance(linear, Conv1D) else (columns, rows)


def _is_plain(module: nn.Module) -> bool:
    return isinstance(module, Linear) and type(module).forward in (nn.Linear.forward, Conv1D.forward)


def _settings(config: Any) -> dict[str, int]:
    """The whole numbers of a configuration, by its own names and by those that transformers gives to all families."""
    own = {name: value for name, value in vars(config).items() if type(value) is int} if config else {}
    return own | {name: own[of] for name, of in getattr(config, "attribute_map", {}).items() if of in own}


def _setting(config: Any, name: str) -> int | None:
    return _settings(config).get(name)


def _heads(config: Any) -> dict[str, int]:
    """The configuration's numbers of heads, the most usual names first."""
    usual = ("num_attention_heads", "num_key_value_heads")
    values = _settings(config)
    others = [name for name in values if re.search(r"heads?$", name) and name not in usual]
    return {name: values[name] for name in (*usual, *others) if values.get(name)}
