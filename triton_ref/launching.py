"""Host code that all launchers share: the properties of a GPU, launches and plans of them for the calls that follow,
and sums of partial results. Read next: autotune.py, which chooses what a plan holds."""

import functools
import threading
import types
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from minimal_attn.checks import MAX_SEQLEN
from minimal_attn.options import CAUSAL_MASK, NO_MASK

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
    """Properties of a GPU. The interpreter, which has no limits, gets those of an H200 without TMA."""
    if INTERPRETING:
        return Properties(0, 227 << 10, 132)
    with torch.accelerator.device_index(device.index):
        target = triton.runtime.driver.active.get_current_target()
    found = triton.runtime.driver.active.utils.get_device_properties(device.index)
    capability = target.arch if target.backend == "cuda" else 0
    return Properties(capability, found["max_shared_mem"], found["multiprocessor_count"])


class _TileMap:
    """How TMA finds tiles of the shape `block` in tensors such as x, wherever they begin."""

    def __init__(self, x, block, descriptor=TensorDescriptor):
        strides = [stride if n > 1 else 16 for n, stride in zip(x.shape[:-1], x.stride())]
        self.dtype, self.sizes, self.descriptor = x.dtype, (list(x.shape), [*strides, 1], list(block)), descriptor

    @functools.lru_cache(maxsize=4096)
    def at(self, address):
        # In place of a tensor: it has all that a descriptor asks for, but keeps no memory alive.
        memory = types.SimpleNamespace(dtype=self.dtype, data_ptr=lambda: address)
        return self.descriptor(memory, *self.sizes)


_thread = threading.local()


def _need_context():
    """Triton's launcher encodes descriptors in the CUDA context of the calling thread, which a new thread lacks until
    it calls the CUDA runtime, as this does, also while a graph is captured."""
    if not hasattr(_thread, "has_context"):
        torch.cuda.is_current_stream_capturing()
        _thread.has_context = True


class Launch:
    """A kernel with all that stays the same from call to call; the first call compiles it. A small attention takes less
    time than looking a kernel up and putting its arguments together.

    Args:
        function: the kernel. Its parameters are what a call gives, tensors first, then `constants`.
        programs: how many.
        constants: sizes, strides and constexprs, for all tensors of the layouts that the calls will have.
        tiles: for each of the first tensors (x, block) or (x, block, descriptor) where TMA reads it, as for _TileMap,
            or None where the kernel gets its address.
        options: num_warps and num_stages.
    """

    def __init__(self, function, programs, constants, tiles=(), **options):
        if programs > MAX_PROGRAMS:
            raise ValueError(f"too many blocks: {programs}, and a launch takes {MAX_PROGRAMS}")
        self.function, self.grid, self.constants, self.options = function, (programs, 1, 1), constants, options
        self.tile_maps = [tile and _TileMap(*tile) for tile in tiles]
        self.kernel = None  # compiled
        self.named = ()  # which arguments of a call are named tuples

    def __call__(self, *arguments):
        """Launches on the current device and stream. A tensor is None in every call or in none."""
        if INTERPRETING:
            return self._interpret(arguments)
        if self.tile_maps:
            if arguments[0].is_cuda:
                _need_context()
            tiles = [x if tile_map is None else tile_map.at(x.data_ptr())
                     for x, tile_map in zip(arguments, self.tile_maps)]
            arguments = (*tiles, *arguments[len(tiles):])
        if self.kernel is None:
            self.kernel = self.function[self.grid](*arguments, *self.constants, **self.options)
            self.named = [i for i, x in enumerate(arguments) if type(x) is not tuple and isinstance(x, tuple)]
            self.constants = _plain(self.constants)
            return
        arguments = list(arguments)
        for i in self.named:
            arguments[i] = tuple(arguments[i])
        self.kernel[self.grid](*arguments, *self.constants)

    def _interpret(self, arguments):
        """Runs the kernel in Triton's interpreter on fp32 copies of bfloat16 tensors. Those that it wrote are rounded
        back."""
        copies = tuple(map(_in_float, arguments))
        self.function[self.grid](*copies, *self.constants, **self.options)
        for x, copy in zip(arguments, copies):
            if copy is not x and not torch.equal(copy.view(torch.int32), _in_float(x).view(torch.int32)):
                x.copy_(copy)


def _in_float(x):
    """x, or a copy in fp32 of a bfloat16 tensor with its strides: the interpreter (3.6 to 3.9) gets dots and casts of
    bfloat16 wrong."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.bfloat16:
        return x
    storage = x.new_empty(0).set_(x.untyped_storage())
    return storage.float().as_strided(x.shape, x.stride(), x.storage_offset())


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
    """A Launch, to be called with (partial, out): out = the sum of kSplits fp32 tensors, from first to last. Each lies
    in memory as out does, without gaps, and begins split_stride elements after the one before."""
    return Launch(_sum_splits, -(-out.numel() // 1024), (out.numel(), split_stride, kSplits, 1024))


WINDOW = "window_left", "window_right"  # parameters that should not be compiled for


@functools.cache
def packed(kernel):
    """A kernel for packed batches, whose sizes change from call to call and should not be compiled for either. Kernels
    for other batches do not read their batch_size."""
    return triton.jit(do_not_specialize=[*WINDOW, "batch_size", "seqlen_q", "seqlen_k", "seqlen_pad"])(kernel.fn)


def mask_of(options):
    """(window_left, window_right, kIsCausal, kIsLocal, kChunk) of a kernel. A side without a bound is as wide as can
    be."""
    return (*(MAX_SEQLEN if n < 0 else min(n, MAX_SEQLEN) for n in options.window), options.mask == CAUSAL_MASK,
            options.mask not in (NO_MASK, CAUSAL_MASK), min(options.attention_chunk, MAX_SEQLEN))


def kind_of(q, k, options):
    """The part of a tuning key beside dtype and head_dim. Lengths of tensors and of a local window are rounded up to a
    power of two. Those of packed batches are left out: no sample's result may depend on its batch."""
    lengths, bias = options.lengths, options.attn_bias
    left, right, is_causal, is_local, _ = mask_of(options)
    kind = (is_causal, is_local, lengths.is_packed, lengths.seqused_q is not None, lengths.seqused_k is not None,
            options.dropout_seed is not None, options.alibi_slopes is not None, options.softcap > 0,
            options.mask_units is not None, options.score_mod is not None,
            bias if bias is None else (str(bias.dtype), bias.shape[2] > 1, bias.shape[3] > 1))
    sizes = () if lengths.is_packed else (q.shape[2], k.shape[2])
    if is_local:
        sizes += (min(left + right + 1, options.attention_chunk or MAX_SEQLEN),)
    return (*kind, *(min(max(triton.next_power_of_2(n), 64), 1 << 15) for n in sizes))


def layouts(*tensors):
    """All of tensors, or None, that a compiled kernel depends on."""
    return [x if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16) for x in tensors]


def plan_key(options, q, *tensors):
    """All of a call that its launches depend on. The values of softmax_scale, softcap and dropout_p may change."""
    mod = options.score_mod
    of_mod = () if mod is None else (mod.source, *layouts(*mod.captured, *(mod.gradients or ())))
    return (q.device, options.mask, options.softmax_scale < 0, options.softcap > 0, *of_mod,
            *layouts(q, *tensors, *options.tensors))


def remember(plans, key, plan, device):
    """plan, kept for later calls with this key, unless it was made under graph capture: it was not free to measure."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        if len(plans) >= MAX_PLANS:
            plans.clear()
        plans[key] = plan
    return plan
