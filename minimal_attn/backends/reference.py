"""backend="reference": the definition, in fp8 too; and what any backend in plain PyTorch does for its gradients."""

import math

import torch

from ..checks import FP8_DTYPES, out_dtype
from ..options import Backend
from ..reference.append import append_in_torch
from ..reference.definition import DTYPES, reference_forward
from ..reference.packed import as_padded
from ..reference.pages import over_gathered


def _forward(q, k, v, options):
    """reference_forward, of fp8 inputs in fp32 and multiplied by their descales."""
    dtype = out_dtype(q.dtype)
    if dtype != q.dtype:
        if options.lengths.is_packed:  # descales are those of samples
            return as_padded(_forward, q, k, v, options)
        heads = q.shape[1] // k.shape[1], 1, 1
        q, k, v = (x.float() if descale is None else x.float() * descale.repeat_interleave(n, 1)[..., None, None]
                   for x, descale, n in zip((q, k, v), options.descales, heads))
    out, *more = reference_forward(q, k, v, options)
    return out.to(dtype), *more


def by_autograd(forward):
    """Makes a Backend's backward from its forward, which is computed again.

    out and lse may be those of more keys than k has. With w = exp(lse of k's keys - lse of all keys), k's keys add
    w · (out of k's keys) to the result, and the gradients of the two factors follow.
    """

    def backward(dout, q, k, v, out, lse, options):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            part, part_lse = forward(*inputs, options._replace(return_lse=True))
        share = (part_lse.detach() - lse.masked_fill(lse == -math.inf, math.inf)).exp()  # 0 without keys
        dout = dout.to(lse.dtype)
        dlse = share * (dout * (part.detach().to(lse.dtype) - out.to(lse.dtype))).sum(-1)
        return torch.autograd.grad((part, part_lse), inputs, ((share[..., None] * dout).to(part.dtype), dlse))

    return backward


BACKEND = Backend(_forward, DTYPES + FP8_DTYPES, True, over_gathered(_forward), append_in_torch, by_autograd(_forward))
