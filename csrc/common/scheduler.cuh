// Which tile of the result a block of threads computes. The blocks that run at the same time have tiles of one head, or
// of a few, and share their K and V (or Q and dO) in L2. The tiles that take longest under a causal mask go first,
// except in a deterministic backward pass.
#pragma once

#include "common/sequence.cuh"

struct Tile {
    int b, h, h_k;  // sample; query head, or the first of those that read h_k; key/value head
    int block;      // which tile of the head: it begins at row or key `block` times its size
    bool is_valid;  // false when there are no more tiles
};

// Numbers that others are divided by. A GPU needs some 30 instructions for that. For a Divisor, which the host makes, a
// product and a shift are enough (Granlund and Montgomery, Division by invariant integers, 1994).
struct Number {
    uint32_t value;
    __host__ __device__ explicit Number(uint32_t value) : value(value) {}
    __host__ __device__ uint32_t quotient(uint32_t n) const { return n / value; }
};
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

// Which head and slot tile idx has, if some heads go together: the first tile of each, then the second of each, and so
// on. Under a causal mask, long tiles begin together then, and short ones fill the gaps after them. In a deterministic
// backward pass, the tiles of one head begin further apart then, and wait less for their turns. But if query heads
// share keys under a causal mask, that pass is slower with heads together (journal).
template <typename N> struct TileOrder {
    N tiles, together, rest;  // tiles and heads of a group of heads, heads of the last group if it has fewer
    N heads, heads_per_kv;    // of a sample; that read one key/value head
    uint32_t first_of_rest, slots;

    __host__ __device__ TileOrder(uint32_t slots, uint32_t all_heads, uint32_t together, uint32_t heads,
                                  uint32_t heads_per_kv)
        : tiles(max(1u, together * slots)), together(together), rest(max(1u, all_heads % together)), heads(heads),
          heads_per_kv(heads_per_kv), first_of_rest(all_heads - all_heads % together), slots(slots) {}

    struct Place { uint32_t bh, slot; };
    __device__ Place at(uint32_t idx) const {
        const uint32_t group = tiles.quotient(idx), first = group * together.value, i = idx - group * tiles.value;
        auto place = [&](const N &of_group) -> Place {
            const uint32_t slot = of_group.quotient(i);
            return {first + i - slot * of_group.value, slot};
        };
        return first < first_of_rest ? place(together) : place(rest);
    }
};

constexpr int kTilesAtOnce = 128;  // about as many as a large GPU computes at the same time

template <int kBlock> __host__ __device__ int num_blocks(int seqlen) {
    return int((int64_t(seqlen) + kBlock - 1) / kBlock);
}

// How the rows of a head, or its keys, are cut into tiles of kBlock. No tile has rows of two samples. The host does not
// know the lengths in a packed batch, but it knows that a sample of n rows has at most n / kBlock + 1 tiles. So sample
// b has the slots from begin / kBlock + b on, and some slots stay empty: their tiles begin beyond the sample's rows.
// kOfSome: only samples with min_rows rows or more need slots, and there are at most begin / min_rows of them before b.
template <int kBlock, bool kOfSome = false> struct TileSlots {
    const int *cu_seqlens;
    int seqlen;
    int64_t batch_size;
    int slots;  // of a head: those of one sample, or of all samples of a packed batch
    int min_rows;  // with kOfSome

    __host__ __device__ TileSlots(const int *cu_seqlens, int seqlen, int64_t batch_size, int min_rows = 0)
        : cu_seqlens(cu_seqlens), seqlen(seqlen), batch_size(batch_size), min_rows(min_rows) {
        slots = cu_seqlens ? first_slot(int(batch_size), seqlen) : num_blocks<kBlock>(seqlen);
    }

    __host__ __device__ int64_t num_tiles(int heads) const { return slots * (cu_seqlens ? 1 : batch_size) * heads; }
    __host__ __device__ int first_slot(int b, int begin) const {
        if constexpr (kOfSome) return begin / kBlock + begin / min_rows;
        else return begin / kBlock + b;
    }
    __device__ int first_slot(int b) const { return first_slot(b, begin_of(cu_seqlens, b, seqlen)); }
    // The sample of a slot: the last one that does not begin after it.
    __device__ int sample_of(int slot) const {
        int b = 0, end = int(batch_size);
        while (end - b > 1) {
            const int middle = b + (end - b) / 2;
            if (first_slot(middle) <= slot) b = middle;
            else end = middle;
        }
        return b;
    }
    // `bh` counts heads: of one sample after the other, or once for all samples of a packed batch. heads_per_kv of them
    // read one key/value head. Unsigned, since a GPU divides such numbers with fewer instructions.
    template <typename N, typename M>
    __device__ Tile tile(uint32_t bh, int slot, const N &heads, const M &heads_per_kv) const {
        int b, h = bh;
        if (cu_seqlens) {
            b = sample_of(slot);
            slot -= first_slot(b);
        } else {
            b = heads.quotient(bh);
            h = bh - b * heads.value;
        }
        return {b, h, int(heads_per_kv.quotient(h)), slot, true};
    }
    // How many go together: as many as have kTilesAtOnce tiles.
    __host__ __device__ uint32_t heads_together(uint32_t together, uint32_t heads) const {
        while (together < heads && 2 * together * slots <= kTilesAtOnce) together *= 2;
        return together;
    }
    // The index of a sample's first tile of head 0 among all tiles. The same tile of the next head is `slots` further.
    __device__ int first_tile(int b, int heads) const { return cu_seqlens ? first_slot(b) : b * heads * slots; }
};

// Tiles of kBlockM query rows of a head, one for each block of threads.
template <int kBlockM, bool kOfSome = false> struct RowTiles : TileSlots<kBlockM, kOfSome> {
    __host__ __device__ explicit RowTiles(const AttnParams &p)
        : TileSlots<kBlockM>(p.cu_seqlens_q, p.seqlen_q, p.batch_size) {}
    __host__ __device__ explicit RowTiles(const DecodeParams &p)
        : TileSlots<kBlockM, true>(p.cu_seqlens_q, p.seqlen_q, p.batch_size, p.min_rows) {}

    template <typename Params> __host__ __device__ static int64_t count(const Params &p) {
        return RowTiles(p).num_tiles(p.nheads);
    }
    template <typename N> __host__ __device__ static TileOrder<N> order(const AttnParams &p) {
        const RowTiles tiles(p);
        const uint32_t heads = p.cu_seqlens_q ? p.nheads : p.nheads * uint32_t(p.batch_size);
        const bool go_together = p.window_right == 0 && !p.cu_seqlens_q;
        return {uint32_t(tiles.slots), heads, go_together ? tiles.heads_together(1, heads) : 1, uint32_t(p.nheads),
                uint32_t(p.nheads / p.nheads_k)};
    }
    template <typename N> __device__ static Tile at(const AttnParams &p, const TileOrder<N> &order, int idx) {
        const auto [bh, slot] = order.at(idx);
        return RowTiles(p).tile(bh, order.slots - 1 - slot, order.heads, order.heads_per_kv);
    }
    __device__ static Tile at(const AttnParams &p, int idx) { return at(p, order<Number>(p), idx); }
};

// Tiles of kBlockN keys of a key/value head.
template <int kBlockN> struct KeyTiles : TileSlots<kBlockN> {
    __host__ __device__ explicit KeyTiles(const AttnParams &p)
        : TileSlots<kBlockN>(p.cu_seqlens_k, p.seqlen_k, p.batch_size) {}

    __host__ __device__ static int64_t count(const AttnParams &p) { return KeyTiles(p).num_tiles(p.nheads_k); }
    // Whether the last keys go first: in a deterministic pass under a causal mask. The fewest rows see them then, and
    // they take the first turns. Another window may be a bound for some samples of a packed batch and not for others,
    // and the order of a sample must not depend on its batch.
    __device__ static bool is_last_first(const AttnBackwardParams &p) {
        return p.deterministic && p.window_right == 0;
    }
    template <typename N> __host__ __device__ static TileOrder<N> order(const AttnBackwardParams &p) {
        const KeyTiles tiles(p);
        const uint32_t heads = p.cu_seqlens_k ? p.nheads_k : p.nheads_k * uint32_t(p.batch_size);
        uint32_t together = p.cu_seqlens_k ? heads : 1;
        const bool go_together = p.window_right == 0 ? !p.deterministic || p.nheads == p.nheads_k : p.deterministic;
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
