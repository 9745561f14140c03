"""FlashAttention forward for Hopper in Gluon, Triton's lower level: what attention.py leaves to the compiler is written
out here. 16-bit inputs without windows and lengths; attention.py chooses it and serves all else.

A program computes tiles of kConsumers × 64 query rows of one head, one after the other. One warp, the producer, asks
TMA for Q, K and V; every other warpgroup is a consumer of 64 rows. They meet in rings of tiles in shared memory:

    producer ── TMA ──▶ full[stage] ──▶ consumers ── wgmma ──▶ empty[stage] ──▶ producer

A consumer computes the softmax of one block while P V of the block before it runs (Shah et al., FlashAttention-3, 2024,
section 3.2). Keys go from right to left, so that the blocks a mask cuts come first.

Read next: the PTX ISA, sections on mbarrier, cp.async.bulk.tensor and wgmma.
"""

import functools
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (fence_async_shared, mbarrier, tma, warpgroup_mma,
                                                              warpgroup_mma_wait)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minimal_attn.options import Lengths

from .launching import MAX_PROGRAMS, Launch
from .mask import key_blocks, keys_of, make_mask, sees
from .scores import log2_unit, online_softmax
from .sequence import sequence

# Triton 3.6 has the longer names alone, 3.9 the shorter ones.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# By kBlockD: the consumers, the keys of a block, the stages of a ring.
TILES = {64: [(2, 128, 2), (3, 128, 2)], 128: [(2, 128, 2)], 256: [(2, 64, 2)]}
REGISTERS = {2: 240, 3: 160}  # of a consumer's thread, by the consumers


class Ring(NamedTuple):
    tiles: Any  # [1, 1, rows, cols] in shared memory for each stage, and two barriers
    full: Any
    empty: Any  # all readers are done


class Work(NamedTuple):
    nheads: Any
    nheads_k: Any
    m_blocks: Any  # tiles of out, of one head
    num_tiles: Any  # of all, which programs take in chunks of `chunk` of them, num_programs apart
    chunk: Any
    mask: Any


@gluon.jit
def _ring(desc, kStages: gl.constexpr, kReaders: gl.constexpr):
    tiles = gl.allocate_shared_memory(desc.dtype, [kStages] + desc.block_type.shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [kStages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [kStages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(kStages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=kReaders)
    return Ring(tiles, full, empty)


@gluon.jit
def _turn(ring, i):
    """The stage of the i-th tile that goes through a ring, and the phase of its barriers."""
    kStages: gl.constexpr = ring.tiles.shape[0]
    return i % kStages, i // kStages & 1


@gluon.jit
def _fetch(desc, ring, stage, phase, b, h, row):
    """Asks TMA for the rows of a head from `row` on, once the readers of the tile before are done."""
    mbarrier.wait(ring.empty.index(stage), phase ^ 1)
    mbarrier.expect(ring.full.index(stage), desc.block_type.nbytes)
    tma_load(desc, [b, h, row, 0], ring.full.index(stage), ring.tiles.index(stage))


@gluon.jit
def _tile(tiles, stage):
    """A stage as the matrix that wgmma takes."""
    return tiles.index(stage).reshape([tiles.shape[3], tiles.shape[4]])


@gluon.jit
def _num_tiles(work):
    """How many tiles of out this program computes."""
    chunks = gl.cdiv(gl.cdiv(work.num_tiles, work.chunk) - gl.program_id(0), gl.num_programs(0))
    last = gl.program_id(0) + (chunks - 1) * gl.num_programs(0)
    return chunks * work.chunk - gl.maximum((last + 1) * work.chunk - work.num_tiles, 0)


@gluon.jit
def _tile_of(n, work, kBlockM: gl.constexpr, kBlockN: gl.constexpr):
    """This program's n-th tile of out: (b, h, h_k, bh, its first row, how many blocks of keys it needs, at least 1).

    Tiles of one head are neighbours, to share its K and V in L2. In chunks of one, those that see most under a causal
    mask come first; in chunks of two, each of them has one that sees much and one that sees little.
    """
    tile_idx = (gl.program_id(0) + n // work.chunk * gl.num_programs(0)) * work.chunk + n % work.chunk
    bh, m_block = tile_idx // work.m_blocks, tile_idx % work.m_blocks
    if work.chunk == 2:
        m_block = gl.where(m_block % 2 == 0, m_block // 2, work.m_blocks - 1 - m_block // 2)
    row0 = (work.m_blocks - 1 - m_block) * kBlockM
    n_blocks = gl.maximum(key_blocks(work.mask, row0, kBlockM, kBlockN).end, 1)  # one may be masked all over
    b, h = bh // work.nheads, bh % work.nheads
    return b, h, h // (work.nheads // work.nheads_k), bh, row0, n_blocks


@gluon.jit
def _produce(q_desc, k_desc, v_desc, sQ, sK, sV, work):
    """For each tile Q, then K and V block by block, V one block behind K, as the consumers take them."""
    kConsumers: gl.constexpr = sQ.tiles.shape[0]
    kBlockM: gl.constexpr = sQ.tiles.shape[3]
    kBlockN: gl.constexpr = sK.tiles.shape[3]
    done = 0
    for n in range(_num_tiles(work)):
        b, h, h_k, bh, row0, n_blocks = _tile_of(n, work, kBlockM * kConsumers, kBlockN)
        for c in gl.static_range(kConsumers):
            _fetch(q_desc, sQ, c, n & 1, b, h, row0 + c * kBlockM)
        for i in range(n_blocks + 1):
            if i < n_blocks:
                stage, phase = _turn(sK, done + i)
                _fetch(k_desc, sK, stage, phase, b, h_k, (n_blocks - 1 - i) * kBlockN)
            if i > 0:
                stage, phase = _turn(sV, done + i - 1)
                _fetch(v_desc, sV, stage, phase, b, h_k, (n_blocks - i) * kBlockN)
        done += n_blocks


@gluon.jit
def _softmax(acc_s, row_max, row_sum, mask, visible, col0, unit_log2, kMasked: gl.constexpr):
    """online_softmax of a block of keys."""
    if kMasked:
        cols = col0 + gl.arange(0, acc_s.shape[1], gl.SliceLayout(0, acc_s.type.layout))
        acc_s = gl.where(sees(mask, visible, cols), acc_s, float("-inf"))
    return online_softmax(acc_s, row_max, row_sum, unit_log2)


@gluon.jit
def _consume(o_desc, lse_ptr, sQ, sK, sV, sO, work, softmax_scale, consumer_idx: gl.constexpr, kOwnO: gl.constexpr):
    """64 rows of out and lse of each tile."""
    mask = work.mask
    kConsumers: gl.constexpr = sQ.tiles.shape[0]
    kBlockM: gl.constexpr = sQ.tiles.shape[3]
    kBlockD: gl.constexpr = sQ.tiles.shape[4]
    kBlockN: gl.constexpr = sK.tiles.shape[3]
    kConvertLate: gl.constexpr = kConsumers > 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kBlockN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, kBlockD, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    unit_log2 = log2_unit(softmax_scale)
    q = _tile(sQ.tiles, consumer_idx)
    done = 0
    for n in range(_num_tiles(work)):
        b, h, h_k, bh, row0, n_blocks = _tile_of(n, work, kBlockM * kConsumers, kBlockN)
        row0 += consumer_idx * kBlockM
        rows = row0 + gl.arange(0, kBlockM, gl.SliceLayout(1, s_layout))
        visible = keys_of(mask, rows)
        # A consumer whose rows are all beyond the end keeps pace with the others.
        n_masked = n_blocks - key_blocks(mask, gl.minimum(row0, mask.seqlen_q - 1), kBlockM, kBlockN).full_end

        mbarrier.wait(sQ.full.index(consumer_idx), n & 1)
        stage, phase = _turn(sK, done)
        mbarrier.wait(sK.full.index(stage), phase)
        acc_s = warpgroup_mma(q, _tile(sK.tiles, stage).permute((1, 0)),
                              gl.zeros([kBlockM, kBlockN], gl.float32, s_layout), use_acc=False)
        mbarrier.arrive(sK.empty.index(stage), count=1)
        row_max = gl.full([kBlockM], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        row_sum = gl.full([kBlockM], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        p, rescale, row_max, row_sum = _softmax(acc_s, row_max, row_sum, mask, visible, (n_blocks - 1) * kBlockN,
                                                unit_log2, True)
        p = gl.convert_layout(p.to(sQ.tiles.dtype), p_layout)
        acc_o = gl.zeros([kBlockM, kBlockD], gl.float32, o_layout)
        # Block i counts from the right: S of block i, and acc_o += P V of block i - 1. First those that a mask cuts.
        for kFull in gl.static_range(2):
            first, last = 1, n_masked
            if kFull:
                first, last = gl.maximum(n_masked, 1), n_blocks
            for i in range(first, last):
                k_stage, k_phase = _turn(sK, done + i)
                v_stage, v_phase = _turn(sV, done + i - 1)
                mbarrier.wait(sK.full.index(k_stage), k_phase)
                s_token = warpgroup_mma(q, _tile(sK.tiles, k_stage).permute((1, 0)),
                                        gl.zeros([64, kBlockN], gl.float32, s_layout), use_acc=False, is_async=True)
                mbarrier.wait(sV.full.index(v_stage), v_phase)
                o_token = warpgroup_mma(p, _tile(sV.tiles, v_stage), acc_o, is_async=True)
                acc_s = warpgroup_mma_wait(1, deps=[s_token])
                mbarrier.arrive(sK.empty.index(k_stage), count=1)
                new_p, rescale, row_max, row_sum = _softmax(acc_s, row_max, row_sum, mask, visible,
                                                            (n_blocks - 1 - i) * kBlockN, unit_log2, not kFull)
                # ptxas would move the wait for P V to before the softmax, but not across a branch, such as that of a
                # barrier, which here is open. Converted late, the old and the new P never need registers at once, which
                # 160 do not hold.
                if not kConvertLate:
                    new_p = gl.convert_layout(new_p.to(p.dtype), p_layout)
                mbarrier.wait(sV.full.index(v_stage), v_phase)
                acc_o, new_p = warpgroup_mma_wait(0, deps=[o_token, new_p])
                if kConvertLate:
                    new_p = gl.convert_layout(new_p.to(p.dtype), p_layout)
                p = new_p
                mbarrier.arrive(sV.empty.index(v_stage), count=1)
                acc_o = acc_o * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
        if kOwnO:
            mbarrier.arrive(sQ.empty.index(consumer_idx), count=1)
        done += n_blocks
        stage, phase = _turn(sV, done - 1)
        mbarrier.wait(sV.full.index(stage), phase)
        acc_o = warpgroup_mma(p, _tile(sV.tiles, stage), acc_o)
        mbarrier.arrive(sV.empty.index(stage), count=1)

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
    sQ = _ring(q_desc, kConsumers, 1)
    sK, sV = _ring(k_desc, kStages, kConsumers), _ring(v_desc, kStages, kConsumers)
    # An sO of its own lets the next tile's Q come early. At head_dim 256 there is no room: one tile a program.
    kOwnO: gl.constexpr = q_desc.block_type.shape[3] <= 128
    sO = sQ.tiles
    if kOwnO:
        sO = gl.allocate_shared_memory(o_desc.dtype, [kConsumers] + o_desc.block_type.shape, o_desc.layout)
    fence_async_shared()
    m_blocks = gl.cdiv(seqlen_q, q_desc.block_type.shape[2] * kConsumers)
    seq = sequence(Lengths(None, None, None, None), 0, 1, seqlen_q, seqlen_k)  # of every sample alike
    work = Work(nheads, nheads_k, m_blocks, num_tiles, chunk, make_mask(seq, 0, 0, kIsCausal, False))
    if kConsumers == 2:
        gl.warp_specialize([(_consume, (o_desc, lse_ptr, sQ, sK, sV, sO, work, softmax_scale, 0, kOwnO)),
                            (_consume, (o_desc, lse_ptr, sQ, sK, sV, sO, work, softmax_scale, 1, kOwnO)),
                            (_produce, (q_desc, k_desc, v_desc, sQ, sK, sV, work))],
                           [4, 1], [kRegisters, 24])
    else:
        gl.warp_specialize([(_consume, (o_desc, lse_ptr, sQ, sK, sV, sO, work, softmax_scale, 0, kOwnO)),
                            (_consume, (o_desc, lse_ptr, sQ, sK, sV, sO, work, softmax_scale, 1, kOwnO)),
                            (_consume, (o_desc, lse_ptr, sQ, sK, sV, sO, work, softmax_scale, 2, kOwnO)),
                            (_produce, (q_desc, k_desc, v_desc, sQ, sK, sV, work))],
                           [4, 4, 1], [kRegisters, kRegisters, 24])


def configs(dtype, kBlockD):
    """Launch options to choose from; none where attention.py serves alone."""
    return [dict(kConsumers=kConsumers, kBlockN=kBlockN, kBlockD=kBlockD, kStages=kStages)
            for kConsumers, kBlockN, kStages in TILES.get(kBlockD, []) if dtype.itemsize == 2]


def launch(config, q, k, v, out, causal, num_sms):
    """attention.launch for a call that attention.hopper_serves."""
    kConsumers, kBlockN, kBlockD, kStages = config.values()
    dtype = getattr(gl, str(q.dtype).removeprefix("torch."))
    blocks = [(x, [1, 1, rows, kBlockD]) for x, rows in ((q, 64), (k, kBlockN), (v, kBlockN), (out, 64))]
    tiles = [(x, block, functools.partial(TensorDescriptor, layout=gl.NVMMASharedLayout.get_default_for(block, dtype)))
             for x, block in blocks]
    num_tiles = -(-q.shape[2] // (64 * kConsumers)) * q.shape[0] * q.shape[1]
    if num_tiles > MAX_PROGRAMS:
        raise ValueError(f"too many rows: {num_tiles} tiles of {64 * kConsumers}, a launch takes {MAX_PROGRAMS}")
    # A program an SM, which loads its next tile's Q and K while it ends one. Under a causal mask tiles differ: where
    # pairs of them do not even that out, a program each, as the hardware finds room.
    programs, chunk = min(num_tiles, num_sms), 1
    if causal and num_tiles >= 8 * num_sms and kBlockD <= 128:
        programs, chunk = num_sms, 2
    elif causal or kBlockD > 128:
        programs = num_tiles
    constants = (q.shape[1], k.shape[1], num_tiles, chunk, q.shape[2], k.shape[2], causal, kConsumers, kStages,
                 REGISTERS[kConsumers])
    start = Launch(_flash_fwd, programs, constants, tiles, num_warps=4)
    return lambda q, k, v, out, lse, _, *options: start(q, k, v, out, lse, options[-2])  # softmax_scale
