"""New keys and values of a cache in plain torch: their checks, their rotation and the writes into the cache.

Su et al., RoFormer, 2021, is where the rotation is from; flash-attn rotates keys when it appends them.
"""

import torch
from torch import Tensor

from ..checks import (OWN, can_read, check_alike, check_both, check_head_dim, check_is, check_needs, check_number,
                      check_shapes, check_tensor_of, empty_like, holds, is_known, same_sizes, sum_dtype)
from ..options import Append, Cache, Lengths
from .packed import begins_and_lengths, places_of_rows
from .pages import capacity_of, check_cache, check_rows, check_sequences, place_in_cache

ROTARY_STEP = 16  # rotary_dim is a multiple of it, as in flash-attn


def check_append(k, v, k_cache, v_cache, append, names=OWN):
    """Raise unless the rows k (B, Hk, Sn, D), or packed (1, Hk, T, D), v and append, whose q is checked, fit into the
    caches. check_dtype follows."""
    seqused_k = names.get("seqused_k", "seqused_k")
    if append.seqused_k is None:
        raise ValueError(f"{seqused_k} must be given with new keys, which go to the places from {seqused_k} on")
    check_alike(None, names, k=k, v=v, k_cache=k_cache)
    if append.cu_seqlens_k_new is not None:
        check_tensor_of("cu_seqlens_k_new", append.cu_seqlens_k_new, k.device)
    lengths = Lengths(append.cu_seqlens_k_new, None, None, append.seqused_k)
    cache, batch_size = Cache(append.page_table, append.batch_idx), lengths.num_samples(k) if k.ndim else 0
    if append.q is not None:
        check_shapes(holds(batch_size == Lengths(append.cu_seqlens_q).num_samples(append.q)),
                     f"k must have as many samples as q, got {batch_size}", q=append.q, k=k)
    # The checks of queries, which new keys pass as well.
    check_cache(k, k_cache, v_cache, lengths, cache, {**names, "q": "k", "cu_seqlens_q": "cu_seqlens_k_new"}, True)
    check_shapes(same_sizes(k.shape[:-1], v.shape[:-1]) and holds(k.shape[1] == k_cache.shape[1])
                 and holds(v.shape[-1] == v_cache.shape[-1]), "k and v must have the same shape, and the heads and "
                 "head_dims of the caches", names, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    _check_rotary(k, batch_size, append)
    values = append.seqused_k, *cache, *lengths, append.rotary_seqlens, append.cu_seqlens_q
    if k.is_cuda or not all(can_read(x) for x in values if isinstance(x, Tensor)):
        return
    capacity, begins, num_new = capacity_of(k_cache, cache), append.seqused_k.tolist(), _num_rows(k, lengths)
    for b, (begin, n) in enumerate(zip(begins, num_new)):
        check_room(f" of sample {b}", seqused_k, begin, n, capacity)
        check_sequences(f"the new keys of sample {b}", b, begin, begin + n, k_cache, cache, names)
    if append.rotary_cos is None:
        return
    rows = num_new
    if append.q is not None:
        num_q = _num_rows(append.q, Lengths(append.cu_seqlens_q))
        rows = [max(n, m if append.q_advances else min(m, 1)) for n, m in zip(num_new, num_q)]
    name, starts = (seqused_k, begins) if append.rotary_seqlens is None else (
        "rotary_seqlens", append.rotary_seqlens.tolist())
    for b, (start, n) in enumerate(zip(starts, rows)):
        if start < 0 or n and start + n > append.rotary_cos.shape[0]:
            raise ValueError(f"rotary_cos has {append.rotary_cos.shape[0]} positions, and sample {b} needs those from "
                             f"{name} {start} on, as many as its {n} rows")


def check_slots(key, value, key_cache, value_cache, slot_mapping):
    """Raise unless key (T, Hk, D) and value fit into caches (num_pages, page_size, Hk, D), at up to T slots."""
    tensors = dict(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    check_alike(None, **tensors)
    check_shapes(key.ndim == value.ndim == 3 and key_cache.ndim == value_cache.ndim == 4,
                 "Expected key and value (T, Hk, D) and caches (num_pages, page_size, Hk, D)", **tensors)
    check_shapes(all(same_sizes(x, y) for x, y in (
        (key.shape[1:], key_cache.shape[2:]), (value.shape[1:], value_cache.shape[2:]),
        (key.shape[:2], value.shape[:2]), (key_cache.shape[:3], value_cache.shape[:3]))),
        "key and value must have the heads and head_dims of the caches, and the same shape but for the head_dim, and "
        "so must the caches", **tensors)
    check_head_dim(key.shape[2], " of key")
    check_head_dim(value.shape[2], " of value")
    check_rows(is_written=True, key_cache=key_cache, value_cache=value_cache)
    check_tensor_of("slot_mapping", slot_mapping, key.device)
    check_shapes(holds(slot_mapping.shape[0] <= key.shape[0]), "slot_mapping must have a value for each row of key, or "
                 "fewer", slot_mapping=slot_mapping, key=key)
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    if not key.is_cuda and can_read(slot_mapping) and slot_mapping.numel():
        last = int(slot_mapping.max())
        check_is("slot_mapping", last, last < num_slots, f"below {num_slots}, the number of slots")


def _check_rotary(k, batch_size, append):
    cos, sin = append.rotary_cos, append.rotary_sin
    check_number("rotary_interleaved", append.rotary_interleaved)
    check_both(rotary_cos=cos, rotary_sin=sin)
    check_needs("rotary_cos and rotary_sin", cos is not None, rotary_seqlens=append.rotary_seqlens)
    if cos is None:
        return
    check_tensor_of("rotary_cos", cos, k.device, dtypes=(k.dtype,))
    check_tensor_of("rotary_sin", sin, k.device, dtypes=(k.dtype,), shapes=(cos.shape,))
    rotary_dim = 2 * cos.shape[1]
    check_shapes(not is_known(cos.shape[0] == 0) and holds(rotary_dim % ROTARY_STEP == 0) and holds(rotary_dim > 0)
                 and holds(rotary_dim <= k.shape[-1]), "rotary_cos must have a position, and "
                 f"{ROTARY_STEP // 2} columns or a multiple of them up to half of the head_dim {k.shape[-1]}",
                 rotary_cos=cos)
    if append.rotary_seqlens is not None:
        check_tensor_of("rotary_seqlens", append.rotary_seqlens, k.device, {"B": batch_size})


def check_room(whose, seqused_name, begin, num_new, capacity):
    if not holds(begin + num_new <= capacity):
        raise ValueError(f"the cache has no room for the new keys{whose}: {seqused_name} is {begin}, {num_new} are "
                         f"new, and there is room for {capacity}")


def _num_rows(x, lengths):
    """How many rows of x each sample has, as a list."""
    return lengths.cu_seqlens_q.diff().tolist() if lengths.is_packed else [x.shape[2]] * x.shape[0]


def append_shapes(k_new, v_new, k_cache, v_cache, *of_append):
    """Uninitialized outputs of an op that appends, as Backend.append returns them."""
    append = Append(*of_append)
    is_rotated = append.q is not None and append.rotary_cos is not None
    q_rotated = empty_like(append.q) if is_rotated else k_new.new_empty(0)
    return q_rotated, k_new.new_empty(0 if append.seqused_k is None else append.seqused_k.shape[0], dtype=torch.int32)


def append_in_torch(k, v, k_cache, v_cache, append):
    """A Backend's append."""
    size = k_cache.shape[2]
    q_rotated, lengths = append_shapes(k, v, k_cache, v_cache, *append)
    if append.slot_mapping is not None:
        slot, size = append.slot_mapping, max(1, size)
        sequence, place, is_valid = slot.div(size, rounding_mode="floor"), slot % size, True
    else:
        capacity = capacity_of(k_cache, Cache(append.page_table))
        taken = append.seqused_k.long().clamp(0, capacity)
        sample, row, num_new = _rows_of(k, append.cu_seqlens_k_new)
        if append.rotary_cos is not None:
            starts = taken if append.rotary_seqlens is None else append.rotary_seqlens.long()
            k = rotated(k, starts[sample] + row, append)
            if append.q is not None:
                q_sample, q_row, _ = _rows_of(append.q, append.cu_seqlens_q)
                q_rotated.copy_(rotated(append.q, starts[q_sample] + q_row * append.q_advances, append))
        place = taken[sample] + row
        is_valid = (row < num_new[sample]) & (place < capacity)
        lengths = (taken + num_new).clamp(max=capacity).int()
        cache = append if capacity else append._replace(page_table=None)
        sequence, place = place_in_cache(sample, place.clamp(max=max(0, capacity - 1)), cache, size)
    is_valid = is_valid & (sequence >= 0) & (sequence < k_cache.shape[0])
    for cache, new in ((k_cache, k), (v_cache, v)):
        _write(cache, new, *(x.flatten() for x in (sequence, place, is_valid)))
    return q_rotated, lengths


def _rows_of(x, cu_seqlens):
    """Each row's sample and its number there, (B, S), or (1, T) if packed, and each sample's number of rows, (B,)."""
    shape = x.shape[0], x.shape[2]
    if cu_seqlens is None:
        cu_seqlens = torch.arange(shape[0] + 1, device=x.device) * shape[1]
    begin, num_rows = begins_and_lengths(cu_seqlens, shape[0] * shape[1])
    sample, row, _ = places_of_rows(begin, num_rows, shape[0] * shape[1])
    return sample.view(shape), row.view(shape), num_rows


def rotated(x, position, append):
    """x (B, H, S, D), rotated in fp32 as at these positions (B, S)."""
    acc_dtype = sum_dtype(x.dtype)
    position = position.clamp(0, append.rotary_cos.shape[0] - 1)
    cos, sin = (table[position][:, None].to(acc_dtype) for table in (append.rotary_cos, append.rotary_sin))
    rotary_dim = 2 * cos.shape[-1]
    turned, rest = x[..., :rotary_dim].to(acc_dtype), x[..., rotary_dim:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if append.rotary_interleaved else turned.chunk(2, -1)
    a, b = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack((a, b), -1).flatten(-2) if append.rotary_interleaved else torch.cat((a, b), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _write(cache, new, sequence, place, is_valid):
    """The valid rows of new (B, Hk, S, D) into cache, in which sequence and place (B · S,) say where they go. The host
    waits for nothing, so that a CUDA graph can hold this: a row that is not valid becomes a copy of one that is, and
    where none is, all become one row that is in the cache."""
    if not (new.numel() and cache.numel()):
        return
    rows, cache = new.transpose(1, 2).flatten(0, 1), cache.transpose(1, 2)
    source = torch.where(is_valid, torch.arange(is_valid.shape[0], device=new.device), is_valid.int().argmax())
    at = sequence[source].clamp(0, cache.shape[0] - 1), place[source].clamp(0, cache.shape[1] - 1)
    cache.index_put_(at, torch.where(is_valid.any(), rows[source], cache[at]))
