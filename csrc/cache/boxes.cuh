// Boxes of keys or values that TMA copies from a sequence or page of a cache to a tile.
#pragma once

#include <numeric>

#include "common/cache_sequence.cuh"
#include "sm90/tiles.cuh"

namespace sm90 {

// A box must not cross the end of a page.
inline int cache_box_rows(const DecodeParams &p, int block_n) {
    return p.page_table ? std::gcd(p.page_size, block_n) : block_n;
}

struct CacheBox {
    int sequence, row;

    // Nothing waits here for the page's number. Boxes that are not needed lie outside of the cache: TMA reads zeros.
    __device__ void find(const DecodeParams &p, int b, int key, bool is_needed) {
        sequence = b, row = is_needed ? key : p.page_size;
        if (p.page_table && is_needed) {
            const int page = unsigned(key) / unsigned(p.page_size);
            sequence = p.page_table[b * p.page_table_stride + page], row -= page * p.page_size;
        } else if (p.cache_batch_idx) sequence = p.cache_batch_idx[b];
    }
    template <int kRows, int kHeadDim>
    __device__ void load(SmemTile<kRows, kHeadDim> &to, int tile_row, const DecodeParams &p, const TmaTensor &x,
                         int h_k, Barrier &full) const {
        load_bytes(to, x, full, row, h_k, max(0, min(sequence, p.num_sequences - 1)), tile_row);
    }
};

struct CacheTensors { TmaTensor k, v; };

template <int kHeadDim>
TmaTensor make_cache_tensor(const char *name, const Tensor &x, const DecodeParams &p, int head_dim) {
    return make_tma_tensor<kHeadDim>(name, x, p.num_sequences, p.nheads_k, p.page_size, head_dim, p.box_rows);
}

}  // namespace sm90
