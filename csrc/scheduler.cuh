// Which tile of the result a block of threads computes. The blocks that run at the same time have tiles of one head, or
// of a few, and share their K and V (or Q and dO) in L2. The tiles that take longest under a causal mask go first,
// except in a deterministic backward pass.
//
// Read next: dropout.h, which probabilities are dropped.
#pragma once

#include "sequence.cuh"

struct Tile {
    int b, h, h_k;  // sample; query head, or the first of those that read h_k; key/value head
    int block;      // which tile of the head: it begins at row or key `block` times its size
    bool is_valid;  // false when there are no more tiles
};

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
    __device__ Tile tile(uint32_t bh, int slot, uint32_t heads, uint32_t heads_per_kv) const {
        int b, h = bh;
        if (cu_seqlens) {
            b = sample_of(slot);
            slot -= first_slot(b);
        } else {
            b = bh / heads;
            h = bh - b * heads;
        }
        return {b, h, int(h / heads_per_kv), slot, true};
    }
    // The head and the slot of tile `idx`, if some heads go together: the first tile of each, then the second of each,
    // and so on. Under a causal mask, long tiles begin together then, and short ones fill the gaps after them.
    struct Place { uint32_t bh, slot; };
    __device__ Place place(uint32_t idx, uint32_t heads, uint32_t together) const {
        const uint32_t first = idx / (together * slots) * together, i = idx - first * slots;
        together = min(together, heads - first);
        return {first + i % together, i / together};
    }
    // How many go together: as many as have about as many tiles as a large GPU computes at the same time.
    __device__ uint32_t heads_together(uint32_t together, uint32_t heads) const {
        while (together < heads && 2 * together * slots <= 128) together *= 2;
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
    __device__ static Tile at(const AttnParams &p, int idx) {
        const RowTiles tiles(p);
        const uint32_t heads = p.cu_seqlens_q ? p.nheads : p.nheads * uint32_t(p.batch_size);
        const bool go_together = p.window_right == 0 && !p.cu_seqlens_q;
        const auto [bh, slot] = tiles.place(idx, heads, go_together ? tiles.heads_together(1, heads) : 1);
        return tiles.tile(bh, tiles.slots - 1 - slot, p.nheads, p.nheads / p.nheads_k);
    }
};

// Tiles of kBlockN keys of a key/value head, one for each block of threads.
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
    __device__ static Tile at(const AttnBackwardParams &p, int idx) {
        const KeyTiles tiles(p);
        const bool is_packed = p.cu_seqlens_k, go_together = p.window_right == 0 && !p.deterministic;
        const uint32_t slots = tiles.slots, heads = is_packed ? p.nheads_k : p.nheads_k * uint32_t(p.batch_size);
        uint32_t together = is_packed ? heads : 1;  // tiles that wait for their turn are slower if heads go together
        if (go_together) together = tiles.heads_together(together, heads);
        const auto [bh, slot] = tiles.place(idx, heads, together);
        Tile tile = tiles.tile(bh, is_last_first(p) ? slots - 1 - slot : slot, p.nheads_k, 1);
        tile.h = tile.h_k * (p.nheads / p.nheads_k);
        return tile;
    }
};
