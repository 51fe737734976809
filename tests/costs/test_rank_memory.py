"""What ranks hold: by hand on a small problem, under every kind of parallelism."""

import pytest
from bound_costs import CELL, LONG, TEXT, bind, cut_plan, small_plan

from motet.costs.memory import MemoryOptions
from motet.schedule.routes import Cell


def test_saved_bytes_follow_the_gradients():
    frozen, trained = bind(small_plan()), bind(small_plan(vision_trainable=((0, 5),)))
    cell = Cell("vision", 0, 0, 0)
    assert 0 < frozen.saved_bytes(cell, False) < trained.saved_bytes(cell, False) / 4
    assert bind(small_plan(text_trainable=())).saved_bytes(Cell("text", 0, 0, 3), False) == 0
    again = bind(small_plan(vision_trainable=((0, 5),), recompute=("vision",)))
    assert again.saved_bytes(cell, False) < trained.saved_bytes(cell, False)


@pytest.mark.parametrize("recompute", [(), ("text",)])
def test_shared_activations(recompute):
    """Context parallelism shares all that is saved; sequence parallelism what norms and recomputed blocks save."""
    one = bind(cut_plan(recompute=recompute), LONG).saved_bytes(CELL, False)
    two = bind(cut_plan(cp_size=2, recompute=recompute), LONG).saved_bytes(CELL, False)
    assert two == pytest.approx(one / 2)
    plain, shared = (
        bind(cut_plan(tp_size=2, sequence_parallel=sp, recompute=recompute), LONG).saved_bytes(CELL, False)
        for sp in (False, True)
    )
    vectors = 1 if recompute else TEXT.layers[1].saved_vectors + TEXT.layers[1].saved_vectors_for_weights
    assert plain - shared == 2 * vectors * 240 * 64 * 4 / 2


def test_context_parallel_ranks_share_the_optimizer_too():
    options = MemoryOptions(zero1=True)
    one, two = (bind(cut_plan(cp_size=size), LONG, memory=options).static_bytes(0) for size in (1, 2))
    assert two == pytest.approx(one * 3 / 4)


def test_fully_sharded_ranks_keep_a_share_and_have_a_block_more():
    whole, sharded = (bind(cut_plan(cp_size=2, fully_sharded=given), LONG) for given in (False, True))
    sizes = [layer.num_parameters * 4 for layer in TEXT.layers]
    assert [layer.part for layer in TEXT.layers] == ["embed", "block", "block", "head"]
    # Kept: half of everything; there while it computes: of parameters and gradients the other half, of one block.
    assert whole.static_bytes(0) == 4 * sum(sizes)
    assert sharded.static_bytes(0) == pytest.approx(2 * sum(sizes) + sum(sizes) - sizes[1])


def test_after_the_input_half_inputs_and_output_gradients_of_linears_remain():
    costs = bind(cut_plan(), LONG)
    tokens, losses, width, keys, inner, vocabulary = 240, 120, 64, 32, 96, 80
    inputs = tokens * (width + width + width + inner)  # of attention, its output, MLP, its last
    outputs = tokens * (width + 2 * keys + width + 2 * inner + width)
    head = losses * (width + vocabulary)
    assert costs.saved_bytes(CELL, half=True) == 4 * (2 * (inputs + outputs) + head)
    frozen = bind(small_plan())
    assert frozen.saved_bytes(Cell("text", 0, 0, 0), half=True) == 0
