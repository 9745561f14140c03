"""Benchmark of a training step: the forward pass and then the backward pass, timed as one call.

Each call makes its graph anew, as a step does; what is judged is dq, dk and dv. The timer hides 0.2 ms of the host's
time; where a call takes more of it, the rest is part of its time. Read next: measure.py.
"""

import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import activated, flash_attention, force_kernel
from . import attention, backward
from .attention import BASELINE, DEFAULT_SEQLENS, DEFAULT_SHAPES, ROW, SHAPES, Shape  # noqa: F401: as options.py asks
from .attention import flash_cuda, flash_triton
from .backward import DTYPES  # noqa: F401
from .measure import host_us

TITLE = "Attention forward and backward pass"


def step_of(forward):
    """(q, k, v, dout, causal) -> (dq, dk, dv), by a graph that is made in the call."""
    def step(q, k, v, dout, causal):
        return torch.autograd.grad(forward(q, k, v, causal), (q, k, v), dout)

    return step


IMPLS = backward.impls_of(step_of)
PROFILES = {name: (f"{heading}, forward and backward", step_of(forward))
            for name, (heading, forward) in attention.PROFILES.items()}
HOST_CONTEXTS = {"cuda:sm80": functools.partial(force_kernel, "sm80"),
                 "torch:flash": functools.partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION),
                 "torch:cudnn": functools.partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION), "activated": activated}


def host_cost(device):
    """{name: µs} that a small forward and backward pass take on the host."""
    q, k, v, dout = torch.randn(4, 1, 4, 64, 64, device=device, dtype=torch.bfloat16)
    qkv = [x.requires_grad_() for x in (q, k, v)]
    forwards = {"flash_attention": flash_attention, "cuda:sm80": flash_cuda, "triton": flash_triton,
                "torch:flash": scaled_dot_product_attention, "torch:cudnn": scaled_dot_product_attention,
                "torch": scaled_dot_product_attention, "activated": scaled_dot_product_attention}
    steps = {name: lambda forward=forward: torch.autograd.grad(forward(*qkv), qkv, dout)
             for name, forward in forwards.items()}
    return host_us(steps, HOST_CONTEXTS)


class Case(backward.Case):
    """The Case of the backward pass with the FLOPs and the memory traffic of the forward pass added. A call frees out,
    so out counts as memory beyond inputs and outputs."""

    impls = IMPLS
    op = "forward_backward"
    columns = ROW
    flops_of_forward = 3.5  # two products, then five

    def __init__(self, setting, device):
        super().__init__(setting, device)
        q, k, v, *_ = self.args
        self.bytes += 2 * q.nbytes + k.nbytes + v.nbytes  # q and out


CASES = {Shape: Case}
