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

// Boxes that are not needed lie outside of the cache: TMA reads zeros.
__device__ inline CachePlace find_box(const DecodeParams &p, int b, int key, bool is_needed) {
    return is_needed ? place_in_cache(p, b, key) : CachePlace{b, p.page_size};
}
// Only here is the page's number needed.
template <int kRows, int kHeadDim>
__device__ void load_box(SmemTile<kRows, kHeadDim> &to, int tile_row, const DecodeParams &p, const TmaTensor &x,
                         const CachePlace &box, int h_k, Barrier &full) {
    load_bytes(to, x, full, box.row, h_k, max(0, min(box.sequence, p.num_sequences - 1)), tile_row);
}

struct CacheBoxes {
    template <int kHeadDim>
    static TmaTensor make_tensor(const char *name, const Tensor &x, const DecodeParams &p, int head_dim) {
        return make_tma_tensor<kHeadDim>(name, x, p.num_sequences, p.nheads_k, p.page_size, head_dim, p.box_rows);
    }
};

}  // namespace sm90
