// decode.cu for more than 32 packed rows on Hopper (sm_90a): for speculative decoding or many query heads per key head.
// A tile has the 64 rows of one wgmma. A block is one warpgroup, or two that divide the keys of a step:
//   TMA      K(n+1) V(n+1)              up to two steps ahead, by the first warp of each
//   wgmma    S = Q K(n)ᵀ ─┐        ┌─ O += P V(n)
//   softmax               └─ P ────┘    a warp has 16 rows and all keys, so P stays in registers
#include "cache/boxes.cuh"
#include "cache/combine.cuh"

namespace sm90 {

using namespace device;
using namespace decoding;

// A warpgroup has 16 KB of K and of V of a step.
template <int kHeadDim_> struct DecodeShape {
    static constexpr int kHeadDim = kHeadDim_, kBlockM = 64, kMTiles = 1, kPartKeys = 8192 / kHeadDim;
    static constexpr int kNumWarps = 4, kMaxWarps = 8, kPartWarps = 4, kBlockKeys = kPartKeys;
    static constexpr int kStages = 3;  // two blocks of a warpgroup with more would not fit a multiprocessor
    using Q = SmemTile<kBlockM, kHeadDim>;
    struct Stage { SmemTile<kPartKeys, kHeadDim> k, v; };
    struct Barriers { Barrier full[kMaxWarps / kPartWarps][kStages]; };
};

// The first warp of a warpgroup asks TMA for its keys and values ahead of the computation, each lane for one box.
template <typename Shape> struct KeyBoxes {
    const unsigned lane_idx;
    const KernelParams &p;
    const TmaTensor &k_tma, &v_tma;
    const WorkItem<Shape> &item;
    int key;  // first of the next step
    CachePlace box = {};
    __device__ int tile_row() const { return lane_idx * p.box_rows; }
    __device__ void find() {
        const int first = key + tile_row();
        if (key < item.end && tile_row() < Shape::kPartKeys)
            box = find_box(p, item.b, item.seq.k_begin + first,
                           first < item.keys.end && first + p.box_rows > item.keys.begin);
    }
    __device__ void load(typename Shape::Stage &stage, Barrier &full) {
        if (key >= item.end) return;
        if (lane_idx == 0) mbarrier_arrive_expect_tx(full, 2 * 2 * Shape::kPartKeys * Shape::kHeadDim);
        if (tile_row() < Shape::kPartKeys) {
            load_box(stage.k, tile_row(), p, k_tma, box, item.h_k, full);
            load_box(stage.v, tile_row(), p, v_tma, box, item.h_k, full);
        }
        key += p.splits.step_keys;
        find();
    }
};

template <typename T, typename Shape>
__global__ void __launch_bounds__(32 * Shape::kMaxWarps, 1)
    decode(const __grid_constant__ KernelParams p, const __grid_constant__ TmaTensor k_tma,
           const __grid_constant__ TmaTensor v_tma) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    constexpr int kThreads = 32 * Shape::kPartWarps, kKeys = Shape::kPartKeys, kStages = Shape::kStages;
    prefetch_parameters(p);
    auto &shared = shared_memory<BlockMemory<Shape>>();
    const int part = warp_uniform(threadIdx.x / kThreads), thread_idx = threadIdx.x % kThreads;
    const int row0 = thread_idx / 32 * 16;
    const bool loads = warp_uniform(thread_idx / 32) == 0;
    Barrier(&full)[kStages] = shared.full[part];
    typename Shape::Stage *const stages = shared.stages() + part * kStages;
    if (threadIdx.x == 0) {
        prefetch(k_tma.map), prefetch(v_tma.map);
        for (auto &of_part : shared.full)
            for (Barrier &full : of_part) mbarrier_init(full, 1);
        mbarrier_init(shared.results_full, 1);
        fence_mbarrier_init();
    }
    if (p.phase == Phase::kAlone) wait_for_previous_kernel();
    __syncthreads();  // the barriers are there
    int stage = 0;
    uint32_t parity = 0;
    auto add_keys = [&](const WorkItem<Shape> &item, int begin, auto &acc_o, Softmax<1> &softmax) {
        load_q<T>(&shared.q, p, item, [&](int row, int vec) { return shared.q.offset(row, 8 * vec); });
        KeyBoxes<Shape> keys{threadIdx.x % 32, p, k_tma, v_tma, item, begin};
        keys.find();
        if (loads)
            for (int i = 0, to = stage; i < kStages; i++, to = to + 1 == kStages ? 0 : to + 1)
                keys.load(stages[to], full[to]);
        cp_async_wait<0>();
        fence_proxy_async();
        __syncthreads();  // Q is there
        for (int key = begin; key < item.end; key += p.splits.step_keys) {
            mbarrier_wait(full[stage], parity);
            clear_unseen<kThreads, kKeys>(thread_idx, 1 + part, item.keys.begin - key, item.keys.end - key,
                                          stages[stage].v);
            float acc_s[1][kKeys / 8][4];
            warpgroup_arrive();
            multiply_abt<T>(acc_s[0], shared.q, stages[stage].k);
            warpgroup_wait<0>(acc_s[0]);
            update(acc_s, acc_o, softmax, p, item, row0, key);
            uint32_t P[kKeys / 16][4];
#pragma unroll
            for (int kk = 0; kk < kKeys / 16; kk++) softmax.probabilities<T>(P[kk], acc_s[0], 0, kk);
            warpgroup_arrive();
            multiply_ab<T>(acc_o[0], P, stages[stage].v);
            warpgroup_wait<0>(acc_o[0], P);
            barrier_sync(1 + part, kThreads);  // all warps have read the stage
            if (loads) keys.load(stages[stage], full[stage]);
            stage = stage + 1 == kStages ? 0 : stage + 1, parity ^= stage == 0;
        }
    };
    decode_items<T>(p, shared, part, row0, add_keys);
#endif
}

template <typename Shape> Splits splits_of(const DecodeParams &p) {
    static_assert(2 * (BlockMemory<Shape>::bytes(Shape::kNumWarps, Shape::kStages) + 1024) <= 228 << 10);
    static_assert(BlockMemory<Shape>::bytes(Shape::kMaxWarps, Shape::kStages) <= 227 << 10);
    return Splits::make<Shape>(p, 2, true);
}

// head_dim is at most 128.
template <typename Act> auto with_decode_shape(const DecodeParams &p, Act act) {
    return p.max_head_dim() <= 64 ? act.template operator()<DecodeShape<64>>()
                                  : act.template operator()<DecodeShape<128>>();
}

DecodeSizes decode_sizes(const DecodeParams &p) {
    return with_decode_shape(p, [&]<typename Shape>() { return splits_of<Shape>(p).sizes(p, Shape::kHeadDim); });
}

void flash_decode(const DecodeParams &p) {
    if (compute_capability() != 90) throw std::runtime_error("minimal_attn: decode_sm90.cu needs a GPU of sm_90");
    with_decode_shape(p, [&, params = p]<typename Shape>() mutable {
        params.box_rows = cache_box_rows(p, Shape::kPartKeys);
        const auto kernel = p.dtype == DType::kFloat16 ? decode<__half, Shape> : decode<__nv_bfloat16, Shape>;
        const Splits splits = splits_of<Shape>(p);
        launch_decode<Shape>(kernel, params, splits,
                             CacheBoxes::make_tensor<Shape::kHeadDim>("k", p.k, params, p.head_dim),
                             CacheBoxes::make_tensor<Shape::kHeadDim>("v", p.v, params, p.head_dim_v));
    });
}

}  // namespace sm90
