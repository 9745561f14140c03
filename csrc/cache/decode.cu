// Attention of a few query tokens to long caches ("decode") on tensor cores, fp16 and bf16, from Ampere (sm_80) on.
// On Hopper other kernels serve more rows (fewest_rows() in ops/cache_launches.h).
//
// Memory bounds the time, as every key is read once for few rows. A tile packs the tokens of a sample and the query
// heads of a key head: packed row r is token r / group of query head h_k · group + r % group. A block has 16 or 32 rows.
// Its warps divide the keys of a step and do not wait for one another: each copies its own keys ahead in a ring of
// stages and has its own maximum, sum and output, which are added at the end (cache/combine.cuh).
//
// The host plans nothing, so a CUDA graph may change the lengths (cache/work.cuh).
#include <algorithm>

#include "cache/combine.cuh"
#include "cache/keys.cuh"
#include "common/device.h"

namespace sm80 {

using namespace device;

// A warp has 32 keys of a step at head_dim 64, otherwise 16.
template <int kHeadDim_, int kBlockM_> struct DecodeShape : KeyShape<kHeadDim_, kBlockM_, kHeadDim_ == 256 ? 2 : 4> {
    static constexpr int kWarpKeys = DecodeShape::kBlockN / DecodeShape::kNumWarps, kMTiles = kBlockM_ / 16;
    static constexpr int kParts = DecodeShape::kNumWarps;  // partial results of a block
};

template <typename Shape> struct DecodeMemory {
    alignas(128) uint16_t sQ[Shape::kBlockM][Shape::kHeadDim];
    typename Scheduler<Shape>::Shared scheduler;
    union Buffer {
        alignas(128) Stage<Shape> stages[1];        // or more
        PartialResult<Shape> parts[Shape::kParts];  // after a work item's last step
    } buffer;

    static size_t bytes(int num_stages) {
        return sizeof(DecodeMemory) - sizeof(Buffer) + std::max(num_stages * sizeof(Stage<Shape>), sizeof(Buffer));
    }
};

__device__ inline void wait_for_step(int num_stages) {
    if (num_stages == 2) cp_async_wait<0>();
    if (num_stages == 3) cp_async_wait<1>();
}

// A step of a warp: scores, probabilities and output of its keys.
template <typename T, typename Shape>
__device__ void attend(const DecodeMemory<Shape> &shared, const Stage<Shape> &stage,
                       float (&acc_o)[Shape::kMTiles][Shape::kHeadDim / 8][4], Softmax<Shape::kMTiles> &softmax,
                       const WorkItem<Shape> &item, int key, const DecodeParams &p, const Scores<> &scores,
                       const ScoreFactors<float> &factors) {
    constexpr int kHeadDim = Shape::kHeadDim, kWarpKeys = Shape::kWarpKeys;
    using Swizzle = sm80::Swizzle<kHeadDim>;
    const int warp_key = threadIdx.x / 32 * kWarpKeys, lane_idx = threadIdx.x % 32;
    const uint32_t offset = warp_key * Swizzle::kRowBytes;
    float acc_s[Shape::kMTiles][kWarpKeys / 8][4] = {};
    multiply_abt<T, kHeadDim>(acc_s, shared_address(shared.sQ) + Swizzle::down(lane_idx),
                              shared_address(stage.sK) + offset + Swizzle::across(lane_idx));
    const int row = lane_idx / 4, lane_key = key + warp_key + lane_idx % 4 * 2;
    change_scores(acc_s, scores, factors, p, item, row, lane_key);
    if (!item.all_rows_see(key)) hide_scores(acc_s, p, item, row, lane_key);
    float alpha[2 * Shape::kMTiles];
    if (softmax.update_row_max(acc_s, alpha)) softmax.rescale(acc_o, alpha);
    const uint32_t v_address = shared_address(stage.sV) + offset + Swizzle::down(lane_idx);
#pragma unroll
    for (int kk = 0; kk < kWarpKeys / 16; kk++) {
        uint32_t P[Shape::kMTiles][4];
        for (int m = 0; m < Shape::kMTiles; m++) softmax.template probabilities<T>(P[m], acc_s[m], m, kk);
        multiply_ab<T, kHeadDim>(acc_o, P, v_address, kk * 16 * Swizzle::kRowBytes);
    }
}

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kNumThreads, 2)
    decode(const __grid_constant__ DecodeParams p, const __grid_constant__ Splits splits,
           const __grid_constant__ Scores<> scores, const __grid_constant__ ScoreFactors<float> factors,
           int num_stages) {
#if __CUDA_ARCH__ < 800  // a GPU without these instructions
    __trap();
#else
    let_next_kernel_begin();
    DecodeMemory<Shape> &shared = shared_memory<DecodeMemory<Shape>>();
    if (p.phase == Phase::kAlone) wait_for_previous_kernel();
    Scheduler<Shape> scheduler(p, splits, shared.scheduler);
    Stage<Shape> *const stages = shared.buffer.stages;
    const int stride = splits.cluster * Shape::kBlockN;
    for (WorkItem<Shape> item = scheduler.first(); item.is_valid(); item = scheduler.next(item)) {
        const int begin = item.begin + scheduler.rank * Shape::kBlockN;
        load_q<T>(shared.sQ, p, item, Swizzle<Shape::kHeadDim>::offset);
        KeyStream<T, Shape> keys(p, item, begin, stride);
#pragma unroll 1
        for (int i = 0; i + 1 < num_stages; i++) keys.load(stages[i]);
        float acc_o[Shape::kMTiles][Shape::kHeadDim / 8][4] = {};
        Softmax<Shape::kMTiles> softmax(factors.softmax_scale_log2);
        wait_for_step(num_stages);
        __syncthreads();  // Q is there
        int stage = 0;
        for (int key = begin; key < item.end; key += stride) {
            wait_for_step(num_stages);
            __syncwarp();  // the warp's keys are there, and its last step is over
            keys.load(stages[(stage == 0 ? num_stages : stage) - 1]);  // in place of that step's
            attend<T>(shared, stages[stage], acc_o, softmax, item, key, p, scores, factors);
            stage = stage + 1 == num_stages ? 0 : stage + 1;
        }
        cp_async_wait<0>();  // groups without copies are left
        __syncthreads();     // all warps have read their stages
        shared.buffer.parts[threadIdx.x / 32].store(item, acc_o, softmax, 0);
        combine<T>(p, scheduler, item, shared.buffer.parts);
    }
    store_padding<T>(p);
    if (p.phase != Phase::kAlone && blockIdx.x == 0) wait_for_previous_kernel();  // the next kernel relies on it
#endif
}

// Two blocks share a multiprocessor if they fit it with two stages.
template <typename Shape> struct Occupancy {
    int num_stages, blocks_per_sm;

    Occupancy() {
        constexpr int kSystemBytes = 1024;  // in each block's shared memory
        auto blocks_with = [](int num_stages) {
            return int(std::min<size_t>(2, (max_shared_memory() + kSystemBytes) /
                                               (DecodeMemory<Shape>::bytes(num_stages) + kSystemBytes)));
        };
        num_stages = blocks_with(3) == 2 || (blocks_with(2) == 1 && blocks_with(3) == 1) ? 3 : 2;
        blocks_per_sm = blocks_with(num_stages);
    }
};

template <typename Shape> Splits splits_of(const DecodeParams &p) {
    return Splits::make<Shape>(p, Occupancy<Shape>().blocks_per_sm);
}

template <typename T, typename Shape> void launch_decode(const DecodeParams &p) {
    if (p.batch_size == 0 || p.nheads == 0 || p.seqlen_q == 0) return;
    const Splits splits = splits_of<Shape>(p);
    const int num_stages = Occupancy<Shape>().num_stages;
    launch_clusters(splits.cluster, decode<T, Shape>, int64_t(splits.num_clusters) * splits.cluster,
                    Shape::kNumThreads, DecodeMemory<Shape>::bytes(num_stages), p.stream, p, splits, Scores<>(p),
                    ScoreFactors<float>(p), num_stages);
}

// Tiles of 32 rows end at head_dim 128: beyond, two blocks of eight warps would not fit the registers.
template <typename Act> auto with_decode_shape(const DecodeParams &p, Act act) {
    const int head_dim = p.max_head_dim();
    const bool has_more_rows = int64_t(p.nheads / p.nheads_k) * p.max_seqlen_q > 16;
    if (head_dim <= 64)
        return has_more_rows ? act.template operator()<DecodeShape<64, 32>>()
                             : act.template operator()<DecodeShape<64, 16>>();
    if (head_dim <= 128)
        return has_more_rows ? act.template operator()<DecodeShape<128, 32>>()
                             : act.template operator()<DecodeShape<128, 16>>();
    return act.template operator()<DecodeShape<256, 16>>();
}

int64_t decode_workspace(const DecodeParams &p) {
    return with_decode_shape(p, [&]<typename Shape>() { return splits_of<Shape>(p).template workspace_bytes<Shape>(p); });
}

int64_t num_decode_counters(const DecodeParams &p) {
    return with_decode_shape(p, [&]<typename Shape>() { return splits_of<Shape>(p).num_counters(p); });
}

void flash_decode(const DecodeParams &p) {
    with_decode_shape(p, [&]<typename Shape>() {
        p.dtype == DType::kFloat16 ? launch_decode<__half, Shape>(p) : launch_decode<__nv_bfloat16, Shape>(p);
    });
}

}  // namespace sm80
