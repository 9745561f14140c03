"""The derivative of an attention op, and the shapes that torch.compile asks for: the same for csrc and for Triton.

An op forward(q, k, v, *options, mode, ...) gives (out, lse), and backward(dout, dlse, q, k, v, out, lse, *options,
mode, need_dq, need_dkv, need_dsinks, need_dbias) gives (dq, dk, dv, dsinks, dbias). The options are those of
Options.of_op: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, alibi_slopes, attn_bias, softmax_scale, softcap,
window_left, window_right, dropout_p, dropout_seed. mode is the one bool that both ops of an implementation take: csrc's
deterministic, Triton's autotune.

The dispatcher's Python part costs more than a small attention takes. ../../csrc/binding/autograd.cpp and
../../triton_ref/ops.py therefore go past it where nothing traces or watches.

Read next: ../../csrc/main.cpp, csrc's ops; flops.py, what they count for.
"""

import functools

import torch

from ..checks import FP8_DTYPES, check_no_derivative, empty_like, empty_outputs
from ..reference.append import append_shapes
from .flops import backward_flops, decode_flops, forward_flops, register_flops

NUM_INPUTS = 17  # of a forward op, from q to mode; what follows has no part in the derivative
SINKS, ATTN_BIAS = 7, 9  # where these are among them


def save(ctx, inputs, output):
    """Saves in ctx everything that the function made by backward_of reads from an op's forward pass."""
    q, k, v, *tensors, softmax_scale, softcap, left, right, dropout_p, dropout_seed, mode = inputs[:NUM_INPUTS]
    ctx.num_inputs = len(inputs)
    ctx.numbers = softmax_scale, softcap, left, right, dropout_p
    ctx.mode = mode
    ctx.save_for_backward(q, k, v, *output, *tensors, dropout_seed)
    ctx.set_materialize_grads(False)  # an lse that nobody uses has no gradient


def backward_of(run, backend):
    """(ctx, dout, dlse) -> the gradients of an op's inputs, by run, which takes the arguments of a backward op."""

    def backward(ctx, dout, dlse):
        q, k, v, out, lse, *tensors, dropout_seed = ctx.saved_tensors
        if q.dtype in FP8_DTYPES:
            raise NotImplementedError(f"backend={backend!r} has no backward pass in {q.dtype}")
        # Their tangents would be lost: Hessian-vector products, forwards over backwards, do this.
        check_no_derivative(f"the backward pass of backend={backend!r}", "backend='reference'", has_backward=True,
                            dout=dout, dlse=dlse)
        if dout is None:
            dout = torch.zeros_like(out)
        need_q, *need_kv = ctx.needs_input_grad[:3]
        need_sinks, need_bias = ctx.needs_input_grad[SINKS], ctx.needs_input_grad[ATTN_BIAS]
        gradients = run(dout, dlse, q, k, v, out, lse, *tensors, *ctx.numbers, dropout_seed, ctx.mode, need_q,
                        any(need_kv), need_sinks, need_bias)
        of_inputs = [None] * ctx.num_inputs
        for place, gradient in zip((0, 1, 2, SINKS, ATTN_BIAS), gradients):
            if ctx.needs_input_grad[place]:
                of_inputs[place] = gradient
        return tuple(of_inputs)

    return backward


def _forward_shapes(q, k, v, *options, **more_options):
    return empty_outputs(q, v)


def _backward_shapes(dout, dlse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks,
                     alibi_slopes, attn_bias, softmax_scale, softcap, window_left, window_right, dropout_p=0.0,
                     dropout_seed=None, mode=False, need_dq=True, need_dkv=True, need_dsinks=False, need_dbias=False):
    needed = [empty_like(x) if is_needed else x.new_empty(0)
              for x, is_needed in ((q, need_dq), (k, need_dkv), (v, need_dkv))]
    dsinks = torch.empty_like(sinks) if need_dsinks else lse.new_empty(0)
    return *needed, dsinks, attn_bias.new_empty(attn_bias.shape) if need_dbias else lse.new_empty(0)


def register(forward, backward, run, backend):
    """Register shapes and FLOPs of the two ops named `forward` and `backward`, and the derivative of `forward`, which
    calls run."""

    def no_second_derivative(ctx, *gradients):
        raise NotImplementedError(f"backend={backend!r} has no second derivative: use backend='torch' with "
                                  "SDPBackend.MATH, or backend='reference'")

    torch.library.register_fake(forward, _forward_shapes)
    torch.library.register_fake(backward, _backward_shapes)
    torch.library.register_autograd(forward, backward_of(run, backend), setup_context=save)
    torch.library.register_autograd(backward, no_second_derivative)
    register_flops(forward.removeprefix("minimal_attn::"), forward_flops)
    register_flops(backward.removeprefix("minimal_attn::"), backward_flops)


@functools.cache
def register_csrc(run=None):
    """Register csrc's ops. Call it once, after the library that defines them is loaded. run: a function that the
    backward pass calls in place of the op flash_backward."""
    torch.library.register_fake("minimal_attn::flash_decode", _forward_shapes)
    torch.library.register_fake("minimal_attn::append_kvcache", append_shapes)
    register_flops("flash_decode", decode_flops)
    register("minimal_attn::flash_forward", "minimal_attn::flash_backward",
             run or torch.ops.minimal_attn.flash_backward, "cuda")
