"""Host code that attention.py, attention_bwd.py and matmul.py share: the properties of a GPU, launches that keep
all that the next call can use again, plans of such launches, and sums of partial results.

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

from minimal_attn.checks import MAX_SEQLEN, empty_like

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
    """Properties of a GPU, from Triton's driver. The interpreter, which has no limits, gets those of an H200 without
    TMA."""
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
    """Stands for the tensor of a descriptor: it has all that the descriptor asks for, but keeps no memory alive."""
    address: int
    dtype: torch.dtype

    def data_ptr(self):
        return self.address


class _TileMap:
    """How TMA finds tiles of the shape `block` in tensors such as x, wherever they begin. The last dimension of x is
    contiguous; one of size 1 may have any stride. layout is that of Gluon's shared memory, None for Triton's."""

    def __init__(self, x, block, layout=None):
        strides = [stride if n > 1 else 16 for n, stride in zip(x.shape[:-1], x.stride())]
        self.dtype, self.sizes = x.dtype, (list(x.shape), [*strides, 1], list(block))
        self.layout = layout

    def at(self, address):
        memory = _Memory(address, self.dtype)
        if self.layout is None:
            return TensorDescriptor(memory, *self.sizes)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
        return GluonDescriptor(memory, *self.sizes, self.layout)


@functools.lru_cache(maxsize=4096)
def _descriptor(tile_map, address):
    return tile_map.at(address)


_thread = threading.local()


def _need_context():
    """Triton's launcher encodes descriptors in the CUDA context of the calling thread. A new thread has none until it
    calls the CUDA runtime, as this does, also while a graph is captured."""
    if not hasattr(_thread, "has_context"):
        torch.cuda.is_current_stream_capturing()
        _thread.has_context = True


class Launch:
    """A kernel with all that stays the same from call to call; the first call compiles it. A small attention takes less
    time than looking a kernel up and putting its arguments together.

    Args:
        function: the kernel. Its parameters are tensors and what else a call gives, then what is in `constants`.
        programs: how many.
        constants: sizes, strides and constexprs, for all tensors of the layouts that the calls will have.
        tiles: for each tensor (x, block) or (x, block, layout) where TMA reads it, as for _TileMap, None where the
            kernel gets its address. Shorter than the tensors: None for the rest.
        options: num_warps and num_stages.

    Raises:
        ValueError: more programs than a launch can have.
    """

    def __init__(self, function, programs, constants, tiles=(), **options):
        if programs > MAX_PROGRAMS:
            raise ValueError(f"too many blocks: {programs}, and a launch takes {MAX_PROGRAMS}")
        self.function, self.grid, self.constants, self.options = function, (programs, 1, 1), constants, options
        self.tile_maps = [tile and _TileMap(*tile) for tile in tiles]
        self.kernel = None  # compiled; None for ever in the interpreter
        self.named = ()  # which arguments of a call are named tuples

    def __call__(self, *arguments):
        """Launch on the current device and stream. A tensor is None in every call or in none."""
        if self.tile_maps:
            if arguments[0].is_cuda:
                _need_context()
            tiles = [x if tile_map is None else _descriptor(tile_map, x.data_ptr())
                     for x, tile_map in zip(arguments, self.tile_maps)]
            arguments = (*tiles, *arguments[len(tiles):])
        if self.kernel is None:
            self.kernel = self.function[self.grid](*arguments, *self.constants, **self.options)
            if self.kernel is not None:
                self.named = [i for i, x in enumerate(arguments) if type(x) is not tuple and isinstance(x, tuple)]
                self.constants = _plain(self.constants)
            return
        arguments = list(arguments)
        for i in self.named:
            arguments[i] = tuple(arguments[i])
        self.kernel[self.grid](*arguments, *self.constants)


def _plain(x):
    """x with plain tuples for named ones, which Triton's launcher takes four times as long to read."""
    return tuple(map(_plain, x)) if isinstance(x, tuple) else x


@triton.jit
def _sum_splits(partial, out, numel, split_stride, kSplits: tl.constexpr, kBlock: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * kBlock + tl.arange(0, kBlock)
    acc = tl.zeros([kBlock], tl.float32)
    for split_idx in tl.static_range(kSplits):
        acc += tl.load(partial + tl.cast(split_stride, tl.int64) * split_idx + i, mask=i < numel)
    tl.store(out + i, acc.to(out.dtype.element_ty), mask=i < numel)


def sum_splits(out, split_stride, kSplits):
    """A Launch, to be called with (partial, out): out = the sum of kSplits tensors, from first to last, which lie
    in memory as out does. They are in fp32, and each begins split_stride elements after the one before. out has no gaps
    in memory."""
    return Launch(_sum_splits, -(-out.numel() // 1024), (out.numel(), split_stride, kSplits, 1024))


# Parameters that should not be compiled for: a window's size, and in a packed batch what changes from call to call.
# Kernels of other batches do not read their batch_size.
WINDOW = "window_left", "window_right"
PACKED_SIZES = "batch_size", "seqlen_q", "seqlen_k", "seqlen_pad"


def mask_of(window):
    """window_left, window_right, kIsCausal and kIsLocal of a kernel. A side without a bound is as wide as can be."""
    is_causal = window == (-1, 0)
    return (*(MAX_SEQLEN if n < 0 else min(n, MAX_SEQLEN) for n in window), is_causal,
            not is_causal and window != (-1, -1))


def num_samples(q, lengths):
    return lengths.cu_seqlens_q.shape[0] - 1 if lengths.is_packed else q.shape[0]


def kind_of(q, k, options):
    """The part of a tuning key that says on what a choice of tiles depends beside dtype and head_dim.

    Lengths of tensors are rounded up to a power of two: 1025 to 2048 are tuned as one. Lengths of packed batches are
    left out: no sample's result may depend on its batch. For a window that is neither none nor causal, the number of
    keys that a row sees counts as well, rounded in the same way: in a narrow window a large tile computes much that the
    mask then drops.
    """
    lengths, bias = options.lengths, options.attn_bias
    left, right, is_causal, is_local = mask_of(options.window)
    kind = (is_causal, is_local, lengths.is_packed, lengths.seqused_q is not None, lengths.seqused_k is not None,
            options.dropout_seed is not None, options.alibi_slopes is not None, options.softcap > 0,
            bias if bias is None else (str(bias.dtype), bias.shape[2] > 1, bias.shape[3] > 1))
    sizes = () if lengths.is_packed else (q.shape[2], k.shape[2])
    if is_local:
        sizes += (left + right + 1,)
    return (*kind, *(min(max(triton.next_power_of_2(n), 64), 1 << 15) for n in sizes))


def layouts(*tensors):
    """All of tensors, or None, that a compiled kernel depends on."""
    return [x if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16) for x in tensors]


def plan_key(options, q, *tensors):
    """All of a call that its launches depend on. Its numbers may be others in the next call: softmax_scale but for the
    sign, softcap, dropout_p."""
    return (q.device, options.window, options.softmax_scale < 0, options.softcap > 0,
            *layouts(q, *tensors, *options.tensors))


def remember(plans, key, plan, device):
    """Keep plan for later calls with this key. One made under graph capture is not kept: it was not free to measure."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        if len(plans) >= MAX_PLANS:
            plans.clear()
        plans[key] = plan
