"""The twin as ops of torch with a derivative, and as a backend of minimal_attn, where importing this file registers it.

Read next: attention.py, the forward pass; attention_bwd.py, the backward pass; decode.py, attention to a cache;
append.py, which fills one; ../minimal_attn/backends/ops.py, the derivative.
"""

from typing import Optional, Tuple

import torch

from minimal_attn.backends import ops
from minimal_attn.backends.triton import Twin, register
from minimal_attn.checks import FP8_DTYPES, check_fp8, empty_outputs, is_eager, wants_gradient
from minimal_attn.options import Cache, Lengths, Options

from . import append, attention, attention_bwd, decode
from .launching import INTERPRETING
from .matmul import triton_matmul


def _options(*of_op):
    """The Options of an op's arguments after its tensors: those of Options.of_op, autotune and in the forward pass
    descales."""
    *tensors, softmax_scale, softcap, left, right, dropout_p, dropout_seed, autotune = of_op[:14]
    *lengths, sinks, alibi_slopes, attn_bias = tensors
    return Options(softmax_scale, (left, right), Lengths(*lengths), sinks, dropout_p, dropout_seed, autotune=autotune,
                   descales=of_op[14:], softcap=softcap, alibi_slopes=alibi_slopes, attn_bias=attn_bias)


@torch.library.custom_op("minimal_attn::triton_forward", mutates_args=())
def triton_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Optional[torch.Tensor],
                   cu_seqlens_k: Optional[torch.Tensor], seqused_q: Optional[torch.Tensor],
                   seqused_k: Optional[torch.Tensor], sinks: Optional[torch.Tensor],
                   alibi_slopes: Optional[torch.Tensor], attn_bias: Optional[torch.Tensor], softmax_scale: float,
                   softcap: float, window_left: int, window_right: int, dropout_p: float = 0.0,
                   dropout_seed: Optional[torch.Tensor] = None, autotune: bool = True,
                   q_descale: Optional[torch.Tensor] = None, k_descale: Optional[torch.Tensor] = None,
                   v_descale: Optional[torch.Tensor] = None) -> Tuple[torch.Tensor, torch.Tensor]:
    """out like q, bf16 if q is fp8 and with v's head_dim, and lse fp32 (B, H, Sq), of checked inputs: q (B, H, Sq, D),
    k (B, Hk, Sk, D), v (B, Hk, Sk, Dv), all with a contiguous last dimension; seqused_q and seqused_k int32 (B,) or
    None; sinks fp32 (H,), contiguous, or None; alibi_slopes fp32 (H,) or (B, H), contiguous, or None; attn_bias 4D,
    bool, of q's dtype or fp32, which broadcasts to (B, H, Sq, Sk), or None; descales fp32 (B, Hk), contiguous, or None;
    dropout_seed int64, one element, or None for no dropout. A softcap of 0 is none. A window of -1 has no bound on that
    side. With cu_seqlens_q and cu_seqlens_k, int32 (B + 1,), q, k and v are a packed batch: (1, H, Tq, D), (1, Hk, Tk,
    D) and (1, Hk, Tk, Dv).
    minimal_attn.flash_attention checks and describes them."""
    return attention.run(q, k, v, _options(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes,
                                           attn_bias, softmax_scale, softcap, window_left, window_right, dropout_p,
                                           dropout_seed, autotune, q_descale, k_descale, v_descale))


@torch.library.custom_op("minimal_attn::triton_backward", mutates_args=())
def triton_backward(dout: torch.Tensor, dlse: Optional[torch.Tensor], q: torch.Tensor, k: torch.Tensor,
                    v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
                    cu_seqlens_q: Optional[torch.Tensor], cu_seqlens_k: Optional[torch.Tensor],
                    seqused_q: Optional[torch.Tensor], seqused_k: Optional[torch.Tensor],
                    sinks: Optional[torch.Tensor], alibi_slopes: Optional[torch.Tensor],
                    attn_bias: Optional[torch.Tensor], softmax_scale: float, softcap: float, window_left: int,
                    window_right: int, dropout_p: float = 0.0, dropout_seed: Optional[torch.Tensor] = None,
                    autotune: bool = True, need_dq: bool = True, need_dkv: bool = True, need_dsinks: bool = False,
                    need_dbias: bool = False
                    ) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq like q, dk like k, dv like v, dsinks like sinks, dbias like attn_bias: what triton_forward's inputs get of
    dout (B, H, Sq, Dv) and dlse (B, H, Sq), or None. Those that are not needed have no elements."""
    options = _options(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, attn_bias, softmax_scale,
                       softcap, window_left, window_right, dropout_p, dropout_seed, autotune)
    gradients = attention_bwd.run(dout, dlse, q, k, v, out, lse, options, need_dq, need_dkv, need_dsinks, need_dbias)
    return tuple(like.new_empty(0) if x is None else x for x, like in zip(gradients, (q, q, q, lse, lse)))


def _backward(*inputs):
    """triton_backward, without the dispatcher where no one wants a second derivative."""
    tensors = (x for x in inputs if isinstance(x, torch.Tensor))
    if not is_eager(*tensors) or torch.is_grad_enabled():
        return triton_backward(*inputs)
    *others, need_dq, need_dkv, need_dsinks, need_dbias = inputs
    return attention_bwd.run(*others[:7], _options(*others[7:]), need_dq, need_dkv, need_dsinks, need_dbias)


class Attention(torch.autograd.Function):
    """triton_forward with its derivative, without the dispatcher; apply takes all arguments of the op."""

    @staticmethod
    def forward(ctx, *inputs):
        output = attention.run(*inputs[:3], _options(*inputs[3:]))
        ops.save(ctx, inputs, output)
        return output

    backward = staticmethod(ops.backward_of(_backward, "triton"))


def _forward(q, k, v, options):
    """The forward of minimal_attn's backend "triton"."""
    check_fp8(q)
    # Tiles that are timed may be others in the next run.
    is_fixed = options.deterministic or torch.are_deterministic_algorithms_enabled()
    options = options._replace(autotune=options.autotune and not is_fixed)
    inputs = q, k, v, *options.tensors
    if is_eager(*inputs) and not any(map(wants_gradient, inputs)):
        return attention.run(q, k, v, options)
    op = Attention.apply if is_eager(*inputs) else torch.ops.minimal_attn.triton_forward
    return op(q, k, v, *options.of_op(), options.autotune, *options.descales)


@torch.library.custom_op("minimal_attn::triton_decode", mutates_args=())
def triton_decode(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cu_seqlens_q: Optional[torch.Tensor],
                  seqused_q: Optional[torch.Tensor], seqused_k: Optional[torch.Tensor],
                  page_table: Optional[torch.Tensor], batch_idx: Optional[torch.Tensor],
                  leftpad_k: Optional[torch.Tensor], tree_mask: Optional[torch.Tensor], sinks: Optional[torch.Tensor],
                  alibi_slopes: Optional[torch.Tensor], softmax_scale: float, softcap: float, window_left: int,
                  window_right: int, num_splits: int = 0, max_seqlen_q: int = 0) -> Tuple[torch.Tensor, torch.Tensor]:
    """out like q with v_cache's head_dim, and lse fp32 (B, H, Sq), of checked inputs: q as of triton_forward, or packed
    by cu_seqlens_q alone, k_cache (N, Hk, S, D) and v_cache (N, Hk, S, Dv). minimal_attn.options.Cache says what the
    other arguments are, and minimal_attn.attention_with_kvcache checks them."""
    options = Options(softmax_scale, (window_left, window_right), Lengths(cu_seqlens_q, None, seqused_q, seqused_k),
                      sinks, softcap=softcap, alibi_slopes=alibi_slopes)
    cache = Cache(page_table, batch_idx, leftpad_k, tree_mask, num_splits, max_seqlen_q)
    return decode.run(q, k_cache, v_cache, options, cache)


@triton_decode.register_fake
def _(q, k_cache, v_cache, *others, **more):
    return empty_outputs(q, v_cache)


def forward_cached(q, k, v, options, cache):
    """The forward_cached of minimal_attn's backend "triton"."""
    if q.dtype in FP8_DTYPES:
        raise TypeError(f"Unsupported dtype: q is {q.dtype}, and attention to a cache takes float32, float16 and "
                        "bfloat16")
    if is_eager(q, k, v, *options.tensors, *cache[:4]):
        return decode.run(q, k, v, options, cache)
    lengths = options.lengths
    return triton_decode(q, k, v, lengths.cu_seqlens_q, lengths.seqused_q, lengths.seqused_k, *cache[:4], options.sinks,
                         options.alibi_slopes, options.softmax_scale, options.softcap, *options.window, *cache[4:])


@torch.library.custom_op("minimal_attn::triton_append", mutates_args=("k_cache", "v_cache"))
def triton_append(k_new: torch.Tensor, v_new: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                  seqused_k: Optional[torch.Tensor], page_table: Optional[torch.Tensor],
                  cache_batch_idx: Optional[torch.Tensor], cu_seqlens_k_new: Optional[torch.Tensor],
                  slot_mapping: Optional[torch.Tensor], q: Optional[torch.Tensor],
                  cu_seqlens_q: Optional[torch.Tensor], rotary_cos: Optional[torch.Tensor],
                  rotary_sin: Optional[torch.Tensor], rotary_seqlens: Optional[torch.Tensor],
                  rotary_interleaved: bool, q_advances: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """(q_rotated like q, lengths int32 (B,)) of checked inputs. The new row t of sample b, of k_new (B, Hk, Sn, D) and
    v_new (B, Hk, Sn, Dv) or packed by cu_seqlens_k_new, goes to place seqused_k[b] + t of the caches that
    triton_decode reads; a place, page or sequence that they do not have is not written. lengths is what seqused_k then
    is. With slot_mapping, int64 (T,), rows of (1, Hk, T, D) go to row s % S of sequence s // S, and seqused_k is None.

    With rotary_cos and rotary_sin (S_ro, rotary_dim / 2), new keys are rotated at position rotary_seqlens[b] + t, by
    default seqused_k[b] + t, and so is q, with q_advances=False all rows at the first position. An output that is not
    asked for has no elements."""
    return append.run(k_new, v_new, k_cache, v_cache, seqused_k, page_table, cache_batch_idx, cu_seqlens_k_new,
                      slot_mapping, q, cu_seqlens_q, rotary_cos, rotary_sin, rotary_seqlens, rotary_interleaved,
                      q_advances)


triton_append.register_fake(ops.append_shapes)
ops.register("minimal_attn::triton_forward", "minimal_attn::triton_backward", _backward, "triton")
register(Twin(_forward, forward_cached, triton_matmul, INTERPRETING))
