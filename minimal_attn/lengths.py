"""The checks of windows and lengths, which turn what a caller gives into Options' window and lengths.

Values are checked where that needs no wait for a GPU. Kernels clamp all others, so that a bad one reads nothing outside
its tensor. Read next: backends/auto.py, which backend serves a call.
"""

import operator
import re

import torch

from .checks import MAX_SEQLEN, can_read, check_tensor, holds, is_eager, is_int, is_known, reworded, same_sizes, shown
from .options import Lengths

NO_WINDOW = (-1, -1)


def check_window_size(window_size):
    """window_size as a tuple of two ints. TypeError unless it is a tuple or a list of two ints or Nones, or an array or
    a tensor of two ints, which the host reads; ValueError unless both are at least -1."""
    pair = window_size
    if isinstance(pair, torch.Tensor):
        check_tensor("window_size", pair)
    if hasattr(pair, "tolist") and not getattr(pair, "is_meta", False):  # an array of numpy has it too
        pair = pair.tolist()
    pair = pair if isinstance(pair, (tuple, list)) else ()
    sides = [-1 if x is None else x.tolist() if isinstance(x, torch.Tensor) else x for x in pair]
    if len(sides) != 2 or not all(map(is_int, sides)):
        raise TypeError(f"window_size must be a pair of ints, (left, right), got {shown(window_size)}")
    if min(sides) < -1:
        raise ValueError(f"window_size must be at least -1 on both sides, and -1 is no bound, got {shown(window_size)}")
    left, right = sides
    return min(operator.index(left), MAX_SEQLEN), min(operator.index(right), MAX_SEQLEN)


def check_window(window_size, causal, lengths, q, k):
    """window_size and causal as Options' window; errors as of check_window_size. q, k and lengths are checked."""
    left, right = check_window_size(window_size)
    if causal:
        right = 0
    if not lengths.are_given:  # kernels may be faster without a bound, and these hide nothing
        left = -1 if left >= 0 and is_known(left >= k.shape[-2] - 1) else left
        right = -1 if right > 0 and is_known(right >= q.shape[-2] - 1) else right
    return left, right


def check_lengths(lengths, seq_lens, q, k):
    """lengths, or those that seq_lens means, if they fit q and k, which are checked.

    TypeError for what is no dense tensor or of a wrong dtype, ValueError for everything else.
    """
    if seq_lens is not None:
        if lengths.are_given:
            raise ValueError("seq_lens cannot be given together with cu_seqlens_q, cu_seqlens_k, seqused_q or "
                             "seqused_k")
        seq_lens = check_seq_lens(seq_lens, q, k)
        return Lengths(seqused_q=seq_lens, seqused_k=seq_lens)
    if not lengths.are_given:
        return lengths
    if (lengths.cu_seqlens_q is None) != (lengths.cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k must both be given, or neither")
    if lengths.is_packed and (q.ndim != 4 or not holds(q.shape[0] == 1)):
        raise ValueError("with cu_seqlens_q, q, k and v must be packed, (1, H, T, D) with all samples one after the "
                         f"other, got q {tuple(q.shape)}")
    check_samples(lengths, q, k.shape[-2])
    return lengths


def check_samples(lengths, q, total_k):
    """Raise unless lengths fit q and total_k: the keys of each sample, or of all together in a packed batch. Serves
    caches as well, whose cu_seqlens_k is None.

    TypeError for what is no dense tensor or of a wrong dtype, ValueError for everything else.
    """
    for name, x in lengths._asdict().items():
        if x is not None:
            check_int32(name, x, q.device)
    batch_size = lengths.num_samples(q)
    if lengths.is_packed:
        bounds = {name: tuple(x.shape) for name, x in zip(("cu_seqlens_q", "cu_seqlens_k"), lengths) if x is not None}
        if not holds(batch_size >= 1) or not all(same_sizes(x, (batch_size + 1,)) for x in bounds.values()):
            raise ValueError(f"{' and '.join(bounds)} must have one shape (B + 1,), with B at least 1, got "
                             f"{' and '.join(map(str, bounds.values()))}")
    for name in ("seqused_q", "seqused_k"):
        check_per_sample(name, getattr(lengths, name), batch_size)
    if not q.is_cuda and all(x is None or can_read(x) for x in lengths):
        _check_values(*(x if x is None else x.tolist() for x in lengths), q.shape[-2], total_k)


def check_int32(name, x, device):
    """TypeError unless x is a dense int32 tensor; ValueError unless it is on the device, contiguous, of one
    dimension."""
    check_tensor(name, x)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} must be on the same device as q ({device}), got {x.device}")
    if x.ndim != 1 or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous and of one dimension, got {shown(x)} with strides {x.stride()}")


def check_per_sample(name, x, batch_size):
    """ValueError unless x is None or has one value a sample."""
    if x is not None and not same_sizes(x.shape, (batch_size,)):
        raise ValueError(f"{name} must have shape ({batch_size},), one value a sample, got {tuple(x.shape)}")


def _check_values(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, total_q, total_k):
    """ValueError unless the lists, or None, say what lies within total_q rows and total_k keys."""
    for name, bounds, used, total in (("q", cu_seqlens_q, seqused_q, total_q), ("k", cu_seqlens_k, seqused_k, total_k)):
        rooms = [total] * len(used or ())
        if bounds is not None:
            shares_keys = name == "k" and used is not None
            if bounds[0] != 0 or not 0 <= min(bounds) <= max(bounds) <= total:
                raise ValueError(f"cu_seqlens_{name} must start at 0 and stay within 0..{total}, got {shown(bounds)}")
            if not shares_keys and bounds != sorted(bounds):
                raise ValueError(f"cu_seqlens_{name} must ascend, got {shown(bounds)}")
            ends = [total] * len(bounds) if shares_keys else bounds[1:]
            rooms = [end - begin for begin, end in zip(bounds, ends)]
        for b, (length, room) in enumerate(zip(used or (), rooms)):
            if not 0 <= length <= room:
                raise ValueError(f"seqused_{name} must be in 0..{room} for sample {b}, got {length}")


def check_max_seqlen(name, max_seqlen):
    """TypeError unless max_seqlen is None, an int or a tensor of one element; ValueError for an int below 0."""
    is_scalar = isinstance(max_seqlen, torch.Tensor) and max_seqlen.numel() == 1
    if not (max_seqlen is None or is_int(max_seqlen) or is_scalar):
        raise TypeError(f"{name} must be None, an int or a tensor of one element, got {shown(max_seqlen)}")
    if is_int(max_seqlen) and not holds(max_seqlen >= 0):
        raise ValueError(f"{name} must not be negative, got {max_seqlen}")


def of_self_attention(error):
    """Rewords an error for a caller that gave one cu_seqlens and one max_seqlen for both q and k."""
    return reworded(error, re.sub(r"(cu_seqlens|max_seqlen)_[qk](?: and \1_[qk])?", r"\1", str(error)))


def check_seq_lens(seq_lens, q, k):
    """seq_lens as an int32 tensor of shape (q.shape[0],) on q's device, or None; TypeError unless it holds integers,
    ValueError unless it fits q and k.

    Values are checked at once for a list or a CPU tensor. For a GPU tensor that takes one small read, which is skipped
    while a CUDA graph is captured or torch.compile traces; the kernels clamp, so a bad value never reads out of bounds.
    """
    if seq_lens is None:
        return None
    if isinstance(seq_lens, torch.Tensor):
        check_tensor("seq_lens", seq_lens)
    seqlen = q.shape[-2]
    if not holds(seqlen == k.shape[-2]):
        raise ValueError(f"seq_lens needs equal lengths of q and k, got seqlen_q {seqlen} and seqlen_k {k.shape[-2]}")
    is_capturing = q.is_cuda and is_eager(q) and torch.cuda.is_current_stream_capturing()
    if not isinstance(seq_lens, torch.Tensor):
        try:
            lengths = [operator.index(n) for n in seq_lens]
        except TypeError:
            raise TypeError("seq_lens must be integers, in a list or an int32 or int64 tensor, got "
                            f"{shown(seq_lens)}") from None
        if any(n <= 0 or not holds(n <= seqlen) for n in lengths):
            raise ValueError(f"seq_lens must be in 1..{seqlen}, got {lengths}")
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cpu")
    elif seq_lens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"seq_lens must be a list or an int32 or int64 tensor, got {seq_lens.dtype}")
    elif seq_lens.device != q.device and seq_lens.device.type != "cpu":
        raise ValueError(f"seq_lens must be on the same device as q ({q.device}) or on the CPU, got {seq_lens.device}")
    if is_capturing and not seq_lens.is_cuda:
        raise ValueError("seq_lens on the CPU cannot be copied while a CUDA graph is captured: pass a GPU tensor")
    batch_size = 1 if q.ndim == 3 else q.shape[0]
    if not same_sizes(seq_lens.shape, (batch_size,)):
        why = "one value for all of a 3D q" if q.ndim == 3 else "one value a sample"
        raise ValueError(f"seq_lens must have shape ({batch_size},), {why}, got {tuple(seq_lens.shape)}")
    if can_read(seq_lens) and not is_capturing and seq_lens.numel():
        low, high = torch.stack(seq_lens.aminmax()).tolist()
        if low < 1 or high > seqlen:
            raise ValueError(f"seq_lens must be in 1..{seqlen}, got values from {low} to {high}")
    # Outside 0..2^31 only where the values could not be read: keep the wrap to 32 bits from making such a value valid.
    seq_lens = seq_lens.clamp(0, seqlen).to(device=q.device, dtype=torch.int32)
    return seq_lens.expand(q.shape[0]).contiguous()
