"""Caches of keys and values in plain torch: their checks, and the copy of what the samples of a batch use of one."""

import torch

from ..checks import (OWN, can_read, check_alike, check_fit, check_index, check_is, check_samples, check_shapes,
                      check_sizes, check_tensor_of, holds, is_known, shown)
from .tree_mask import seen_in_tree


def check_cached(q, k, v, lengths, cache, names=OWN):
    """Raise unless q (B, H, Sq, D) or packed (1, H, Tq, D), a cache in k (N, Hk, S, D) and v, lengths and cache fit
    together, and the keys that the samples use are there. check_dtype follows."""
    check_cache(q, k, v, lengths, cache, names)
    if q.is_cuda or not all(x is None or can_read(x) for x in (*lengths, *cache[:3])):
        return
    batch_size, seqused_k = lengths.num_samples(q), lengths.seqused_k
    ends = [capacity_of(k, cache)] * batch_size if seqused_k is None else seqused_k.tolist()
    begins = [0] * batch_size if cache.leftpad_k is None else cache.leftpad_k.tolist()
    for b, (begin, end) in enumerate(zip(begins, ends)):
        check_index("leftpad_k", begin, end + 1, f"sample {b}", names)
        check_sequences(f"sample {b}", b, begin, end, k, cache, names)


def check_cache(q, k, v, lengths, cache, names=OWN, is_written=False):
    """check_cached, but for the values of cache, which say where a sample's keys are. is_written: as check_rows."""
    tensors = {"q": q, "k_cache": k, "v_cache": v}
    check_alike(None, names, **tensors)
    check_fit(tensors, names, is_cached=True)
    check_rows(names, is_written, k_cache=k, v_cache=v)
    if cache.page_table is not None:
        check_tensor_of("page_table", cache.page_table, q.device, names=names)
    capacity = capacity_of(k, cache)
    check_sizes(q, capacity)
    check_samples(lengths, q, capacity, names)
    batch_size, has_rows = lengths.num_samples(q), cache.page_table is not None and cache.batch_idx is None
    for name, x in (("cache_batch_idx", cache.batch_idx), ("leftpad_k", cache.leftpad_k),
                    ("page_table", cache.page_table if has_rows else None)):
        if x is not None:
            check_tensor_of(name, x, q.device, {"B": batch_size}, names)
    if cache.page_table is cache.batch_idx is None and not holds(k.shape[0] == batch_size):
        check_shapes(False, "without cache_batch_idx and page_table, the cache must have as many sequences as there "
                     f"are samples, {batch_size}", names, **tensors)
    if cache.page_table is not None and is_known(cache.page_table.shape[0] == 0) and not is_known(batch_size == 0):
        raise ValueError(f"{names.get('page_table', 'page_table')} must have rows for cache_batch_idx to number, got "
                         f"{shown(cache.page_table)}")


def check_rows(names=OWN, is_written=False, **caches):
    """ValueError unless the last dimension of each cache is contiguous, or if elements share memory that is written."""
    for name, x in caches.items():
        called, strides = names.get(name, name), x.stride()
        check_is(called, strides, holds(strides[-1] == 1), "of strides that end with 1, since no cache is copied")
        if is_written:
            check_is(called, strides, not any(is_known(step == 0) and is_known(size > 1)
                                              for step, size in zip(strides, x.shape)),
                     "of strides other than 0, since the cache is written")


def capacity_of(k, cache):
    """How many keys a sample has room for: none in a cache without sequences."""
    sequences = 1 if cache.page_table is None else cache.page_table.shape[1]
    return 0 if is_known(k.shape[0] == 0) else k.shape[2] * sequences


def check_sequences(whose, b, begin, end, k, cache, names):
    """ValueError unless the pages of sample b from place `begin` to `end` exist, or else its cached sequence."""
    row, (num_sequences, _, size, _) = b, k.shape
    if cache.batch_idx is not None:
        row, numbered = int(cache.batch_idx[b]), k if cache.page_table is None else cache.page_table
        check_index("cache_batch_idx", row, len(numbered), whose, names)
    if cache.page_table is not None and begin < end:
        for page in cache.page_table[row, begin // size:(end - 1) // size + 1].tolist():
            check_index("page_table", page, num_sequences, whose, names)


def with_own_rows(cache):
    """A checked Cache or Append with a row of page_table for each sample, in place of a cache_batch_idx, which on a GPU
    may be anything: a row that is not there has no page that is."""
    if cache.page_table is None or cache.batch_idx is None:
        return cache
    rows = cache.batch_idx.clamp(0, cache.page_table.shape[0] - 1)
    table = cache.page_table.index_select(0, rows).masked_fill_((rows != cache.batch_idx)[:, None], -1)
    return cache._replace(page_table=table, batch_idx=None)


def place_in_cache(sample, key, cache, size):
    """(sequence, place in it) of the keys of samples, in a cache of sequences or pages of `size` keys."""
    if cache.page_table is not None:
        return cache.page_table.long()[sample, key // size], key % size
    return sample if cache.batch_idx is None else cache.batch_idx.long()[sample], key


def over_gathered(forward):
    """A Backend's forward_cached, by its forward on copies (B, Hk, capacity, D) of what the samples use, with anything
    beyond their keys. For a packed q they are packed, with the same room for each. Values are clamped as in kernels."""

    def forward_cached(q, k, v, options, cache):
        lengths, capacity = options.lengths, capacity_of(k, cache)
        sample = torch.arange(lengths.num_samples(q), device=k.device)[:, None]
        key, seqused = torch.arange(capacity, device=k.device), torch.full_like(sample, capacity)
        if lengths.seqused_k is not None:
            seqused = lengths.seqused_k.long().clamp(0, capacity)[:, None]
        if cache.leftpad_k is not None:
            leftpad = cache.leftpad_k.long()[:, None].clamp(min=0)
            key, seqused = key + leftpad, (seqused - leftpad).clamp(min=0)
        sequence, place = place_in_cache(sample, key.clamp(max=capacity - 1), cache, k.shape[2])
        sequence, place = torch.broadcast_tensors(sequence.clamp(0, k.shape[0] - 1), place)
        k, v = (x[sequence, :, place].transpose(1, 2) for x in (k, v))
        options = options._replace(seqused_k=seqused[:, 0].int())
        if cache.tree_mask is not None:
            options = options._replace(attn_bias=seen_in_tree(cache.tree_mask, capacity, options.lengths))
        if lengths.is_packed:
            k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (k, v))
            bounds = torch.arange(len(sample) + 1, dtype=torch.int32, device=k.device) * capacity
            options = options._replace(cu_seqlens_k=bounds)
        return forward(q, k, v, options)

    return forward_cached
