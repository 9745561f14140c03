"""The facade of caches of keys and values: one tensor of many sequences, or a pool of pages that a table gives to
samples (Kwon et al., PagedAttention, 2023, section 4).
"""

from torch import Tensor

from .attention import BACKENDS, backend_name
from .backends import reference
from .backends.cuda import can_read_cache
from .checks import (FP8_DTYPES, NO_WINDOW, OWN, autocast, check_both, check_dtype, check_needs, check_no_derivative,
                     check_number, checked_options, is_int, is_known, is_static, shown)
from .options import NO_MASK, Append, Cache, Options
from .reference.append import check_append, check_slots
from .reference.pages import check_cached, with_own_rows
from .reference.tree_mask import check_tree_mask


def attention_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, seqused_k: Tensor | None = None, *,
                           page_table: Tensor | None = None, cache_batch_idx: Tensor | None = None,
                           leftpad_k: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
                           max_seqlen_q: int | Tensor | None = None, seqused_q: Tensor | None = None,
                           causal: bool = False, sm_scale: float | None = None,
                           window_size: tuple[int, int] = NO_WINDOW, attention_chunk: int = 0, softcap: float = 0,
                           sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, num_splits: int = 0,
                           return_lse: bool = False, k: Tensor | None = None, v: Tensor | None = None,
                           cu_seqlens_k_new: Tensor | None = None, rotary_cos: Tensor | None = None,
                           rotary_sin: Tensor | None = None, rotary_interleaved: bool = True,
                           rotary_seqlens: Tensor | None = None, tree_mask: Tensor | None = None,
                           backend: str = "auto") -> Tensor | tuple[Tensor, Tensor]:
    """softmax(sm_scale · Q Kᵀ) V of the keys and values that a cache holds for each sample.

    New keys and values, k and v, are first written into the cache, after those that are there: q then attends to both.

    Args:
        q: (B, H, Sq, D), usually with Sq 1 or a few, in the dtypes of flash_attention but for float8. With cu_seqlens_q
            (1, H, Tq, D), packed. Under torch.autocast, q is cast if the caches have the dtype of autocast.
        k_cache, v_cache: in q's dtype, (N, Hk, S, D), N cached sequences; with page_table (num_pages, Hk, page_size,
            D), pages of any size. v may have another head_dim. Read by their strides, of which that of the last
            dimension is 1: K and V may alternate in memory, and pages may lie head by head or row by row.
        seqused_k: int32 (B,), contiguous, on q's device: how many keys of a sample are valid, from the first of its
            sequence on; all if None. 0 is allowed.
        page_table: int32 (B, max_pages), its last dimension contiguous, on q's device: the pages of each sample in
            order; with cache_batch_idx any number of rows. Only entries of keys are read. Samples may share pages.
        cache_batch_idx: int32 (B,), contiguous: each sample's sequence, or row of page_table; its own number if None.
        leftpad_k: int32 (B,), contiguous: where a sample's keys begin, so that seqlen_k is seqused_k - leftpad_k.
        cu_seqlens_q: int32 (B + 1,): where each sample's rows begin in a packed q.
        max_seqlen_q: an upper bound of the lengths in cu_seqlens_q, by which kernels are chosen and memory is reserved:
            a tight one is faster. Longer samples are served without splits. A tensor is never read, and counts as None.
        seqused_q: int32 (B,): how many rows of a sample are valid, as of flash_attention.
        causal, window_size, attention_chunk, sm_scale, softcap, sinks, alibi_slopes, return_lse, backend: as of
            flash_attention. The last row sees the last key. On a GPU, "cuda" serves float16 and bfloat16 from sm_80 on,
            where head_dims, strides and addresses are multiples of 16 bytes, and "auto" takes "triton" for all else.
            "torch", "reference" and "cuda" on the CPU copy the keys that samples have room for.
        num_splits: into how many parts at most the keys of a sample are split, 1 to 256, by its own lengths alone. Then
            its bits do not depend on its batch. 0: as is fastest; "cuda" then looks at the lengths of the whole batch.
        k, v, cu_seqlens_k_new, rotary_seqlens: as append_to_kvcache. seqused_k must then be given; it counts the keys
            before the append, and seqlen_k counts old and new ones. Under torch.autocast, k and v are cast as q is.
        rotary_cos, rotary_sin, rotary_interleaved: as append_to_kvcache, for k and for q: row t of a sample's q as at
            position rotary_seqlens[b] + t with causal, a window or chunks, else all rows as at rotary_seqlens[b].
        tree_mask: bool (Sq, Sq) or (B, Sq, Sq), Sq at most 64, for a draft that branches: row i sees the j-th of the
            last seqlen_q keys of its sample where tree_mask[..., i, j], and all keys before them. It takes the place
            of causal. Or int64 (Sq,) or (B, Sq), as pack_tree_mask gives it. All of these keys must be finite.

    Returns:
        out, as q with v's head_dim; with return_lse a tuple (out, lse), lse (B, H, Sq), or (1, H, Tq) of a packed q. A
        row that sees no key has out 0 and lse -inf, or its sink.

    Raises:
        As append_to_kvcache and flash_attention, before anything is written. The values of page_table, cache_batch_idx,
        leftpad_k and lengths are checked for CPU tensors, and clamped on a GPU, where they must not change while the
        call runs, but may between replays of a CUDA graph.
        NotImplementedError: also tree_mask together with cu_seqlens_q, window_size, attention_chunk, alibi_slopes or
        rotary_cos.
    """
    given = Options(cu_seqlens_q, None, seqused_q, seqused_k, sinks, alibi_slopes, None, sm_scale, softcap,
                    attention_chunk=attention_chunk, return_lse=return_lse)
    cache = Cache(page_table, cache_batch_idx, leftpad_k, tree_mask, num_splits, max_seqlen_q)
    append = Append(cu_seqlens_k_new=cu_seqlens_k_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                    rotary_seqlens=rotary_seqlens, rotary_interleaved=rotary_interleaved)
    return attend_cached(q, k_cache, v_cache, given, cache, append, k, v, causal, window_size, backend)


def attend_cached(q, k_cache, v_cache, given, cache, append, k, v, causal, window_size, backend, names=OWN):
    """attention_with_kvcache of what its caller gave. append: those of its fields that are not in given and cache.
    names: as in checks.py, and what the caller calls this function."""
    q, k, v = _autocast(k_cache, q, k, v)
    check_cached(q, k_cache, v_cache, given.lengths, cache, names)
    chosen = _backend_of(backend, lambda: can_read_cache(q, k_cache, v_cache), q, k_cache, v_cache, given.sinks)
    check_number("max_seqlen_q", cache.max_seqlen_q)
    check_number("num_splits", cache.num_splits)
    options = checked_options(given, q, k_cache, causal, window_size, names=names, is_whole=False)
    tree_mask, max_seqlen_q = cache.tree_mask, cache.max_seqlen_q
    if tree_mask is not None:
        tree_mask = check_tree_mask(tree_mask, q, causal, {
            "cu_seqlens_q": (options.lengths.is_packed, "give a padded q, and seqused_q"),
            "window_size": (options.window != NO_WINDOW, "hide keys by tree_mask or leftpad_k"),
            "attention_chunk": (options.attention_chunk > 0, "hide keys by tree_mask or leftpad_k"),
            "alibi_slopes": (options.alibi_slopes is not None, "places in the cache are not positions in the text"),
            "rotary_cos": (append.rotary_cos is not None, "rotate q and k by the depths of their tokens before")})
    is_bound = is_int(max_seqlen_q) and is_static(max_seqlen_q)
    cache = with_own_rows(cache._replace(tree_mask=tree_mask, num_splits=int(cache.num_splits),
                                         max_seqlen_q=int(max_seqlen_q) if is_bound else 0))
    q = _rows_contiguous(q)
    check_both(k=k, v=v)
    has_new = k is not None
    check_needs("new keys and values, k and v", has_new, cu_seqlens_k_new=append.cu_seqlens_k_new,
                rotary_cos=append.rotary_cos, rotary_sin=append.rotary_sin, rotary_seqlens=append.rotary_seqlens)
    if has_new:
        append = append._replace(seqused_k=options.seqused_k, page_table=cache.page_table, batch_idx=cache.batch_idx,
                                 q=q, cu_seqlens_q=options.cu_seqlens_q, q_advances=options.mask != NO_MASK)
        check_append(k, v, k_cache, v_cache, append, names)
    _check_runs(chosen, q)
    tensors = {"q": q, names.get("k_cache", "k_cache"): k_cache, names.get("v_cache", "v_cache"): v_cache,
               "sinks": options.sinks}
    if has_new:
        tensors |= {"k": k, "v": v, "rotary_cos": append.rotary_cos, "rotary_sin": append.rotary_sin}
    check_no_derivative(names.get("function", "attention_with_kvcache"), "flash_attention", **tensors)
    if _is_empty(q, k_cache, cache.page_table):
        chosen = reference.BACKEND  # there is nothing to launch
    if has_new:
        q_rotated, seqused_k = _append(chosen, k, v, k_cache, v_cache, append)
        q = q if append.rotary_cos is None else q_rotated
        options = options._replace(seqused_k=seqused_k)
    out, lse = chosen.forward_cached(q, k_cache, v_cache, options, cache)
    return (out, lse) if options.return_lse else out


def append_to_kvcache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, seqused_k: Tensor, *,
                      page_table: Tensor | None = None, cache_batch_idx: Tensor | None = None,
                      cu_seqlens_k_new: Tensor | None = None, rotary_cos: Tensor | None = None,
                      rotary_sin: Tensor | None = None, rotary_interleaved: bool = True,
                      rotary_seqlens: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Write new keys and values into a cache, after those that each sample has there. Nothing else of it changes.

    Args:
        k, v: (B, Hk, Sn, D) and (B, Hk, Sn, Dv), in the caches' dtype; with cu_seqlens_k_new packed, (1, Hk, T, ...).
        k_cache, v_cache: as attention_with_kvcache, float32, float16, bfloat16 or float64.
        seqused_k: int32 (B,), contiguous: how many places of a sample are taken, from the first of its sequence or
            pages on. Row t of sample b goes to place seqused_k[b] + t.
        page_table, cache_batch_idx: as attention_with_kvcache. If two samples write to one place, one of them wins.
        cu_seqlens_k_new: int32 (B + 1,), contiguous: where each sample's rows begin in packed k and v.
        rotary_cos, rotary_sin: (S_ro, rotary_dim / 2), contiguous, in the dtype of k, rotary_dim a multiple of 16 and
            at most D: cosine and sine of each position. The first rotary_dim columns of k are rotated before they are
            written, in fp32 (fp64 for float64).
        rotary_interleaved: rotate the columns (2i, 2i + 1) as a pair, else (i, i + rotary_dim / 2), as transformers.
        rotary_seqlens: int32 (B,), contiguous: row t of sample b is rotated as at position rotary_seqlens[b] + t.
            seqused_k if None.
        backend: as flash_attention.

    Returns:
        int32 (B,): how many places of each sample are taken now.

    Raises:
        TypeError: an input that is not a dense tensor, an unsupported dtype, or dtypes that differ.
        ValueError: a wrong shape, device or head_dim, a cache whose last dimension is not contiguous or whose elements
            share memory, or one argument without another that it needs. For CPU tensors also new rows for which there
            is no room or page, and positions beyond rotary_cos. On a GPU such rows are not written, and positions count
            as the nearest that there is.
        NotImplementedError: an input requires grad or has a forward-mode tangent.
    """
    k, v = _autocast(k_cache, k, v)
    append = Append(seqused_k, page_table, cache_batch_idx, cu_seqlens_k_new, rotary_cos=rotary_cos,
                    rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens, rotary_interleaved=rotary_interleaved)
    check_append(k, v, k_cache, v_cache, append)
    chosen = _backend_of(backend, lambda: can_read_cache(k), k, name="k")
    _check_runs(chosen, k)
    check_no_derivative("append_to_kvcache", "torch.cat", k=k, v=v, k_cache=k_cache, v_cache=v_cache,
                        rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    return _append(chosen, k, v, k_cache, v_cache, with_own_rows(append))[1]


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
                      kv_cache_dtype: str = "auto", k_scale: Tensor | None = None, v_scale: Tensor | None = None, *,
                      backend: str = "auto") -> None:
    """Write new keys and values into pages, each to a slot of its own, as vLLM's reshape_and_cache_flash.

    Args:
        key, value: (T, Hk, D) and (T, Hk, Dv), float32, float16, bfloat16 or float64.
        key_cache, value_cache: (num_pages, page_size, Hk, D) and (num_pages, page_size, Hk, Dv), in the dtype of key,
            of any strides, of which that of the last dimension is 1.
        slot_mapping: int64 (T,) or shorter, contiguous: row t goes to place s % page_size of page s // page_size, with
            s = slot_mapping[t]. Rows of negative slots, and those beyond slot_mapping, are not written. If two rows
            have one slot, one of them wins.
        kv_cache_dtype: "auto", or the name of the caches' dtype. k_scale, v_scale: of fp8 caches; they change nothing.
        backend: as flash_attention.

    Raises:
        As append_to_kvcache. ValueError: for CPU tensors also a slot that does not exist; on a GPU such rows are not
        written. NotImplementedError: also another kv_cache_dtype.
    """
    check_slots(key, value, key_cache, value_cache, slot_mapping)
    chosen = _backend_of(backend, lambda: can_read_cache(key), key, name="key")
    _check_runs(chosen, key)
    if kv_cache_dtype not in ("auto", str(key_cache.dtype).removeprefix("torch.")):
        raise NotImplementedError(f"reshape_and_cache: kv_cache_dtype {shown(kv_cache_dtype)} is not supported for "
                                  f"caches in {key_cache.dtype}, only 'auto' and the name of their dtype are")
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    check_no_derivative("reshape_and_cache", "torch.cat", key=key, value=value, **caches)
    rows = (x[:slot_mapping.shape[0]].transpose(0, 1)[None] for x in (key, value))
    _append(chosen, *rows, *(x.transpose(1, 2) for x in caches.values()), Append(slot_mapping=slot_mapping))


def _backend_of(backend, can_serve, x, *others, name="q"):
    """The Backend that a caller's backend means for caches and x, which the caller calls `name`: "triton" where "auto" means a "cuda" that cannot serve the call."""
    chosen = backend_name(backend, x, *others)
    chosen = BACKENDS["triton" if backend == "auto" and chosen == "cuda" and not can_serve() else chosen]
    check_dtype(x, [dtype for dtype in chosen.dtypes if dtype not in FP8_DTYPES], name)
    return chosen


def _check_runs(chosen, x):
    """Raise if a backend cannot run on x's device."""
    if (why_not := chosen.why_not(x.device)) is not None:
        raise why_not


def _append(chosen, k, v, k_cache, v_cache, append):
    """chosen.append, or the reference's where there is nothing to launch."""
    append_rows = (reference.BACKEND if _is_empty(k, k_cache, append.page_table) else chosen).append
    return append_rows(_rows_contiguous(k), _rows_contiguous(v), k_cache, v_cache, append)


def _is_empty(*tensors):
    """Whether one of these tensors, or None, has no elements."""
    return any(x is not None and is_known(x.numel() == 0) for x in tensors)


def _rows_contiguous(x):
    return x if is_known(x.stride(-1) == 1) else x.contiguous()


def _autocast(k_cache, *tensors):
    """The tensors, under torch.autocast in its dtype if the cache has that dtype: a cache is never cast."""
    cast = autocast(*tensors)
    return cast if getattr(cast[0], "dtype", None) == getattr(k_cache, "dtype", None) else tensors
