"""Caches of keys and values in plain torch: their checks, and the copy of what the samples of a batch use of one.

Read next: reference.py, which is given such copies.
"""

import torch

from .backends import Lengths


def over_gathered(forward):
    """A Backend's forward_cached, by its forward on copies of what the samples use."""

    def forward_cached(q, k, v, options, cache):
        k, v, lengths = gathered(q, k, v, options.lengths, cache)
        return forward(q, k, v, options._replace(lengths=lengths))

    return forward_cached


def gathered(q, k, v, lengths, cache):
    """(k, v, lengths) of the batch that a cache stands for: copies (B, Hk, capacity, D), 0 beyond a sample's keys. For
    a packed q they are packed as well, with the same room for each sample. Values are clamped as kernels clamp them.
    """
    num_sequences, nheads_k, size, _ = k.shape
    is_paged, is_packed = cache.page_table is not None, lengths.is_packed
    batch_size = lengths.cu_seqlens_q.shape[0] - 1 if is_packed else q.shape[0]
    capacity = size * cache.page_table.shape[1] if is_paged else size
    key = torch.arange(capacity, device=k.device).expand(batch_size, -1)
    seqused = key.new_full((batch_size, 1), capacity)
    if lengths.seqused_k is not None:
        seqused = lengths.seqused_k.long()[:, None].clamp(0, capacity)
    if cache.leftpad_k is not None:
        leftpad = cache.leftpad_k.long()[:, None].clamp(min=0)
        key, seqused = key + leftpad, (seqused - leftpad).clamp(min=0)
    is_hidden = torch.arange(capacity, device=k.device) >= seqused
    if num_sequences:
        key = key.clamp(max=capacity - 1)
        if is_paged:
            sequence = cache.page_table.long().gather(1, key // size)
        elif cache.batch_idx is not None:
            sequence = cache.batch_idx.long()[:, None]
        else:
            sequence = torch.arange(batch_size, device=k.device)[:, None]
        place = sequence.clamp(0, num_sequences - 1), slice(None), key % size if is_paged else key
        k, v = (x[place].masked_fill(is_hidden[..., None, None], 0).transpose(1, 2) for x in (k, v))
    else:
        k, v = (x.new_zeros(batch_size, nheads_k, capacity, x.shape[-1]) for x in (k, v))
    if not is_packed:
        return k, v, lengths._replace(seqused_k=seqused[:, 0].int())
    begin = torch.arange(batch_size + 1, dtype=torch.int32, device=k.device) * capacity
    k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (k, v))
    return k, v, lengths._replace(cu_seqlens_k=begin, seqused_k=seqused[:, 0].int())
