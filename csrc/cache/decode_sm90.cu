// decode.cu on Hopper (sm_90a), with TMA in place of copies by threads: an instruction for a page of a warp's keys.
#include "cache/boxes.cuh"
#include "cache/warps.cuh"

namespace sm90 {

using namespace device;
using namespace decoding;

// Copies a warp's keys and values by TMA. Lane i looks for the i-th box of a step.
template <typename Shape> struct BoxedKeys {
    static constexpr int kRows = Shape::kWarpKeys, kHeadDim = Shape::kHeadDim;
    const DecodeParams &p;
    const CacheTensors &cache;
    WarpsMemory<Shape> &shared;
    const int num_stages;
    int to = 0, from = 0;  // stages of the next copy and of the next step
    uint32_t parity = 0;
    int key, stride;       // first key of the next copy, and keys to the one after it
    CacheBox box = {};

    __device__ void begin(const WorkItem<Shape> &item, int first_key, int keys_of_step) {
        fence_proxy_async();  // partial results were there where TMA will copy to
        __syncthreads();      // all warps have read them
        key = first_key, stride = keys_of_step;
        find(item);
        for (int i = 0; i + 1 < num_stages; i++) load(item);
    }
    __device__ const WarpStage<Shape> &next(const WorkItem<Shape> &item, int key_of_step) {
        mbarrier_wait(full(from), parity);
        __syncwarp();  // the last step is over
        load(item);    // in place of that step's
        WarpStage<Shape> &stage = shared.stage(from);
        from = after(from), parity ^= from == 0;
        clear_unseen(stage, item.keys.begin - key_of_step, item.keys.end - key_of_step);
        return stage;
    }
    __device__ void wait_for_q() const { cp_async_wait<0>(); }
    __device__ void end() const {}

  private:
    __device__ Barrier &full(int stage) const { return shared.full[stage][threadIdx.x / 32]; }
    __device__ int after(int stage) const { return stage + 1 == num_stages ? 0 : stage + 1; }

    __device__ void find(const WorkItem<Shape> &item) {
        const int tile_row = threadIdx.x % 32 * p.box_rows, first = key + tile_row;
        if (key < item.end && tile_row < kRows)
            box.find(p, item.b, item.seq.k_begin + first,
                     first < item.keys.end && first + p.box_rows > item.keys.begin);
    }
    __device__ void load(const WorkItem<Shape> &item) {
        if (key >= item.end) return;
        using Tile = SmemTile<kRows, kHeadDim>;
        auto &k = reinterpret_cast<Tile &>(shared.stage(to).k), &v = reinterpret_cast<Tile &>(shared.stage(to).v);
        if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_tx(full(to), sizeof(WarpStage<Shape>));
#pragma unroll 1
        for (int lane = 0, row = 0; row < kRows; lane++, row += p.box_rows) {
            const CacheBox of_lane{__shfl_sync(~0u, box.sequence, lane), __shfl_sync(~0u, box.row, lane)};
            if (!elect_one()) continue;
            of_lane.load(k, row, p, cache.k, item.h_k, full(to));
            of_lane.load(v, row, p, cache.v, item.h_k, full(to));
        }
        to = after(to), key += stride;
        find(item);
    }
    // What no row sees may be NaN, and 0 · NaN is NaN.
    __device__ static void clear_unseen(WarpStage<Shape> &stage, int begin, int end) {
        if (begin <= 0 && end >= kRows) return;
        for (int i = threadIdx.x % 32; i < kRows * (kHeadDim / 8); i += 32) {
            const int row = i / (kHeadDim / 8), vec = i % (kHeadDim / 8);
            if (row < begin || row >= end)
                reinterpret_cast<uint4 &>(stage.v[PanelSwizzle<kRows>::offset(row, vec) / 2]) = uint4{};
        }
        fence_proxy_async();  // before TMA copies to the same place
        __syncwarp();         // all rows are 0
    }
};

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kNumThreads, 2)
    decode_tma(const __grid_constant__ DecodeParams p, const __grid_constant__ Splits splits,
               const __grid_constant__ Scores<> scores, const __grid_constant__ ScoreFactors<float> factors,
               const __grid_constant__ CacheTensors cache, int num_stages) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    auto &shared = shared_memory<WarpsMemory<Shape>>();
    if (threadIdx.x == 0) {
        prefetch(cache.k.map), prefetch(cache.v.map);
        for (auto &barriers : shared.full)
            for (Barrier &full : barriers) mbarrier_init(full, 1);
        fence_mbarrier_init();
    }
    BoxedKeys<Shape> keys{p, cache, shared, num_stages};
    decode_by_warps<T>(p, splits, scores, factors, shared, keys);
#endif
}

template <typename Shape> Splits splits_of(const DecodeParams &p) { return Splits::make<Shape>(p, 2); }

template <typename T, typename Shape> void launch_decode(DecodeParams p) {
    using Memory = WarpsMemory<Shape>;
    if (p.batch_size == 0 || p.nheads == 0 || p.seqlen_q == 0) return;
    p.box_rows = cache_box_rows(p, Shape::kWarpKeys);
    const Splits splits = splits_of<Shape>(p);
    const int64_t blocks = int64_t(splits.num_clusters) * splits.cluster;
    // Two blocks share a multiprocessor, but few have one each.
    const int num_stages = blocks <= p.num_sms ? Memory::kMostStages : 3;
    launch_clusters(splits.cluster, decode_tma<T, Shape>, blocks, Shape::kNumThreads, Memory::bytes(num_stages),
                    p.stream, p, splits, Scores<>(p), ScoreFactors<float>(p),
                    CacheTensors{make_cache_tensor<Shape::kHeadDim>("k", p.k, p, p.head_dim),
                                 make_cache_tensor<Shape::kHeadDim>("v", p.v, p, p.head_dim_v)}, num_stages);
}

int64_t decode_workspace(const DecodeParams &p) {
    return with_warp_shape(p, [&]<typename Shape>() { return splits_of<Shape>(p).template workspace_bytes<Shape>(p); });
}

int64_t num_decode_counters(const DecodeParams &p) {
    return with_warp_shape(p, [&]<typename Shape>() { return splits_of<Shape>(p).num_counters(p); });
}

void flash_decode(const DecodeParams &p) {
    if (compute_capability() != 90) throw std::runtime_error("minimal_attn: decode_sm90.cu needs a GPU of sm_90");
    with_warp_shape(p, [&]<typename Shape>() {
        p.dtype == DType::kFloat16 ? launch_decode<__half, Shape>(p) : launch_decode<__nv_bfloat16, Shape>(p);
    });
}

}  // namespace sm90
