"""FlashAttention forward for Hopper in Gluon, Triton's lower level: what attention.py leaves to the compiler is written
out here. 16-bit inputs without windows and lengths; attention.py chooses it and serves all else.

A program computes tiles of kConsumers × 64 query rows of one head, one after the other. One warp, the producer, asks
TMA for Q, K and V; every other warpgroup is a consumer of 64 rows. They meet in shared memory, K and V each in a ring
of kStages tiles, Q in one of a single stage:

    producer ── TMA ──▶ full[stage] ──▶ consumers ── wgmma ──▶ empty[stage] ──▶ producer

A consumer multiplies Q Kᵀ of one block and P V of the block before it in one go, and computes the softmax of the first
while the second runs (Shah et al., FlashAttention-3, 2024, section 3.2). Keys go from right to left, so that the blocks
a mask cuts come first and the loop over the others has no mask.

Read next: mask.py for the mask, attention.py for the softmax; the PTX ISA, sections on mbarrier, cp.async.bulk.tensor
and wgmma.
"""

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (fence_async_shared, mbarrier, tma, warpgroup_mma,
                                                              warpgroup_mma_wait)

from minimal_attn.options import Lengths

from .launching import MAX_PROGRAMS, Launch
from .mask import key_blocks, keys_of, make_mask, sees
from .sequence import sequence

# Triton 3.6 has the longer names alone, 3.9 the shorter ones.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# By kBlockD: the consumers, the keys of a block, the stages of a ring. With 3 consumers a thread has 160 registers,
# with 2 of them 240.
TILES = {64: [(2, 128, 2), (3, 128, 2)], 128: [(2, 128, 2)], 256: [(2, 64, 2)]}
REGISTERS = {2: 240, 3: 160}


@gluon.jit
def _tile(ring, stage):
    """A stage of a ring of tiles [1, 1, rows, cols], as the matrix that wgmma takes."""
    return ring.index(stage).reshape([ring.shape[3], ring.shape[4]])


@gluon.jit
def _num_tiles(sizes):
    """How many tiles of out this program computes: chunks of `chunk` of them, num_programs apart."""
    nheads, nheads_k, m_blocks, num_tiles, chunk, mask = sizes
    chunks = gl.cdiv(gl.cdiv(num_tiles, chunk) - gl.program_id(0), gl.num_programs(0))
    last = gl.program_id(0) + (chunks - 1) * gl.num_programs(0)
    return chunks * chunk - gl.maximum((last + 1) * chunk - num_tiles, 0)


@gluon.jit
def _tile_of(n, sizes, kBlockM: gl.constexpr, kBlockN: gl.constexpr):
    """This program's n-th tile of out: (b, h, h_k, bh, its first row, how many blocks of keys it needs, at least 1).

    Tiles of one head are neighbours, to share its K and V in L2. In chunks of one, those that see most under a causal
    mask come first; in chunks of two, each of them has one that sees much and one that sees little.
    """
    nheads, nheads_k, m_blocks, num_tiles, chunk, mask = sizes
    tile_idx = (gl.program_id(0) + n // chunk * gl.num_programs(0)) * chunk + n % chunk
    bh, m_block = tile_idx // m_blocks, tile_idx % m_blocks
    if chunk == 2:
        m_block = gl.where(m_block % 2 == 0, m_block // 2, m_blocks - 1 - m_block // 2)
    m_block = m_blocks - 1 - m_block
    row0 = m_block * kBlockM
    blocks = key_blocks(mask, row0, kBlockM, kBlockN)
    n_block_max = gl.maximum(blocks.end, 1)  # at least one, which may be masked all over
    return bh // nheads, bh % nheads, bh % nheads // (nheads // nheads_k), bh, row0, n_block_max


@gluon.jit
def _produce(q_desc, k_desc, v_desc, shared, sizes):
    """For each tile Q, then K and V block by block, V one block behind K, as the consumers take them."""
    sQ, sK, sV, sO, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared
    kConsumers: gl.constexpr = sQ.shape[0]
    kBlockM: gl.constexpr = sQ.shape[3]
    kStages: gl.constexpr = sK.shape[0]
    kBlockN: gl.constexpr = sK.shape[3]
    done, phase_q = 0, 0
    for n in range(_num_tiles(sizes)):
        b, h, h_k, bh, row0, n_block_max = _tile_of(n, sizes, kBlockM * kConsumers, kBlockN)
        for c in gl.static_range(kConsumers):
            mbarrier.wait(q_empty.index(c), phase_q ^ 1)
            mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
            tma_load(q_desc, [b, h, row0 + c * kBlockM, 0], q_full.index(c), sQ.index(c))
        for i in range(n_block_max + 1):
            if i < n_block_max:
                stage, phase = (done + i) % kStages, (done + i) // kStages & 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                tma_load(k_desc, [b, h_k, (n_block_max - 1 - i) * kBlockN, 0], k_full.index(stage), sK.index(stage))
            if i > 0:
                stage, phase = (done + i - 1) % kStages, (done + i - 1) // kStages & 1
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                tma_load(v_desc, [b, h_k, (n_block_max - i) * kBlockN, 0], v_full.index(stage), sV.index(stage))
        done += n_block_max
        phase_q ^= 1


@gluon.jit
def _softmax(acc_s, row_max, row_sum, visible, col0, softmax_scale_log2, kMasked: gl.constexpr):
    """P = exp(scale · (S - max)), the factor that rescales what was summed so far, the new row_max and row_sum."""
    if kMasked:
        cols = col0 + gl.arange(0, acc_s.shape[1], gl.SliceLayout(0, acc_s.type.layout))
        acc_s = gl.where(sees(visible, cols, False), acc_s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(acc_s, 1))
    # A row that has seen no key, or only scores of -inf: exp2(-inf) is 0, not NaN.
    max_sub = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(acc_s * softmax_scale_log2 - (max_sub * softmax_scale_log2)[:, None])
    rescale = gl.exp2((row_max - max_sub) * softmax_scale_log2)
    return p, rescale, new_max, row_sum * rescale + gl.sum(p, 1)


@gluon.jit
def _attend(acc_o, p, row_max, row_sum, q, shared, done, first, last, n_block_max, visible, softmax_scale_log2,
            kMasked: gl.constexpr, kConvertLate: gl.constexpr):
    """The blocks i of [first, last), counted from the right: S of block i, and acc_o += P V of block i - 1."""
    sQ, sK, sV, sO, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared
    kStages: gl.constexpr = sK.shape[0]
    kBlockN: gl.constexpr = sK.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kBlockN, 16])
    o_layout: gl.constexpr = acc_o.type.layout
    p_layout: gl.constexpr = p.type.layout
    for i in range(first, last):
        k_stage, k_phase = (done + i) % kStages, (done + i) // kStages & 1
        v_stage, v_phase = (done + i - 1) % kStages, (done + i - 1) // kStages & 1
        mbarrier.wait(k_full.index(k_stage), k_phase)
        s_token = warpgroup_mma(q, _tile(sK, k_stage).permute((1, 0)),
                                gl.zeros([64, kBlockN], gl.float32, s_layout), use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        o_token = warpgroup_mma(p, _tile(sV, v_stage), acc_o, is_async=True)
        acc_s = warpgroup_mma_wait(1, deps=[s_token])
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        new_p, rescale, row_max, row_sum = _softmax(acc_s, row_max, row_sum, visible, (n_block_max - 1 - i) * kBlockN,
                                                    softmax_scale_log2, kMasked)
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
def _consume(o_desc, lse_ptr, shared, sizes, softmax_scale, consumer_idx: gl.constexpr, kOwnO: gl.constexpr):
    """64 rows of out and lse of each tile."""
    sQ, sK, sV, sO, q_full, q_empty, k_full, k_empty, v_full, v_empty = shared
    nheads, nheads_k, m_blocks, num_tiles, chunk, mask = sizes
    kConsumers: gl.constexpr = sQ.shape[0]
    kBlockM: gl.constexpr = sQ.shape[3]
    kBlockD: gl.constexpr = sQ.shape[4]
    kStages: gl.constexpr = sK.shape[0]
    kBlockN: gl.constexpr = sK.shape[3]
    kConvertLate: gl.constexpr = kConsumers > 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kBlockN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kBlockD, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    # A scale of 0 makes all scores alike; so does the least number, which does not turn a masked -inf into NaN.
    softmax_scale_log2 = gl.maximum(softmax_scale * 1.4426950408889634, 1e-37)
    q = _tile(sQ, consumer_idx)
    done, phase_q = 0, 0
    for n in range(_num_tiles(sizes)):
        b, h, h_k, bh, row0, n_block_max = _tile_of(n, sizes, kBlockM * kConsumers, kBlockN)
        row0 += consumer_idx * kBlockM
        rows = row0 + gl.arange(0, kBlockM, gl.SliceLayout(1, s_layout))
        visible = keys_of(mask, rows)
        # A consumer whose rows are all beyond the end keeps pace with the others.
        blocks = key_blocks(mask, gl.minimum(row0, mask.seqlen_q - 1), kBlockM, kBlockN)
        n_masked = n_block_max - blocks.full_end

        mbarrier.wait(q_full.index(consumer_idx), phase_q)
        stage = done % kStages
        mbarrier.wait(k_full.index(stage), done // kStages & 1)
        acc_s = warpgroup_mma(q, _tile(sK, stage).permute((1, 0)),
                              gl.zeros([kBlockM, kBlockN], gl.float32, s_layout), use_acc=False)
        mbarrier.arrive(k_empty.index(stage), count=1)
        row_max = gl.full([kBlockM], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        row_sum = gl.full([kBlockM], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        p, rescale, row_max, row_sum = _softmax(acc_s, row_max, row_sum, visible, (n_block_max - 1) * kBlockN,
                                                softmax_scale_log2, True)
        p = gl.convert_layout(p.to(sQ.dtype), p_layout)
        acc_o = gl.zeros([kBlockM, kBlockD], gl.float32, o_layout)
        acc_o, p, row_max, row_sum = _attend(acc_o, p, row_max, row_sum, q, shared, done, 1, n_masked, n_block_max,
                                             visible, softmax_scale_log2, True, kConvertLate)
        acc_o, p, row_max, row_sum = _attend(acc_o, p, row_max, row_sum, q, shared, done, gl.maximum(n_masked, 1),
                                             n_block_max, n_block_max, visible, softmax_scale_log2, False, kConvertLate)
        if kOwnO:
            mbarrier.arrive(q_empty.index(consumer_idx), count=1)
        done += n_block_max
        phase_q ^= 1
        stage, phase = (done - 1) % kStages, (done - 1) // kStages & 1
        mbarrier.wait(v_full.index(stage), phase)
        acc_o = warpgroup_mma(p, _tile(sV, stage), acc_o)
        mbarrier.arrive(v_empty.index(stage), count=1)

        empty = (visible.begin >= visible.end) | (row_sum == 0.0)
        row_sum = gl.where(empty, 1.0, row_sum)
        lse = gl.where(empty, float("-inf"), row_max * softmax_scale + gl.log(row_sum))
        gl.store(lse_ptr + bh.to(gl.int64) * mask.seqlen_q + rows, lse, mask=rows < mask.seqlen_q)
        # The out of an empty row is 0 even where V, times probabilities of 0, gave NaN.
        empty = gl.convert_layout(empty, gl.SliceLayout(1, o_layout))
        row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, o_layout))
        tma.store_wait(0)  # of the tile before
        _tile(sO, consumer_idx).store(gl.where(empty[:, None], 0.0, acc_o / row_sum[:, None]).to(o_desc.dtype))
        fence_async_shared()
        tma_store(o_desc, [b, h, row0, 0], sO.index(consumer_idx))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["nheads", "nheads_k", "num_tiles", "chunk", "seqlen_q", "seqlen_k"])
def _flash_fwd(q_desc, k_desc, v_desc, o_desc, lse_ptr, softmax_scale, nheads, nheads_k, num_tiles, chunk, seqlen_q,
               seqlen_k, kIsCausal: gl.constexpr, kConsumers: gl.constexpr, kStages: gl.constexpr,
               kRegisters: gl.constexpr):
    sQ = gl.allocate_shared_memory(q_desc.dtype, [kConsumers] + q_desc.block_type.shape, q_desc.layout)
    sK = gl.allocate_shared_memory(k_desc.dtype, [kStages] + k_desc.block_type.shape, k_desc.layout)
    sV = gl.allocate_shared_memory(v_desc.dtype, [kStages] + v_desc.block_type.shape, v_desc.layout)
    # An sO of its own lets the next tile's Q come early. At head_dim 256 there is no room: one tile a program.
    kOwnO: gl.constexpr = q_desc.block_type.shape[3] <= 128
    sO = sQ
    if kOwnO:
        sO = gl.allocate_shared_memory(o_desc.dtype, [kConsumers] + o_desc.block_type.shape, o_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [kConsumers, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [kConsumers, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [kStages, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [kStages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [kStages, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [kStages, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(kConsumers):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_empty.index(c), count=1)
    for stage in gl.static_range(kStages):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=kConsumers)
        mbarrier.init(v_empty.index(stage), count=kConsumers)
    fence_async_shared()
    shared = (sQ, sK, sV, sO, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    m_blocks = gl.cdiv(seqlen_q, q_desc.block_type.shape[2] * kConsumers)
    seq = sequence(Lengths(None, None, None, None), 0, 1, seqlen_q, seqlen_k)  # of every sample alike
    mask = make_mask(seq, 0, 0, kIsCausal, False)
    sizes = (nheads, nheads_k, m_blocks, num_tiles, chunk, mask)
    if kConsumers == 2:
        gl.warp_specialize([(_consume, (o_desc, lse_ptr, shared, sizes, softmax_scale, 0, kOwnO)),
                            (_consume, (o_desc, lse_ptr, shared, sizes, softmax_scale, 1, kOwnO)),
                            (_produce, (q_desc, k_desc, v_desc, shared, sizes))],
                           [4, 1], [kRegisters, 24])
    else:
        gl.warp_specialize([(_consume, (o_desc, lse_ptr, shared, sizes, softmax_scale, 0, kOwnO)),
                            (_consume, (o_desc, lse_ptr, shared, sizes, softmax_scale, 1, kOwnO)),
                            (_consume, (o_desc, lse_ptr, shared, sizes, softmax_scale, 2, kOwnO)),
                            (_produce, (q_desc, k_desc, v_desc, shared, sizes))],
                           [4, 4, 1], [kRegisters, kRegisters, 24])


def configs(dtype, kBlockD):
    """Launch options to choose from, as dictionaries; none where attention.py serves alone."""
    return [dict(kConsumers=kConsumers, kBlockN=kBlockN, kBlockD=kBlockD, kStages=kStages)
            for kConsumers, kBlockN, kStages in TILES.get(kBlockD, []) if dtype.itemsize == 2]


@functools.cache
def _layout(rows, kBlockD, dtype):
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, kBlockD], getattr(gl, str(dtype).removeprefix("torch.")))


def launch(config, q, k, v, out, causal, num_sms):
    """attention.launch for checked inputs that TMA reaches, with a softmax_scale of at least 0 and without a window,
    lengths, descales and dropout."""
    kConsumers, kBlockN, kBlockD, kStages = config.values()
    tiles = [(x, (1, 1, rows, kBlockD), _layout(rows, kBlockD, x.dtype))
             for x, rows in ((q, 64), (k, kBlockN), (v, kBlockN), (out, 64))]
    num_tiles = -(-q.shape[2] // (64 * kConsumers)) * q.shape[0] * q.shape[1]
    if num_tiles > MAX_PROGRAMS:
        raise ValueError(f"too many rows: {num_tiles} tiles of {64 * kConsumers}, a launch takes {MAX_PROGRAMS}")
    # A program an SM, which loads its next tile's Q and K while it ends one. Under a causal mask tiles differ: where
    # pairs of them do not even that out, a program each, as the hardware finds room.
    programs, chunk = min(num_tiles, num_sms), 1
    if causal:
        programs, chunk = (num_sms, 2) if num_tiles >= 8 * num_sms else (num_tiles, 1)
    if kBlockD > 128:
        programs, chunk = num_tiles, 1
    constants = (q.shape[1], k.shape[1], num_tiles, chunk, q.shape[2], k.shape[2], causal, kConsumers, kStages,
                 REGISTERS[kConsumers])
    start = Launch(_flash_fwd, programs, constants, tiles, num_warps=4)
    return lambda q, k, v, out, lse, *options: start(q, k, v, out, lse, options[-2])  # softmax_scale
