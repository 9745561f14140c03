"""Attention to a cache of keys and values, as models that generate text have it: the facade.

A cache is one tensor of many sequences, or a pool of pages that a table gives to samples (Kwon et al., PagedAttention,
2023, section 4). Read next: pages.py, what it means in plain torch; flash_attn_kvcache.py, the same by flash-attn's
names.
"""

import math

from torch import Tensor

from . import reference
from .backends import Cache, Lengths, Options
from .checks import FP8_DTYPES, autocast, check_no_derivative, check_options, check_sinks, check_tensor, is_int
from .cuda import can_read_cache
from .interface import BACKENDS, backend_name
from .lengths import NO_WINDOW, check_max_seqlen, check_window_size
from .pages import check_cached, check_num_splits
from .scores import check_alibi_slopes, check_softcap


def attention_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, seqused_k: Tensor | None = None, *,
                           page_table: Tensor | None = None, cache_batch_idx: Tensor | None = None,
                           leftpad_k: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
                           max_seqlen_q: int | Tensor | None = None, seqused_q: Tensor | None = None,
                           causal: bool = False, sm_scale: float | None = None,
                           window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0.0,
                           sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, num_splits: int = 0,
                           return_lse: bool = False, backend: str = "auto") -> Tensor | tuple[Tensor, Tensor]:
    """softmax(sm_scale · Q Kᵀ) V of the keys and values that a cache holds for each sample.

    Args:
        q: (B, H, Sq, D), usually with Sq 1 or a few, in the dtypes of flash_attention but for float8. With cu_seqlens_q
            (1, H, Tq, D), packed. Under torch.autocast, q is cast if the caches have the dtype of autocast.
        k_cache, v_cache: (N, Hk, S, D), N cached sequences; with page_table (num_pages, Hk, page_size, D), pages of any
            size. v may have another head_dim. Read by their strides, of which that of the last dimension is 1: K and V
            may alternate in memory, and pages may lie head by head or row by row.
        seqused_k: int32 (B,), contiguous, on q's device: how many keys of a sample are valid, from the first of its
            sequence on; all if None. 0 is allowed.
        page_table: int32 (B, max_pages), its last dimension contiguous, on q's device: the pages of each sample in
            order. Entries beyond a sample's keys are not read. Samples may share pages.
        cache_batch_idx: int32 (B,), contiguous: the cached sequence of each sample, its own number if None. Not with
            page_table.
        leftpad_k: int32 (B,), contiguous: where the keys of a sample begin; those before are not seen, and seqlen_k is
            seqused_k - leftpad_k.
        cu_seqlens_q: int32 (B + 1,): where each sample's rows begin in a packed q.
        max_seqlen_q: an upper bound of the lengths in cu_seqlens_q, by which memory for partial results is reserved.
            Longer samples are served without splits. A tensor is never read, and counts as None.
        seqused_q: int32 (B,): how many rows of a sample are valid, as of flash_attention.
        causal, window_size: bottom-right aligned, as of flash_attention: the last row sees the last key.
        sm_scale, softcap, sinks, alibi_slopes, return_lse, backend: as of flash_attention.
        num_splits: into how many parts at most the keys of a sample are split, 1 to 256. 0: it depends on the sample's
            own lengths alone, so that its bits do not depend on its batch.

    Returns:
        out, as q with v's head_dim; with return_lse a tuple (out, lse), lse (B, H, Sq), or (1, H, Tq) of a packed q. A
        row that sees no key has out 0 and lse -inf, or its sink.

    Raises:
        TypeError: an input that is not a dense tensor, an unsupported dtype, dtypes that differ, or an argument of the
            wrong type.
        ValueError: a wrong shape, device, head_dim, option or backend, a cache whose last dimension is not contiguous,
            or cache_batch_idx together with page_table. The values of page_table, cache_batch_idx, leftpad_k and
            lengths are checked for CPU tensors. On a GPU they are clamped, so that nothing outside is read.
        NotImplementedError: an input requires grad or has a forward-mode tangent.
        Otherwise as flash_attention.
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, x)
    q = _autocast(q, k_cache)
    name = backend_name(backend, q, k_cache, v_cache, sinks)
    if backend == "auto" and name == "cuda" and not can_read_cache(q, k_cache, v_cache):
        name = "triton"
    chosen = BACKENDS[name]
    check_max_seqlen("max_seqlen_q", max_seqlen_q)
    lengths = Lengths(cu_seqlens_q, None, seqused_q, seqused_k)
    cache = Cache(page_table, cache_batch_idx, leftpad_k, check_num_splits(num_splits),
                  int(max_seqlen_q) if is_int(max_seqlen_q) else 0)
    check_cached(q, k_cache, v_cache, lengths, cache, [x for x in chosen.dtypes if x not in FP8_DTYPES])
    check_options(causal, sm_scale)
    why_not = chosen.why_not(q.device)
    if why_not is not None:
        raise why_not
    left, right = check_window_size(window_size)
    sinks = check_sinks(sinks, q)
    alibi_slopes = check_alibi_slopes(alibi_slopes, q, lengths)
    check_no_derivative("attention_with_kvcache", "flash_attention", q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks)
    scale = 1 / math.sqrt(q.shape[-1]) if sm_scale is None else float(sm_scale)
    options = Options(scale, (left, 0 if causal else right), lengths, sinks, return_lse=return_lse,
                      softcap=check_softcap(softcap), alibi_slopes=alibi_slopes)
    if q.numel() == 0 or k_cache.numel() == 0 or page_table is not None and page_table.numel() == 0:
        chosen = reference.BACKEND  # there is nothing to launch
    out, lse = chosen.forward_cached(q if q.stride(-1) == 1 else q.contiguous(), k_cache, v_cache, options, cache)
    return (out, lse) if return_lse else out


def _autocast(q, k_cache):
    """q, under torch.autocast in its dtype if the cache has that dtype: a cache is never cast."""
    cast, _, _ = autocast(q, None, None)
    return cast if cast.dtype == k_cache.dtype else q
