"""Derives how blocks of diffusers' transformers are cut for tensor parallelism, from the names of their linears.

Each attention is a region: queries, keys and values of places and conditions are cut by their outputs, so that a rank
computes whole heads of both, and what leaves the attention by its inputs. The first linear of an MLP is cut by its
outputs, the second by its inputs. Blocks in which attention and MLP run side by side (Flux) have one linear behind
both, whose inputs are cut in two sections. Modulations by the time step, and what is outside of blocks, stay whole.

Two models of diffusers have a plan of their own, with which a test compares these cuts; SD3 and PixArt have none.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from motet.parallel.tensor.tensor_cuts import LinearCut, Region, TensorCuts

COLUMNS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
ROWS = ("to_out.0", "to_add_out")
"""Linears of an attention."""
COUNTS = ("heads", "inner_dim")
"""Attributes of an attention by which its forward finds the width of a head; their ratio stays the same."""
UP, DOWN = "net.0.proj", "net.2"
"""Linears of an MLP."""
SIDE_COLUMN, SIDE_ROW = "proj_mlp", "proj_out"
"""Linears of a block in which attention and MLP run side by side."""


def diffusion_cuts(blocks: Mapping[str, nn.Module]) -> TensorCuts:
    """The cuts of the blocks of a stage, by their paths in it."""
    linears: dict[str, LinearCut] = {}
    regions: list[Region] = []
    counts: list[tuple[str, str]] = []
    must_divide: dict[str, int] = {}
    block: Any
    part: Any
    for path, block in blocks.items():
        for attention, part in _attentions(path, block):
            must_divide["num_attention_heads"] = part.heads
            counts += [(attention, name) for name in COUNTS if isinstance(getattr(part, name, None), int)]
            linears |= {f"{attention}.{name}": LinearCut("column") for name in _held(part, COLUMNS)}
            rows = tuple(f"{attention}.{name}" for name in _held(part, ROWS))
            entries: tuple[str, ...] = (attention,)
            if not rows:
                up, down = f"{path}.{SIDE_COLUMN}", f"{path}.{SIDE_ROW}"
                rows, entries = (down,), (attention, up)
                inner = block.get_submodule(SIDE_COLUMN).out_features
                width = block.get_submodule(SIDE_ROW).in_features
                linears |= {up: LinearCut("column"), down: LinearCut("row", (width - inner, inner))}
            linears |= {row: LinearCut("row") for row in rows if row not in linears}
            regions.append(Region(entries, rows))
        for name, part in block.named_modules():
            if _held(part, (UP, DOWN)) == [UP, DOWN]:
                up, down = f"{path}.{name}.{UP}", f"{path}.{name}.{DOWN}"
                # A gated MLP has both of its branches in the first linear.
                ratio = part.get_submodule(UP).out_features // part.get_submodule(DOWN).in_features
                linears |= {up: LinearCut("column", (1,) * ratio), down: LinearCut("row")}
                regions.append(Region((up,), (down,)))
    return TensorCuts(
        blocks=tuple(blocks),
        linears=linears,
        parameters={},
        regions=tuple(regions),
        counts=tuple(counts),
        must_divide=must_divide,
        is_whole_model=False,
    )


def _attentions(path: str, block: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in block.named_modules():
        if _held(part, COLUMNS[:3]):
            yield f"{path}.{name}", part


def _held(module: nn.Module, names: tuple[str, ...]) -> list[str]:
    """Those of these paths at which the module has a linear."""
    found = []
    for name in names:
        part: nn.Module | None = module
        for step in name.split("."):
            part = dict(part.named_children()).get(step) if part is not None else None
        if isinstance(part, nn.Linear):
            found.append(name)
    return found
