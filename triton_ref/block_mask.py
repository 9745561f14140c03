"""Block masks (minimal_attn/block_mask.py) in the kernels of both passes: the tiles that they need, and the bits of one.

Before a kernel starts, _list_tiles writes a list for each of its tiles of rows, or of keys where it owns keys: of the
tiles along the other side that have a unit that is not empty. The loops walk along the list, and so the compiler can
fetch tiles ahead. A list also says how many of its tiles lie before each tile: a range of tiles, which other masks
leave, is a range of places in it. Lists are written in each call, because a mask may change in its own memory.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .launching import Launch
from .mask import BlockRange


class Tiles(NamedTuple):
    """The list of one tile, or all tiles where lists is None."""
    lists: Any
    num_tiles: Any
    begin: Any  # of its list: how many are listed before tiles 0, 1 .. num_tiles; then 2 · tile + (a unit is not full)


@triton.jit
def _list_tiles(units_ptr, lists_ptr, kLine: tl.constexpr, line_units, line_stride, lines, kTile: tl.constexpr,
                tile_units, tile_stride, num_tiles, kBlock: tl.constexpr):
    """The list of one tile of kLine rows: of tiles of kTile keys. Or of one of keys: of tiles of rows."""
    kLineUnits: tl.constexpr = max(kLine // 64, 1)
    units_ptr += (tl.program_id(0) // lines).to(tl.int64) * line_units * tile_units
    lists_ptr += tl.program_id(0).to(tl.int64) * (2 * num_tiles + 1)
    i = tl.arange(0, kLineUnits * max(kTile // 64, 1))[None, :]
    line = tl.program_id(0) % lines * kLine // 64 + i % kLineUnits
    count = 0
    for tile0 in range(0, num_tiles + 1, kBlock):
        tiles = tile0 + tl.arange(0, kBlock)
        place = tiles[:, None] * kTile // 64 + i // kLineUnits
        units = tl.load(units_ptr + line * line_stride + place * tile_stride,
                        mask=(line < line_units) & (place < tile_units), other=-2)
        lowest, highest = tl.min(units, 1), tl.max(units, 1)
        is_listed = (highest > -2) & (tiles < num_tiles)
        is_partial = (lowest != -1) | (highest != -1)
        end = count + tl.cumsum(is_listed.to(tl.int32), 0)
        before = end - is_listed.to(tl.int32)
        tl.store(lists_ptr + tiles, before, mask=tiles <= num_tiles)
        tl.store(lists_ptr + num_tiles + 1 + before, 2 * tiles + is_partial.to(tl.int32), mask=is_listed)
        count = tl.max(end, 0)


@triton.jit
def list_of(strides, b, h, index, num_lists, num_tiles):
    """Where the list of the tile `index` of num_lists begins, for head h of sample b. strides: ScoreStrides."""
    begin = 0
    if strides.mask_batch is not None:
        head = tl.cast(b, tl.int64) * strides.mask_batch + h * strides.mask_head
        begin = (head * num_lists + index) * (2 * num_tiles + 1)
    return begin


@triton.jit
def place_of(tiles, tile):
    """The place of a tile in a list, or of the next one that is there."""
    if tiles.lists is not None:
        tile = tl.load(tiles.lists + tiles.begin + tl.minimum(tile, tiles.num_tiles))
    return tile


@triton.jit
def places_of(tiles, blocks):
    """A BlockRange of tiles, as one of places."""
    return BlockRange(place_of(tiles, blocks.begin), place_of(tiles, blocks.full_begin),
                      place_of(tiles, blocks.full_end), place_of(tiles, blocks.end))


@triton.jit
def tile_at(tiles, place):
    """(the tile at a place, whether it has a unit that is not full)."""
    tile, is_partial = place, False
    if tiles.lists is not None:
        tile = tl.load(tiles.lists + tiles.begin + tiles.num_tiles + 1 + place)
        tile, is_partial = tile // 2, tile % 2 != 0
    return tile, is_partial


@triton.jit
def hidden(scores, s, row0, col0, is_partial, kOfKeys: tl.constexpr = False):
    """s, the result of shifted, with -inf where a block mask hides a key from a row. kOfKeys: s is [keys, rows]."""
    if scores.options.units is not None:
        if is_partial:
            s = tl.where(_bits(scores, row0, col0, s.shape[0], s.shape[1], kOfKeys), s, float("-inf"))
    return s


@triton.jit
def _bits(scores, row0, col0, kLines: tl.constexpr, kCols: tl.constexpr, kOfKeys: tl.constexpr):
    """Whether each row sees each key of a tile: bool [kLines, kCols], with kOfKeys [keys, rows]. A word has the bits of
    two lines, eight apart, and of a pair of columns in each of the eight groups of a unit, see BlockMask.bits."""
    if kOfKeys:
        row0, col0 = col0, row0
    lines = (row0 + tl.arange(0, kLines))[:, None, None]
    cols = (col0 + tl.arange(0, max(kCols // 64, 1)) * 64)[None, :, None]  # the first of each unit
    rows, keys = lines, cols
    if kOfKeys:
        rows, keys = cols, lines
    unit = tl.load(scores.numbers.units + rows // 64 * scores.strides.unit_row + keys // 64,
                   mask=(rows < scores.numbers.seqlen_q) & (keys < scores.numbers.seqlen_k), other=-2)
    unit = tl.minimum(unit, scores.strides.num_bits - 1)
    word = kOfKeys * 128 + lines % 64 // 16 * 32 + lines % 8 * 4 + tl.arange(0, 4)[None, None, :]
    words = tl.load(scores.options.bits + unit.to(tl.int64) * 256 + word, mask=unit >= 0, other=0)
    words = tl.where(unit == -1, -1, words) >> lines // 8 % 2 * 16
    groups = (col0 % 64 // 8 + tl.arange(0, min(kCols, 64) // 8))[:, None, None]
    bits = words[:, :, None, :, None] >> (groups * 2 + tl.arange(0, 2))[None, None]
    return (bits & 1).reshape(kLines, kCols) != 0


def with_lists(start, units, kBlockM, kBlockN, seqlen_q, seqlen_k, of_keys=False):
    """start, a Launch of a kernel that has ScoreOptions as its last argument, after _list_tiles if there are units.
    of_keys: the kernel owns tiles of keys."""
    if units is None:
        return start
    # The size of a tile, the units, the stride of one, and the tiles, of rows and of keys.
    sides = [(kBlockM, units.shape[2], units.shape[3], triton.cdiv(seqlen_q, kBlockM)),
             (kBlockN, units.shape[3], 1, triton.cdiv(seqlen_k, kBlockN))]
    own, others = sides[::-1] if of_keys else sides
    shape = units.shape[0] * units.shape[1] * own[-1], 2 * others[-1] + 1
    write = Launch(_list_tiles, shape[0], (*own, *others, 128))

    def call(*arguments):
        scores = arguments[-1]
        lists = scores.units.new_empty(shape)
        write(scores.units, lists)
        start(*arguments[:-1], scores._replace(lists=lists))

    return call
