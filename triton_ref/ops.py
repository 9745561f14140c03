"""The twin as ops of torch with a derivative, and as a backend of minimal_attn, where importing this file registers it.

Read next: attention.py, the forward pass; attention_bwd.py, the backward pass; ../minimal_attn/ops.py, the derivative.
"""

from typing import Optional, Tuple

import torch

from minimal_attn import ops, twin
from minimal_attn.backends import Options
from minimal_attn.checks import check_fp8, is_eager, wants_gradient

from . import attention, attention_bwd
from .launching import INTERPRETING
from .matmul import triton_matmul


@torch.library.custom_op("minimal_attn::triton_forward", mutates_args=())
def triton_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Optional[torch.Tensor],
                   softmax_scale: float, causal: bool, dropout_p: float = 0.0,
                   dropout_seed: Optional[torch.Tensor] = None, autotune: bool = True,
                   q_descale: Optional[torch.Tensor] = None, k_descale: Optional[torch.Tensor] = None,
                   v_descale: Optional[torch.Tensor] = None) -> Tuple[torch.Tensor, torch.Tensor]:
    """out like q, bf16 if q is fp8, and lse fp32 (B, H, Sq), of checked inputs: q (B, H, Sq, D), k, v (B, Hk, Sk, D),
    all with a contiguous last dimension, seq_lens int32 (B,) or None, descales fp32 (B, Hk), contiguous, or None,
    dropout_seed int64, one element, or None for no dropout. minimal_attn.flash_attention checks and describes them."""
    return attention.run(q, k, v, Options(causal, softmax_scale, seq_lens, dropout_p, dropout_seed, autotune=autotune,
                                          descales=(q_descale, k_descale, v_descale)))


@torch.library.custom_op("minimal_attn::triton_backward", mutates_args=())
def triton_backward(dout: torch.Tensor, dlse: Optional[torch.Tensor], q: torch.Tensor, k: torch.Tensor,
                    v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, seq_lens: Optional[torch.Tensor],
                    softmax_scale: float, causal: bool, dropout_p: float = 0.0,
                    dropout_seed: Optional[torch.Tensor] = None, autotune: bool = True, need_dq: bool = True,
                    need_dkv: bool = True) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq like q, dk like k, dv like v: what triton_forward's inputs get of dout (B, H, Sq, D) and dlse (B, H, Sq), or
    None. Those that are not needed have no elements."""
    options = Options(causal, softmax_scale, seq_lens, dropout_p, dropout_seed, autotune=autotune)
    gradients = attention_bwd.run(dout, dlse, q, k, v, out, lse, options, need_dq, need_dkv)
    return tuple(q.new_empty(0) if x is None else x for x in gradients)


def _backward(dout, dlse, q, k, v, out, lse, seq_lens, softmax_scale, causal, dropout_p, dropout_seed, autotune,
              need_dq, need_dkv):
    """triton_backward, without the dispatcher where no one wants a second derivative."""
    if is_eager(dout, dlse, q, k, v) and not torch.is_grad_enabled():
        options = Options(causal, softmax_scale, seq_lens, dropout_p, dropout_seed, autotune=autotune)
        return attention_bwd.run(dout, dlse, q, k, v, out, lse, options, need_dq, need_dkv)
    return triton_backward(dout, dlse, q, k, v, out, lse, seq_lens, softmax_scale, causal, dropout_p, dropout_seed,
                           autotune, need_dq, need_dkv)


class Attention(torch.autograd.Function):
    """triton_forward with its derivative, without the dispatcher; apply takes all arguments of the op."""

    @staticmethod
    def forward(ctx, *inputs):
        q, k, v, seq_lens, softmax_scale, causal, dropout_p, dropout_seed, autotune, *descales = inputs
        output = attention.run(q, k, v, Options(causal, softmax_scale, seq_lens, dropout_p, dropout_seed,
                                                autotune=autotune, descales=descales))
        ops.save(ctx, inputs, output)
        return output

    backward = staticmethod(ops.backward_of(_backward, "triton"))


def _forward(q, k, v, options):
    """The forward of minimal_attn's backend "triton"."""
    check_fp8(q)
    # Tiles that are timed may be others in the next run.
    is_fixed = options.deterministic or torch.are_deterministic_algorithms_enabled()
    options = options._replace(autotune=options.autotune and not is_fixed)
    if is_eager(q, k, v) and not any(map(wants_gradient, (q, k, v))):
        return attention.run(q, k, v, options)
    op = Attention.apply if is_eager(q, k, v) else torch.ops.minimal_attn.triton_forward
    return op(q, k, v, *options.of_op(), options.autotune, *options.descales)


ops.register("minimal_attn::triton_forward", "minimal_attn::triton_backward", _backward, "triton")
twin.register(twin.Twin(_forward, triton_matmul, INTERPRETING))
