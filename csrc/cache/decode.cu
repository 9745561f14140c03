// Attention of a few query tokens to long caches ("decode") on tensor cores, fp16 and bf16, from Ampere (sm_80) on.
// On Hopper other kernels serve more rows (fewest_rows() in ops/cache_launches.h).
//
// Memory bounds the time, as every key is read once for few rows. A tile packs the tokens of a sample and the query
// heads of a key head: packed row r is token r / group of query head h_k · group + r % group. Four warps share 16 rows,
// and a block has 16 or 32:
//   cp.async       K(n+2) V(n+2)                                     two steps ahead, in a ring of three
//   Q Kᵀ           warps divide the keys ─ row maxima ─┐  through shared memory
//   P              warps divide the keys ───── P ──────┤  through shared memory
//   P V            warps divide the columns          ◀─┘
// Copies run ahead into the next run, and one thread finds runs two ahead. Two blocks share a multiprocessor where they
// fit, if need be with two stages: one computes while the other waits.
//
// The host plans nothing, so a CUDA graph may change the lengths: blocks divide the work equally on the device
// (cache/share.cuh). Blocks that share a tile combine partial results, in the order of the keys, from a workspace
// (cache/join.cuh).
#include <algorithm>

#include "cache/combine.cuh"
#include "cache/keys.cuh"
#include "common/device.h"

namespace sm80 {

using namespace device;

template <int kHeadDim_, int kBlockM_> struct DecodeShape : KeyShape<kHeadDim_, kBlockM_ / 4> {
    static constexpr int kBlockM = kBlockM_, kRowWarps = 4, kLaneRows = 2;
    static constexpr int kScoreWarps = std::min(DecodeShape::kBlockN / 16, kRowWarps);
    static constexpr int kSTiles = DecodeShape::kBlockN / kScoreWarps / 8, kDTiles = kHeadDim_ / kRowWarps / 8;
    static constexpr int kLaneKeys = 2 * kSTiles, kLaneCols = 2 * kDTiles;
    using AccS = float[kSTiles][4];
    using AccO = float[1][kDTiles][4];

    __device__ static int warp_row() { return kBlockM == 16 ? 0 : threadIdx.x / (32 * kRowWarps) * 16; }
    __device__ static int part() { return threadIdx.x / 32 % kRowWarps; }
    __device__ static int row_of_lane(int i) { return warp_row() + threadIdx.x % 32 / 4 + 8 * i; }
    __device__ static int key_of_lane(int j) { return column_of_lane(part() * kSTiles, j); }
    __device__ static int col_of_lane(int j) { return column_of_lane(part() * kDTiles, j); }
    __device__ static float &at(AccS &acc, int i, int j) { return acc[j / 2][2 * i + j % 2]; }
    __device__ static float &at(AccO &acc, int i, int j) { return acc[0][j / 2][2 * i + j % 2]; }

  private:
    __device__ static int column_of_lane(int n, int j) { return 8 * (n + j / 2) + threadIdx.x % 4 * 2 + j % 2; }
};

template <typename Shape> struct DecodeMemory {
    alignas(128) uint16_t sQ[Shape::kBlockM][Shape::kHeadDim];
    alignas(128) uint16_t sP[Shape::kBlockM][Shape::kBlockN];
    alignas(16) float row_max[Shape::kBlockM][Shape::kScoreWarps];
    alignas(16) float row_sum[Shape::kBlockM][Shape::kScoreWarps];
    typename Scheduler<Shape>::Shared scheduler;
    alignas(128) Stage<Shape> stages[1];  // or more

    static size_t bytes(int num_stages) { return sizeof(DecodeMemory) + (num_stages - 1) * sizeof(Stage<Shape>); }
};

__device__ inline void wait_for_step(int num_stages) {
    if (num_stages == 2) cp_async_wait<0>();
    if (num_stages == 3) cp_async_wait<1>();
}

template <typename Shape>
__device__ void read_q(uint32_t (&q)[Shape::kHeadDim / 16][4], const DecodeMemory<Shape> &shared) {
    using Swizzle = sm80::Swizzle<Shape::kHeadDim>;
    const uint32_t address = shared_address(shared.sQ) + Swizzle::down(threadIdx.x % 32);
#pragma unroll
    for (int kk = 0; kk < Shape::kHeadDim / 16; kk++) ldmatrix(q[kk], Swizzle::move(address, Shape::warp_row(), kk));
}

template <typename T, typename Shape> struct Step {
    static constexpr int kHeadDim = Shape::kHeadDim, kWarpKeys = 8 * Shape::kSTiles;
    using QSwizzle = Swizzle<kHeadDim>;
    using PSwizzle = Swizzle<Shape::kBlockN>;
    DecodeMemory<Shape> &shared;
    const DecodeParams &p;
    const WorkItem<Shape> &item;
    const uint32_t (&q)[Shape::kHeadDim / 16][4];
    const bool has_rows;
    const int part = Shape::part(), lane_idx = threadIdx.x % 32;
    typename Shape::AccS acc_s = {};

    __device__ bool has_scores() const { return has_rows && part < Shape::kScoreWarps; }

    __device__ void score(const Stage<Shape> &stage, int key, const Scores<> &scores,
                          const ScoreFactors<float> &factors) {
        const uint32_t k_address =
            QSwizzle::move(shared_address(stage.sK) + QSwizzle::across(lane_idx), part * kWarpKeys, 0);
#pragma unroll
        for (int kk = 0; kk < kHeadDim / 16; kk++)
            for (int n = 0; n < Shape::kSTiles; n += 2) {
                uint32_t b[4];
                ldmatrix(b, QSwizzle::move(k_address, 8 * n, kk));
                mma<T>(acc_s[n], q[kk], b[0], b[1]);
                mma<T>(acc_s[n + 1], q[kk], b[2], b[3]);
            }
        change_scores<Shape>(acc_s, scores, factors, p, item, key);
        if (!item.all_rows_see(key)) hide_scores<Shape>(acc_s, p, item, key);
#pragma unroll
        for (int i = 0; i < Shape::kLaneRows; i++) {
            float max = -INFINITY;
            for (int n = 0; n < Shape::kSTiles; n++) max = fmaxf(max, fmaxf(acc_s[n][2 * i], acc_s[n][2 * i + 1]));
            max = __fmul_rn(quad_reduce(max, fmaxf), factors.softmax_scale_log2);  // rounded as in exponentiate()
            if (lane_idx % 4 == 0) shared.row_max[Shape::row_of_lane(i)][part] = max;
        }
    }
    __device__ void exponentiate(RowState (&rows)[Shape::kLaneRows], float softmax_scale_log2) {
#pragma unroll
        for (int i = 0; i < Shape::kLaneRows; i++)
            for (int n = 0; n < Shape::kSTiles; n++) {
                const float x = exp2_approx(acc_s[n][2 * i] * softmax_scale_log2 - rows[i].max);
                const float y = exp2_approx(acc_s[n][2 * i + 1] * softmax_scale_log2 - rows[i].max);
                rows[i].sum += x + y;
                const uint32_t offset = PSwizzle::offset(Shape::row_of_lane(i), part * Shape::kSTiles + n);
                store_shared(shared_address(shared.sP) + offset + lane_idx % 4 * 4, pack<T>(x, y));
            }
    }
    __device__ void multiply_v(TileState<Shape> &state, const Stage<Shape> &stage) {
        const uint32_t p_address =
            PSwizzle::move(shared_address(shared.sP) + PSwizzle::down(lane_idx), Shape::warp_row(), 0);
        const uint32_t v_address = shared_address(stage.sV) + QSwizzle::down(lane_idx);
#pragma unroll
        for (int kk = 0; kk < Shape::kBlockN / 16; kk++) {
            uint32_t P[1][4];
            ldmatrix(P[0], PSwizzle::move(p_address, 0, kk));
            multiply_ab<T, kHeadDim>(state.acc_o, P, v_address, kk * 16 * QSwizzle::kRowBytes, part * Shape::kDTiles);
        }
    }
};

template <typename Shape> __device__ void grow(TileState<Shape> &state, const DecodeMemory<Shape> &shared) {
#pragma unroll
    for (int i = 0; i < Shape::kLaneRows; i++) {
        float max = state.rows[i].max;
        for (int w = 0; w < Shape::kScoreWarps; w++) max = fmaxf(max, shared.row_max[Shape::row_of_lane(i)][w]);
        state.grow(i, max);
    }
}

template <typename Shape> __device__ void add_sums(TileState<Shape> &state, DecodeMemory<Shape> &shared) {
#pragma unroll
    for (int i = 0; i < Shape::kLaneRows; i++) {
        const float sum = quad_reduce(state.rows[i].sum, [](float x, float y) { return x + y; });
        if (Shape::part() < Shape::kScoreWarps && threadIdx.x % 4 == 0)
            shared.row_sum[Shape::row_of_lane(i)][Shape::part()] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Shape::kLaneRows; i++) {
        state.rows[i].sum = 0.f;
        for (int w = 0; w < Shape::kScoreWarps; w++) state.rows[i].sum += shared.row_sum[Shape::row_of_lane(i)][w];
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
    auto &partial = reinterpret_cast<PartialResult<Shape> &>(shared.stages);  // after a work item's last step
    static_assert(sizeof(partial) <= 2 * sizeof(Stage<Shape>));
    const int stride = splits.cluster * Shape::kBlockN;
    for (WorkItem<Shape> item = scheduler.first(); item.is_valid(); item = scheduler.next(item)) {
        const int begin = item.begin + scheduler.rank * Shape::kBlockN;
        load_q<T>(shared.sQ, p, item, Swizzle<Shape::kHeadDim>::offset);
        KeyStream<T, Shape> keys(p, item, begin, stride);
#pragma unroll 1
        for (int i = 0; i + 1 < num_stages; i++) keys.load(shared.stages[i]);
        TileState<Shape> state;
        const bool has_rows = Shape::warp_row() < item.rows;
        uint32_t q[Shape::kHeadDim / 16][4];
        wait_for_step(num_stages);
        __syncthreads();  // Q and the first keys are there
        read_q(q, shared);
        int stage = 0;
        for (int key = begin; key < item.end; key += stride) {
            Step<T, Shape> step{shared, p, item, q, has_rows};
            if (step.has_scores()) step.score(shared.stages[stage], key, scores, factors);
            __syncthreads();  // the row maxima are there, and the last step is over
            keys.load(shared.stages[(stage == 0 ? num_stages : stage) - 1]);  // in place of that step's
            if (has_rows) grow(state, shared);
            if (step.has_scores()) step.exponentiate(state.rows, factors.softmax_scale_log2);
            wait_for_step(num_stages);
            __syncthreads();  // P is there, and the next keys
            if (has_rows) step.multiply_v(state, shared.stages[stage]);
            stage = stage + 1 == num_stages ? 0 : stage + 1;
        }
        cp_async_wait<0>();  // for groups without copies
        add_sums(state, shared);  // after it, all threads have read the stages
        partial.store(item, state);
        combine<T>(p, scheduler, item, partial);
        __syncthreads();
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
