"""Packed batches: samples of different lengths one after the other. as_padded is for backends that know padded batches
alone, with_own_keys for those without gradients of keys that samples share.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import can_read, check_number, check_shapes, check_tensor, check_tensor_of, holds, is_int, is_known
from ..options import Lengths


def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack a padded batch: take what the mask says is valid, wherever it lies in a sample (flash_attn.bert_padding).
    The host waits for the number of valid positions, and for the largest length.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S) on its device, True or not 0 where a position is valid: bool, int64, int32 or uint8.

    Returns:
        (packed (T, ...), indices int64 (T,) of its rows in hidden_states.flatten(0, 1), cu_seqlens int32 (B + 1,), the
        largest length, the lengths int32 (B,)).

    TypeError: what is no dense tensor, or a mask of another dtype. ValueError: a wrong shape or device. RuntimeError:
    while a CUDA graph is captured.
    """
    check_tensor("hidden_states", hidden_states)
    mask = check_mask("attention_mask", attention_mask, hidden_states)
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a mask cannot be read while a CUDA graph is captured: pack the batch before, or give "
                           "cu_seqlens")
    seqused = mask.sum(1, dtype=torch.int32)
    indices = mask.flatten().nonzero().squeeze(1)
    cu_seqlens = pad(seqused.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(seqused.max()) if seqused.numel() else 0
    return hidden_states.flatten(0, 1).index_select(0, indices), indices, cu_seqlens, longest, seqused


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The reverse of unpad_input (flash_attn.bert_padding): (batch, seqlen, ...), 0 where nothing was valid.

    hidden_states: (T, ...). indices: int64 (T,) on its device, as of unpad_input. batch, seqlen: ints from 0 on.
    TypeError: what is no dense tensor, indices that are not int64, or a size that is no int. ValueError: a wrong shape,
    size or device, or more rows than the padded batch has.
    """
    x, total = hidden_states, check_number("batch", batch) * check_number("seqlen", seqlen)
    check_tensor("hidden_states", x)
    check_tensor_of("indices", indices, x.device, shapes=(x.shape[:1],))
    check_shapes(holds(x.shape[0] <= total), f"batch and seqlen have room for {total} rows", hidden_states=x)
    return x.new_zeros(total, *x.shape[1:]).index_copy(0, indices, x).unflatten(0, (batch, seqlen))


def check_mask(name, mask, x):
    """mask as bool, True or not 0 where a position of x (B, S, ...) is valid."""
    check_shapes(x.ndim > 1, "hidden_states must be (B, S, ...)", hidden_states=x)
    check_tensor_of(name, mask, x.device, dict(zip("BS", x.shape)))
    return mask != 0


def as_padded(forward, q, k, v, options):
    """The result of a packed batch, by a Backend's forward of padded batches: each sample gets rows of its own."""
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = options.lengths
    begin_q, seqlen_q = begins_and_lengths(cu_seqlens_q, q.shape[2])
    if seqused_q is not None:
        seqlen_q = seqlen_q.minimum(seqused_q.clamp(min=0))
    begin_k, seqlen_k = _keys(cu_seqlens_k, seqused_k, k.shape[2])
    rows, keys = _padded_rows(begin_q, seqlen_q, q.shape[2]), _padded_rows(begin_k, seqlen_k, k.shape[2])
    lengths = Lengths(seqused_q=seqlen_q.int(), seqused_k=seqlen_k.int())
    padded = (x[0][:, at].transpose(0, 1) for x, at in ((q, rows), (k, keys), (v, keys)))
    out, *of_rows = forward(*padded, options.with_lengths(lengths))
    sample, row, is_padding = places_of_rows(begin_q, seqlen_q, q.shape[2])
    row = row.clamp(max=out.shape[2] - 1)
    out = out[sample, :, row].transpose(0, 1)[None].masked_fill(is_padding[:, None], 0)
    return out, *(x if x is None else x[sample, :, row].t()[None].masked_fill(is_padding, float("-inf"))
                  for x in of_rows)


def with_own_keys(k, v, lengths, max_seqlen_k):
    """k, v and lengths of the same packed batch, in which no two samples share keys: copies of the keys of one sample
    after the other, in B · max_seqlen_k rows, as flash_attention describes. Gradients of what was copied more than once
    are added up in fp32 and in a fixed order. ValueError for a max_seqlen_k below the length of a sample, where the
    host may read that; elsewhere its keys are NaN.
    """
    total, batch_size = k.shape[2], lengths.seqused_k.shape[0]
    begin, seqlen = _keys(lengths.cu_seqlens_k, lengths.seqused_k, total)
    longest = int(seqlen.max()) if can_read(seqlen) and not (seqlen.is_cuda and is_int(max_seqlen_k)) else None
    if not is_int(max_seqlen_k):
        max_seqlen_k = total if longest is None else longest
    if longest is not None and max_seqlen_k < longest:
        raise ValueError(f"max_seqlen_k must be at least the largest of seqused_k, {longest}, got {max_seqlen_k}")
    capacity = _clamped(max_seqlen_k, total)
    bounds = pad(seqlen.clamp(max=capacity).cumsum(0), (1, 0))
    sample, row, _ = places_of_rows(bounds[:-1], seqlen, batch_size * capacity)
    # Rows after the last sample are copies of any keys: no row of q sees them, and their gradients are 0.
    rows = (begin[sample] + row) % total
    k, v = (_take_rows(x[0].transpose(0, 1), rows) for x in (k, v))
    if longest is None and not is_known(capacity >= total):
        # By a factor, which gradients have too: masked_fill would make theirs 0.
        factor = k.new_ones(batch_size).masked_fill(seqlen > capacity, float("nan"))[sample, None, None]
        k, v = k * factor, v * factor
    k, v = (x.transpose(0, 1)[None] for x in (k, v))
    return k, v, lengths._replace(cu_seqlens_k=bounds.int(), seqused_k=None)


def _clamped(size, limit):
    """max(1, min(size, limit)) without a guard while torch traces. Dynamo of torch 2.11 takes no sym_min of ints."""
    size = size if is_known(size <= limit) else limit if is_known(limit <= size) else torch.sym_min(size, limit)
    return size if is_known(size >= 1) else 1 if is_known(size <= 1) else torch.sym_max(size, 1)


# These two are ops, since torch.compile would make atomics of what is in the second one, and Dynamo of torch 2.11 loses
# the gradient of an autograd.Function around it. Each is the derivative of the other.
@torch.library.custom_op("minimal_attn::take_rows", mutates_args=())
def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x (T, ...) at the rows (N,): (N, ...), contiguous."""
    return x.index_select(0, rows)


@torch.library.custom_op("minimal_attn::add_rows", mutates_args=())
def _add_rows(parts: Tensor, rows: Tensor, total: int) -> Tensor:
    """(total, ...) of parts (N, ...): the sum of those for each of the rows (N,)."""
    wide = parts.to(torch.promote_types(parts.dtype, torch.float32))
    sums = wide.new_zeros(total, *parts.shape[1:])
    # Each device takes the function that adds in a fixed order: index_add_ has atomics on a GPU, index_put_ on the CPU.
    sums.index_put_((rows,), wide, accumulate=True) if parts.is_cuda else sums.index_add_(0, rows, wide)
    return sums.to(parts.dtype)


def _save_rows(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])
    ctx.total = inputs[0].shape[0]


_take_rows.register_fake(lambda x, rows: x.new_empty(*rows.shape, *x.shape[1:]))
_add_rows.register_fake(lambda parts, rows, total: parts.new_empty(total, *parts.shape[1:]))
_take_rows.register_autograd(lambda ctx, dout: (_add_rows(dout, *ctx.saved_tensors, ctx.total), None),
                             setup_context=_save_rows)
_add_rows.register_autograd(lambda ctx, dsums: (_take_rows(dsums, *ctx.saved_tensors), None, None),
                            setup_context=_save_rows)


def begins_and_lengths(cu_seqlens, total):
    """(B,) and (B,): where samples begin, and their lengths."""
    bounds = cu_seqlens.long().clamp(0, total)
    bounds[:1].zero_()
    return bounds[:-1], bounds.diff().clamp(min=0)


def places_of_rows(begin, seqlen, total):
    """(total,) each, of the rows of a packed batch: sample, number within it, and whether the row is padding."""
    row = torch.arange(total, device=begin.device)
    sample = torch.searchsorted(begin.cummax(0).values, row, right=True) - 1
    row = row - begin[sample]
    return sample, row, row >= seqlen[sample]


def _keys(cu_seqlens_k, seqused_k, total):
    """begins_and_lengths of keys: with seqused_k, a sample's keys may reach into the next ones'."""
    begin, seqlen = begins_and_lengths(cu_seqlens_k, total)
    return begin, seqlen if seqused_k is None else seqused_k.clamp(min=0).minimum(total - begin)


def _padded_rows(begin, seqlen, total):
    """The packed row of each padded one, (B, S). S is the largest length, or `total` where lengths cannot be read."""
    longest = min(max(1, int(seqlen.max())), total) if can_read(seqlen) else total
    return (begin[:, None] + torch.arange(longest, device=begin.device)).clamp(max=total - 1)
