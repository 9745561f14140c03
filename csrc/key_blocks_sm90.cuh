// How blocks of keys and values come to shared memory by TMA: from tensors, or from a cache of sequences or of pages.
//
// Read next: producer_sm90.cuh, the threads that ask for them.
#pragma once

#include "flash.h"
#include "scheduler.cuh"
#include "sequence.cuh"
#include "tiles_sm90.cuh"

namespace sm90 {

// From tensors, by one thread, which calls find() and then load() with a tile for K and one for V.
template <int kBlockN> struct KeyBlocks {
    static constexpr int kThreads = 1;
    const int h_k, b, k_begin;
    int key;

    __device__ KeyBlocks(const AttnParams &, const Tile &tile, const Sequence &seq)
        : h_k(tile.h_k), b(tile.b), k_begin(seq.k_begin) {}

    __device__ void find(int n_block) { key = k_begin + n_block * kBlockN; }
    template <int kHeadDim>
    __device__ void load(SmemTile<kBlockN, kHeadDim> &to, const TmaTensor &x, Barrier &full) const {
        load_tile(to, x, full, key, h_k, b);
    }
};

// From a cache, by a warp. A box of TMA is 16 rows of a page, and each lane asks for one of them: a page may have any
// multiple of 16 keys. Without pages a box is a whole block.
template <int kBlockN> struct CachedKeyBlocks {
    static constexpr int kThreads = 32, kBoxes = kBlockN / 16;
    const DecodeParams &p;
    const Tile &tile;
    const Sequence &seq;
    int sequence, row;  // in the cache: where this lane's box begins

    __device__ CachedKeyBlocks(const DecodeParams &p, const Tile &tile, const Sequence &seq)
        : p(p), tile(tile), seq(seq) {
        __syncwarp();  // no lane waits for this tile while others go on to the next one
    }

    // The number of a page comes from memory. Nothing waits for it here.
    __device__ void find(int n_block) {
        sequence = tile.b, row = seq.k_begin + n_block * kBlockN;
        if (p.page_table) {
            row += threadIdx.x % kBoxes * 16;
            const int page = unsigned(row) / unsigned(p.page_size);
            const bool is_valid = row < seq.seqlen_k;
            if (is_valid) sequence = p.page_table[tile.b * p.page_table_stride + page];
            row = is_valid ? row - page * p.page_size : p.page_size;  // TMA writes zeros for rows outside of the page
        } else if (p.cache_batch_idx) sequence = p.cache_batch_idx[tile.b];
    }
    template <int kHeadDim>
    __device__ void load(SmemTile<kBlockN, kHeadDim> &to, const TmaTensor &x, Barrier &full) const {
        const int in_cache = max(0, min(sequence, p.num_sequences - 1)), boxes = p.page_table ? kBoxes : 1;
        __syncwarp();  // no lane waits for this buffer while others go on to the next one
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(full, sizeof(to));
        if (threadIdx.x < boxes) load_bytes(to, x, full, row, tile.h_k, in_cache, 16 * threadIdx.x);
    }
};

}  // namespace sm90
