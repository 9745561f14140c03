"""Formulas for torch.utils.flop_counter.FlopCounterMode: our ops count as scaled_dot_product_attention does, which
takes no mask and no window into account. Lengths count where they can be read.
"""

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def forward_flops(q, k, v, *lengths, out_val=None, **others):
    """FLOPs of both products. lengths begin with cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k."""
    return 2 * q.shape[1] * num_scores(q, k.shape[2], *lengths[:4]) * (q.shape[3] + v.shape[3])


def backward_flops(dout, dlse, q, k, v, out, lse, *lengths, out_val=None, **others):
    """FLOPs of the scores, formed again, and of four products. All count, also those that a call does not need."""
    return 2 * q.shape[1] * num_scores(q, k.shape[2], *lengths[:4]) * (3 * q.shape[3] + 2 * v.shape[3])


def decode_flops(q, k_cache, v_cache, cu_seqlens_q, seqused_q, seqused_k, page_table=None, batch_idx=None,
                 leftpad_k=None, *others, out_val=None, **more):
    capacity = k_cache.shape[2] * (1 if page_table is None else page_table.shape[1])
    if leftpad_k is not None:
        seqused_k = (capacity if seqused_k is None else seqused_k) - leftpad_k
    pairs = num_scores(q, capacity, cu_seqlens_q, None, seqused_q, seqused_k)
    return 2 * q.shape[1] * pairs * (q.shape[3] + v_cache.shape[3])


def num_scores(q, seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
    """The scores of one head. Without values, as many as there may be: a packed batch then counts as one sample."""
    given = [x for x in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k) if x is not None]
    if not given or any(type(x) is not torch.Tensor or x.is_meta for x in given):
        return q.shape[0] * q.shape[2] * seqlen_k
    batch_size = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    return sum(rows * keys for rows, keys in zip(_lengths(q.shape[2], batch_size, cu_seqlens_q, seqused_q),
                                                 _lengths(seqlen_k, batch_size, cu_seqlens_k, seqused_k)))


def _lengths(total, batch_size, cu_seqlens, seqused):
    """A list of the lengths of samples. Those in seqused may reach into the next sample's keys."""
    if seqused is not None:
        return seqused.clamp(0, total).tolist()
    return [total] * batch_size if cu_seqlens is None else cu_seqlens.clamp(0, total).diff().tolist()


def register_flops(name, formula):
    """Count an op of ours by this formula, also in a counter that is at work while the op is made."""
    try:
        from torch.utils.flop_counter import FlopCounterMode, register_flop_formula
    except Exception:  # it imports Triton, which may be broken
        return
    op = getattr(torch.ops.minimal_attn, name)
    register_flop_formula(op, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(counter := getattr(mode, "counter", None), FlopCounterMode):
            counter.flop_registry[op] = formula
