// Tiles of keys for the blocks of a backward pass, like RowTiles for query rows.
#pragma once

#include "common/scheduler.cuh"
#include "flash_bwd.h"

// A Number that divides by a product and a shift (Granlund and Montgomery, Division by invariant integers, 1994).
struct Divisor {
    uint32_t value, multiplier = 0, shift = 0;
    __host__ __device__ explicit Divisor(uint32_t value) : value(value) {
        while (1ull << shift < value) shift++;
        if (value > 1) multiplier = uint32_t(((1ull << (31 + shift)) + value - 1) / value), shift--;
    }
    __device__ uint32_t quotient(uint32_t n) const {  // n < 2^31
        return value == 1 ? n : uint32_t(uint64_t(n) * multiplier >> 32) >> shift;
    }
};

template <int kBlockN> struct KeyTiles : TileSlots<kBlockN> {
    __host__ __device__ explicit KeyTiles(const AttnParams &p)
        : TileSlots<kBlockN>(p.cu_seqlens_k, p.seqlen_k, p.batch_size) {}

    __host__ __device__ static int64_t count(const AttnParams &p) { return KeyTiles(p).num_tiles(p.nheads_k); }
    // Last keys go first in a deterministic pass under a causal mask: the fewest rows see them, and they take the first
    // turns. Other windows may bind only some samples of a packed batch: a sample's order must not depend on that.
    __device__ static bool is_last_first(const AttnBackwardParams &p) {
        return p.deterministic && p.window_right == 0;
    }
    template <typename N> __host__ __device__ static TileOrder<N> order(const AttnBackwardParams &p) {
        const KeyTiles tiles(p);
        const uint32_t heads = p.cu_seqlens_k ? p.nheads_k : p.nheads_k * uint32_t(p.batch_size);
        uint32_t together = p.cu_seqlens_k ? heads : 1;
        // Under masks tiles differ: the long ones of all heads go first.
        const bool go_together = p.window_right == 0 ? !p.deterministic || p.nheads == p.nheads_k
                                                     : p.deterministic || p.block_mask.rows;
        if (go_together) together = tiles.heads_together(together, heads);
        return {uint32_t(tiles.slots), heads, together, uint32_t(p.nheads_k), uint32_t(p.nheads / p.nheads_k)};
    }
    template <typename N> __device__ static Tile at(const AttnBackwardParams &p, const TileOrder<N> &order, int idx) {
        const auto [bh, slot] = order.at(idx);
        Tile tile = KeyTiles(p).tile(bh, is_last_first(p) ? order.slots - 1 - slot : slot, order.heads, Number(1));
        tile.h = tile.h_k * order.heads_per_kv.value;
        return tile;
    }
    __device__ static Tile at(const AttnBackwardParams &p, int idx) { return at(p, order<Number>(p), idx); }
};
