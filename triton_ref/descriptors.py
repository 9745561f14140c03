"""Tensor descriptors, which tell TMA where a matrix is and which tiles to copy, made once for each place in memory.

Read next: attention.py and matmul.py, which read and write through them.
"""

import functools
from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class _Memory:
    """What a descriptor asks of its tensor; unlike that, it keeps no memory alive."""
    address: int
    dtype: torch.dtype

    def data_ptr(self):
        return self.address


@functools.lru_cache(maxsize=4096)
def _cached(address, dtype, shape, strides, block, layout):
    memory = _Memory(address, dtype)
    if layout is None:
        return TensorDescriptor(memory, list(shape), list(strides), list(block))
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
    return GluonDescriptor(memory, list(shape), list(strides), list(block), layout)


def descriptor(x, block, layout=None):
    """A tensor descriptor of x, whose last dimension is contiguous; block is the shape of its tiles, layout how Gluon's
    shared memory holds them. The stride of a dimension of 1 is no matter."""
    shape = tuple(x.shape)
    strides = tuple(stride if n > 1 else 16 for n, stride in zip(shape[:-1], x.stride()))
    return _cached(x.data_ptr(), x.dtype, shape, (*strides, 1), tuple(block), layout)
