"""Blocks of a stage compiled by `torch.compile`, each separately, for sequences of any length.

Blocks of one shape share their code: it takes batch and length as symbols (`dynamic=True`), so that a new length
compiles nothing. One row and several rows are two cases, and so are forwards with and without a graph. Everything
around blocks stays as it is: embeddings, masks, positions, losses, messages.
"""

import torch

from motet.parallel.activations import HasBlocks


def compile_blocks(stage: HasBlocks, backend: str) -> None:
    """From now on the stage's blocks run compiled. `backend`: of `torch.compile`. Before `treat_activations`, so that
    recomputation runs the compiled block again."""
    for block in stage.running_blocks.values():
        block.forward = torch.compile(block.forward, backend=backend, dynamic=True)
