"""FlashAttention backward in Triton: dq, dk, dv, dsinks and dbias from dout, and from dlse where lse was used as well.

P is formed again from lse. With dP = dO Vᵀ and delta = rowsum(dO ∘ O), dS = P ∘ (dP - delta), and the gradients are
dV = Pᵀ dO, dK = softmax_scale · dSᵀ Q, dQ = softmax_scale · dS K; d lse / d S = P makes dlse a part of delta. A sink is
a score whose value is 0, and thus its dP: its gradient is the sum of -P · delta.

dK and dV come from one kernel and dQ from another. Q Kᵀ and dO Vᵀ are therefore formed twice, but there are no atomics,
and every run gives the same bits. There is no workspace of Q's size, except where programs share a block of keys.

Tri Dao, FlashAttention-2, 2023, Algorithm 2, which adds dQ up in memory instead. Read next: attention_bwd_kernels.py.
"""

import contextlib
import functools
import math

import torch
import triton

from minimal_attn.checks import empty_like
from minimal_attn.options import NO_MASK, Lengths

from . import autotune as tuner
from .attention import block_d, can_use_tma, config_of, tile_of
from .attention_bwd_kernels import PAD, _flash_bwd_bias, _flash_bwd_kv, _flash_bwd_q, _preprocess, _splits_of
from .block_mask import with_lists
from .dropout import dropout_of
from .launching import INTERPRETING, Launch, kind_of, mask_of, packed, plan_key, properties, remember, sum_splits
from .scores import bytes_of_scores, functions_of, score_options, score_strides
from .sequence import num_slots, strides_of

# Rows and keys of a tile, num_warps and num_stages, as TILES in attention.py. dK and dV take two sums and two operands,
# twice the registers of dQ. So a program has fewer keys of its own for them than rows for dQ.
KV_TILES = {
    (4, 64): [(32, 32, 4, 1)], (4, 128): [(16, 32, 4, 1)], (4, 256): [(16, 16, 4, 1)],
    (2, 64): [(128, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2)],
    (2, 128): [(64, 64, 4, 2), (32, 64, 4, 2)],
    (2, 256): [(64, 64, 8, 2), (32, 64, 8, 2), (32, 32, 4, 1)],
}
# Where something changes the scores, which takes registers.
SCORES_KV_TILES = KV_TILES | {
    (2, 64): [(64, 64, 8, 2), (64, 64, 4, 2)],
    (2, 128): [(64, 64, 8, 2), (32, 64, 8, 2), (64, 64, 4, 2)],  # a block mask takes few
    (2, 256): [(32, 64, 8, 2), (32, 32, 4, 1)],
}
Q_TILES = {
    (4, 64): [(32, 32, 4, 1)], (4, 128): [(32, 16, 4, 1)], (4, 256): [(16, 16, 4, 1)],
    (2, 64): [(64, 64, 4, 2), (128, 64, 8, 3)],
    (2, 128): [(128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)],
    (2, 256): [(128, 32, 8, 2), (64, 32, 4, 3), (64, 32, 8, 2), (32, 32, 4, 1)],
}
# Where a score_mod changes them, whose derivatives take registers too.
SCORE_MOD_Q_TILES = Q_TILES | {
    (2, 64): [(64, 64, 8, 2), (64, 64, 4, 2)],
    (2, 128): [(64, 64, 8, 2), (64, 32, 4, 2)],
    (2, 256): [(64, 32, 8, 2), (32, 32, 4, 1)],
}
# The gradient of a bias: both operands of both products are in shared memory, in fp32 in registers.
BIAS_TILES = {
    (4, 64): [(32, 32, 4, 1)], (4, 128): [(32, 32, 4, 1)], (4, 256): [(16, 16, 4, 1)],
    (2, 64): [(64, 64, 4, 1)], (2, 128): [(64, 64, 4, 1)], (2, 256): [(32, 32, 4, 1)],
}


@functools.cache
def tile_configs(side, dtype, head_dim, max_shared_memory=227 << 10, head_dim_v=None, bias_bytes=0, has_scores=False,
                 has_score_mod=False):
    """Launch options as those of attention.py, for the side "kv", "q" or "bias" whose gradients the kernel computes.
    has_scores: something changes the scores."""
    kBlockD, kBlockDv = block_d(dtype, head_dim), block_d(dtype, head_dim_v or head_dim)
    largest = max(kBlockD, kBlockDv)

    def fits(kBlockM, kBlockN, num_warps, num_stages):
        own, other = (kBlockN, kBlockM) if side == "kv" else (kBlockM, kBlockN)  # two tiles of each
        of_tiles = 2 * (own + num_stages * other) * largest * dtype.itemsize
        return of_tiles + num_stages * kBlockM * kBlockN * bias_bytes + 4096 <= max_shared_memory

    tables = {"kv": SCORES_KV_TILES if has_scores else KV_TILES, "q": SCORE_MOD_Q_TILES if has_score_mod else Q_TILES,
              "bias": BIAS_TILES}
    tiles = [tile for tile in tables[side][dtype.itemsize, max(64, largest)] if fits(*tile)] or [(16, 16, 4, 1)]
    return [config_of(*tile, kBlockD, kBlockDv) for tile in tiles]


def _num_splits(group, seqlen_q, seqlen_k, is_packed=False):
    """How many programs at most share a block of keys that `group` query heads read: num_splits of
    csrc/common/bwd_workspace.cuh, which says why. Here a split has whole heads. A packed batch, whose lengths the host
    does not know, has 1.

    It is of the padded lengths. Where seqused_q and seqused_k differ, a sample may thus have another number of splits
    than alone, and the last bits of its dK and dV depend on the padding."""
    if is_packed:
        return 1
    rows = group * seqlen_q
    return _splits_of.fn(rows, min(group, 16, rows // seqlen_k))


def _has_empty_rows(q, k, options):
    """Whether lengths or a mask may leave rows without a key. The host does not read lengths, but where those of q
    and of k are one tensor, a sample has more rows than keys only if q is longer than k."""
    used_q, used_k = (None if x is None else x.data_ptr() for x in (options.seqused_q, options.seqused_k))
    return options.lengths.is_packed or options.mask != NO_MASK and (used_q != used_k or q.shape[2] > k.shape[2])


def _launch(side, config, tma, arguments, mask, has_empty_rows, clears_delta, score_mod):
    """A Launch for the gradients of one side, for the arguments that its kernel has first. clears_delta: delta may be
    NaN in rows without a key."""
    q, k, v, dout, *gradients, lse_padded, delta, lengths = arguments[:-3]
    (nheads, seqlen_q, head_dim), (nheads_k, seqlen_k), head_dim_v = q.shape[1:], k.shape[1:3], v.shape[-1]
    batch_size, is_packed = lengths.num_samples(q), lengths.is_packed
    kBlockM, kBlockN, kBlockD, kBlockDv, num_warps, num_stages = config.values()
    splits = ()
    if side == "kv":
        function = packed(_flash_bwd_kv) if is_packed else _flash_bwd_kv
        max_splits = _num_splits(nheads // nheads_k, seqlen_q, seqlen_k, is_packed)
        slots = num_slots.fn(lengths.cu_seqlens_k, batch_size, seqlen_k, kBlockN)
        programs = q.shape[0] * slots * nheads_k * max_splits
        splits = max_splits, max(k.numel(), v.numel())
        flags = has_empty_rows, clears_delta, is_packed or lengths.seqused_q is not None or seqlen_q % kBlockM != 0
    elif side == "q":
        function, flags = packed(_flash_bwd_q) if is_packed else _flash_bwd_q, [has_empty_rows]
        programs = q.shape[0] * num_slots.fn(lengths.cu_seqlens_q, batch_size, seqlen_q, kBlockM) * nheads
    else:  # samples, heads, rows and keys may share a bias
        function, flags = _flash_bwd_bias, [n == 1 for n in gradients[0].shape]
        sizes = batch_size, nheads, triton.cdiv(seqlen_q, kBlockM), triton.cdiv(seqlen_k, kBlockN)
        programs = math.prod(1 if is_shared else size for size, is_shared in zip(sizes, flags))
    tiles = [(q, (1, 1, kBlockM, kBlockD)), (k, (1, 1, kBlockN, kBlockD)), (v, (1, 1, kBlockN, kBlockDv)),
             (dout, (1, 1, kBlockM, kBlockDv)), *[None] * len(gradients), (lse_padded, (1, kBlockM)),
             (delta, (1, kBlockM))]
    constants = (strides_of(q, k, v, dout, *gradients), score_strides(q, arguments[-1]), batch_size, nheads, nheads_k,
                 seqlen_q, seqlen_k, delta.shape[1], head_dim, head_dim_v, *splits, *mask, *flags,
                 tile_of(config, head_dim, head_dim_v, tma), *[score_mod] * (side != "bias"))
    start = Launch(function, programs, constants, tiles if tma else (), num_warps=num_warps, num_stages=num_stages)
    return with_lists(start, arguments[-1].units, kBlockM, kBlockN, seqlen_q, seqlen_k, side == "kv")


_plans = {}  # {all that the launches depend on: {"preprocess", "kv", "q", "bias": the Launch; "sums": two}}


def run(dout, dlse, q, k, v, out, lse, options, need_dq=True, need_dkv=True, need_dsinks=False, need_dbias=False):
    """(dq, dk, dv, dsinks, dbias) of checked inputs and what the forward made of them with these options, None for what
    is not needed. dlse may be None.

    Raises:
        NotImplementedError: a packed batch with seqused_k; on a GPU, float32 with dropout and a bias or a mask.
    """
    lengths = options.lengths
    if lengths.is_packed and lengths.seqused_k is not None:
        raise NotImplementedError("backend='triton' has no backward pass for cu_seqlens with seqused_k: key ranges may "
                                  "overlap")
    # Triton 3.6 compiles it to a kernel whose dV is wrong on an H200, where its interpreter and 16 bits are right.
    if (q.dtype == torch.float32 and options.dropout_seed is not None and not INTERPRETING
            and not (options.attn_bias is options.mask_units is options.score_mod is None)):
        raise NotImplementedError("backend='triton' has no backward pass in float32 for dropout with attn_bias, "
                                  "block_mask or score_mod")
    captured_gradients = [] if options.score_mod is None else options.score_mod.gradients or []
    need_dq = need_dq or len(captured_gradients) > 0  # they come from the same kernel
    dq = empty_like(q) if need_dq else None
    dk, dv = (empty_like(k), empty_like(v)) if need_dkv else (None, None)
    dbias = options.attn_bias.new_empty(options.attn_bias.shape) if need_dbias else None
    if not q.numel() or not k.numel():  # without keys out does not depend on the sinks, and lse is its row's sink
        dsinks = torch.zeros_like(options.sinks) if need_dsinks else None
        if need_dsinks and dlse is not None:
            dsinks += dlse.masked_fill(lse == -math.inf, 0).sum((0, 2))
        dq, dk, dv, dbias = (x if x is None else x.zero_() for x in (dq, dk, dv, dbias))
        return dq, dk, dv, dsinks, dbias
    if dout.stride(-1) != 1:  # as the gradient of a sum
        dout = dout.contiguous()
    batch_size, nheads, seqlen_q, _ = q.shape
    scores = score_options(options)
    unit = options.softmax_scale if not options.has_scores else scores.softcap or 1.0
    seqlen_pad = num_slots.fn(lengths.cu_seqlens_q, lengths.num_samples(q), seqlen_q, PAD.value) * PAD.value
    lse_padded, delta = (lse.new_empty(batch_size * nheads, seqlen_pad) for _ in range(2))
    sinks, dsinks_of_rows = (options.sinks, torch.empty_like(delta)) if need_dsinks else (None, None)
    preprocessed = (out, dout, lse, dlse, sinks, delta, lse_padded, dsinks_of_rows,
                    Lengths(*[lengths.cu_seqlens_q] * 2))
    shared = lse_padded, delta, lengths, dropout_of(options), options.softmax_scale, scores
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
    if need_dbias:
        dbias_accum = dbias.float()  # fp32, for sums of many
        sides["bias"] = q, k, v, dout, dbias_accum, *shared
    with torch.accelerator.device_index(q.device.index):  # None on the CPU: nothing to switch
        has_empty_rows = _has_empty_rows(q, k, options)
        # A row without a key has an lse if there are sinks, and so its dlse counts.
        clears_delta = has_empty_rows and dlse is not None and options.sinks is not None
        key = (*plan_key(options, q, k, v, out, dout, lse, dlse), options.autotune and tuner.is_on(), has_empty_rows,
               need_dq, need_dkv, need_dsinks, need_dbias)
        plan = _plans.get(key)
        is_new = plan is None
        if is_new:
            constants = (strides_of(out, dout, dlse), lengths.num_samples(q), nheads, seqlen_q, seqlen_pad,
                         out.shape[-1], 64, block_d(out.dtype, out.shape[-1]))
            plan = {"preprocess": Launch(packed(_preprocess) if lengths.is_packed else _preprocess,
                                         delta.numel() // 64, constants)}
        plan["preprocess"](*preprocessed, unit)
        if is_new:  # tiles are timed on what _preprocess made
            plan |= {side: _choose(side, arguments, options, has_empty_rows, clears_delta)
                     for side, arguments in sides.items()}
            if max_splits > 1:
                plan["sums"] = [sum_splits(x, split_stride, max_splits) for x in (dk, dv)]
            remember(_plans, key, plan, q.device)
            if options.autotune:  # runs that were timed have added to them
                for x in filter(torch.is_tensor, captured_gradients):
                    x.zero_()
        with _beside(q.device, need_dq and need_dkv and _pays_beside(q, k, v)) as second_stream:
            if need_dkv:
                plan["kv"](*sides["kv"])
            if need_dq:
                with second_stream:
                    plan["q"](*sides["q"])
            if max_splits > 1:
                for add, partial, gradient in zip(plan["sums"], dkv_accum, (dk, dv)):
                    add(partial, gradient)
        if need_dbias:
            plan["bias"](*sides["bias"])
            dbias.copy_(dbias_accum)
    dsinks = dsinks_of_rows.view(batch_size, nheads, -1).sum((0, 2)) if need_dsinks else None
    return dq, dk, dv, dsinks, dbias


# A second stream for each first one. Threads do not share it, since one may be capturing a CUDA graph.
_stream = functools.cache(lambda device, first: torch.cuda.Stream(device))
MIN_WORK_FOR_A_STREAM = 2**34  # elements of Q times keys


def _pays_beside(q, k, v):
    """Whether the two kernels should run beside each other, so that one fills the multiprocessors that the other leaves
    at its end. At head_dim 128 that is worth 2 to 5 %; at 64, or in a small call, it can cost as much."""
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
                           bytes_of_scores(options), options.has_scores, options.score_mod is not None)
    # A descriptor ends with the tensor, not with a padded sample.
    tma = side != "bias" and (lengths.is_packed or not lengths.are_given) and can_use_tma(q, k, v, dout)
    key = (str(q.dtype), configs[0]["kBlockD"], configs[0]["kBlockDv"], *kind_of(q, k, options), tma)

    def launch(config):
        return _launch(side, config, tma, arguments, mask_of(options), has_empty_rows, clears_delta,
                       functions_of(options))

    return tuner.fastest_launch(f"attention_bwd_{side}", key, configs, launch, arguments, options.autotune)
