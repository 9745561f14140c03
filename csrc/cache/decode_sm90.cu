// decode.cu for more than 32 packed rows on Hopper (sm_90a): for speculative decoding or many query heads per key head.
// A tile has the 64 rows of one wgmma, and a block is one warpgroup:
//   TMA      K(n+1) V(n+1)              up to two steps ahead, by the first warp
//   wgmma    S = Q K(n)ᵀ ─┐        ┌─ O += P V(n)
//   softmax               └─ P ────┘    a warp has 16 rows and all keys, so P stays in registers
#include <algorithm>

#include "cache/boxes.cuh"
#include "cache/combine.cuh"
#include "common/device.h"

namespace sm90 {

using namespace device;
using namespace decoding;

// A step has 16 KB of K and of V each.
template <int kHeadDim_> struct DecodeShape {
    static constexpr int kHeadDim = kHeadDim_, kBlockM = 64, kBlockN = 8192 / kHeadDim, kNumWarps = 4;
    static constexpr int kAlignment = kBlockN, kStages = 3;  // two blocks with more would not fit a multiprocessor
    static constexpr bool kWarpsHaveKeys = false;            // they have rows of their own
    static constexpr int block_keys(int) { return kBlockN; }
};

template <typename Shape> struct Stage {
    SmemTile<Shape::kBlockN, Shape::kHeadDim> k, v;
};

template <typename Shape> struct DecodeMemory {
    SmemTile<Shape::kBlockM, Shape::kHeadDim> q;
    union {
        Stage<Shape> stages[Shape::kStages];
        struct {
            PartialResult<Shape> partial;
            ClusterResults<Shape> results;
        } end;  // after a work item's last step
    };
    Barrier results_full;
    Barrier full[Shape::kStages];
    typename Scheduler<Shape>::Shared scheduler;
};

// The first warp asks TMA for keys and values ahead of the computation, each lane for one box of a step.
template <typename Shape> struct KeyBoxes {
    const DecodeParams &p;
    const CacheTensors &cache;
    const WorkItem<Shape> &item;
    const int stride;  // keys from one step of this block to the next
    int key;           // first of the next step
    CacheBox box = {};

    __device__ KeyBoxes(const DecodeParams &p, const CacheTensors &cache, const WorkItem<Shape> &item, int key,
                        int stride)
        : p(p), cache(cache), item(item), stride(stride), key(key) {
        find();
    }
    __device__ int tile_row() const { return threadIdx.x * p.box_rows; }
    __device__ void find() {
        const int first = key + tile_row();
        if (key < item.end && tile_row() < Shape::kBlockN)
            box.find(p, item.b, item.seq.k_begin + first,
                     first < item.keys.end && first + p.box_rows > item.keys.begin);
    }
    __device__ void load(Stage<Shape> &stage, Barrier &full) {
        if (key >= item.end) return;
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(full, 2 * 2 * Shape::kBlockN * Shape::kHeadDim);
        if (tile_row() < Shape::kBlockN) {
            box.load(stage.k, tile_row(), p, cache.k, item.h_k, full);
            box.load(stage.v, tile_row(), p, cache.v, item.h_k, full);
        }
        key += stride;
        find();
    }
};

template <typename T, typename Shape>
__device__ void attend(const SmemTile<Shape::kBlockM, Shape::kHeadDim> &q, const Stage<Shape> &stage,
                       float (&acc_o)[1][Shape::kHeadDim / 8][4], Softmax<1> &softmax, const WorkItem<Shape> &item,
                       int row, int key, const DecodeParams &p, const Scores<> &scores,
                       const ScoreFactors<float> &factors) {
    float acc_s[1][Shape::kBlockN / 8][4];
    warpgroup_arrive();
    multiply_abt<T>(acc_s[0], q, stage.k);
    warpgroup_wait<0>(acc_s[0]);
    const int lane_key = key + threadIdx.x % 4 * 2;
    change_scores(acc_s, scores, factors, p, item, row, lane_key);
    if (!item.all_rows_see(key, Shape::kBlockN)) hide_scores(acc_s, p, item, row, lane_key);
    float alpha[2];
    if (softmax.update_row_max(acc_s, alpha)) softmax.rescale(acc_o, alpha);
    uint32_t P[Shape::kBlockN / 16][4];
#pragma unroll
    for (int kk = 0; kk < Shape::kBlockN / 16; kk++) softmax.probabilities<T>(P[kk], acc_s[0], 0, kk);
    warpgroup_arrive();
    multiply_ab<T>(acc_o[0], P, stage.v);
    warpgroup_wait<0>(acc_o[0], P);
}

template <typename T, typename Shape>
__global__ void __launch_bounds__(32 * Shape::kNumWarps, 2)
    decode(const __grid_constant__ DecodeParams p, const __grid_constant__ Splits splits,
           const __grid_constant__ Scores<> scores, const __grid_constant__ ScoreFactors<float> factors,
           const __grid_constant__ CacheTensors cache) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    prefetch_parameters(p, splits, scores, factors);
    auto &shared = shared_memory<DecodeMemory<Shape>>();
    const bool loads = warp_uniform(threadIdx.x / 32) == 0;
    if (threadIdx.x == 0) {
        prefetch(cache.k.map), prefetch(cache.v.map);
        for (Barrier &full : shared.full) mbarrier_init(full, 1);
        mbarrier_init(shared.results_full, 1);
        fence_mbarrier_init();
    }
    if (p.phase == Phase::kAlone) wait_for_previous_kernel();
    __syncthreads();  // the barriers are there
    Scheduler<Shape> scheduler(p, splits, shared.scheduler);
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    int stage = 0;
    uint32_t parity = 0, results_parity = 0;
    for (ItemIndex at = scheduler.first(); at.b >= 0; at = scheduler.next(at)) {
        const WorkItem<Shape> item(p, splits, scheduler.plan, at);
        if (item.rows == 0) continue;
        const int begin = item.begin + scheduler.rank * Shape::kBlockN;
        load_q<T>(&shared.q, p, item, [&](int row, int vec) { return shared.q.offset(row, 8 * vec); });
        KeyBoxes<Shape> keys(p, cache, item, begin, splits.step_keys);
        if (loads)
            for (int i = 0, to = stage; i < Shape::kStages; i++, to = to + 1 == Shape::kStages ? 0 : to + 1)
                keys.load(shared.stages[to], shared.full[to]);
        float acc_o[1][Shape::kHeadDim / 8][4] = {};
        Softmax<1> softmax(factors.softmax_scale_log2);
        cp_async_wait<0>();
        fence_proxy_async();
        __syncthreads();  // Q is there
        for (int key = begin; key < item.end; key += splits.step_keys) {
            mbarrier_wait(shared.full[stage], parity);
            clear_unseen<32 * Shape::kNumWarps, Shape::kBlockN>(threadIdx.x, 0, item.keys.begin - key,
                                                                item.keys.end - key, shared.stages[stage].v);
            attend<T>(shared.q, shared.stages[stage], acc_o, softmax, item, row, key, p, scores, factors);
            __syncthreads();  // all warps have read the stage
            if (loads) keys.load(shared.stages[stage], shared.full[stage]);
            stage = stage + 1 == Shape::kStages ? 0 : stage + 1, parity ^= stage == 0;
        }
        if (splits.cluster > 1) cluster_arrive_relaxed();  // this block has read its keys
        let_next_kernel_begin();
        scheduler.take_next();
        shared.end.partial.store(item, acc_o, softmax, threadIdx.x / 32 * 16);
        combine<T>(p, scheduler, item, &shared.end.partial, shared.end.results, shared.results_full, results_parity);
        fence_proxy_async();  // the partial result was there where TMA will copy to
        __syncthreads();
    }
    store_padding<T>(p);
    if (p.phase != Phase::kAlone && blockIdx.x == 0) wait_for_previous_kernel();  // the next kernel relies on it
#endif
}

template <typename Shape> Splits splits_of(const DecodeParams &p) { return Splits::make<Shape>(p, 2, false); }

template <typename T, typename Shape> void launch_decode(DecodeParams p) {
    static_assert(2 * (sizeof(DecodeMemory<Shape>) + 1024) <= 228 << 10);  // the GPU takes 1 KB of each block
    p.box_rows = cache_box_rows(p, Shape::kBlockN);
    const Splits splits = splits_of<Shape>(p);
    launch_clusters(true, splits.cluster, decode<T, Shape>, int64_t(splits.num_clusters) * splits.cluster,
                    32 * Shape::kNumWarps,
                 sizeof(DecodeMemory<Shape>), p.stream, p, splits, Scores<>(p), ScoreFactors<float>(p),
                 CacheTensors{make_cache_tensor<Shape::kHeadDim>("k", p.k, p, p.head_dim),
                              make_cache_tensor<Shape::kHeadDim>("v", p.v, p, p.head_dim_v)});
}

// head_dim is at most 128.
template <typename Act> auto with_decode_shape(const DecodeParams &p, Act act) {
    return p.max_head_dim() <= 64 ? act.template operator()<DecodeShape<64>>()
                                  : act.template operator()<DecodeShape<128>>();
}

int64_t decode_workspace(const DecodeParams &p) {
    return with_decode_shape(
        p, [&]<typename Shape>() { return splits_of<Shape>(p).workspace_bytes(p, Shape::kHeadDim); });
}

int64_t num_decode_counters(const DecodeParams &p) {
    return with_decode_shape(p, [&]<typename Shape>() { return splits_of<Shape>(p).num_counters(p); });
}

void flash_decode(const DecodeParams &p) {
    if (compute_capability() != 90) throw std::runtime_error("minimal_attn: decode_sm90.cu needs a GPU of sm_90");
    with_decode_shape(p, [&]<typename Shape>() {
        p.dtype == DType::kFloat16 ? launch_decode<__half, Shape>(p) : launch_decode<__nv_bfloat16, Shape>(p);
    });
}

}  // namespace sm90
