"""The derivative of an attention op, and the shapes that torch.compile asks for: the same for csrc and for Triton.

An op forward(q, k, v, *options, mode, ...) gives (out, lse, max_logits), the last one empty if it is not asked for, and
backward(dout, dlse, q, k, v, out, lse, *options, mode, need_dq, need_dkv, need_dsinks, need_dbias) gives (dq, dk, dv,
dsinks, dbias). The options are those of Options.of_op. mode is the one bool that both ops of an implementation take:
csrc's deterministic, Triton's autotune.

The dispatcher's Python part costs more than a small attention takes. ../../csrc/binding/autograd.cpp and
../../triton_ref/ops.py therefore go past it where nothing traces or watches.
"""

import functools

import torch

from ..checks import FP8_DTYPES, check_no_derivative, empty_like, empty_outputs
from ..options import DIFFERENTIABLE, OF_OP, Options
from ..reference.append import append_shapes
from .flops import backward_flops, decode_flops, forward_flops, register_flops

PLACES = 0, 1, 2, *(3 + Options._fields.index(name) for name in DIFFERENTIABLE)  # of inputs that have gradients
NEEDED = True, True, False, False  # the defaults of need_dq, need_dkv, need_dsinks and need_dbias


def save(ctx, inputs, output):
    """Saves in ctx everything that the function made by backward_of reads from an op's forward pass."""
    given = inputs[:3 + OF_OP + 1]  # up to mode: what follows has no part in the derivative
    ctx.num_inputs = len(inputs)
    ctx.numbers = [None if isinstance(x, torch.Tensor) else x for x in given]
    ctx.save_for_backward(*output[:2], *(x if isinstance(x, torch.Tensor) else None for x in given))
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)  # an lse that nobody uses has no gradient


def backward_of(run, backend):
    """(ctx, dout, dlse, None) -> the gradients of an op's inputs, by run, which takes what a backward op takes."""

    def backward(ctx, dout, dlse, _):
        out, lse, *tensors = ctx.saved_tensors
        q, k, v, *options = (number if x is None else x for x, number in zip(tensors, ctx.numbers))
        if q.dtype in FP8_DTYPES:
            raise NotImplementedError(f"backend={backend!r} has no backward pass in {q.dtype}")
        # Their tangents would be lost: Hessian-vector products, forwards over backwards, do this.
        check_no_derivative(f"the backward pass of backend={backend!r}", "backend='reference'", has_backward=True,
                            dout=dout, dlse=dlse)
        if dout is None:
            dout = torch.zeros_like(out)
        need_q, need_k, need_v, *need_others = (ctx.needs_input_grad[place] for place in PLACES)
        gradients = run(dout, dlse, q, k, v, out, lse, *options, need_q, need_k or need_v, *need_others)
        of_inputs = [None] * ctx.num_inputs
        for place, gradient in zip(PLACES, gradients):
            if ctx.needs_input_grad[place]:
                of_inputs[place] = gradient
        return tuple(of_inputs)

    return backward


def _forward_shapes(q, k, v, *options, **more_options):
    out, lse = empty_outputs(q, v)
    is_asked_for = Options(*options[:OF_OP], **more_options).return_max_logits
    return out, lse, torch.empty_like(lse) if is_asked_for else lse.new_empty(0)


def _backward_shapes(dout, dlse, q, k, v, out, lse, *given):
    options, needed = Options(*given[:OF_OP]), given[OF_OP + 1:]
    need_dq, need_dkv, *need_others = (*needed, *NEEDED[len(needed):])  # the dispatcher drops defaults
    like = [empty_like(x) if is_needed else x.new_empty(0)
            for x, is_needed in ((q, need_dq), (k, need_dkv), (v, need_dkv))]
    return *like, *(x.new_empty(x.shape) if is_needed else lse.new_empty(0)
                    for x, is_needed in zip(options.differentiable, need_others))


def register(forward, backward, run, backend):
    """Register shapes and FLOPs of the two ops of these names, and the derivative of `forward`, which calls run."""

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
    """Register csrc's ops, once they are loaded. run: what the backward pass calls in place of flash_backward."""
    torch.library.register_fake("minimal_attn::flash_decode", lambda q, k, v, *options, **more: empty_outputs(q, v))
    torch.library.register_fake("minimal_attn::append_kvcache", append_shapes)
    register_flops("flash_decode", decode_flops)
    register("minimal_attn::flash_forward", "minimal_attn::flash_backward",
             run or torch.ops.minimal_attn.flash_backward, "cuda")
