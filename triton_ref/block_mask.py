"""Block masks (minimal_attn/block_mask.py) in the kernels of both passes: the tiles that they need, and a tile's bits.

For each tile of rows, _list_tiles lists the tiles of keys with a unit that is not empty. For a kernel that owns keys it
lists tiles of rows. Along a list the compiler can fetch tiles ahead, which it does not where each step begins with an
if. Other masks leave a range of tiles. It becomes a range of places in the list, for a list also counts.

Each call writes its lists anew, because a mask may change in its own memory.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .launching import Launch
from .mask import BlockRange


class Tiles(NamedTuple):
    """The list of one tile; all tiles if there is no block mask."""
    list: Any  # a pointer: how many are listed before tiles 0, 1 .. num_tiles; then 2 · tile + (a unit is not full)
    num_tiles: Any


@triton.jit
def _list_tiles(units_ptr, lists_ptr, kOwn: tl.constexpr, own_units, own_stride, own_tiles, kTile: tl.constexpr,
                tile_units, tile_stride, num_tiles, kBlock: tl.constexpr):
    """The list of one tile of kOwn rows, of tiles of kTile keys; or rows and keys exchanged."""
    kOwnUnits: tl.constexpr = max(kOwn // 64, 1)
    units_ptr += (tl.program_id(0) // own_tiles).to(tl.int64) * own_units * tile_units
    lists_ptr += tl.program_id(0).to(tl.int64) * (2 * num_tiles + 1)
    i = tl.arange(0, kOwnUnits * max(kTile // 64, 1))[None, :]  # of the units of a tile
    own = tl.program_id(0) % own_tiles * kOwn // 64 + i % kOwnUnits
    count = 0
    for tile0 in range(0, num_tiles + 1, kBlock):
        tiles = tile0 + tl.arange(0, kBlock)
        other = tiles[:, None] * kTile // 64 + i // kOwnUnits
        units = tl.load(units_ptr + own * own_stride + other * tile_stride,
                        mask=(own < own_units) & (other < tile_units), other=-2)
        is_listed = (tl.max(units, 1) > -2) & (tiles < num_tiles)
        is_partial = (tl.max(units, 1) != -1) | (tl.min(units, 1) != -1)
        end = count + tl.cumsum(is_listed.to(tl.int32), 0)
        before = end - is_listed.to(tl.int32)
        tl.store(lists_ptr + tiles, before, mask=tiles <= num_tiles)
        tl.store(lists_ptr + num_tiles + 1 + before, 2 * tiles + is_partial.to(tl.int32), mask=is_listed)
        count = tl.max(end, 0)


@triton.jit
def tiles_of(scores, tile, own_tiles, num_tiles):
    """The Tiles that a tile, one of own_tiles, needs of num_tiles."""
    begin = 0
    if scores.options.units is not None:
        begin = scores.options.lists + (scores.numbers.mask_head * own_tiles + tile) * (2 * num_tiles + 1)
    return Tiles(begin, num_tiles)


@triton.jit
def place_of(scores, tiles, tile):
    """The place of a tile in a list, or of the next one that is there."""
    if scores.options.units is not None:
        tile = tl.load(tiles.list + tl.minimum(tile, tiles.num_tiles))
    return tile


@triton.jit
def places_of(scores, tiles, blocks):
    """A BlockRange of tiles, as one of places."""
    return BlockRange(place_of(scores, tiles, blocks.begin), place_of(scores, tiles, blocks.full_begin),
                      place_of(scores, tiles, blocks.full_end), place_of(scores, tiles, blocks.end))


@triton.jit
def tile_at(scores, tiles, place, kBlock: tl.constexpr):
    """(the first row, or key, of the tile at a place, whether a unit of it is not full). kBlock: how many it has."""
    tile, is_partial = place, False
    if scores.options.units is not None:
        entry = tl.load(tiles.list + tiles.num_tiles + 1 + place)
        tile, is_partial = entry // 2, entry % 2 != 0
    return tile * kBlock, is_partial


@triton.jit
def hidden(scores, s, row0, col0, is_partial, kOfKeys: tl.constexpr = False):
    """s, the result of shifted, with -inf where a row does not see a key. kOfKeys: s is [keys, rows].

    A word of BlockMask.bits is of two lines of s, eight apart, and of two columns in each of eight groups of a unit.
    """
    if scores.options.units is not None:
        if is_partial:
            line0, first_col = (col0, row0) if kOfKeys else (row0, col0)
            lines = (line0 + tl.arange(0, s.shape[0]))[:, None, None]
            cols = (first_col + tl.arange(0, max(s.shape[1] // 64, 1)) * 64)[None, :, None]  # one of each unit
            rows, keys = (cols, lines) if kOfKeys else (lines, cols)
            unit = tl.load(scores.options.units + scores.numbers.mask_head * scores.strides.unit_head
                           + rows // 64 * scores.strides.unit_row + keys // 64,
                           mask=(rows < scores.numbers.seqlen_q) & (keys < scores.numbers.seqlen_k), other=-2)
            unit = tl.minimum(unit, scores.strides.num_bits - 1)
            word = kOfKeys * 128 + lines % 64 // 16 * 32 + lines % 8 * 4 + tl.arange(0, 4)[None, None, :]
            words = tl.load(scores.options.bits + unit.to(tl.int64) * 256 + word, mask=unit >= 0, other=0)
            words = tl.where(unit == -1, -1, words) >> lines // 8 % 2 * 16
            groups = (first_col % 64 // 8 + tl.arange(0, min(s.shape[1], 64) // 8))[:, None, None]
            bits = words[:, :, None, :, None] >> (groups * 2 + tl.arange(0, 2))[None, None]
            s = tl.where((bits & 1).reshape(s.shape) != 0, s, float("-inf"))
    return s


def with_lists(start, units, kBlockM, kBlockN, seqlen_q, seqlen_k, owns_keys=False):
    """start, a Launch with ScoreOptions as the last argument, after _list_tiles if there are units. owns_keys: its
    programs own keys, not rows."""
    if units is None:
        return start
    # The size of a tile, how many units there are, how far apart, and how many tiles: of rows, and of keys.
    sides = [(kBlockM, units.shape[2], units.shape[3], triton.cdiv(seqlen_q, kBlockM)),
             (kBlockN, units.shape[3], 1, triton.cdiv(seqlen_k, kBlockN))]
    own, others = sides[::-1] if owns_keys else sides
    shape = units.shape[0] * units.shape[1] * own[-1], 2 * others[-1] + 1
    write = Launch(_list_tiles, shape[0], (*own, *others, 128))

    def call(*arguments):
        scores = arguments[-1]
        lists = scores.units.new_empty(shape)
        write(scores.units, lists)
        start(*arguments[:-1], scores._replace(lists=lists))

    return call
