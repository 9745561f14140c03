"""Matrix product in Triton: C = A B with fp32 sums, for matrices of any size and any strides.

A program computes tiles [kBlockM, kBlockN] of C, one after the other. With TMA (Hopper on) there is one program a
multiprocessor, and the loops over tiles and over K are one: the first copies of the next tile are under way while this
one is stored. Everywhere else a tile is read through pointers, by any strides. If there are few tiles, kSplits programs
share a tile's K, and a second kernel adds up what they found, always in the same order.

Read next: autotune.py, which picks the fastest of the configs that _ranked proposes.
"""

import functools
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from minimal_attn.checks import check_matmul, check_no_derivative, is_eager

from . import autotune
from .attention import add_product
from .launching import INTERPRETING, Launch, layouts, properties, remember, sum_splits


@triton.jit
def _load(x, row, col, rows, cols, strides, kTmaDim: tl.constexpr, kBlockRows: tl.constexpr, kBlockCols: tl.constexpr):
    """[kBlockRows, kBlockCols] of a matrix from (row, col) on, with 0 beyond the ends of the matrix."""
    if kTmaDim is None:
        r, c = row + tl.arange(0, kBlockRows), col + tl.arange(0, kBlockCols)
        pointers = x + r.to(tl.int64)[:, None] * strides[0] + c.to(tl.int64)[None, :] * strides[1]
        return tl.load(pointers, mask=(r < rows)[:, None] & (c < cols)[None, :], other=0.0)
    elif kTmaDim == 1:
        return x.load([row, col])
    else:
        return x.load([col, row]).T


@triton.jit
def _matmul(a, b, c, m, n, k, a_strides, b_strides, kTmaDimA: tl.constexpr, kTmaDimB: tl.constexpr,
            kBlockM: tl.constexpr, kBlockN: tl.constexpr, kBlockK: tl.constexpr, kSplits: tl.constexpr):
    """c [m, n], or with kSplits > 1 the partial sums: kSplits matrices one below the other, of whole tiles each.
    a, b and c are pointers, or tensor descriptors. kTmaDimA and kTmaDimB: None, or what _contiguous_dim says."""
    kTma: tl.constexpr = kTmaDimA is not None
    kGroupM: tl.constexpr = 8
    tl.assume(k > 0)
    m_blocks, n_blocks = tl.cdiv(m, kBlockM), tl.cdiv(n, kBlockN)
    k_blocks = tl.cdiv(k, kBlockK * kSplits)  # of a split; what they count too much reads as 0
    for tile in tl.range(tl.program_id(0), m_blocks * n_blocks * kSplits, tl.num_programs(0), flatten=kTma):
        # Down kGroupM rows of tiles, then one to the right: programs that run together share rows and columns in L2.
        split, tile_idx = tile % kSplits, tile // kSplits
        group, in_group = tile_idx // (kGroupM * n_blocks), tile_idx % (kGroupM * n_blocks)
        group_rows = tl.minimum(m_blocks - group * kGroupM, kGroupM)
        m_block, n_block = group * kGroupM + in_group % group_rows, in_group // group_rows

        row, col = m_block * kBlockM, n_block * kBlockN
        acc = tl.zeros([kBlockM, kBlockN], tl.float32)
        for k_block in range(k_blocks):
            k_idx = (split * k_blocks + k_block) * kBlockK
            a_tile = _load(a, row, k_idx, m, k, a_strides, kTmaDimA, kBlockM, kBlockK)
            b_tile = _load(b, k_idx, col, k, n, b_strides, kTmaDimB, kBlockK, kBlockN)
            acc = add_product(acc, a_tile, b_tile)

        row += split * m_blocks * kBlockM
        if kTma:
            c.store([row, col], acc.to(c.dtype))
        else:
            rows, cols = row + tl.arange(0, kBlockM), col + tl.arange(0, kBlockN)
            row_end = m if kSplits == 1 else kSplits * m_blocks * kBlockM
            tl.store(c + rows.to(tl.int64)[:, None] * n + cols[None, :], acc.to(c.dtype.element_ty),
                     mask=(rows < row_end)[:, None] & (cols < n)[None, :])


# (kBlockM, kBlockN, kBlockK, TFLOP/s of one multiprocessor on such tiles), by size of an element, measured on an H200.
TILES = {
    2: ((128, 256, 64, 6.4),  # 128 sums a thread in 8 warps; three stages, and a tile of C beside them
        (128, 128, 64, 6.0),
        (64, 128, 128, 5.5),  # from here on for few tiles: more of them, each at a lower rate
        (64, 64, 128, 4.0),
        (64, 32, 128, 2.1),
        (16, 128, 128, 1.2),  # up to 16 rows the time goes to reading B: wide tiles unless they are too few
        (16, 64, 256, 0.9),
        (16, 32, 256, 0.4)),
    # True fp32 runs on the FMA units from registers, so the tiles are small.
    4: ((64, 64, 32, 0.30), (32, 32, 32, 0.20), (16, 64, 32, 0.15), (16, 32, 32, 0.10)),
}
MAX_TRIED = 6  # configs that autotuning times


def tile_config(dtype: torch.dtype, m: int, n: int, k: int, is_tma: bool = True, num_sms: int = 132,
                shared_memory: int = 227 << 10) -> dict:
    """The launch options for (m, k) times (k, n) by a model of the time, without a measurement and without a GPU:
    kBlockM, kBlockN, kBlockK, kSplits, num_warps, num_stages.

    Args:
        is_tma: whether tiles are copied by TMA; then shared memory also holds a tile of C.
        num_sms, shared_memory: multiprocessors of the GPU, and the bytes that a program may have; by default an H200's.
    """
    return _ranked(dtype, m, n, k, is_tma, num_sms, shared_memory)[0]


def _ranked(dtype, m, n, k, is_tma, num_sms, shared_memory):
    """The configs that may be the fastest, by a model of the time in µs: tiles run in waves of num_sms at the rate of
    TILES, or memory is the limit, at 3 TB/s; a launch takes 5, another one to add up splits 3 and what it reads."""
    bytes_moved = dtype.itemsize * (m * k + k * n + m * n)
    found = []
    for kBlockM, kBlockN, kBlockK, rate in TILES[dtype.itemsize]:
        if (kBlockM == 16) != (m <= 16):
            continue
        tiles = cdiv(m, kBlockM) * cdiv(n, kBlockN)
        for kSplits in (1, 2, 4, 8, 16) if tiles < num_sms else (1,):
            config = _config(dtype, kBlockM, kBlockN, kBlockK, kSplits, is_tma, shared_memory)
            k_span = cdiv(k, kBlockK * kSplits) * kBlockK
            compute = cdiv(tiles * kSplits, num_sms) * (2e-6 * kBlockM * kBlockN * k_span / rate + 0.2)
            adding = 3 + kSplits * (0.5 + 8 * m * n / 3e6) if kSplits > 1 else 0
            if config["num_stages"] > 1:
                found.append((5 + max(compute, bytes_moved / 3e6) + adding, compute, config))
    found.sort(key=lambda entry: entry[:2])
    return [config for time, _, config in found[:MAX_TRIED] if time <= 1.2 * found[0][0]]


def _config(dtype, kBlockM, kBlockN, kBlockK, kSplits, is_tma, shared_memory):
    """A config with as many stages as there is memory for, at most 5, since more gain nothing."""
    warps_of_4 = cdiv(kBlockM * kBlockN, 64 * 64 if dtype == torch.float32 else 128 * 128)
    c_bytes = kBlockM * kBlockN * (dtype.itemsize if kSplits == 1 else 4) if is_tma else 0
    barriers = 1024
    num_stages = (shared_memory - barriers - c_bytes) // ((kBlockM + kBlockN) * kBlockK * dtype.itemsize)
    return dict(kBlockM=kBlockM, kBlockN=kBlockN, kBlockK=kBlockK, kSplits=kSplits, num_warps=min(8, 4 * warps_of_4),
                num_stages=min(5, num_stages))


def _contiguous_dim(x):
    """The dimension along which TMA can read x: 1, or 0 for the transpose of a row-major matrix; None for neither."""
    for dim in (1, 0):
        stride = x.stride(1 - dim)
        if x.stride(dim) == 1 and stride >= x.shape[dim] and stride * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0:
            return dim
    return None


def _tile(x, dim, kBlockRows, kBlockCols):
    """(matrix, sizes of a tile), as Launch takes it. Where dimension 0 is contiguous, TMA reads the transpose."""
    return (x, (kBlockRows, kBlockCols)) if dim == 1 else (x.T, (kBlockCols, kBlockRows))


def _launch(a, b, c, dims, num_sms, config):
    """A function of (a, b, c) that computes c = a @ b. dims: the _contiguous_dim of a and of b, None without TMA."""
    (m, k), n = a.shape, b.shape[1]
    kBlockM, kBlockN, kBlockK, kSplits, num_warps, num_stages = config.values()
    m_blocks = cdiv(m, kBlockM)
    programs, tiles = m_blocks * cdiv(n, kBlockN) * kSplits, ()
    new_partial = functools.partial(torch.empty, (kSplits * m_blocks * kBlockM, n), dtype=torch.float32)
    if dims is not None:
        programs = min(programs, num_sms)
        tiles = (_tile(a, dims[0], kBlockM, kBlockK), _tile(b, dims[1], kBlockK, kBlockN),
                 _tile(c if kSplits == 1 else new_partial(device="meta"), 1, kBlockM, kBlockN))
    constants = m, n, k, a.stride(), b.stride(), *(dims or (None, None)), kBlockM, kBlockN, kBlockK, kSplits
    product = Launch(_matmul, programs, constants, tiles, num_warps=num_warps, num_stages=num_stages)
    if kSplits == 1:
        return product
    add = sum_splits(c, m_blocks * kBlockM * n, kSplits)

    def product_of_splits(a, b, c):
        partial = new_partial(device=c.device)
        product(a, b, partial)
        add(partial, c)

    return product_of_splits


def _multiply(a: Tensor, b: Tensor, block_m: Optional[int], block_n: Optional[int], block_k: Optional[int],
              use_autotune: bool) -> Tensor:
    """triton_matmul of checked arguments."""
    c = a.new_empty((a.shape[0], b.shape[1]))
    if 0 in a.shape or 0 in b.shape:
        return c.zero_()
    options = use_autotune and autotune.is_on(), block_m, block_n, block_k
    key = (a.device, *layouts(a, b), *options)
    with torch.accelerator.device_index(a.device.index):  # no index, nothing to do: the CPU
        plan = _plans.get(key) or remember(_plans, key, _plan(a, b, c, *options), a.device)
        plan(a, b, c)
    return c


_plans = {}  # {all that a launch depends on: the launch}


def _plan(a, b, c, use_autotune, *blocks):
    """_launch's function for a config: that of the given sizes of blocks, else the tuned or the usual one."""
    (m, k), n = a.shape, b.shape[1]
    capability, shared_memory, num_sms = properties(a.device)
    dims = _contiguous_dim(a), _contiguous_dim(b)
    # TMA copies rows that start at multiples of 16 bytes, of c as well.
    if capability < 90 or None in dims or a.dtype == torch.float32 or n % 8:
        dims = None
    sizes = tuple(map(_bucket, (m, n, k))) if use_autotune else (m, n, k)
    if None in blocks:
        configs = _ranked(a.dtype, *sizes, dims is not None, num_sms, shared_memory)
    else:
        configs = [_config(a.dtype, *blocks, 1, dims is not None, shared_memory)]
        if configs[0]["num_stages"] < 1:
            raise ValueError(f"block_m, block_n and block_k must fit {shared_memory} bytes of shared memory, which "
                             f"{blocks} do not in {a.dtype}")
    key = (str(a.dtype), *sizes, *(dims or [stride == 1 for stride in (*a.stride(), *b.stride())]))
    return autotune.fastest_launch("matmul", key, configs, lambda config: _launch(a, b, c, dims, num_sms, config),
                                   (a, b, c), use_autotune)


def _bucket(size):
    """size rounded up to 4, 5, 6 or 7 times a power of two: sizes that share one choice of autotuning."""
    step = max(16, 1 << max(0, (size - 1).bit_length() - 3))
    return cdiv(size, step) * step


_matmul_op = torch.library.custom_op("minimal_attn::triton_matmul", _multiply, mutates_args=())


@_matmul_op.register_fake
def _(a, b, block_m, block_n, block_k, use_autotune):
    return a.new_empty((a.shape[0], b.shape[1]))


def triton_matmul(a: Tensor, b: Tensor, block_m: Optional[int] = None, block_n: Optional[int] = None,
                  block_k: Optional[int] = None, use_autotune: bool = True) -> Tensor:
    """minimal_attn.triton_matmul, which describes it."""
    check_matmul(a, b, block_m, block_n, block_k)
    if a.device.type == "cpu" and not INTERPRETING:
        raise ValueError("CUDA tensors required: a and b are on the CPU, and Triton's interpreter, which runs the "
                         "kernel there, is off; set TRITON_INTERPRET=1 before Python starts")
    check_no_derivative("triton_matmul", "torch.matmul", a=a, b=b)
    # The op costs 15 µs, and only tracing needs it.
    return (_multiply if is_eager(a, b) else _matmul_op)(a, b, block_m, block_n, block_k, use_autotune)
