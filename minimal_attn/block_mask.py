"""Block masks: any mask, for kernels that are never compiled for one.

A mask is cut into units of 64 rows by 64 keys. Kernels skip the empty units and mask nothing in the full ones. For the
partial units they read one bit a score. Functions and dense masks are evaluated part by part: everywhere, to find the
states of units, and again in partial units, to keep their bits.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import max_pool2d, pad

from .checks import (can_read, check_apart, check_is, check_number, check_range, check_tensor, check_tensor_of, is_int,
                     shown)
from .options import warn

UNIT = 64  # rows of a unit, and keys
FULL, EMPTY = -1, -2  # states of a unit
PARTIAL = 0  # until units have the numbers of their bits
PART = 2**26  # scores that are evaluated at a time: an int64 for each takes 512 MiB
PICTURE = 20, 60  # lines and columns, at most


@dataclass(eq=False, repr=False)
class BlockMask:
    """Which keys each row sees. create_block_mask builds one, and so do from_dense, from_blocks and from_torch.

    With M = ceil(Q_LEN / 64), N = ceil(KV_LEN / 64), Bm = B or 1 and Hm = H or 1, where 1 broadcasts. All tensors are
    int32, contiguous and on one device.

    A unit is full if all rows see all keys that exist in it, so kernels must mask the ends of lengths by themselves. In
    the bits of a partial unit, rows and keys beyond the ends are hidden. Copies and pickles have no mask_mod.

    The words are made of the units, once: to change a mask, use copy_. Kernels clamp the numbers of bits, and trust the
    words: a deterministic backward pass may wait forever for words that disagree with them.
    """

    units: Tensor  # (Bm, Hm, M, N): EMPTY, FULL, or the number of the unit's bits, from 0 on
    # (Bm, Hm, M, ceil(N / 32)): bit n % 32 of word n // 32 says that unit (m, n) is not empty
    row_words: Tensor = field(init=False)
    key_words: Tensor = field(init=False)  # (Bm, Hm, N, ceil(M / 32)): the same with rows and keys exchanged
    # (P, 2, 128), P no less than there are partial units: a word for each thread of a warpgroup that holds the unit as
    # the accumulator of a 64 x 64 product. Thread row // 16 * 32 + row % 8 * 4 + key % 8 // 2 has bit
    # row // 8 % 2 * 16 + key // 8 * 2 + key % 2, which says that the row sees the key.
    # The second 128 have row and key exchanged, for the backward pass, whose accumulators are [keys, rows].
    bits: Tensor
    Q_LEN: int
    KV_LEN: int
    mask_mod: Callable | None = None  # from_torch's is torch's, which says nothing about blocks that are not listed

    def __post_init__(self):
        grid = -(-self.Q_LEN // UNIT), -(-self.KV_LEN // UNIT)
        check_tensor("units", self.units)
        check_tensor_of("units", self.units, self.device, shapes=(("Bm", "Hm", *grid),))
        check_tensor_of("bits", self.bits, self.device)
        visible = self.units != EMPTY
        self.row_words, self.key_words = _flags(visible), _flags(visible.mT)

    @staticmethod
    def from_dense(mask: Tensor, *, num_bits: int | None = None, compile: bool = False) -> "BlockMask":
        """A bool tensor (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk), True where a row sees a key. A B or H of 1 broadcasts.
        Rows and keys do not: mask.expand(...) repeats them. num_bits, compile, errors: as create_block_mask."""
        _check_values("mask", mask)
        mask = mask[(None,) * (4 - mask.ndim)]
        dense = create_block_mask(lambda b, h, q_idx, kv_idx: mask[b, h, q_idx, kv_idx], *mask.shape, mask.device,
                                  num_bits=num_bits, compile=compile)
        return replace(dense, mask_mod=None)

    @staticmethod
    def from_blocks(blocks: Tensor, Q_LEN: int, KV_LEN: int, BLOCK_SIZE: int | tuple[int, int], *,
                    num_bits: int = 0) -> "BlockMask":
        """A bool tensor (B or 1, H or 1, ceil(Q_LEN / rows), ceil(KV_LEN / keys)), True where rows of a block see its
        keys. BLOCK_SIZE: its rows and keys, or one number for both, multiples of 64. num_bits: room for copy_."""
        _check_values("blocks", blocks)
        visible = _units_of(blocks, "blocks", Q_LEN, KV_LEN, BLOCK_SIZE)
        check_number("num_bits", num_bits)
        states = torch.where(visible, FULL, EMPTY)
        return replace(_assemble(states, lambda b, *_: b < 0, Q_LEN, KV_LEN, num_bits, compile=False), mask_mod=None)

    @staticmethod
    def from_torch(block_mask, *, num_bits: int | None = None, compile: bool = False) -> "BlockMask":
        """A BlockMask of torch.nn.attention.flex_attention, whose BLOCK_SIZE are multiples of 64. Its mask_mod is
        evaluated in its partial blocks alone. The host reads their number. num_bits, compile: as create_block_mask.
        TypeError: another type, and what create_block_mask says of mask_mod. ValueError: other sizes."""
        from torch.nn.attention import flex_attention  # takes a second or two

        check_is("block_mask", type(block_mask), isinstance(block_mask, flex_attention.BlockMask),
                 "a BlockMask of minimal_attn or torch, for from_torch of torch alone", TypeError)
        columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
        states = torch.where(_listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns), PARTIAL, EMPTY)
        if block_mask.full_kv_num_blocks is not None:
            is_full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
            states = torch.where(is_full, FULL, states)
        states = _units_of(states, "the lists of block_mask", *block_mask.seq_lengths, block_mask.BLOCK_SIZE)
        check_number("num_bits", num_bits or 0)
        _check_mask_mod(block_mask.mask_mod, states.device)
        # A unit of a partial block may be full or empty.
        index = (states == PARTIAL).flatten().nonzero()[:, 0]
        parts = _evaluate(_states, compile, block_mask.mask_mod, index, states.shape, *block_mask.seq_lengths, UNIT)
        states.view(-1)[index] = torch.cat([index[:0], *(part[:, 0] for part in parts)])
        return _assemble(states, block_mask.mask_mod, *block_mask.seq_lengths, num_bits, compile)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(Bm, Hm, Q_LEN, KV_LEN)."""
        return *self.units.shape[:2], self.Q_LEN, self.KV_LEN

    @property
    def device(self) -> torch.device:
        return self.units.device

    @property
    def _tensors(self):
        return {name: getattr(self, name) for name in ("units", "row_words", "key_words", "bits")}

    def to(self, device) -> "BlockMask":
        """This mask on a device. Tensors that mask_mod captures stay where they are."""
        return replace(self, units=self.units.to(device), bits=self.bits.to(device))

    def copy_(self, other: "BlockMask") -> "BlockMask":
        """Make this the other mask, in its own memory, so that CUDA graphs find it there. ValueError: another shape, or
        more rows of bits than this one has: num_bits makes room for them."""
        if self.shape != other.shape or self.bits.shape[0] < other.bits.shape[0]:
            raise ValueError(f"copy_ needs a BlockMask of the same shape with at most as many bits, got {other!r} for "
                             f"{self!r}")
        for name, x in other._tensors.items():
            getattr(self, name)[:x.shape[0]].copy_(x)
        self.mask_mod = other.mask_mod
        return self

    def to_dense(self) -> Tensor:
        """bool (Bm, Hm, Q_LEN, KV_LEN), True where a row sees a key."""
        return dense_of(self.units, self.bits, self.Q_LEN, self.KV_LEN)

    def sparsity(self) -> float:
        """The percentage of units that are empty."""
        return 100 * (self.units == EMPTY).double().mean().item()

    def __str__(self):
        states = self.units[0, 0].clamp(max=PARTIAL).double()[None]
        step = [-(-size // most) for size, most in zip(states.shape[1:], PICTURE)]
        high, low = (sign * max_pool2d(sign * states, step, ceil_mode=True)[0] for sign in (1, -1))
        cells = torch.where(high == EMPTY, EMPTY, torch.where((high == FULL) & (low == FULL), FULL, PARTIAL)).tolist()
        shown_as = {FULL: "█", PARTIAL: "░", EMPTY: "·"}
        picture = "\n".join("".join(shown_as[cell] for cell in line) for line in cells)
        return (f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%)\n{picture}\n"
                "First sample and head: █ full, ░ partial, · empty")

    def __repr__(self):
        return f"BlockMask(shape={self.shape}, num_bits={self.bits.shape[0]}, device={str(self.device)!r})"

    def __getstate__(self):
        return {**vars(self), "mask_mod": None}


def create_block_mask(mask_mod: Callable, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device=None, *,
                      num_bits: int | None = None, compile: bool = False) -> BlockMask:
    """The BlockMask of a function, as torch.nn.attention.flex_attention's create_block_mask.

    Args:
        mask_mod: (b, h, q_idx, kv_idx) -> whether the row sees the key. It is given integer tensors without dimensions,
            under torch.vmap, and returns such a tensor of bool. It may capture tensors on the device.
        B, H: samples and heads, or None where mask_mod does not depend on them.
        Q_LEN, KV_LEN: rows and keys.
        device: "cuda" if None and there is one, else "cpu".
        num_bits: room for the bits of so many partial units, also for a later copy_. None: as many as there are, a
            number that the host must read.
        compile: fuse mask_mod with what follows by torch.compile. It takes seconds for each mask_mod, so it is for long
            sequences and masks that are built in every step. If it fails, there is a warning, and this and all later
            masks are built without it.

    Raises:
        TypeError: a size that is no int, or a mask_mod that is no function, does not return bool, or does what vmap
            refuses, as an `if` on a value.
        ValueError: a size below 1, another device, a mask_mod that returns more than one value, and on the CPU more
            partial units than num_bits. On a GPU, that is an assertion on the device.
    """
    B, H = (1 if size is None else size for size in (B, H))
    for name, size in dict(B=B, H=H, Q_LEN=Q_LEN, KV_LEN=KV_LEN, num_bits=num_bits or 0).items():
        check_number(name, size)
    device = _check_device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    _check_mask_mod(mask_mod, device)
    M, N = -(-Q_LEN // UNIT), -(-KV_LEN // UNIT)
    strips = torch.arange(B * H * M, device=device)  # of 64 rows and all keys
    parts = _evaluate(_states, compile, mask_mod, strips, (B, H, M, 1), Q_LEN, KV_LEN, N * UNIT)
    return _assemble(torch.cat([*parts]).view(B, H, M, N), mask_mod, Q_LEN, KV_LEN, num_bits, compile)


def dense_of(units, bits, seqlen_q, seqlen_k):
    """BlockMask.to_dense of its tensors."""
    seen = (bits[:, 0, :, None] >> _places(bits) & 1).bool()
    # Dimensions: (P, row // 16, row % 8, key % 8 // 2, row // 8 % 2, key // 8, key % 2)
    seen = seen.view(-1, 4, 8, 4, 2, 8, 2).permute(0, 1, 4, 2, 5, 3, 6).reshape(bits.shape[0], UNIT, UNIT)
    constant = torch.arange(2, device=units.device).bool()[:, None, None].expand(2, UNIT, UNIT)
    seen = torch.cat([seen, constant])[units]  # EMPTY and FULL are the last two
    return seen.transpose(3, 4).flatten(4, 5).flatten(2, 3)[:, :, :seqlen_q, :seqlen_k]


def _assemble(states, mask_mod, Q_LEN, KV_LEN, num_bits, compile):
    """The BlockMask of states (Bm, Hm, M, N), in whose partial units mask_mod is evaluated."""
    is_partial = (states == PARTIAL).flatten()
    found = is_partial.sum()
    if num_bits is None:
        num_bits = int(found)
    elif not states.is_cuda:
        check_range("num_bits", num_bits, int(found), whose=", the number of partial units")
    else:
        torch._assert_async(found <= num_bits, f"a BlockMask has more than {num_bits} partial units, its num_bits")
    numbers = is_partial.cumsum(0).view_as(states) - 1
    units = torch.where(states == PARTIAL, torch.where(numbers < num_bits, numbers, EMPTY), states).int()
    index = torch.nonzero_static(is_partial, size=num_bits, fill_value=0)[:, 0]
    parts = _evaluate(_bits, compile, mask_mod, index, states.shape, Q_LEN, KV_LEN, UNIT)
    bits = torch.cat([units.new_empty(0, 2, 128), *parts])
    return BlockMask(units, bits, Q_LEN, KV_LEN, mask_mod)


def _evaluate(function, compile, mask_mod, index, grid, Q_LEN, KV_LEN, width):
    """The results of _states or _bits, by torch.compile if it can, for parts of index, which counts boxes of 64 rows
    and `width` keys in a grid (Bm, Hm, M, ceil(KV_LEN / width))."""
    global _can_compile
    for part in index.split(max(1, PART // (UNIT * width))) if index.numel() else ():
        args = mask_mod, part, grid, Q_LEN, KV_LEN, width
        if compile and _can_compile and not is_compiling():
            try:
                yield _compiled(function)(*args)
                continue
            except Exception as error:  # one of mask_mod comes again below
                _can_compile = False
                warn(f"torch.compile fails, so block masks are built without it: {shown(error)}")
        yield function(*args)


@functools.cache
def _compiled(function):
    return torch.compile(function, dynamic=True)


_can_compile = True  # until it fails


def _states(*boxes):
    """The states of the units of boxes, (boxes, width / 64), by the arguments of _seen."""
    seen, _, _ = _seen(*boxes)
    units = seen.unflatten(2, (-1, UNIT))
    return torch.where(units.all((1, 3)), FULL, torch.where(units.any((1, 3)), PARTIAL, EMPTY))


def _bits(mask_mod, index, grid, Q_LEN, KV_LEN, width):
    """The bits of units, (units, 2, 128). width: 64."""
    seen, rows, keys = _seen(mask_mod, index, grid, Q_LEN, KV_LEN, width)
    seen = seen & (rows < Q_LEN)[:, :, None] & (keys < KV_LEN)[:, None]
    return torch.stack((_fragments(seen), _fragments(seen.mT)), 1)


def _seen(mask_mod, index, grid, Q_LEN, KV_LEN, width):
    """mask_mod over boxes (boxes, 64, width), their rows (boxes, 64) and their keys (boxes, width). Beyond the ends are
    copies of the last row and key: they change no state, and mask_mod is defined for them."""
    _, heads, M, N = grid
    row, column = index // N, index % N
    rows, keys = (i[:, None] * size + torch.arange(size, device=index.device)
                  for i, size in ((row % M, UNIT), (column, width)))
    seen = _over_boxes(mask_mod, row // (heads * M), row // M % heads, rows.clamp(max=Q_LEN - 1),
                       keys.clamp(max=KV_LEN - 1))
    return seen, rows, keys


def _over_boxes(mask_mod, b, h, rows, keys):
    """mask_mod over boxes: (boxes, rows, keys)."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # takes a second or two

    for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        mask_mod = torch.vmap(mask_mod, in_dims=dims)
    with TransformGetItemToIndex():  # x[q_idx] may be written, where vmap has tensors and indexing wants numbers
        return mask_mod(b, h, rows, keys)


def _fragments(seen):
    """Bits (units, 128) of bool (units, 64, 64), as BlockMask.bits."""
    # Dimensions: (units, row // 16, row // 8 % 2, row % 8, key // 8, key % 8 // 2, key % 2)
    seen = seen.reshape(-1, 4, 2, 8, 8, 4, 2).permute(0, 1, 3, 5, 2, 4, 6)
    return _words(seen.reshape(-1, 128, 32))


def _flags(visible):
    """Words (..., ceil(n / 32)) of bool (..., n)."""
    return _words(pad(visible, (0, -visible.shape[-1] % 32)).unflatten(-1, (-1, 32)))


def _words(seen):
    """int32 (...) of bool (..., 32), the lowest bit first."""
    return (seen.int() << _places(seen)).sum(-1, dtype=torch.int32)


def _places(x):
    return torch.arange(32, dtype=torch.int32, device=x.device)


def _listed(num_blocks, indices, columns):
    """bool (..., rows, columns) of blocks that lists of torch's BlockMask have. What is behind a count is no index."""
    is_in = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    blocks = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return blocks.scatter_(-1, torch.where(is_in, indices, columns).long(), True)[..., :columns]


def _units_of(blocks, name, Q_LEN, KV_LEN, BLOCK_SIZE):
    """(Bm, Hm, M, N): the values of units in blocks (Bm, Hm, rows, columns) of BLOCK_SIZE."""
    sizes = BLOCK_SIZE if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE, BLOCK_SIZE)
    check_is("BLOCK_SIZE", BLOCK_SIZE, len(sizes) == 2 and all(
        is_int(size) and size > 0 and size % UNIT == 0 for size in sizes), f"a multiple of {UNIT}, or a pair of them")
    check_number("Q_LEN", Q_LEN)
    check_number("KV_LEN", KV_LEN)
    grid = -(-Q_LEN // sizes[0]), -(-KV_LEN // sizes[1])
    check_is(name, blocks, blocks.ndim == 4 and blocks.shape[2:] == grid,
             f"of shape (B or 1, H or 1, {grid[0]}, {grid[1]})")
    m, n = (torch.arange(-(-seqlen // UNIT), device=blocks.device) // (size // UNIT)
            for seqlen, size in zip((Q_LEN, KV_LEN), sizes))
    return blocks[:, :, m[:, None], n].contiguous()


def _check_device(device):
    device = torch.device(device)
    check_is("the device of a BlockMask", str(device), device.type in ("cpu", "cuda"), "a CPU or a GPU")
    return device


def _check_values(name, x):
    """Raise unless x is a bool tensor, and not empty, on a CPU or a GPU."""
    check_tensor(name, x)
    check_tensor_of(name, x, _check_device(x.device))
    check_is(name, x, x.numel() > 0, "a tensor with elements")


def _check_mask_mod(mask_mod, device):
    """Raise unless mask_mod gives a bool for the first row and key."""
    check_is("mask_mod", mask_mod, callable(mask_mod), "a function of b, h, q_idx and kv_idx", TypeError)
    first = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        seen = _over_boxes(mask_mod, first[0], first[0], first, first)
    except (RuntimeError, ValueError) as error:
        raise TypeError(f"mask_mod must return a tensor, made of tensors on {device} by what torch.vmap takes, which "
                        f"is no `if` on values: {error}") from error
    dtype = getattr(seen, "dtype", type(seen))
    if dtype != torch.bool:
        raise TypeError(f"mask_mod must return a tensor of bool, got {dtype}")
    check_is("mask_mod", seen[0, 0, 0], seen.ndim == 3, "a function that returns a tensor without dimensions")


def with_tensors(given, q, k):
    """The Options `given`, whose mask_units are a BlockMask, torch's or None, with its tensors, for checked q and k."""
    block_mask = given.mask_units
    if block_mask is None:
        return given
    check_apart("block_mask", ": write the samples into the mask", cu_seqlens=given.cu_seqlens_q)
    if not isinstance(block_mask, BlockMask):
        if not hasattr(block_mask, "_minimal_attn"):  # an attribute: Dynamo would not look into a dict again
            block_mask._minimal_attn = BlockMask.from_torch(block_mask)
        block_mask = block_mask._minimal_attn
    sizes = *(q.shape[:2] if q.ndim == 4 else (q.shape[0], 1)), q.shape[-2], k.shape[-2]
    if block_mask.shape[2:] != sizes[2:] or any(n not in (1, size) for n, size in zip(block_mask.shape, sizes)):
        check_is("block_mask", block_mask, False,
                 f"of a shape that broadcasts to {sizes}, (batch size, heads, rows, keys)")
    if block_mask.device != q.device:
        check_is("block_mask", block_mask, False, f"on {q.device}, as q is")
    if not q.is_cuda and can_read(block_mask.units):  # kernels for a GPU clamp them
        for number in block_mask.units.aminmax():
            check_range("each unit of block_mask", int(number), EMPTY, block_mask.bits.shape[0] - 1)
    names = "mask_units", "mask_row_words", "mask_key_words", "mask_bits"
    return given._replace(**dict(zip(names, block_mask._tensors.values())))
