"""What the launchers of attention.py, attention_bwd.py and matmul.py share: what a GPU has, tensor descriptors, sums of
partial results, and plans, which spare a call the work that the call before it did.

Read next: autotune.py, which chooses what a plan holds.
"""

import functools
import threading
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from minimal_attn.checks import empty_like

# With TRITON_INTERPRET=1 at import the kernels run on the CPU, in numpy.
INTERPRETING = triton.knobs.runtime.interpret

MAX_PROGRAMS = 2**31 - 1  # of a launch
MAX_PLANS = 4096


class Properties(NamedTuple):
    capability: int  # 90 for Hopper; 0 for what is not NVIDIA's
    max_shared_memory: int  # bytes that one program can have
    num_sms: int


@functools.cache
def properties(device):
    """Those of a GPU, as Triton's driver tells them; of an H200 but for TMA in the interpreter, which has no limits."""
    if INTERPRETING:
        return Properties(0, 227 << 10, 132)
    with torch.accelerator.device_index(device.index):
        target = triton.runtime.driver.active.get_current_target()
    found = triton.runtime.driver.active.utils.get_device_properties(device.index)
    capability = target.arch if target.backend == "cuda" else 0
    return Properties(capability, found["max_shared_mem"], found["multiprocessor_count"])


def to_float(x):
    """x in fp32 with a contiguous last dimension, or None for None. Triton's interpreter (3.6 to 3.9) gets dots and
    casts of bf16 and fp8 wrong, so it is given this instead. The order of dimensions stays: fake kernels rely on it."""
    return None if x is None else empty_like(x, torch.float32).copy_(x)


@dataclass(frozen=True)
class _Memory:
    """What a descriptor asks of its tensor; unlike that, it keeps no memory alive."""
    address: int
    dtype: torch.dtype

    def data_ptr(self):
        return self.address


@functools.lru_cache(maxsize=4096)
def _descriptor(address, dtype, shape, strides, block, layout):
    memory = _Memory(address, dtype)
    if layout is None:
        return TensorDescriptor(memory, list(shape), list(strides), list(block))
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    return GluonDescriptor(memory, list(shape), list(strides), list(block), layout)


_thread = threading.local()


def descriptor(x, block, layout=None):
    """Tells TMA where x is, to copy tiles of the shape `block`. x is on the current device, and its last dimension is
    contiguous. layout is that of Gluon's shared memory, None for Triton's. A dimension of 1 may have any stride."""
    if x.is_cuda and not hasattr(_thread, "has_context"):
        # Triton's launcher encodes descriptors in the CUDA context of the calling thread. A new thread has none until
        # it calls the CUDA runtime, as this does, also while a graph is captured.
        torch.cuda.is_current_stream_capturing()
        _thread.has_context = True
    shape = tuple(x.shape)
    strides = tuple(stride if n > 1 else 16 for n, stride in zip(shape[:-1], x.stride()))
    return _descriptor(x.data_ptr(), x.dtype, shape, (*strides, 1), tuple(block), layout)


@triton.jit
def _sum_splits(partial, out, numel, split_stride, kSplits: tl.constexpr, kBlock: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * kBlock + tl.arange(0, kBlock)
    acc = tl.zeros([kBlock], tl.float32)
    for split in tl.static_range(kSplits):
        acc += tl.load(partial + split * split_stride + i, mask=i < numel)
    tl.store(out + i, acc.to(out.dtype.element_ty), mask=i < numel)


def sum_splits(partial, out, split_stride, kSplits):
    """out = the sum of kSplits tensors that lie in memory as out does, from the first to the last. They are in fp32, and
    each begins split_stride elements after the one before. out has no gaps in memory."""
    numel = out.numel()
    _sum_splits[(triton.cdiv(numel, 1024),)](partial, out, numel, split_stride, kSplits=kSplits, kBlock=1024)


def remember(plans, key, plan, device):
    """Keep a plan for the calls of its key. One made under graph capture is not kept: it was not free to measure."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        if len(plans) >= MAX_PLANS:
            plans.clear()
        plans[key] = plan
