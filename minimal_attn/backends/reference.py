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
    """reference_forward, and fp8: in fp32 with what the descales make of it."""
    dtype = out_dtype(q.dtype)
    if dtype != q.dtype:
        if options.lengths.is_packed:  # descales are those of samples
            return as_padded(_forward, q, k, v, options)
        heads = q.shape[1] // k.shape[1], 1, 1
        q, k, v = (x.float() if descale is None else x.float() * descale.repeat_interleave(n, 1)[..., None, None]
                   for x, descale, n in zip((q, k, v), options.descales, heads))
    out, lse = reference_forward(q, k, v, options)
    return out.to(dtype), lse


def always(device=None):
    """Backend's why_not of what runs anywhere."""
    return None


def by_autograd(forward):
    """A Backend's backward by its forward, which is computed again.

    With w = exp(lse of these keys - lse of all), their share of the result is w · out of these keys, and the gradients
    of the two factors follow.
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


BACKEND = Backend(_forward, DTYPES + FP8_DTYPES, True, always, over_gathered(_forward), append_in_torch,
                  by_autograd(_forward))
