"""A plain read of memory, the ceiling of attention to a cache: a Triton kernel that reads words and adds them up.

Each program reads a share of neighbouring words, 16 bytes a load.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096  # words
PROGRAMS = 2  # for each SM: the blocks in flight of two hide the latency of memory


@triton.jit
def _read(words_ptr, sums_ptr, num_words, share, kBlock: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * share
    acc = tl.zeros([kBlock], tl.int32)
    for i in tl.range(0, share, kBlock, num_stages=4):
        places = begin + i + tl.arange(0, kBlock)
        acc += tl.load(words_ptr + places, mask=places < num_words, other=0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(acc.to(tl.int64), 0))


def read(words):
    """int64 (programs,): the sum of the contiguous int32 words that each program has read, up to multiples of 2^32."""
    programs = PROGRAMS * (torch.cuda.get_device_properties(words.device).multi_processor_count if words.is_cuda else 1)
    share = triton.cdiv(triton.cdiv(words.numel(), programs), BLOCK) * BLOCK
    sums = torch.empty(programs, dtype=torch.int64, device=words.device)
    _read[(programs,)](words, sums, words.numel(), share, BLOCK, num_warps=8)
    return sums
