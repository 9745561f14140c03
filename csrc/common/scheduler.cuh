// Which tile of the result a block of threads computes. Blocks that run at the same time have tiles of a few heads, so
// that they share K and V (or Q and dO) in L2. The longest tiles of a causal mask go first, unless deterministic.
#pragma once

#include "common/sequence.cuh"

struct Tile {
    int b, h, h_k;  // sample; query head, or the first of those that read h_k; key/value head
    int block;      // the tile begins at row or key `block` times its size
    bool is_valid;  // false after the last tile
};

// A divisor. A division takes a GPU some 30 instructions; see Divisor in key_tiles.cuh.
struct Number {
    uint32_t value;
    __host__ __device__ explicit Number(uint32_t value) : value(value) {}
    __host__ __device__ uint32_t quotient(uint32_t n) const { return n / value; }
};

// The order of tiles where groups of heads go together: the first tile of each head, then the second of each, and so
// on. Under a causal mask, long tiles begin together and short ones fill the gaps after them. In a deterministic
// backward pass the tiles of one head begin further apart and wait less for their turns, but it is slower if query
// heads also share keys under a causal mask (journal).
template <typename N> struct TileOrder {
    N tiles, together, rest;  // tiles and heads of a group, heads of a smaller last group
    N heads, heads_per_kv;    // heads of a sample, query heads of a key/value head
    uint32_t first_of_rest, slots;

    __host__ __device__ TileOrder(uint32_t slots, uint32_t all_heads, uint32_t together, uint32_t heads,
                                  uint32_t heads_per_kv)
        : tiles(max(1u, together * slots)), together(together), rest(max(1u, all_heads % together)), heads(heads),
          heads_per_kv(heads_per_kv), first_of_rest(all_heads - all_heads % together), slots(slots) {}

    struct HeadSlot { uint32_t bh, slot; };
    __device__ HeadSlot at(uint32_t idx) const {
        const uint32_t group = tiles.quotient(idx), first = group * together.value, i = idx - group * tiles.value;
        auto in_group = [&](const N &of_group) -> HeadSlot {
            const uint32_t slot = of_group.quotient(i);
            return {first + i - slot * of_group.value, slot};
        };
        return in_group(first < first_of_rest ? together : rest);
    }
};

constexpr int kTilesAtOnce = 128;  // about what a large GPU computes at the same time

template <int kBlock> __host__ __device__ int num_blocks(int seqlen) {
    return int((int64_t(seqlen) + kBlock - 1) / kBlock);
}

// The rows or keys of a head, cut into tiles of kBlock. No tile has rows of two samples. The host does not know the
// lengths in a packed batch, but a sample of n rows has at most n / kBlock + 1 tiles. So sample b has the slots from
// begin / kBlock + b on, and some slots stay empty: their tiles begin beyond the sample's rows.
// kOfSome: only samples with at least min_rows rows need slots. At most begin / min_rows of them are before sample b.
template <int kBlock, bool kOfSome = false> struct TileSlots {
    const int *cu_seqlens;
    int seqlen;
    int64_t batch_size;
    int slots;     // of a head, in one sample or in a whole packed batch
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
    __device__ int sample_of(int slot) const {
        return last_sample(int(batch_size), [&](int b) { return first_slot(b) <= slot; });
    }
    // bh: b · heads + h, or h in a packed batch. Unsigned numbers take fewer instructions to divide.
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
    // As many heads as have kTilesAtOnce tiles.
    __host__ __device__ uint32_t heads_together(uint32_t together, uint32_t heads) const {
        while (together < heads && 2 * together * slots <= kTilesAtOnce) together *= 2;
        return together;
    }
    // Index of a sample's first tile of head 0 among all tiles. The next head follows `slots` later.
    __device__ int first_tile(int b, int heads) const { return cu_seqlens ? first_slot(b) : b * heads * slots; }
};

// Tiles of kBlockM query rows of a head.
template <int kBlockM, bool kOfSome = false> struct RowTiles : TileSlots<kBlockM, kOfSome> {
    template <typename Params> __host__ __device__ static int min_rows(const Params &p) {
        if constexpr (kOfSome) return p.min_rows;
        else return 0;
    }
    template <typename Params>
    __host__ __device__ explicit RowTiles(const Params &p)
        : TileSlots<kBlockM, kOfSome>(p.cu_seqlens_q, p.seqlen_q, p.batch_size, min_rows(p)) {}

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
