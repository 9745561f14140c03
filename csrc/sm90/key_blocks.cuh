// How blocks of keys and values come to shared memory by TMA: from tensors, or from a cache of sequences or of pages.
#pragma once

#include <numeric>

#include "common/cache_sequence.cuh"
#include "common/scheduler.cuh"
#include "sm90/tiles.cuh"

namespace sm90 {

// From tensors, by one thread, which calls find() and then load() with a tile for K and one for V.
template <int kBlockN> struct KeyBlocks {
    static constexpr int kLoaders = 1;
    const int h_k, b, k_begin;
    int key;

    __device__ KeyBlocks(const AttnParams &, const Tile &tile, const Sequence &seq, int)
        : h_k(tile.h_k), b(tile.b), k_begin(seq.k_begin) {}

    __device__ static void begin_tile() {}
    __device__ void find(int n_block) { key = k_begin + n_block * kBlockN; }
    template <int kHeadDim>
    __device__ void load(SmemTile<kBlockN, kHeadDim> &to, const TmaTensor &x, Barrier &full) const {
        load_tile(to, x, full, key, h_k, b);
    }
};

// The rows of a box, by which a block of kBlockN keys is copied from a cache: no box may cross the end of a page.
inline int cache_box_rows(const DecodeParams &p, int block_n) {
    return p.page_table ? std::gcd(p.page_size, block_n) : block_n;
}

// A box in the cache.
struct CacheBox {
    int sequence, row;

    // That of sample b from key `key` on, as the cache counts them. The number of a page comes from memory, and nothing
    // waits for it here. What is not needed lies outside of the cache, where TMA reads zeros.
    __device__ void find(const DecodeParams &p, int b, int key, bool is_needed) {
        sequence = b, row = is_needed ? key : p.page_size;
        if (p.page_table && is_needed) {
            const int page = unsigned(key) / unsigned(p.page_size);
            sequence = p.page_table[b * p.page_table_stride + page], row -= page * p.page_size;
        } else if (p.cache_batch_idx) sequence = p.cache_batch_idx[b];
    }
    // To a tile, from tile_row on.
    template <int kRows, int kHeadDim>
    __device__ void load(SmemTile<kRows, kHeadDim> &to, int tile_row, const DecodeParams &p, const TmaTensor &x,
                         int h_k, Barrier &full) const {
        load_bytes(to, x, full, row, h_k, max(0, min(sequence, p.num_sequences - 1)), tile_row);
    }
};

// From a cache, by two warps, one for K and one for V. A lane finds a box, up to the last row of a block. Boxes are
// asked for one after another: with pages of 16 keys, one warp for both would keep the products waiting. One lane asks
// for all boxes of its warp. If each lane asked for its own, ptxas would loop over the lanes around every instruction.
template <int kBlockN> struct CachedKeyBlocks {
    static constexpr int kLoaders = 2;
    const DecodeParams &p;
    const Tile &tile;
    const Sequence &seq;
    CacheBox box, next;  // of a block, and of the one before it

    __device__ CachedKeyBlocks(const DecodeParams &p, const Tile &tile, const Sequence &seq, int n_block)
        : p(p), tile(tile), seq(seq) {
        find_next(n_block);
    }

    __device__ static void begin_tile() {
        __syncwarp();  // no lane waits for this tile while others go on to the next one
    }
    __device__ int tile_row() const { return threadIdx.x % 32 * p.box_rows; }
    __device__ void find_next(int n_block) {
        const int key = n_block * kBlockN + tile_row();
        if (tile_row() < kBlockN) next.find(p, tile.b, seq.k_begin + key, key >= 0 && key < seq.seqlen_k);
    }
    // The walk goes downwards. The number of the next block's page is on its way while this block is loaded.
    __device__ void find(int n_block) {
        box = next;
        find_next(n_block - 1);
    }
    template <int kHeadDim>
    __device__ void load(SmemTile<kBlockN, kHeadDim> &to, const TmaTensor &x, Barrier &full) const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(full, 2 * kBlockN * kHeadDim);
        const int h_k = tile.h_k;
#pragma unroll 1
        for (int lane = 0, row = 0; row < kBlockN; lane++, row += p.box_rows) {
            const CacheBox of_lane{__shfl_sync(~0u, box.sequence, lane), __shfl_sync(~0u, box.row, lane)};
            if (elect_one()) of_lane.load(to, row, p, x, h_k, full);
        }
    }
};

}  // namespace sm90
