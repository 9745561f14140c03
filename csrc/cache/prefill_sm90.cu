// Prompts with keys in a cache ("prefill") on Hopper (sm_90a), by sm90/flash_sm90.cuh.
#include "cache/boxes.cuh"
#include "sm90/flash_sm90.cuh"

namespace sm90 {

// K and V have a warp each: with pages of 16 keys, one for both would keep the products waiting. Each lane finds a box,
// but one lane asks for all: otherwise ptxas loops over the lanes around every instruction.
template <int kBlockN> struct CachedKeyBlocks : CacheBoxes {
    static constexpr int kLoaders = 2;
    const DecodeParams &p;
    const Tile &tile;
    const Sequence &seq;
    CachePlace box, next;  // of a block, and of the one before it

    __device__ CachedKeyBlocks(const DecodeParams &p, const Tile &tile, const Sequence &seq, int n_block)
        : p(p), tile(tile), seq(seq) {
        find_next(n_block);
    }
    __device__ static void begin_tile() {
        __syncwarp();  // no lane is still waiting for this tile when others wait for the next
    }
    __device__ int tile_row() const { return threadIdx.x % 32 * p.box_rows; }
    __device__ void find_next(int n_block) {
        const int key = n_block * kBlockN + tile_row();
        if (tile_row() < kBlockN) next = find_box(p, tile.b, seq.k_begin + key, key >= 0 && key < seq.seqlen_k);
    }
    // The next block's page number arrives while this block is loaded.
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
            const CachePlace of_lane{__shfl_sync(~0u, box.sequence, lane), __shfl_sync(~0u, box.row, lane)};
            if (elect_one()) load_box(to, row, p, x, of_lane, h_k, full);
        }
    }
};

struct Cached : Plain {
    static constexpr bool kCached = true;
    using Input = DecodeParams;
    template <int kBlockN> using KeyBlocks = CachedKeyBlocks<kBlockN>;
};

void flash_prefill(const DecodeParams &p) {
    if (compute_capability() != 90) throw std::runtime_error("minimal_attn: prefill_sm90.cu needs a GPU of sm_90");
    with_shape<Cached>(p.max_head_dim(), [&, params = p]<typename Shape>() mutable {
        params.box_rows = cache_box_rows(p, Shape::kBlockN);
        launch_fwd<Shape>(params);
    });
}

}  // namespace sm90
