"""FlashAttention forward for Hopper in Gluon, Triton's lower level: what attention.py leaves to the compiler is written
out here. 16-bit inputs without seq_lens; attention.py chooses it and serves all else.

A program owns kConsumers × 64 query rows of one head. One warp, the producer, asks TMA for tiles; every other warpgroup
is a consumer of 64 rows. They meet in shared memory, K and V each in a ring of kStages tiles:

    producer ── TMA ──▶ full_barriers[stage] ──▶ consumers ── wgmma ──▶ empty_barriers[stage] ──▶ producer

A consumer multiplies Q Kᵀ of one block and P V of the block before it in one go, and computes the softmax of the first
while the second runs (Shah et al., FlashAttention-3, 2024, section 3.2). Keys go from right to left, so that the blocks
a mask cuts come first and the loop over the others has no mask.

Read next: attention.py for the mask and the softmax; the PTX ISA, sections on mbarrier, cp.async.bulk.tensor and wgmma.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (fence_async_shared, mbarrier, tma, warpgroup_mma,
                                                              warpgroup_mma_wait)

from .descriptors import descriptor

# By kBlockD: the consumers, the keys of a block, the stages of a ring. With 3 consumers a thread has 160 registers,
# with 2 of them 240.
TILES = {64: [(2, 128, 2), (3, 128, 2)], 128: [(2, 128, 2)], 256: [(2, 64, 2)]}
REGISTERS = {2: 240, 3: 160}


@gluon.jit
def _tile(ring, stage):
    """A stage of a ring of tiles [1, 1, rows, cols], as the matrix that wgmma takes."""
    kRows: gl.constexpr = ring.shape[3]
    kCols: gl.constexpr = ring.shape[4]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([kRows, kCols], ring.dtype)
    return ring.index(stage)._reinterpret(ring.dtype, [kRows, kCols], layout)


@gluon.jit
def _produce(shared, load):
    """Q once, then K and V block by block, V one block behind K, as the consumers take them."""
    q_desc, k_desc, v_desc, b, h, h_k, row0, n_block_max = load
    sQ, sK, sV, q_full, k_full, k_empty, v_full, v_empty = shared
    kConsumers: gl.constexpr = sQ.shape[0]
    kBlockM: gl.constexpr = sQ.shape[3]
    kStages: gl.constexpr = sK.shape[0]
    kBlockN: gl.constexpr = sK.shape[3]
    for c in gl.static_range(kConsumers):
        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [b, h, row0 + c * kBlockM, 0], q_full.index(c), sQ.index(c))
    for i in range(n_block_max + 1):
        if i < n_block_max:
            stage, phase = i % kStages, i // kStages & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [b, h_k, (n_block_max - 1 - i) * kBlockN, 0], k_full.index(stage),
                                            sK.index(stage))
        if i > 0:
            stage, phase = (i - 1) % kStages, (i - 1) // kStages & 1
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [b, h_k, (n_block_max - i) * kBlockN, 0], v_full.index(stage),
                                            sV.index(stage))


@gluon.jit
def _softmax(acc_s, row_max, row_sum, visible, col0, scale_log2, kMasked: gl.constexpr):
    """P = exp(scale · (S - max)), the factor that rescales what was summed so far, the new row_max and row_sum."""
    if kMasked:
        cols = col0 + gl.arange(0, acc_s.shape[1], gl.SliceLayout(0, acc_s.type.layout))
        acc_s = gl.where(cols[None, :] < visible[:, None], acc_s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(acc_s, 1))
    # A row that has seen no key, or only scores of -inf: exp2(-inf) is 0, not NaN.
    max_sub = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(acc_s * scale_log2 - (max_sub * scale_log2)[:, None])
    rescale = gl.exp2((row_max - max_sub) * scale_log2)
    return p, rescale, new_max, row_sum * rescale + gl.sum(p, 1)


@gluon.jit
def _attend(acc_o, p, row_max, row_sum, q, shared, first, last, n_block_max, visible, scale_log2, kMasked: gl.constexpr,
            kConvertLate: gl.constexpr):
    """The blocks i of [first, last), counted from the right: S of block i, and acc_o += P V of block i - 1."""
    sQ, sK, sV, q_full, k_full, k_empty, v_full, v_empty = shared
    kStages: gl.constexpr = sK.shape[0]
    kBlockN: gl.constexpr = sK.shape[3]
    kBlockD: gl.constexpr = sK.shape[4]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kBlockN, 16])
    o_layout: gl.constexpr = acc_o.type.layout
    p_layout: gl.constexpr = p.type.layout
    for i in range(first, last):
        k_stage, v_stage, v_phase = i % kStages, (i - 1) % kStages, (i - 1) // kStages & 1
        mbarrier.wait(k_full.index(k_stage), i // kStages & 1)
        s_token = warpgroup_mma(q, _tile(sK, k_stage).permute((1, 0)),
                                gl.zeros([64, kBlockN], gl.float32, s_layout), use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        o_token = warpgroup_mma(p, _tile(sV, v_stage), acc_o, is_async=True)
        acc_s = warpgroup_mma_wait(1, deps=[s_token])
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        new_p, rescale, row_max, row_sum = _softmax(acc_s, row_max, row_sum, visible, (n_block_max - 1 - i) * kBlockN,
                                                    scale_log2, kMasked)
        # ptxas would move the wait for P V to before the softmax, but not across a branch, such as that of a barrier,
        # which here is open. Converted late, the old and the new P never need registers at once, which 160 do not hold.
        if not kConvertLate:
            new_p = gl.convert_layout(new_p.to(p.dtype), p_layout)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        acc_o, new_p = warpgroup_mma_wait(0, deps=[o_token, new_p])
        if kConvertLate:
            new_p = gl.convert_layout(new_p.to(p.dtype), p_layout)
        p = new_p
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        acc_o = acc_o * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
    return acc_o, p, row_max, row_sum


@gluon.jit
def _consume(shared, work, consumer_idx: gl.constexpr, kIsCausal: gl.constexpr):
    """64 rows of out and lse."""
    o_desc, lse_ptr, b, h, bh, row0, n_block_max, seqlen_q, seqlen_k, softmax_scale = work
    sQ, sK, sV, q_full, k_full, k_empty, v_full, v_empty = shared
    kConsumers: gl.constexpr = sQ.shape[0]
    kBlockM: gl.constexpr = sQ.shape[3]
    kBlockD: gl.constexpr = sQ.shape[4]
    kStages: gl.constexpr = sK.shape[0]
    kBlockN: gl.constexpr = sK.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kBlockN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kBlockD, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    # The whole mask is one number a row: it sees the keys [0, visible).
    row0 += consumer_idx * kBlockM
    rows = row0 + gl.arange(0, kBlockM, gl.SliceLayout(1, s_layout))
    visible = gl.full([kBlockM], 0, gl.int32, gl.SliceLayout(1, s_layout)) + seqlen_k
    first_visible = seqlen_k
    if kIsCausal:
        shift = 1 + seqlen_k - seqlen_q
        visible = gl.minimum(visible, rows + shift)
        first_visible = gl.minimum(seqlen_k, row0 + shift)
    visible = gl.where(rows < seqlen_q, visible, 0)
    n_masked = n_block_max - gl.minimum(gl.maximum(first_visible, 0) // kBlockN, n_block_max)

    # A scale of 0 makes all scores alike; so does the least number, which does not turn a masked -inf into NaN.
    scale_log2 = gl.maximum(softmax_scale * 1.4426950408889634, 1e-37)
    mbarrier.wait(q_full.index(consumer_idx), 0)
    q = _tile(sQ, consumer_idx)
    mbarrier.wait(k_full.index(0), 0)
    acc_s = warpgroup_mma(q, _tile(sK, 0).permute((1, 0)),
                          gl.zeros([kBlockM, kBlockN], gl.float32, s_layout), use_acc=False)
    mbarrier.arrive(k_empty.index(0), count=1)
    row_max = gl.full([kBlockM], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    row_sum = gl.full([kBlockM], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    p, rescale, row_max, row_sum = _softmax(acc_s, row_max, row_sum, visible, (n_block_max - 1) * kBlockN, scale_log2,
                                            True)
    p = gl.convert_layout(p.to(sQ.dtype), p_layout)
    acc_o = gl.zeros([kBlockM, kBlockD], gl.float32, o_layout)
    kConvertLate: gl.constexpr = kConsumers > 2
    acc_o, p, row_max, row_sum = _attend(acc_o, p, row_max, row_sum, q, shared, 1, n_masked, n_block_max, visible,
                                         scale_log2, True, kConvertLate)
    acc_o, p, row_max, row_sum = _attend(acc_o, p, row_max, row_sum, q, shared, gl.maximum(n_masked, 1), n_block_max,
                                         n_block_max, visible, scale_log2, False, kConvertLate)
    i = n_block_max - 1
    mbarrier.wait(v_full.index(i % kStages), i // kStages & 1)
    acc_o = warpgroup_mma(p, _tile(sV, i % kStages), acc_o)

    empty = (visible <= 0) | (row_sum == 0.0)
    row_sum = gl.where(empty, 1.0, row_sum)
    lse = gl.where(empty, float("-inf"), row_max * softmax_scale + gl.log(row_sum))
    gl.store(lse_ptr + bh.to(gl.int64) * seqlen_q + rows, lse, mask=rows < seqlen_q)
    # The out of an empty row is 0 even where V, times probabilities of 0, gave NaN.
    empty = gl.convert_layout(empty, gl.SliceLayout(1, o_layout))
    row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, o_layout))
    q.store(gl.where(empty[:, None], 0.0, acc_o / row_sum[:, None]).to(o_desc.dtype))  # Q has been read
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [b, h, row0, 0], sQ.index(consumer_idx))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["nheads", "nheads_k", "seqlen_q", "seqlen_k"])
def _flash_fwd(q_desc, k_desc, v_desc, o_desc, lse_ptr, nheads, nheads_k, seqlen_q, seqlen_k, softmax_scale,
               kIsCausal: gl.constexpr, kConsumers: gl.constexpr, kStages: gl.constexpr,
               kRegisters: gl.constexpr):
    kBlockM: gl.constexpr = q_desc.block_type.shape[2] * kConsumers
    kBlockN: gl.constexpr = k_desc.block_type.shape[2]
    # Blocks of one head are neighbours, to share its K and V in L2; the rows that see most under a causal mask go
    # first.
    m_blocks = gl.cdiv(seqlen_q, kBlockM)
    row0 = (m_blocks - 1 - gl.program_id(0) % m_blocks) * kBlockM
    bh = gl.program_id(0) // m_blocks
    b, h = bh // nheads, bh % nheads
    h_k = h // (nheads // nheads_k)
    last_visible = seqlen_k
    if kIsCausal:
        last_visible = gl.minimum(seqlen_k, gl.minimum(row0 + kBlockM, seqlen_q) + seqlen_k - seqlen_q)
    n_block_max = gl.cdiv(gl.maximum(last_visible, 1), kBlockN)  # at least one, which may be masked all over

    sQ = gl.allocate_shared_memory(q_desc.dtype, [kConsumers] + q_desc.block_type.shape, q_desc.layout)
    sK = gl.allocate_shared_memory(k_desc.dtype, [kStages] + k_desc.block_type.shape, k_desc.layout)
    sV = gl.allocate_shared_memory(v_desc.dtype, [kStages] + v_desc.block_type.shape, v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [kConsumers, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [kStages, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [kStages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [kStages, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [kStages, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(kConsumers):
        mbarrier.init(q_full.index(c), count=1)
    for stage in gl.static_range(kStages):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=kConsumers)
        mbarrier.init(v_empty.index(stage), count=kConsumers)
    fence_async_shared()
    shared = (sQ, sK, sV, q_full, k_full, k_empty, v_full, v_empty)
    load = (q_desc, k_desc, v_desc, b, h, h_k, row0, n_block_max)
    work = (o_desc, lse_ptr, b, h, bh, row0, n_block_max, seqlen_q, seqlen_k, softmax_scale)
    if kConsumers == 2:
        gl.warp_specialize([(_consume, (shared, work, 0, kIsCausal)), (_consume, (shared, work, 1, kIsCausal)),
                            (_produce, (shared, load))], [4, 1], [kRegisters, 24])
    else:
        gl.warp_specialize([(_consume, (shared, work, 0, kIsCausal)), (_consume, (shared, work, 1, kIsCausal)),
                            (_consume, (shared, work, 2, kIsCausal)), (_produce, (shared, load))],
                           [4, 4, 1], [kRegisters, kRegisters, 24])


def configs(dtype, kBlockD):
    """Launch options to choose from, as dictionaries; none where attention.py serves alone."""
    return [dict(kConsumers=kConsumers, kBlockN=kBlockN, kBlockD=kBlockD, kStages=kStages)
            for kConsumers, kBlockN, kStages in TILES.get(kBlockD, []) if dtype.itemsize == 2]


@functools.cache
def _layout(rows, kBlockD, dtype):
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, kBlockD], getattr(gl, str(dtype).removeprefix("torch.")))


def launch(config, q, k, v, out, lse, softmax_scale, causal, kernel=None):
    """One launch for checked inputs that TMA reaches; kernel and result as of attention.launch."""
    kConsumers, kBlockN, kBlockD, kStages = config.values()
    tiles = [descriptor(x, (1, 1, rows, kBlockD), _layout(rows, kBlockD, x.dtype))
             for x, rows in ((q, 64), (k, kBlockN), (v, kBlockN), (out, 64))]
    programs = -(-q.shape[2] // (64 * kConsumers)) * q.shape[0] * q.shape[1]
    arguments = (*tiles, lse, q.shape[1], k.shape[1], q.shape[2], k.shape[2], softmax_scale, causal, kConsumers, kStages,
                 REGISTERS[kConsumers])
    if kernel is None:
        return _flash_fwd[(programs,)](*arguments, num_warps=4)
    kernel[(programs, 1, 1)](*arguments)
    return kernel
