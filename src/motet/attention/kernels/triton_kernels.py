"""Flash attention over the non-empty tiles of a mask, forward and backward, in Triton.

Every program works off one *task*: a block of queries (or, for the gradients of keys and values, a block of keys) and a
run of its non-empty tiles. Tiles whose pairs are all allowed come first in a run and pay for no mask. A block whose
tiles are shared out over several tasks leaves partial results, which a second kernel merges: outputs by their
log-sum-exps, gradients by adding in a fixed order. Nothing is added atomically, so results are the same bit by bit.

Source: intra-device balance, thesis 3.3.2.2 and 3.4.2; the online softmax is the usual one of flash attention.
Deviation: the papers' kernel tests bitfields per element; here a query sees keys in two intervals of positions, and
of the classes that a word of bits names (docs/attention.md), which tells apart images of one modality.
Limits: head dimensions up to 256; keys and values of one head group are read once for each query head.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    # The interpreter multiplies bfloat16 wrongly; float32 is never rounded to TF32.
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _load_rows(base, rows, stride, columns, row_limit, HEAD_DIM: tl.constexpr):
    """[rows, columns] of a matrix; zeros outside."""
    inside = (rows[:, None] < row_limit) & (columns[None, :] < HEAD_DIM)
    return tl.load(base + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _allowed(lo, hi, classes_seen, position, key_class):
    """[queries, keys]: position in one of the query's two intervals, and a class that it sees."""
    lo_0, lo_1 = lo
    hi_0, hi_1 = hi
    p = position[None, :]
    in_interval = ((p >= lo_0[:, None]) & (p < hi_0[:, None])) | ((p >= lo_1[:, None]) & (p < hi_1[:, None]))
    return in_interval & (((classes_seen[:, None] >> key_class[None, :]) & 1) != 0)


@triton.jit
def _load_queries_mask(LO, HI, CLASSES_SEEN, batch, rows, num_queries):
    """Intervals and classes that the queries see: ((lo, lo), (hi, hi), bits of classes); empty beyond the last
    query."""
    inside = rows < num_queries
    at = batch.to(tl.int64) * num_queries + rows
    lo = (tl.load(LO + 2 * at, mask=inside, other=0), tl.load(LO + 2 * at + 1, mask=inside, other=0))
    hi = (tl.load(HI + 2 * at, mask=inside, other=0), tl.load(HI + 2 * at + 1, mask=inside, other=0))
    return lo, hi, tl.load(CLASSES_SEEN + at, mask=inside, other=0)


@triton.jit
def _load_keys_mask(POSITION, KEY_CLASS, batch, rows, num_keys):
    """(positions, classes) of keys; position -1, which no interval holds, beyond the last key."""
    inside = rows < num_keys
    at = batch.to(tl.int64) * num_keys + rows
    return tl.load(POSITION + at, mask=inside, other=-1), tl.load(KEY_CLASS + at, mask=inside, other=0).to(tl.int64)


@triton.jit
def _add_keys(highest, total, out, q, k, v, allowed, scale_2, MASKED: tl.constexpr, UPCAST: tl.constexpr):
    """The online softmax after more keys: highest score of each row, sum of the exponentials, weighted values."""
    scores = _dot(q, tl.trans(k), UPCAST) * scale_2
    if MASKED:
        scores = tl.where(allowed, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    shift = new_highest
    if MASKED:  # A row that has seen no key yet must not compute inf - inf.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    p = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(highest - shift)
    out = out * decay[:, None] + _dot(p.to(v.dtype), v, UPCAST)
    return new_highest, total * decay + tl.sum(p, 1), out


@triton.jit
def forward_kernel(
    Q, K, V, OUT, LSE, PARTIAL_OUT, PARTIAL_LSE,
    LO, HI, CLASSES_SEEN, POSITION, KEY_CLASS,
    TASKS, COLUMNS,
    num_queries, num_keys, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One task and one query head: OUT [batch, heads, queries, dim], LSE [batch, heads, queries] in base 2."""
    task, head = tl.program_id(0), tl.program_id(1)
    batch = tl.load(TASKS + 6 * task)
    block = tl.load(TASKS + 6 * task + 1)
    first = tl.load(TASKS + 6 * task + 2)
    first_partial = tl.load(TASKS + 6 * task + 3)
    last = tl.load(TASKS + 6 * task + 4)
    slot = tl.load(TASKS + 6 * task + 5)

    rows = block * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, DIM)
    q_base = Q + (batch * NUM_HEADS + head).to(tl.int64) * num_queries * HEAD_DIM
    kv_offset = (batch * (NUM_HEADS // GROUP) + head // GROUP).to(tl.int64) * num_keys * HEAD_DIM
    q = _load_rows(q_base, rows, HEAD_DIM, columns, num_queries, HEAD_DIM)
    lo, hi, classes_seen = _load_queries_mask(LO, HI, CLASSES_SEEN, batch, rows, num_queries)
    scale_2 = scale * LOG2_E

    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, DIM], tl.float32)
    for tile in range(first, first_partial):
        for step in tl.static_range(BLOCK // STEP):
            keys = tl.load(COLUMNS + tile) * BLOCK + step * STEP + tl.arange(0, STEP)
            k = _load_rows(K + kv_offset, keys, HEAD_DIM, columns, num_keys, HEAD_DIM)
            v = _load_rows(V + kv_offset, keys, HEAD_DIM, columns, num_keys, HEAD_DIM)
            highest, total, out = _add_keys(highest, total, out, q, k, v, None, scale_2, False, UPCAST)
    for tile in range(first_partial, last):
        for step in tl.static_range(BLOCK // STEP):
            keys = tl.load(COLUMNS + tile) * BLOCK + step * STEP + tl.arange(0, STEP)
            position, key_class = _load_keys_mask(POSITION, KEY_CLASS, batch, keys, num_keys)
            allowed = _allowed(lo, hi, classes_seen, position, key_class)
            k = _load_rows(K + kv_offset, keys, HEAD_DIM, columns, num_keys, HEAD_DIM)
            v = _load_rows(V + kv_offset, keys, HEAD_DIM, columns, num_keys, HEAD_DIM)
            highest, total, out = _add_keys(highest, total, out, q, k, v, allowed, scale_2, True, UPCAST)

    has_keys = total > 0
    out = out / tl.where(has_keys, total, 1.0)[:, None]
    lse = tl.where(has_keys, highest + tl.log2(tl.where(has_keys, total, 1.0)), float("-inf"))
    in_dim = columns[None, :] < HEAD_DIM
    if slot < 0:
        inside = rows < num_queries
        at = (batch * NUM_HEADS + head).to(tl.int64) * num_queries + rows
        tl.store(
            OUT + at[:, None] * HEAD_DIM + columns[None, :], out.to(OUT.dtype.element_ty), inside[:, None] & in_dim
        )
        tl.store(LSE + at, lse, inside)
    else:
        at = (slot * NUM_HEADS + head).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(PARTIAL_OUT + at[:, None] * HEAD_DIM + columns[None, :], out, in_dim)
        tl.store(PARTIAL_LSE + at, lse)


@triton.jit
def merge_outputs_kernel(
    PARTIAL_OUT, PARTIAL_LSE, OUT, LSE, SPLIT_BLOCKS, num_queries,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of queries whose tiles were distributed: its partial outputs become one by their log-sum-exps."""
    index, head = tl.program_id(0), tl.program_id(1)
    batch = tl.load(SPLIT_BLOCKS + 4 * index)
    block = tl.load(SPLIT_BLOCKS + 4 * index + 1)
    first = tl.load(SPLIT_BLOCKS + 4 * index + 2)
    last = tl.load(SPLIT_BLOCKS + 4 * index + 3)
    columns = tl.arange(0, DIM)
    in_dim = columns[None, :] < HEAD_DIM
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    out = tl.zeros([BLOCK, DIM], tl.float32)
    for slot in range(first, last):
        at = (slot * NUM_HEADS + head).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        lse = tl.load(PARTIAL_LSE + at)
        part = tl.load(PARTIAL_OUT + at[:, None] * HEAD_DIM + columns[None, :], mask=in_dim, other=0.0)
        new_highest = tl.maximum(highest, lse)
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weight = tl.exp2(lse - shift)
        decay = tl.exp2(highest - shift)
        out = out * decay[:, None] + part * weight[:, None]
        total = total * decay + weight
        highest = new_highest
    has_keys = total > 0
    out = out / tl.where(has_keys, total, 1.0)[:, None]
    rows = block * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_queries
    at = (batch * NUM_HEADS + head).to(tl.int64) * num_queries + rows
    tl.store(OUT + at[:, None] * HEAD_DIM + columns[None, :], out.to(OUT.dtype.element_ty), inside[:, None] & in_dim)
    lse = tl.where(has_keys, highest + tl.log2(tl.where(has_keys, total, 1.0)), float("-inf"))
    tl.store(LSE + at, lse, inside)


@triton.jit
def _score_gradients(q, k, v, d_out, lse, delta, allowed, scale, MASKED: tl.constexpr, UPCAST: tl.constexpr):
    """(probabilities, gradients of the unscaled scores), both [queries, keys], recomputed from the log-sum-exp."""
    scores = _dot(q, tl.trans(k), UPCAST) * (scale * LOG2_E)
    # Rows without keys, and rows outside, have lse = inf here and so only zeros.
    p = tl.exp2(scores - lse[:, None])
    if MASKED:
        p = tl.where(allowed, p, 0.0)
    d_p = _dot(d_out, tl.trans(v), UPCAST)
    return p, p * (d_p - delta[:, None]) * scale


@triton.jit
def _load_row_statistics(LSE, DELTA, at, inside):
    lse = tl.load(LSE + at, mask=inside, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse), tl.load(DELTA + at, mask=inside, other=0.0)


@triton.jit
def query_gradient_kernel(
    Q, K, V, D_OUT, LSE, DELTA, D_Q, PARTIAL,
    LO, HI, CLASSES_SEEN, POSITION, KEY_CLASS,
    TASKS, COLUMNS,
    num_queries, num_keys, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One task and one query head: D_Q [batch, heads, queries, dim]."""
    task, head = tl.program_id(0), tl.program_id(1)
    batch = tl.load(TASKS + 6 * task)
    block = tl.load(TASKS + 6 * task + 1)
    first = tl.load(TASKS + 6 * task + 2)
    first_partial = tl.load(TASKS + 6 * task + 3)
    last = tl.load(TASKS + 6 * task + 4)
    slot = tl.load(TASKS + 6 * task + 5)

    rows = block * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, DIM)
    at = (batch * NUM_HEADS + head).to(tl.int64) * num_queries
    q = _load_rows(Q + at * HEAD_DIM, rows, HEAD_DIM, columns, num_queries, HEAD_DIM)
    d_out = _load_rows(D_OUT + at * HEAD_DIM, rows, HEAD_DIM, columns, num_queries, HEAD_DIM)
    lse, delta = _load_row_statistics(LSE, DELTA, at + rows, rows < num_queries)
    lo, hi, classes_seen = _load_queries_mask(LO, HI, CLASSES_SEEN, batch, rows, num_queries)
    kv_offset = (batch * (NUM_HEADS // GROUP) + head // GROUP).to(tl.int64) * num_keys * HEAD_DIM

    d_q = tl.zeros([BLOCK, DIM], tl.float32)
    for tile in range(first, first_partial):
        for step in tl.static_range(BLOCK // STEP):
            keys = tl.load(COLUMNS + tile) * BLOCK + step * STEP + tl.arange(0, STEP)
            k = _load_rows(K + kv_offset, keys, HEAD_DIM, columns, num_keys, HEAD_DIM)
            v = _load_rows(V + kv_offset, keys, HEAD_DIM, columns, num_keys, HEAD_DIM)
            _, d_scores = _score_gradients(q, k, v, d_out, lse, delta, None, scale, False, UPCAST)
            d_q += _dot(d_scores.to(k.dtype), k, UPCAST)
    for tile in range(first_partial, last):
        for step in tl.static_range(BLOCK // STEP):
            keys = tl.load(COLUMNS + tile) * BLOCK + step * STEP + tl.arange(0, STEP)
            position, key_class = _load_keys_mask(POSITION, KEY_CLASS, batch, keys, num_keys)
            allowed = _allowed(lo, hi, classes_seen, position, key_class)
            k = _load_rows(K + kv_offset, keys, HEAD_DIM, columns, num_keys, HEAD_DIM)
            v = _load_rows(V + kv_offset, keys, HEAD_DIM, columns, num_keys, HEAD_DIM)
            _, d_scores = _score_gradients(q, k, v, d_out, lse, delta, allowed, scale, True, UPCAST)
            d_q += _dot(d_scores.to(k.dtype), k, UPCAST)

    in_dim = columns[None, :] < HEAD_DIM
    if slot < 0:
        to = D_Q + at * HEAD_DIM + rows[:, None].to(tl.int64) * HEAD_DIM + columns[None, :]
        tl.store(to, d_q.to(D_Q.dtype.element_ty), (rows < num_queries)[:, None] & in_dim)
    else:
        partial = (slot * NUM_HEADS + head).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(PARTIAL + partial[:, None] * HEAD_DIM + columns[None, :], d_q, in_dim)


@triton.jit
def key_value_gradient_kernel(
    Q, K, V, D_OUT, LSE, DELTA, D_K, D_V, PARTIAL_K, PARTIAL_V,
    LO, HI, CLASSES_SEEN, POSITION, KEY_CLASS,
    TASKS, ROWS,
    num_queries, num_keys, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One task (a block of keys and blocks of queries that see it) and one key head, over all its query heads."""
    task, kv_head = tl.program_id(0), tl.program_id(1)
    batch = tl.load(TASKS + 6 * task)
    block = tl.load(TASKS + 6 * task + 1)
    first = tl.load(TASKS + 6 * task + 2)
    first_partial = tl.load(TASKS + 6 * task + 3)
    last = tl.load(TASKS + 6 * task + 4)
    slot = tl.load(TASKS + 6 * task + 5)

    keys = block * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, DIM)
    num_kv_heads: tl.constexpr = NUM_HEADS // GROUP
    kv_offset = (batch * num_kv_heads + kv_head).to(tl.int64) * num_keys * HEAD_DIM
    k = _load_rows(K + kv_offset, keys, HEAD_DIM, columns, num_keys, HEAD_DIM)
    v = _load_rows(V + kv_offset, keys, HEAD_DIM, columns, num_keys, HEAD_DIM)
    position, key_class = _load_keys_mask(POSITION, KEY_CLASS, batch, keys, num_keys)

    d_k = tl.zeros([BLOCK, DIM], tl.float32)
    d_v = tl.zeros([BLOCK, DIM], tl.float32)
    for member in range(GROUP):
        at = (batch * NUM_HEADS + kv_head * GROUP + member).to(tl.int64) * num_queries
        for tile in range(first, first_partial):
            for step in tl.static_range(BLOCK // STEP):
                rows = tl.load(ROWS + tile) * BLOCK + step * STEP + tl.arange(0, STEP)
                q = _load_rows(Q + at * HEAD_DIM, rows, HEAD_DIM, columns, num_queries, HEAD_DIM)
                d_out = _load_rows(D_OUT + at * HEAD_DIM, rows, HEAD_DIM, columns, num_queries, HEAD_DIM)
                lse, delta = _load_row_statistics(LSE, DELTA, at + rows, rows < num_queries)
                p, d_scores = _score_gradients(q, k, v, d_out, lse, delta, None, scale, False, UPCAST)
                d_v += _dot(tl.trans(p).to(d_out.dtype), d_out, UPCAST)
                d_k += _dot(tl.trans(d_scores).to(q.dtype), q, UPCAST)
        for tile in range(first_partial, last):
            for step in tl.static_range(BLOCK // STEP):
                rows = tl.load(ROWS + tile) * BLOCK + step * STEP + tl.arange(0, STEP)
                lo, hi, classes_seen = _load_queries_mask(LO, HI, CLASSES_SEEN, batch, rows, num_queries)
                allowed = _allowed(lo, hi, classes_seen, position, key_class)
                q = _load_rows(Q + at * HEAD_DIM, rows, HEAD_DIM, columns, num_queries, HEAD_DIM)
                d_out = _load_rows(D_OUT + at * HEAD_DIM, rows, HEAD_DIM, columns, num_queries, HEAD_DIM)
                lse, delta = _load_row_statistics(LSE, DELTA, at + rows, rows < num_queries)
                p, d_scores = _score_gradients(q, k, v, d_out, lse, delta, allowed, scale, True, UPCAST)
                d_v += _dot(tl.trans(p).to(d_out.dtype), d_out, UPCAST)
                d_k += _dot(tl.trans(d_scores).to(q.dtype), q, UPCAST)

    in_dim = columns[None, :] < HEAD_DIM
    if slot < 0:
        inside = (keys < num_keys)[:, None] & in_dim
        to = kv_offset + keys[:, None].to(tl.int64) * HEAD_DIM + columns[None, :]
        tl.store(D_K + to, d_k.to(D_K.dtype.element_ty), inside)
        tl.store(D_V + to, d_v.to(D_V.dtype.element_ty), inside)
    else:
        partial = (slot * num_kv_heads + kv_head).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(PARTIAL_K + partial[:, None] * HEAD_DIM + columns[None, :], d_k, in_dim)
        tl.store(PARTIAL_V + partial[:, None] * HEAD_DIM + columns[None, :], d_v, in_dim)


@triton.jit
def add_partials_kernel(
    PARTIAL, OUT, SPLIT_BLOCKS, num_rows,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block whose tiles were distributed: its partial gradients are added in the order of their slots."""
    index, head = tl.program_id(0), tl.program_id(1)
    batch = tl.load(SPLIT_BLOCKS + 4 * index)
    block = tl.load(SPLIT_BLOCKS + 4 * index + 1)
    first = tl.load(SPLIT_BLOCKS + 4 * index + 2)
    last = tl.load(SPLIT_BLOCKS + 4 * index + 3)
    columns = tl.arange(0, DIM)
    in_dim = columns[None, :] < HEAD_DIM
    total = tl.zeros([BLOCK, DIM], tl.float32)
    for slot in range(first, last):
        at = (slot * NUM_HEADS + head).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(PARTIAL + at[:, None] * HEAD_DIM + columns[None, :], mask=in_dim, other=0.0)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    to = ((batch * NUM_HEADS + head).to(tl.int64) * num_rows + rows)[:, None] * HEAD_DIM + columns[None, :]
    tl.store(OUT + to, total.to(OUT.dtype.element_ty), (rows < num_rows)[:, None] & in_dim)
