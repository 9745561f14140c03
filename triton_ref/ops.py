"""The twin as ops of torch with a derivative, and as a backend of minimal_attn, where importing this file registers it.

Read next: attention.py, the forward pass; attention_bwd.py, the backward pass; decode.py, attention to a cache;
append.py, which fills one; ../minimal_attn/backends/ops.py, the derivative.
"""

import torch

from minimal_attn.backends import ops
from minimal_attn.backends.triton import Twin, register
from minimal_attn.checks import FP8_DTYPES, check_fp8, empty_outputs, is_eager, wants_gradient
from minimal_attn.options import Append, Cache, Lengths, Options

from . import append, attention, attention_bwd, decode
from .launching import INTERPRETING
from .matmul import triton_matmul

# The arguments of Options.of_op, and autotune.
OPTIONS = ("Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? sinks, "
           "Tensor? alibi_slopes, Tensor? attn_bias, float softmax_scale, float softcap, SymInt window_left, "
           "SymInt window_right, float dropout_p=0., Tensor? dropout_seed=None, bool autotune=True")
NUM_OPTIONS = OPTIONS.count(",") + 1


def _options(*of_op):
    """The Options of an op's arguments OPTIONS, and of descales. torch leaves out the last ones that are defaults."""
    of_op += (0.0, None, True, None, None, None)[len(of_op) - 11:]
    *lengths, sinks, slopes, bias, softmax_scale, softcap, left, right, dropout_p, dropout_seed, autotune = of_op[:14]
    return Options(softmax_scale, (left, right), Lengths(*lengths), sinks, dropout_p, dropout_seed, autotune=autotune,
                   descales=of_op[14:], softcap=softcap, alibi_slopes=slopes, attn_bias=bias)


def _op(name, schema, mutates_args=()):
    return torch.library.custom_op(f"minimal_attn::triton_{name}", mutates_args=mutates_args, schema=schema)


@_op("forward", f"(Tensor q, Tensor k, Tensor v, {OPTIONS}, Tensor? q_descale=None, Tensor? k_descale=None, "
                "Tensor? v_descale=None) -> (Tensor, Tensor)")
def triton_forward(q, k, v, *of_op):
    """out like q, bf16 if q is fp8 and with v's head_dim, and lse fp32 (B, H, Sq), of checked inputs: q (B, H, Sq, D),
    k (B, Hk, Sk, D), v (B, Hk, Sk, Dv), all with a contiguous last dimension, and options as in
    minimal_attn.options.Options. A softcap of 0 is none. A window of -1 has no bound on that side. With cu_seqlens_q
    and cu_seqlens_k, q, k and v are a packed batch: (1, H, Tq, D), (1, Hk, Tk, D) and (1, Hk, Tk, Dv).
    minimal_attn.flash_attention checks and describes them."""
    return attention.run(q, k, v, _options(*of_op))


def _run_backward(dout, dlse, q, k, v, out, lse, *of_op):
    return attention_bwd.run(dout, dlse, q, k, v, out, lse, _options(*of_op[:NUM_OPTIONS]), *of_op[NUM_OPTIONS:])


@_op("backward", f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {OPTIONS}, "
                 "bool need_dq=True, bool need_dkv=True, bool need_dsinks=False, bool need_dbias=False) "
                 "-> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def triton_backward(*inputs):
    """dq like q, dk like k, dv like v, dsinks like sinks, dbias like attn_bias: what triton_forward's inputs get of
    dout (B, H, Sq, Dv) and dlse (B, H, Sq), or None. Those that are not needed have no elements."""
    q, lse = inputs[2], inputs[6]
    return tuple(like.new_empty(0) if x is None else x for x, like in zip(_run_backward(*inputs), (q, q, q, lse, lse)))


def _backward(*inputs):
    """triton_backward, without the dispatcher where no one wants a second derivative."""
    tensors = (x for x in inputs if isinstance(x, torch.Tensor))
    return (triton_backward if not is_eager(*tensors) or torch.is_grad_enabled() else _run_backward)(*inputs)


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


@_op("decode", "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cu_seqlens_q, Tensor? seqused_q, Tensor? seqused_k, "
               "Tensor? page_table, Tensor? batch_idx, Tensor? leftpad_k, Tensor? tree_mask, Tensor? sinks, "
               "Tensor? alibi_slopes, float softmax_scale, float softcap, SymInt window_left, SymInt window_right, "
               "SymInt num_splits=0, SymInt max_seqlen_q=0) -> (Tensor, Tensor)")
def triton_decode(q, k_cache, v_cache, cu_seqlens_q, seqused_q, seqused_k, page_table, batch_idx, leftpad_k, tree_mask,
                  sinks, slopes, softmax_scale, softcap, window_left, window_right, *more):
    """out like q with v_cache's head_dim, and lse fp32 (B, H, Sq), of checked inputs: q as of triton_forward, or packed
    by cu_seqlens_q alone, k_cache (N, Hk, S, D) and v_cache (N, Hk, S, Dv). minimal_attn.options.Cache says what the
    other arguments are, and minimal_attn.attention_with_kvcache checks them."""
    options = Options(softmax_scale, (window_left, window_right), Lengths(cu_seqlens_q, None, seqused_q, seqused_k),
                      sinks, softcap=softcap, alibi_slopes=slopes)
    return decode.run(q, k_cache, v_cache, options, Cache(page_table, batch_idx, leftpad_k, tree_mask, *more))


@triton_decode.register_fake
def _(q, k_cache, v_cache, *others):
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


@_op("append", "(Tensor k_new, Tensor v_new, Tensor(a2!) k_cache, Tensor(a3!) v_cache, Tensor? seqused_k, "
               "Tensor? page_table, Tensor? cache_batch_idx, Tensor? cu_seqlens_k_new, Tensor? slot_mapping, "
               "Tensor? q, Tensor? cu_seqlens_q, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_seqlens, "
               "bool rotary_interleaved, bool q_advances) -> (Tensor, Tensor)", ("k_cache", "v_cache"))
def triton_append(k_new, v_new, k_cache, v_cache, *arguments):
    """(q_rotated like q, lengths int32 (B,)) of checked inputs, which minimal_attn.options.Append describes: writes
    k_new (B, Hk, Sn, D) and v_new (B, Hk, Sn, Dv) to their places in the caches that triton_decode reads. lengths is
    what seqused_k then is. An output that is not asked for has no elements."""
    return append.run(k_new, v_new, k_cache, v_cache, Append(*arguments))


triton_append.register_fake(ops.append_shapes)
ops.register("minimal_attn::triton_forward", "minimal_attn::triton_backward", _backward, "triton")
register(Twin(_forward, forward_cached, triton_matmul, INTERPRETING))
