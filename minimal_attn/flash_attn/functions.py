"""The functions of flash-attn, by their names and in the order of flash-attn 2, over flash_attention.

What flash-attn 3, flash-attn 4 and vLLM add to them are keywords. pack_gqa, scheduler_metadata, sm_margin and
fa_version tune kernels of theirs and change nothing here, and neither does num_splits, but with a page table. Read
next: kvcache.py, those of caches; ../reference/packed.py, packed batches.
"""

import functools
import inspect
import re

from torch import Tensor

from ..attention import checked_attention, is_zero
from ..backends.cuda import NO_LENGTHS, fast_path
from ..caches import attention_with_kvcache
from ..checks import autocast, check_dropout_p, check_tensor, out_dtype, reworded, same_sizes, shown, wants_gradient
from ..lengths import NO_WINDOW, check_int32, check_max_seqlen, of_self_attention
from ..options import Lengths

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0, softmax_scale: float | None = None,
                    causal: bool = False, window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0,
                    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
                    *, out: Tensor | None = None, s_aux: Tensor | None = None, learnable_sink: Tensor | None = None,
                    sinks: Tensor | None = None, return_softmax_lse: bool = False, return_lse: bool = False,
                    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
                    qv: Tensor | None = None, attention_chunk: int = 0, num_splits: int = 0,
                    pack_gqa: bool | None = None, sm_margin: int = 0, fa_version: int | None = None,
                    score_mod: None = None, mask_mod: None = None, aux_tensors: None = None,
                    dropout_seed: Tensor | None = None, backend: str = "auto") -> Result:
    """flash_attention with the signature and the layout of flash-attn (flash_attn.flash_attn_func).

    Args:
        q: (B, Sq, H, D); k, v: (B, Sk, Hk, D), v also with another head_dim. Dtypes, head dimensions, causal,
            deterministic, backend: as flash_attention.
        dropout_p, dropout_seed: as flash_attention. flash-attn has no such seed and drops other elements.
        softmax_scale: factor of the scores, 1/sqrt(D) if None.
        window_size: (left, right), also in a tensor, which is read, as flash_attention; None is (-1, -1).
        return_attn_probs: return (out, lse, None); the probabilities themselves are never formed.
        return_softmax_lse, return_lse: return (out, lse).
        out: (B, Sq, H, D) with v's head_dim, of the result's dtype, on q's device: the result is copied into it. Not
            with gradients.
        s_aux, learnable_sink, sinks: three names of one argument, those of flash-attn 3, flash-attn 4 and vLLM: sinks
            (H,) as of flash_attention.
        softcap, alibi_slopes: as flash_attention.
        q_descale, k_descale, v_descale, qv, attention_chunk: only their defaults are supported.
        score_mod, mask_mod, aux_tensors: only None is supported.
        num_splits, pack_gqa, sm_margin, fa_version: change nothing.

    Returns:
        out (B, Sq, H, D), with v's head_dim, in q's dtype, or in autocast's; lse (B, H, Sq) in fp32, natural log.

    Raises:
        NotImplementedError: an argument that is not supported yet. Otherwise as flash_attention.
    """
    if not (score_mod is mask_mod is aux_tensors is None):
        refuse("flash_attn_func", score_mod=score_mod, mask_mod=mask_mod, aux_tensors=aux_tensors)
    return_lse = return_lse or return_softmax_lse
    window_size = NO_WINDOW if window_size is None else window_size
    if s_aux is not None or learnable_sink is not None:
        sinks = one_of("flash_attn_func", s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks)
    if (is_zero(dropout_p) and is_zero(softcap) and alibi_slopes is out is q_descale is k_descale is v_descale is qv
            is None and attention_chunk == 0 and (backend == "auto" or backend == "cuda")
            and isinstance(deterministic, bool)):
        result = fast_path(q, k, v, causal, softmax_scale, True, return_lse or return_attn_probs, deterministic,
                           window_size, NO_LENGTHS, sinks)
        if result is not None:
            return (*result, None) if return_attn_probs else result
    refuse("flash_attn_func", q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, qv=qv,
           attention_chunk=attention_chunk)
    check_layout("flash_attn_func", "(B, S, H, D)", q=q, k=k, v=v)
    check_out(out, _result_dtype(q), q, k, v, sinks)
    result = checked_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal, softmax_scale,
                               dropout_p, dropout_seed, deterministic, return_lse or return_attn_probs, backend,
                               window_size=window_size, sinks=sinks, softcap=softcap, alibi_slopes=alibi_slopes,
                               scale_name="softmax_scale")
    o, *lse = result if isinstance(result, tuple) else (result,)
    return returned(o.transpose(1, 2), lse, out, return_attn_probs)


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
                           fa_version: int | None = None, score_mod: None = None, mask_mod: None = None,
                           aux_tensors: None = None, dynamic_causal: bool | None = None,
                           min_seqlen_k: int | None = None, gather_kv_indices: Tensor | None = None,
                           dropout_seed: Tensor | None = None, backend: str = "auto") -> Result:
    """Attention of a packed batch, whose samples lie one after the other (flash_attn.flash_attn_varlen_func).

    Args:
        q: (Tq, H, D); k, v: (Tk, Hk, D), v also with another head_dim.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k: as flash_attention.
        block_table, page_table: two names of one argument, those of flash-attn 2 and 3: int32 (B, max_pages), the pages
            of each sample in k (num_pages, page_size, Hk, D) and v, as attention_with_kvcache. seqused_k says how many
            keys a sample has. As in flash-attn 2, cu_seqlens_k may say it in its place, by the differences of its
            entries. Without both, all pages are full. There is no dropout and no gradient. num_splits as
            attention_with_kvcache.
        scheduler_metadata: changes nothing.
        dynamic_causal, min_seqlen_k, gather_kv_indices: only None, False and 0 are supported.
        All others: as flash_attn_func, but out is (Tq, H, D).

    Returns:
        out (Tq, H, D), with v's head_dim, in q's dtype, or in autocast's; lse (H, Tq) in fp32, natural log; in a tuple
        as flash_attn_func.

    Raises:
        NotImplementedError: an argument that is not supported yet. Otherwise as flash_attention.
    """
    if not (score_mod is mask_mod is aux_tensors is dynamic_causal is min_seqlen_k is gather_kv_indices is None):
        refuse("flash_attn_varlen_func", score_mod=score_mod, mask_mod=mask_mod, aux_tensors=aux_tensors,
               dynamic_causal=dynamic_causal, min_seqlen_k=min_seqlen_k, gather_kv_indices=gather_kv_indices)
    window_size = NO_WINDOW if window_size is None else window_size
    if s_aux is not None or learnable_sink is not None:
        sinks = one_of("flash_attn_varlen_func", s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks)
    check_max_seqlen("max_seqlen_q", max_seqlen_q)
    check_max_seqlen("max_seqlen_k", max_seqlen_k)
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    return_lse = return_lse or return_softmax_lse or return_attn_probs
    if (is_zero(dropout_p) and is_zero(softcap) and alibi_slopes is block_table is page_table is out is q_descale
            is k_descale is v_descale is qv is None and attention_chunk == 0
            and (backend == "auto" or backend == "cuda") and isinstance(deterministic, bool)):
        result = fast_path(q, k, v, causal, softmax_scale, True, return_lse, deterministic, window_size, lengths,
                           sinks)
        if result is not None:
            return (*result, None) if return_attn_probs else result
    refuse("flash_attn_varlen_func", q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, qv=qv,
           attention_chunk=attention_chunk)
    if cu_seqlens_q is None:
        raise ValueError("flash_attn_varlen_func: cu_seqlens_q must be given; flash_attn_func takes batches without it")
    if block_table is not None or page_table is not None:
        return _attend_pages(q, k, v, block_table, page_table, cu_seqlens_k, seqused_k, dropout_p, return_attn_probs,
                             cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, seqused_q=seqused_q,
                             softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
                             sinks=sinks, alibi_slopes=alibi_slopes, num_splits=num_splits, return_lse=return_lse,
                             backend=backend, out=out)
    if cu_seqlens_k is None and seqused_k is not None:
        raise ValueError("flash_attn_varlen_func: seqused_k without cu_seqlens_k needs a page table: give block_table, "
                         "or cu_seqlens_k, which says where the keys of a sample begin")
    check_layout("flash_attn_varlen_func", "(T, H, D)", q=q, k=k, v=v)
    check_out(out, _result_dtype(q), q, k, v, sinks)
    result = checked_attention(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), causal, softmax_scale, dropout_p,
                               dropout_seed, deterministic, return_lse, backend, window_size=window_size,
                               lengths=Lengths(*lengths), max_seqlen_k=max_seqlen_k, sinks=sinks, softcap=softcap,
                               alibi_slopes=alibi_slopes, scale_name="softmax_scale")
    o, *lse = (x[0] for x in (result if isinstance(result, tuple) else (result,)))
    return returned(o.transpose(0, 1), lse, out, return_attn_probs)


def _of_parts(whole):
    """Decorator of a function that calls `whole` with parts of packed tensors and passes **keywords on.

    Its signature, which clients inspect, has the keyword-only arguments of `whole`, and errors speak of its own name.
    """
    keywords = [x for x in inspect.signature(whole).parameters.values() if x.kind == x.KEYWORD_ONLY]

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except (TypeError, ValueError, NotImplementedError) as error:
                raise reworded(error, str(error).replace(whole.__name__, function.__name__)) from None

        signature = inspect.signature(function)
        own = [x for x in signature.parameters.values() if x.kind != x.VAR_KEYWORD]
        wrapper.__signature__ = signature.replace(parameters=[*own, *keywords])
        return wrapper

    return decorate


@_of_parts(flash_attn_func)
def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0, softmax_scale: float | None = None,
                              causal: bool = False, window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0,
                              alibi_slopes: Tensor | None = None, deterministic: bool = False,
                              return_attn_probs: bool = False, **keywords) -> Result:
    """flash_attn_func of qkv (B, S, 3, H, D), which holds q, k and v; none is copied. All else as there."""
    q, k, v = _parts("flash_attn_qkvpacked_func", "(B, S, 3, H, D)", qkv=qkv)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs, **keywords)


@_of_parts(flash_attn_func)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0, softmax_scale: float | None = None,
                             causal: bool = False, window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0,
                             alibi_slopes: Tensor | None = None, deterministic: bool = False,
                             return_attn_probs: bool = False, **keywords) -> Result:
    """flash_attn_func of q (B, Sq, H, D) and kv (B, Sk, 2, Hk, D), which holds k and v; none is copied. All else as
    there."""
    k, v = _parts("flash_attn_kvpacked_func", "(B, S, 2, H, D)", kv=kv)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs, **keywords)


@_of_parts(flash_attn_varlen_func)
def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor | None = None,
                                     dropout_p: float = 0, softmax_scale: float | None = None, causal: bool = False,
                                     window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0,
                                     alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                     return_attn_probs: bool = False, **keywords) -> Result:
    """flash_attn_varlen_func of qkv (T, 3, H, D), which holds q, k and v; none is copied. All else as there."""
    q, k, v = _parts("flash_attn_varlen_qkvpacked_func", "(T, 3, H, D)", qkv=qkv)
    try:
        return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
                                      softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                      return_attn_probs, **keywords)
    except (TypeError, ValueError) as error:
        raise of_self_attention(error) from None


@_of_parts(flash_attn_varlen_func)
def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                                    max_seqlen_q: int | Tensor | None = None, max_seqlen_k: int | Tensor | None = None,
                                    dropout_p: float = 0, softmax_scale: float | None = None, causal: bool = False,
                                    window_size: tuple[int, int] = NO_WINDOW, softcap: float = 0,
                                    alibi_slopes: Tensor | None = None, deterministic: bool = False,
                                    return_attn_probs: bool = False, **keywords) -> Result:
    """flash_attn_varlen_func of q (Tq, H, D) and kv (Tk, 2, Hk, D), which holds k and v; none is copied. All else as
    there."""
    k, v = _parts("flash_attn_varlen_kvpacked_func", "(T, 2, H, D)", kv=kv)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs, **keywords)


def refuse(function, **arguments):
    """NotImplementedError for the first argument that is not its default, None or 0."""
    for name, value in arguments.items():
        if not (value is None or isinstance(value, (int, float)) and value == 0):
            raise NotImplementedError(f"{function}: {name} is not supported yet, only its default is")


def one_of(function, **arguments):
    """The value of the one argument that is given, or None; TypeError if several are."""
    given = {name: value for name, value in arguments.items() if value is not None}
    if len(given) > 1:
        raise TypeError(f"{function}: {' and '.join(given)} are names of the same argument, give one of them")
    return next(iter(given.values()), None)


def check_layout(function, layout, **tensors):
    for name, x in tensors.items():
        check_tensor(name, x)
        if x.ndim != layout.count(",") + 1:
            raise ValueError(f"{function}: {name} must be {layout}, got {tuple(x.shape)}")


def _parts(function, layout, **tensor):
    """The parts of a tensor of that layout, whose third dimension from the end numbers them."""
    check_layout(function, layout, **tensor)
    (name, x), = tensor.items()
    if x.shape[-3] != (3 if name == "qkv" else 2):
        raise ValueError(f"{function}: {name} must be {layout}, got {tuple(x.shape)}")
    return x.unbind(-3)


def check_out(out, dtype, q, k, v, sinks):
    """ValueError unless out is None or can take the result, which has this dtype."""
    if out is None:
        return
    check_tensor("out", out)
    shape = *q.shape[:-1], v.shape[-1]
    if (out.dtype, out.device) != (dtype, q.device) or not same_sizes(out.shape, shape):
        raise ValueError(f"out must be {dtype} of shape {shape} on {q.device}, got {shown(out)} on {out.device}")
    if any(map(wants_gradient, (q, k, v, sinks, out))):
        raise ValueError("out cannot be given where gradients are wanted: call under torch.no_grad()")


def _result_dtype(q):
    """Dtype of the result of checked_attention."""
    return out_dtype(autocast(q.new_empty(0))[0].dtype)


def returned(result, lse, out, return_attn_probs):
    """Returns a result in flash-attn's form: the tensor alone, (tensor, lse), or (tensor, lse, None) with
    return_attn_probs. lse: a list with the lse, or an empty one. out: the tensor to write the result to, or None."""
    result = result if out is None else out.copy_(result)
    return (result, *lse, None) if return_attn_probs else (result, *lse) if lse else result


def heads_first(x, is_packed):
    """x (B, S, H, D) or packed (T, H, D), as (B, H, S, D) or (1, H, T, D); None stays None."""
    if x is None:
        return None
    return x.transpose(0, 1)[None] if is_packed else x.transpose(1, 2)


def _attend_pages(q, k, v, block_table, page_table, cu_seqlens_k, seqused_k, dropout_p, return_attn_probs, **options):
    """flash_attn_varlen_func with a page table."""
    function = "flash_attn_varlen_func"
    names = {"k_cache": "k", "v_cache": "v", "page_table": "page_table" if block_table is None else "block_table"}
    options["page_table"] = one_of(function, block_table=block_table, page_table=page_table)
    check_layout(function, "(T, H, D)", q=q)
    check_layout(function, "(num_pages, page_size, Hk, D)", k=k, v=v)
    if check_dropout_p(dropout_p) > 0:
        raise NotImplementedError(f"{function}: dropout_p is not supported with {names['page_table']}, only 0 is")
    if cu_seqlens_k is not None:
        if seqused_k is not None:
            raise ValueError(f"{function}: cu_seqlens_k and seqused_k cannot both be given with {names['page_table']}, "
                             "since each says how many keys a sample has")
        check_int32("cu_seqlens_k", cu_seqlens_k, q.device)
        seqused_k = cu_seqlens_k.diff()
        names["seqused_k"] = "the difference of entries of cu_seqlens_k"
    return attend_cached(function, names, q, k, v, seqused_k, return_attn_probs, **options)


def attend_cached(function, names, q, k_cache, v_cache, seqused_k, return_attn_probs=False, *, cu_seqlens_q,
                  softmax_scale, out, **options):
    """attention_with_kvcache for a function of flash-attn, whose names of its arguments are in `names`.

    q is (T, H, D) with cu_seqlens_q, else (B, Sq, H, D), and caches are (N, S, Hk, D), which is checked.
    """
    is_packed = cu_seqlens_q is not None
    check_out(out, k_cache.dtype, q, k_cache, v_cache, options["sinks"])
    try:
        result = attention_with_kvcache(heads_first(q, is_packed), k_cache.transpose(1, 2), v_cache.transpose(1, 2),
                                        seqused_k, cu_seqlens_q=cu_seqlens_q, sm_scale=softmax_scale, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        names = {"attention_with_kvcache": function, "sm_scale": "softmax_scale", **names}
        raise reworded(error, re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))) from None
    o, *lse = result if isinstance(result, tuple) else (result,)
    if is_packed:
        return returned(o[0].transpose(0, 1), [x[0] for x in lse], out, return_attn_probs)
    return returned(o.transpose(1, 2), lse, out, return_attn_probs)
