"""The functions of flash-attn, by their names and in the order of flash-attn 2, over flash_attention. What flash-attn
3, flash-attn 4 and vLLM add to them are keywords.
"""

import inspect

from torch import Tensor

from ..attention import attend, fast_path
from ..caches import attend_cached
from ..checks import (NO_WINDOW, autocast, check_apart, check_is, check_layout, check_max_seqlens, check_needs,
                      check_number, check_tensor, check_tensor_of, out_dtype, same_sizes, wants_gradient)
from ..options import NO_BLOCK_MASK, Append, Cache, Options

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]
# Names of arguments and functions in errors, as in checks.py. _names are those of a function that calls another one.
NAMES = {name: {"function": name, "sm_scale": "softmax_scale"} for name in (
    "flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func")}
NAMES["flash_attn_varlen_qkvpacked_func"] |= {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen")}


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0, softmax_scale: float | None = None,
                    causal: bool = False, window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
                    *, out: Tensor | None = None, s_aux: Tensor | None = None, learnable_sink: Tensor | None = None,
                    sinks: Tensor | None = None, return_softmax_lse: bool = False, return_lse: bool = False,
                    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
                    qv: Tensor | None = None, attention_chunk: int = 0, num_splits: int = 0,
                    pack_gqa: bool | None = None, sm_margin: int = 0, fa_version: int | None = None,
                    score_mod: None = None, mask_mod: None = None, aux_tensors: None = None,
                    dropout_seed: Tensor | None = None, backend: str = "auto",
                    _names: dict = NAMES["flash_attn_func"]) -> Result:
    """flash_attention with the signature and the layout of flash-attn (flash_attn.flash_attn_func).

    Args:
        q: (B, Sq, H, D); k, v: (B, Sk, Hk, D), v also with another head_dim.
        softmax_scale: flash_attention's sm_scale, 1/sqrt(D) if None.
        window_size: (left, right) as flash_attention; None is (-1, -1).
        return_attn_probs: return (out, lse, None); the probabilities themselves are never formed.
        return_softmax_lse, return_lse: return (out, lse).
        out: (B, Sq, H, D) with v's head_dim, of the result's dtype, on q's device: the result goes there. No gradients.
        s_aux, learnable_sink, sinks: three names of the sinks (H,), those of flash-attn 3, flash-attn 4 and vLLM.
        q_descale, k_descale, v_descale, qv, score_mod, mask_mod, aux_tensors: only their defaults are supported.
        num_splits, pack_gqa, sm_margin, fa_version: change nothing.
        All others: as flash_attention.

    Returns:
        out (B, Sq, H, D), with v's head_dim, in q's dtype, or in autocast's; lse (B, H, Sq) in fp32, natural log.

    Raises:
        As flash_attention. NotImplementedError: an unsupported argument. TypeError: two names of one argument.
    """
    return_lse = return_lse or return_softmax_lse or return_attn_probs
    window_size = NO_WINDOW if window_size is None else window_size
    if s_aux is not None or learnable_sink is not None:
        sinks = one_of(_names, s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks)
    given = Options(None, None, None, None, sinks, alibi_slopes, None, softmax_scale, softcap, -1, -1, attention_chunk,
                    dropout_p, dropout_seed, False, *NO_BLOCK_MASK, deterministic, True, q_descale, k_descale,
                    v_descale, None, return_lse)
    if out is qv is score_mod is mask_mod is aux_tensors is None:
        result = fast_path(q, k, v, given, causal, window_size, backend, True)
        if result is not None:
            return (*result, None) if return_attn_probs else result
    refuse(_names, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, qv=qv, score_mod=score_mod,
           mask_mod=mask_mod, aux_tensors=aux_tensors)
    return _attend(_names, q, k, v, given, out, return_attn_probs, causal, window_size, backend)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
                           max_seqlen_q: int | Tensor | None = None, max_seqlen_k: int | Tensor | None = None,
                           dropout_p: float = 0, softmax_scale: float | None = None, causal: bool = False,
                           window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0,
                           alibi_slopes: Tensor | None = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: Tensor | None = None, *,
                           out: Tensor | None = None, s_aux: Tensor | None = None,
                           learnable_sink: Tensor | None = None, sinks: Tensor | None = None,
                           seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
                           return_softmax_lse: bool = False, return_lse: bool = False,
                           q_descale: Tensor | None = None, k_descale: Tensor | None = None,
                           v_descale: Tensor | None = None, qv: Tensor | None = None,
                           page_table: Tensor | None = None, attention_chunk: int = 0, num_splits: int = 0,
                           pack_gqa: bool | None = None, scheduler_metadata: Tensor | None = None, sm_margin: int = 0,
                           fa_version: int | None = None, ver: int | None = None, score_mod: None = None,
                           mask_mod: None = None, aux_tensors: None = None, dynamic_causal: bool | None = None,
                           min_seqlen_k: int | None = None, gather_kv_indices: Tensor | None = None,
                           dropout_seed: Tensor | None = None, backend: str = "auto",
                           _names: dict = NAMES["flash_attn_varlen_func"]) -> Result:
    """Attention of a packed batch, whose samples lie one after the other (flash_attn.flash_attn_varlen_func).

    Args:
        q: (Tq, H, D); k, v: (Tk, Hk, D), v also with another head_dim.
        block_table, page_table: two names of one argument, those of flash-attn 2 and 3: int32 (B, max_pages), the pages
            of each sample in k (num_pages, page_size, Hk, D) and v, as attention_with_kvcache, also for num_splits.
            seqused_k, or the differences of the entries of cu_seqlens_k, say how many keys a sample has. Without both,
            all pages are full. There is no dropout and no gradient.
        scheduler_metadata, ver: change nothing.
        dynamic_causal, min_seqlen_k, gather_kv_indices: only None, False and 0 are supported.
        All others: as flash_attn_func and flash_attention, but out is (Tq, H, D).

    Returns and Raises:
        As flash_attn_func, but out is (Tq, H, D) and lse (H, Tq).
    """
    window_size = NO_WINDOW if window_size is None else window_size
    if s_aux is not None or learnable_sink is not None:
        sinks = one_of(_names, s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks)
    check_max_seqlens(max_seqlen_q, max_seqlen_k, _names)
    return_lse = return_lse or return_softmax_lse or return_attn_probs
    given = Options(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, None, softmax_scale, softcap,
                    -1, -1, attention_chunk, dropout_p, dropout_seed, False, *NO_BLOCK_MASK, deterministic, True,
                    q_descale, k_descale, v_descale, None, return_lse)
    if (block_table is page_table is out is qv is score_mod is mask_mod is aux_tensors is dynamic_causal is min_seqlen_k
            is gather_kv_indices is None):
        result = fast_path(q, k, v, given, causal, window_size, backend, True)
        if result is not None:
            return (*result, None) if return_attn_probs else result
    refuse(_names, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, qv=qv, score_mod=score_mod,
           mask_mod=mask_mod, aux_tensors=aux_tensors, dynamic_causal=dynamic_causal, min_seqlen_k=min_seqlen_k,
           gather_kv_indices=gather_kv_indices)
    if cu_seqlens_q is None:
        raise ValueError(f"{_names['function']}: {_names.get('cu_seqlens_q', 'cu_seqlens_q')} must be given; "
                         "flash_attn_func takes batches without it")
    if block_table is not None or page_table is not None:
        return _attend_pages(_names, q, k, v, given, block_table, page_table, max_seqlen_q, num_splits, out,
                             return_attn_probs, causal, window_size, backend)
    check_needs("a page table: give block_table, or cu_seqlens_k, which says where the keys of a sample begin",
                cu_seqlens_k is not None, seqused_k=seqused_k)
    return _attend(_names, q, k, v, given, out, return_attn_probs, causal, window_size, backend, max_seqlen_k)


def _parameters(function, *hidden):
    return [x for x in inspect.signature(function).parameters.values() if x.name not in hidden]


def _passes_on_to(whole, *replaced):
    """Decorator of a function whose *args and **keywords are the parameters of `whole` without the replaced ones."""
    def decorate(function):
        parameters = *_parameters(function, "args", "keywords"), *_parameters(whole, "_names", *replaced)
        function.__signature__ = inspect.Signature(parameters, return_annotation=Result)
        return function

    return decorate


for _whole in (flash_attn_func, flash_attn_varlen_func):
    _whole.__signature__ = inspect.Signature(_parameters(_whole, "_names"), return_annotation=Result)
OF_QKV, OF_VARLEN = ("q", "k", "v"), ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "block_table")


@_passes_on_to(flash_attn_func, *OF_QKV)
def flash_attn_qkvpacked_func(qkv: Tensor, *args, **keywords) -> Result:
    """flash_attn_func of qkv (B, S, 3, H, D), which holds q, k and v; none is copied."""
    names = NAMES["flash_attn_qkvpacked_func"]
    check_layout("(B, S, 3, H, D)", names, {-3: 3}, qkv=qkv)
    return flash_attn_func(*qkv.unbind(-3), *args, **keywords, _names=names)


@_passes_on_to(flash_attn_func, *OF_QKV)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args, **keywords) -> Result:
    """flash_attn_func of q (B, Sq, H, D) and kv (B, Sk, 2, Hk, D), which holds k and v; none is copied."""
    names = NAMES["flash_attn_kvpacked_func"]
    check_layout("(B, S, 2, H, D)", names, {-3: 2}, kv=kv)
    return flash_attn_func(q, *kv.unbind(-3), *args, **keywords, _names=names)


@_passes_on_to(flash_attn_varlen_func, *OF_VARLEN, "max_seqlen_q", "max_seqlen_k")
def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor | None = None, *args,
                                     **keywords) -> Result:
    """flash_attn_varlen_func of qkv (T, 3, H, D), which holds q, k and v; none is copied."""
    names = NAMES["flash_attn_varlen_qkvpacked_func"]
    check_layout("(T, 3, H, D)", names, {-3: 3}, qkv=qkv)
    return flash_attn_varlen_func(*qkv.unbind(-3), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **keywords,
                                  _names=names)


@_passes_on_to(flash_attn_varlen_func, *OF_VARLEN)
def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *args,
                                    **keywords) -> Result:
    """flash_attn_varlen_func of q (Tq, H, D) and kv (Tk, 2, Hk, D), which holds k and v; none is copied."""
    names = NAMES["flash_attn_varlen_kvpacked_func"]
    check_layout("(T, 2, H, D)", names, {-3: 2}, kv=kv)
    return flash_attn_varlen_func(q, *kv.unbind(-3), cu_seqlens_q, cu_seqlens_k, *args, **keywords, _names=names)


def refuse(names, **arguments):
    """NotImplementedError for the first argument that is not its default, None or 0."""
    for name, value in arguments.items():
        if not (value is None or isinstance(value, (int, float)) and value == 0):
            raise NotImplementedError(f"{names['function']}: {name} is not supported yet, only its default is")


def one_of(names, **arguments):
    """The value of the one argument that is given, or None; TypeError if several are."""
    given = {name: value for name, value in arguments.items() if value is not None}
    if len(given) > 1:
        raise TypeError(f"{names['function']}: {' and '.join(given)} are names of the same argument, give one of them")
    return next(iter(given.values()), None)


def check_out(out, dtype, shape, device, *inputs):
    """ValueError unless out is None, or is of this dtype and shape on the device and no input wants a gradient."""
    if out is None:
        return
    check_tensor("out", out)
    check_is("out", out, (out.dtype, out.device) == (dtype, device) and same_sizes(out.shape, shape),
             f"{dtype} of shape {tuple(shape)} on {device}")
    if any(map(wants_gradient, (out, *inputs))):
        raise ValueError("out cannot be given where gradients are wanted: call under torch.no_grad()")


def heads_first(x, is_packed):
    """x (B, S, H, D) or packed (T, H, D), as (B, H, S, D) or (1, H, T, D); None stays None."""
    return None if x is None else x.transpose(0, 1)[None] if is_packed else x.transpose(1, 2)


def _rows_first(result, is_packed, out, return_attn_probs):
    """A result of the facade in flash-attn's layout and form. out: None, or the tensor to write to."""
    o, *lse = result if isinstance(result, tuple) else (result,)
    o, lse = (o[0].transpose(0, 1), [x[0] for x in lse]) if is_packed else (o.transpose(1, 2), lse)
    o = o if out is None else out.copy_(o)
    return (o, *lse, None) if return_attn_probs else (o, *lse) if lse else o


def _attend(names, q, k, v, given, out, return_attn_probs, causal, window_size, backend, max_seqlen_k=None):
    """attention.attend by flash-attn's layouts: (B, S, H, D), or with cu_seqlens (T, H, D)."""
    is_packed = given.cu_seqlens_q is not None
    check_layout("(T, H, D)" if is_packed else "(B, S, H, D)", names, q=q, k=k, v=v)
    if out is not None:
        dtype = out_dtype(autocast(q.new_empty(0))[0].dtype)
        check_out(out, dtype, (*q.shape[:-1], v.shape[-1]), q.device, q, k, v, given.sinks)
    result = attend(*(heads_first(x, is_packed) for x in (q, k, v)), given, causal, window_size, backend,
                    max_seqlen_k=max_seqlen_k, names=names)
    return _rows_first(result, is_packed, out, return_attn_probs)


def _attend_pages(names, q, k, v, given, block_table, page_table, max_seqlen_q, num_splits, out, return_attn_probs,
                  *mask_and_backend):
    """flash_attn_varlen_func with a page table."""
    of_table = "page_table" if block_table is None else "block_table"
    table = one_of(names, block_table=block_table, page_table=page_table)
    check_layout("(T, H, D)", names, q=q)
    check_layout("(num_pages, page_size, Hk, D)", names, k=k, v=v)
    if check_number("dropout_p", given.dropout_p) > 0:
        raise NotImplementedError(f"{names['function']}: dropout_p is not supported with {of_table}, only 0 is")
    names = {**names, "k_cache": "k", "v_cache": "v", "page_table": of_table}
    if given.cu_seqlens_k is not None:
        check_apart("cu_seqlens_k", f", beside {of_table}: each says how many keys a sample has",
                    seqused_k=given.seqused_k)
        check_tensor_of("cu_seqlens_k", given.cu_seqlens_k, q.device)
        given = given._replace(cu_seqlens_k=None, seqused_k=given.cu_seqlens_k.diff())
        names["seqused_k"] = "the difference of entries of cu_seqlens_k"
    cache = Cache(table, num_splits=num_splits, max_seqlen_q=max_seqlen_q)
    return attend_rows(names, q, k, v, given, cache, Append(), None, None, out, return_attn_probs, *mask_and_backend)


def attend_rows(names, q, k_cache, v_cache, given, cache, append, k, v, out, return_attn_probs, *mask_and_backend):
    """caches.attend_cached by flash-attn's layouts, which are checked. mask_and_backend: what follows v there."""
    is_packed = given.cu_seqlens_q is not None
    check_out(out, k_cache.dtype, (*q.shape[:-1], v_cache.shape[-1]), q.device, q, k_cache, v_cache, given.sinks)
    result = attend_cached(heads_first(q, is_packed), k_cache.transpose(1, 2), v_cache.transpose(1, 2), given, cache,
                           append, k, v, *mask_and_backend, names)
    return _rows_first(result, is_packed, out, return_attn_probs)
