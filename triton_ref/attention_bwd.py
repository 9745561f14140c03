"""FlashAttention backward in Triton: dq, dk, dv, dsinks and dbias from dout, and from dlse where lse was used as well.

P is formed again from lse. With dP = dO Vᵀ and delta = rowsum(dO ∘ O), dS = P ∘ (dP - delta), and the gradients are
dV = Pᵀ dO, dK = softmax_scale · dSᵀ Q, dQ = softmax_scale · dS K; d lse / d S = P makes dlse a part of delta. A sink is
a score whose value is 0, and thus its dP: its gradient is the sum of -P · delta.

The kernel of preprocess.py computes delta, and what each row adds to dsinks. Those of attention_bwd_kernels.py compute
dK and dV, dQ, and the gradient of a bias. Q Kᵀ and dO Vᵀ are therefore formed twice, but there are no atomics, and
every run gives the same bits. There is no workspace of Q's size, except where programs share a block of keys.

Tri Dao, FlashAttention-2, 2023, Algorithm 2, which adds dQ up in memory instead. Read next: attention_bwd_kernels.py,
the kernels.
"""

import contextlib
import functools
import math

import torch
import triton

from minimal_attn.checks import empty_like
from minimal_attn.options import Lengths

from . import autotune as tuner
from .attention import Tile, block_d, can_use_tma, config_of, in_float
from .attention_bwd_kernels import (_flash_bwd_bias, _flash_bwd_kv, _flash_bwd_kv_packed, _flash_bwd_q,
                                    _flash_bwd_q_packed, _splits_of)
from .dropout import count_and_scale, seed_of
from .launching import (INTERPRETING, Launch, kind_of, mask_of, num_samples, plan_key, properties, remember, sum_splits,
                        to_float)
from .preprocess import launch_preprocess, padded_rows
from .scores import bias_bytes, score_constants, score_options
from .sequence import num_slots, strides_of

# (kBlockM, kBlockN, num_warps, num_stages) by bytes of an element and the larger of kBlockD and kBlockDv, as TILES in
# attention.py: rows and keys of a tile. dK and dV take two sums and two operands, twice the registers of dQ. So a
# program has fewer keys of its own for them than rows for dQ. At head_dim 256, the larger tiles need 200 KB of shared
# memory.
KV_TILES = {
    (4, 64): [(32, 32, 4, 1)],
    (4, 128): [(16, 32, 4, 1)],
    (4, 256): [(16, 16, 4, 1)],
    (2, 64): [(128, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2)],
    (2, 128): [(64, 64, 4, 2), (32, 64, 4, 2)],
    (2, 256): [(64, 64, 8, 2), (32, 64, 8, 2), (32, 32, 4, 1)],
}
# In 16 bits with scores that something changes, which takes registers: by the larger of kBlockD and kBlockDv.
SCORES_KV_TILES = {64: [(64, 64, 8, 2), (64, 64, 4, 2)], 128: [(64, 64, 8, 2), (32, 64, 8, 2)],
                   256: [(32, 64, 8, 2), (32, 32, 4, 1)]}
Q_TILES = {
    (4, 64): [(32, 32, 4, 1)],
    (4, 128): [(32, 16, 4, 1)],
    (4, 256): [(16, 16, 4, 1)],
    (2, 64): [(64, 64, 4, 2), (128, 64, 8, 3)],
    (2, 128): [(128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)],
    (2, 256): [(128, 32, 8, 2), (64, 32, 4, 3), (64, 32, 8, 2), (32, 32, 4, 1)],
}


@functools.cache
def tile_configs(side, dtype, head_dim, max_shared_memory=227 << 10, head_dim_v=None, bias_bytes=0, has_scores=False):
    """Launch options to choose from; the first is the choice without tuning.

    Args:
        side: "kv" or "q", whose gradients the kernel computes.
        dtype, head_dim: of q.
        max_shared_memory: bytes that one program can have; 227 KB on Hopper.
        head_dim_v: of v, if it is another.
        bias_bytes: of a bias, for each score. has_scores: something changes the scores.
    """
    kBlockD, kBlockDv = block_d(dtype, head_dim), block_d(dtype, head_dim_v or head_dim)
    largest = max(kBlockD, kBlockDv)

    def fits(kBlockM, kBlockN, num_warps, num_stages):
        """Two tiles of the program's own block, and num_stages of each of the two that the loop loads."""
        own, other = (kBlockN, kBlockM) if side == "kv" else (kBlockM, kBlockN)
        of_tiles = 2 * (own + num_stages * other) * largest * dtype.itemsize
        return of_tiles + num_stages * kBlockM * kBlockN * bias_bytes + 4096 <= max_shared_memory

    tiles = (KV_TILES if side == "kv" else Q_TILES)[dtype.itemsize, max(64, largest)]
    if side == "kv" and has_scores and dtype.itemsize == 2:
        tiles = SCORES_KV_TILES[max(64, largest)]
    tiles = [tile for tile in tiles if fits(*tile)] or [(16, 16, 4, 1)]
    return [config_of(*tile, kBlockD, kBlockDv) for tile in tiles]


def _num_splits(group, seqlen_q, seqlen_k, is_packed=False):
    """How many programs share a block of keys that `group` query heads read: num_splits of
    csrc/common/bwd_workspace.cuh, which says why. Here a split has whole heads. The kernel calls _splits_of with the
    rows of its sample and this result as max_splits. That is of the padded lengths. Where seqused_q and seqused_k
    differ, a sample may thus have another number of splits than it would have alone, and the last bits of its dK and dV
    depend on the padding.

    The result is 1 for a packed batch, whose lengths the host does not know."""
    if is_packed:
        return 1
    rows = group * seqlen_q
    return _splits_of.fn(rows, min(group, 16, rows // seqlen_k))


def _has_empty_rows(q, k, lengths, window):
    """Whether lengths or a window may leave rows without a key. The host does not read lengths. It sees whether those
    of q and of k are one tensor: then a sample has more rows than keys only where q is longer than k."""
    used_q, used_k = (None if x is None else x.data_ptr() for x in (lengths.seqused_q, lengths.seqused_k))
    return lengths.is_packed or window[1] >= 0 and (used_q != used_k or q.shape[2] > k.shape[2] + window[1])


def _launch(side, config, tma, arguments, window, has_empty_rows, clears_delta):
    """A Launch for the gradients of one side, "kv" or "q", for the arguments that its kernel has first.

    clears_delta: delta may be NaN in rows without a key."""
    q, k, v, dout, *gradients, lse_padded, delta, lengths = arguments[:-5]
    (nheads, seqlen_q, head_dim), (nheads_k, seqlen_k), head_dim_v = q.shape[1:], k.shape[1:3], v.shape[-1]
    batch_size, is_packed = num_samples(q, lengths), lengths.is_packed
    kBlockM, kBlockN, kBlockD, kBlockDv, num_warps, num_stages = config.values()
    if side == "kv":
        function = _flash_bwd_kv_packed if is_packed else _flash_bwd_kv
        max_splits = _num_splits(nheads // nheads_k, seqlen_q, seqlen_k, is_packed)
        blocks = num_slots.fn(lengths.cu_seqlens_k, batch_size, seqlen_k, kBlockN) * nheads_k * max_splits
        splits = max_splits, max(k.numel(), v.numel())
        flags = clears_delta, is_packed or lengths.seqused_q is not None or seqlen_q % kBlockM != 0
    else:
        function, splits, flags = _flash_bwd_q_packed if is_packed else _flash_bwd_q, (), ()
        blocks = num_slots.fn(lengths.cu_seqlens_q, batch_size, seqlen_q, kBlockM) * nheads
    tiles = [(q, (1, 1, kBlockM, kBlockD)), (k, (1, 1, kBlockN, kBlockD)), (v, (1, 1, kBlockN, kBlockDv)),
             (dout, (1, 1, kBlockM, kBlockDv)), *[None] * len(gradients), (lse_padded, (1, kBlockM)),
             (delta, (1, kBlockM))]
    strides, is_fast = score_constants(q, arguments[-1])
    constants = (strides_of(q, k, v, dout, *gradients), strides, batch_size, nheads, nheads_k, seqlen_q, seqlen_k,
                 delta.shape[1], head_dim, head_dim_v, *splits, *mask_of(window), is_fast, has_empty_rows, *flags,
                 Tile(kBlockM, kBlockN, kBlockD, kBlockDv, head_dim < kBlockD or head_dim_v < kBlockDv, tma))
    return Launch(function, blocks * q.shape[0], constants, tiles if tma else (), num_warps=num_warps,
                  num_stages=num_stages)


def launch_bias(arguments, window):
    """A Launch of _flash_bwd_bias for the arguments that it has first. dbias is fp32 and contiguous."""
    q, k, v, dout, dbias, _, delta, *_, scores = arguments
    (batch_size, nheads, seqlen_q, head_dim), (nheads_k, seqlen_k), head_dim_v = q.shape, k.shape[1:3], v.shape[-1]
    kBlockD, kBlockDv = block_d(q.dtype, head_dim), block_d(q.dtype, head_dim_v)
    # Both operands of both products are in shared memory, in fp32 in registers.
    block = (32 if q.itemsize == 4 else 64) // (2 if max(kBlockD, kBlockDv) > 128 else 1)
    shares = [n == 1 for n in dbias.shape]
    sizes = batch_size, nheads, triton.cdiv(seqlen_q, block), triton.cdiv(seqlen_k, block)
    programs = math.prod(1 if is_shared else size for size, is_shared in zip(sizes, shares))
    strides, is_fast = score_constants(q, scores)
    constants = (strides_of(q, k, v, dout, dbias.expand(*q.shape[:3], -1)), strides, batch_size, nheads, nheads_k,
                 seqlen_q, seqlen_k, delta.shape[1], head_dim, head_dim_v, *mask_of(window), is_fast, *shares,
                 Tile(block, block, kBlockD, kBlockDv))
    return Launch(_flash_bwd_bias, programs, constants, num_warps=4, num_stages=1)


# {all that the launches depend on: {"preprocess", "kv", "q", "bias", "sum_k" or "sum_v", those that are needed: the
# Launch}}
_plans = {}


def run(dout, dlse, q, k, v, out, lse, options, need_dq=True, need_dkv=True, need_dsinks=False, need_dbias=False):
    """(dq, dk, dv, dsinks, dbias) of checked inputs and what the forward made of them with these options; dlse may be
    None. Without need_dq dq is None, without need_dkv dk and dv are, and so on, and nothing is spent on them.

    Raises:
        NotImplementedError: a packed batch with seqused_k; on a GPU, float32 with dropout and a bias or a mask.
    """
    lengths, window, seed = options.lengths, options.window, seed_of(options)
    if lengths.is_packed and lengths.seqused_k is not None:
        raise NotImplementedError("backend='triton' has no backward pass for cu_seqlens with seqused_k: key ranges may "
                                  "overlap")
    # Triton 3.6 compiles it to a kernel whose dV is wrong on an H200, where its interpreter and 16 bits are right.
    if q.dtype == torch.float32 and seed is not None and options.attn_bias is not None and not INTERPRETING:
        raise NotImplementedError("backend='triton' has no backward pass in float32 for dropout with attn_bias")
    if INTERPRETING and q.dtype == torch.bfloat16:
        *gradients, dsinks, dbias = run(*map(to_float, (dout, dlse, q, k, v, out)), lse, in_float(options), need_dq,
                                        need_dkv, need_dsinks, need_dbias)
        return *(x if x is None else x.bfloat16() for x in gradients), dsinks, dbias_of(options, dbias)
    dq = empty_like(q) if need_dq else None
    dk, dv = (empty_like(k), empty_like(v)) if need_dkv else (None, None)
    dbias = lse.new_zeros(options.attn_bias.shape) if need_dbias else None  # a sum of many, so as they are
    if not q.numel() or not k.numel():  # without keys out does not depend on the sinks, and lse is its row's sink
        dsinks = torch.zeros_like(options.sinks) if need_dsinks else None
        if need_dsinks and dlse is not None:
            dsinks += dlse.masked_fill(lse == -math.inf, 0).sum((0, 2))
        return *(x if x is None else x.zero_() for x in (dq, dk, dv)), dsinks, dbias_of(options, dbias)
    if dout.stride(-1) != 1:  # as the gradient of a sum
        dout = dout.contiguous()
    batch_size, nheads, seqlen_q, _ = q.shape
    scores = score_options(options)
    unit = options.softmax_scale if not options.has_scores else scores.softcap or 1.0
    seqlen_pad = padded_rows(seqlen_q, lengths, num_samples(q, lengths))
    lse_padded, delta = (lse.new_empty(batch_size * nheads, seqlen_pad) for _ in range(2))
    sinks, dsinks_of_rows = (options.sinks, torch.empty_like(delta)) if need_dsinks else (None, None)
    rows = Lengths(*[lengths.cu_seqlens_q] * 2)
    preprocessed = out, dout, lse, dlse, sinks, delta, lse_padded, dsinks_of_rows, rows
    shared = (lse_padded, delta, lengths, seed, *count_and_scale(options.dropout_p if seed is not None else 0.0),
              options.softmax_scale, scores)
    max_splits = _num_splits(nheads // k.shape[1], seqlen_q, k.shape[2], lengths.is_packed) if need_dkv else 1
    sides = {}
    if need_dkv:
        split_stride = max(k.numel(), v.numel())
        dkv_accum = [lse.new_empty(max_splits, split_stride) for _ in range(2)] if max_splits > 1 else []
        # A split's sums lie in memory as the gradient does.
        sums = [x.as_strided(dx.shape, dx.stride()) for x, dx in zip(dkv_accum, (dk, dv))] or (dk, dv)
        sides["kv"] = q, k, v, dout, *sums, *shared
    if need_dq:
        sides["q"] = q, k, v, dout, dq, *shared
    with torch.accelerator.device_index(q.device.index):  # None on the CPU: nothing to switch
        has_empty_rows = _has_empty_rows(q, k, lengths, window)
        # A row without a key has an lse if there are sinks, and so its dlse counts.
        clears_delta = has_empty_rows and dlse is not None and options.sinks is not None
        key = (*plan_key(options, q, k, v, out, dout, lse, dlse), options.autotune and tuner.is_on(), has_empty_rows,
               need_dq, need_dkv, need_dsinks, need_dbias)
        plan = _plans.get(key)
        is_new = plan is None
        if is_new:
            plan = {"preprocess": launch_preprocess(*preprocessed)}
        plan["preprocess"](*preprocessed, unit)
        if is_new:  # tiles are timed on what preprocess.py made
            plan |= {side: _choose(side, arguments, options, has_empty_rows, clears_delta)
                     for side, arguments in sides.items()}
            if need_dbias:
                plan["bias"] = launch_bias((q, k, v, dout, dbias, *shared), window)
            if max_splits > 1:
                plan |= {"sum_k": sum_splits(dk, split_stride, max_splits),
                         "sum_v": sum_splits(dv, split_stride, max_splits)}
            remember(_plans, key, plan, q.device)
        with _beside(q.device, need_dq and need_dkv and _pays_beside(q, k, v)) as second_stream:
            if need_dkv:
                plan["kv"](*sides["kv"])
            if need_dq:
                with second_stream:
                    plan["q"](*sides["q"])
            if max_splits > 1:
                plan["sum_k"](dkv_accum[0], dk)
                plan["sum_v"](dkv_accum[1], dv)
        if need_dbias:
            plan["bias"](q, k, v, dout, dbias, *shared)
    dsinks = dsinks_of_rows.view(batch_size, nheads, -1).sum((0, 2)) if need_dsinks else None
    return dq, dk, dv, dsinks, dbias_of(options, dbias)


def dbias_of(options, dbias):
    """The gradient of a bias in its dtype, or None."""
    return dbias if dbias is None else dbias.to(options.attn_bias.dtype)


@functools.cache
def _stream(device, first):
    """A second stream for each first one. Threads do not share it, since one may be capturing a CUDA graph."""
    return torch.cuda.Stream(device)


MIN_WORK_FOR_A_STREAM = 2**34  # elements of Q times keys


def _pays_beside(q, k, v):
    """Whether the two kernels should run beside each other: one fills the multiprocessors that the other leaves at its
    end. At head_dim 128 that is worth 2 to 5 %, at 64 it can cost as much. In a small call the second stream costs the
    host more than it saves."""
    is_large = q.numel() * k.shape[2] >= MIN_WORK_FOR_A_STREAM
    return q.is_cuda and is_large and block_d(q.dtype, max(q.shape[-1], v.shape[-1])) >= 128


@contextlib.contextmanager
def _beside(device, pays):
    """A context for launches on a second stream, which begins with the current one and ends before it goes on."""
    if not pays:
        yield contextlib.nullcontext()
        return
    first = torch.cuda.current_stream(device)
    second = _stream(device, first.cuda_stream)
    second.wait_stream(first)
    try:
        yield torch.cuda.stream(second)
    finally:
        first.wait_stream(second)


def _choose(side, arguments, options, has_empty_rows, clears_delta):
    """The Launch of one of tile_configs: the first, or the fastest."""
    (q, k, v, dout), lengths = arguments[:4], options.lengths
    configs = tile_configs(side, q.dtype, q.shape[-1], properties(q.device).max_shared_memory, v.shape[-1],
                           bias_bytes(options.attn_bias), options.has_scores)
    # A descriptor ends with the tensor, not with a padded sample.
    tma = (lengths.is_packed or not lengths.are_given) and can_use_tma(q, k, v, dout)
    key = (str(q.dtype), configs[0]["kBlockD"], configs[0]["kBlockDv"], *kind_of(q, k, options), tma)

    def launch(config):
        return _launch(side, config, tma, arguments, options.window, has_empty_rows, clears_delta)

    return tuner.fastest_launch(f"attention_bwd_{side}", key, configs, launch, arguments, options.autotune)
