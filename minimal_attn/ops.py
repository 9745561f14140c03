"""What Python adds to the ops of csrc/main.cpp: the shapes that torch.compile asks for, and the derivative.

The derivative comes twice. register_autograd gives it to the dispatcher, for torch.compile and all that watches ops;
../csrc/autograd.cpp is the same without the dispatcher, whose Python part costs more than a small attention takes.

Read next: ../csrc/main.cpp; interface.py, which calls both.
"""

import functools

import torch

from .checks import check_no_derivative, empty_like


def _forward_shapes(q, k, v, seq_lens, softmax_scale, causal, dropout_p=0.0, dropout_seed=None, deterministic=False):
    return empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _backward_shapes(dout, dlse, q, k, v, out, lse, seq_lens, softmax_scale, causal, dropout_p=0.0, dropout_seed=None,
                     deterministic=False, need_dq=True, need_dkv=True):
    return tuple(empty_like(x) if is_needed else x.new_empty(0)
                 for x, is_needed in ((q, need_dq), (k, need_dkv), (v, need_dkv)))


def _save(ctx, inputs, output):
    q, k, v, seq_lens, ctx.softmax_scale, ctx.causal, ctx.dropout_p, dropout_seed, ctx.deterministic = inputs
    ctx.save_for_backward(q, k, v, *output, seq_lens, dropout_seed)
    ctx.set_materialize_grads(False)  # an lse that nobody uses has no gradient


def _backward(ctx, dout, dlse):
    q, k, v, out, lse, seq_lens, dropout_seed = ctx.saved_tensors
    # Their tangents would be lost: Hessian-vector products, forwards over backwards, do this.
    check_no_derivative("the backward pass of backend='cuda'", "backend='reference'", has_backward=True, dout=dout,
                        dlse=dlse)
    if dout is None:
        dout = torch.zeros_like(out)
    need_q, *need_kv = ctx.needs_input_grad[:3]
    gradients = torch.ops.minimal_attn.flash_backward(dout, dlse, q, k, v, out, lse, seq_lens, ctx.softmax_scale,
                                                      ctx.causal, ctx.dropout_p, dropout_seed, ctx.deterministic,
                                                      need_q, any(need_kv))
    return (*(x if is_needed else None for x, is_needed in zip(gradients, (need_q, *need_kv))), *[None] * 6)


def _no_second(ctx, *gradients):
    raise NotImplementedError("backend='cuda' has no second derivative: use backend='torch' with SDPBackend.MATH, or "
                              "backend='reference'")


@functools.cache
def register():
    """Once, after the library that defines the ops is loaded."""
    torch.library.register_fake("minimal_attn::flash_forward", _forward_shapes)
    torch.library.register_fake("minimal_attn::flash_backward", _backward_shapes)
    torch.library.register_autograd("minimal_attn::flash_forward", _backward, setup_context=_save)
    torch.library.register_autograd("minimal_attn::flash_backward", _no_second)
