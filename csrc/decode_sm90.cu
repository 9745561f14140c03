// Attention of a few rows to long caches on Hopper's tensor cores, fp16 and bf16 (sm_90a): decoding, several tokens of
// a sample as in speculative decoding, or many query heads for each key head.
//
// As in decode.cu every key is read once for a tile of packed rows. wgmma multiplies 64 rows at least, and there are
// fewer. So the products are transposed: keys and columns of V are the rows of a wgmma, and packed rows are its columns,
// 16, 32 or 64 of them. The four warps of a block are one warpgroup, and a warp has 16 of 64 keys or columns:
//   TMA      K(n+2) V(n+2)                                    two steps ahead, asked for by the first warp
//   wgmma    Sᵀ = K(n) Qᵀ ─ row maxima ─┐                 ┌─ Oᵀ += V(n)ᵀ Pᵀ
//   softmax                             └─ P, where K(n) was
// Two blocks share a multiprocessor, but for 64 rows: one computes while the other waits. Shares, parts, and how their results become
// one are those of decode.cu.
//
// Read next: bwd_workspace_sm90.cuh, the sums in memory of the backward pass.
#include <algorithm>

#include "decode_result.cuh"
#include "decode_rows.cuh"
#include "device.h"
#include "key_blocks_sm90.cuh"

namespace sm90 {

using namespace device;
using namespace decoding;

// A block: kBlockM packed rows.
template <int kHeadDim_, int kBlockM_> struct DecodeShape : KeyShape<kHeadDim_> {
    using Keys = KeyShape<kHeadDim_>;
    static constexpr int kBlockM = kBlockM_, kRowTiles = kBlockM / 8;
    static constexpr int kBlocksPerSm = kBlockM == 64 ? 1 : 2, kStages = kBlocksPerSm == 1 ? 4 : 3;
    static constexpr int kKeyTiles = Keys::kBlockN / 64, kColTiles = kHeadDim_ / 64;
    using AccS = float[kKeyTiles][kRowTiles][4];  // Sᵀ and Oᵀ, 64 keys or columns at a time
    using AccO = float[kColTiles][kRowTiles][4];
    static constexpr int kLaneRows = 2 * kRowTiles, kLaneKeys = 2 * kKeyTiles, kLaneCols = 2 * kColTiles, kVec = 1;

    __device__ static int row_of_lane(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
    __device__ static int key_of_lane(int j) {
        return j / 2 * 64 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + j % 2 * 8;
    }
    __device__ static int col_of_lane(int j) { return key_of_lane(j); }
    template <typename Acc> __device__ static float &at(Acc &acc, int i, int j) {
        return acc[j / 2][i / 2][j % 2 * 2 + i % 2];
    }
};

template <typename Shape> struct Stage {
    SmemTile<Shape::kBlockN, Shape::kHeadDim> k, v;

    // P lies where K was.
    __device__ auto &p() { return reinterpret_cast<SmemTile<Shape::kBlockM, Shape::kBlockN> &>(k); }
};

template <typename Shape> struct DecodeMemory {
    SmemTile<Shape::kBlockM, Shape::kHeadDim> q;
    Stage<Shape> stages[Shape::kStages];
    alignas(16) float of_rows[Shape::kBlockM][Shape::kNumWarps];  // of the keys of each warp: maxima, then sums
    Barrier full[Shape::kStages];
    Run<Shape> run, ahead;  // that the block computes, and that its first warp loads
    int steps_of_warps[Shape::kNumWarps];
    bool is_last;

    __device__ auto &joins() { return reinterpret_cast<Join (&)[Shape::kBlockM][8]>(q); }
};

struct CacheTensors { TmaTensor k, v; };

// The keys and values of a block's share, on their way from the cache to shared memory by TMA. They run ahead of what
// the block computes. A lane of the first warp has a box, up to the last row of a block.
template <typename Shape> struct KeyBoxes : StepsAhead<Shape> {
    using StepsAhead<Shape>::p, StepsAhead<Shape>::run, StepsAhead<Shape>::key;
    CacheBox box;  // of the next step

    __device__ int tile_row() const { return threadIdx.x * p.box_rows; }
    __device__ void find() {
        this->settle();
        const int first = key + tile_row();
        if (run.is_valid() && tile_row() < Shape::kBlockN)
            box.find(p, run.b, run.cut.seq.k_begin + first, first < run.cut.end && first + p.box_rows > run.cut.begin);
    }
    // Starts the copies of the next step to a stage, if there is one.
    __device__ void load(Stage<Shape> &stage, const CacheTensors &cache, Barrier &full) {
        if (!run.is_valid()) return;
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(full, 2 * 2 * Shape::kBlockN * Shape::kHeadDim);
        if (tile_row() < Shape::kBlockN) {
            box.load(stage.k, tile_row(), p, cache.k, run.h_k, full);
            box.load(stage.v, tile_row(), p, cache.v, run.h_k, full);
        }
        key += Shape::kBlockN;
        find();
    }
};

// Values that no row sees may be NaN, and 0 · NaN is NaN: they become 0.
template <typename Shape> __device__ void clear_unseen(Stage<Shape> &stage, const Run<Shape> &run, int key) {
    const int begin = run.cut.begin - key, end = run.cut.end - key;
    if (begin <= 0 && end >= Shape::kBlockN) return;
    constexpr int kVecs = Shape::kHeadDim / 8;
    for (int i = threadIdx.x; i < Shape::kBlockN * kVecs; i += Shape::kNumThreads) {
        const int row = i / kVecs;
        if (row < begin || row >= end)
            *reinterpret_cast<uint4 *>(reinterpret_cast<char *>(&stage.v) + stage.v.offset(row, i % kVecs * 8)) = {};
    }
    fence_proxy_async();
    __syncthreads();
}

// What the lanes of a warp that share their rows have of them becomes one, in all of them.
template <typename Op> __device__ float reduce_rows(float x, Op op) {
    for (int lanes = 4; lanes < 32; lanes *= 2) x = op(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

// Of row i of this lane, a number of each warp, in shared memory.
template <typename Shape> __device__ void share(DecodeMemory<Shape> &shared, int i, float x) {
    if (threadIdx.x % 32 < 4) shared.of_rows[Shape::row_of_lane(i)][threadIdx.x / 32] = x;
}
template <typename Shape> __device__ float4 shared_numbers(const DecodeMemory<Shape> &shared, int i) {
    return *reinterpret_cast<const float4 *>(shared.of_rows[Shape::row_of_lane(i)]);
}

// Several accumulators as one list of registers.
template <int kCount, int kTiles> __device__ auto &all_tiles(float (&acc)[kCount][kTiles][4]) {
    return reinterpret_cast<float (&)[kCount * kTiles][4]>(acc);
}

// The scores of this warp's keys, and their row maxima.
template <typename T, typename Shape>
__device__ void score(typename Shape::AccS &acc_s, DecodeMemory<Shape> &shared, const Stage<Shape> &stage, int key,
                      const DecodeParams &p, const Scores<> &scores, const ScoreFactors<float> &factors) {
    warpgroup_arrive();
#pragma unroll
    for (int n = 0; n < Shape::kKeyTiles; n++)
        for (int kk = 0; kk < Shape::kHeadDim / 16; kk++)
            wgmma<T>(acc_s[n], stage.k.columns_desc(kk, 64 * n), shared.q.columns_desc(kk), kk > 0);
    warpgroup_commit_batch();
    warpgroup_wait<0>(all_tiles(acc_s));
    change_scores<Shape>(acc_s, scores, factors, p, shared.run, key);
    if (!shared.run.all_rows_see(key)) hide_scores<Shape>(acc_s, p, shared.run, key);
#pragma unroll
    for (int i = 0; i < Shape::kLaneRows; i++) {
        float max = -INFINITY;
        for (int j = 0; j < Shape::kLaneKeys; j++) max = fmaxf(max, Shape::at(acc_s, i, j));
        max = reduce_rows(max, fmaxf);
        share(shared, i, __fmul_rn(max, factors.softmax_scale_log2));  // rounded before it is subtracted
    }
}

// The maxima of all warps are there, and the scores become P.
template <typename T, typename Shape>
__device__ void exponentiate(typename Shape::AccS &acc_s, TileState<Shape> &state, DecodeMemory<Shape> &shared,
                             Stage<Shape> &stage, float softmax_scale_log2) {
#pragma unroll
    for (int i = 0; i < Shape::kLaneRows; i++) {
        const float4 max = shared_numbers(shared, i);
        state.grow(i, fmaxf(state.rows[i].max, fmaxf(fmaxf(max.x, max.y), fmaxf(max.z, max.w))));
        for (int j = 0; j < Shape::kLaneKeys; j++) {
            float &s = Shape::at(acc_s, i, j);
            s = exp2_approx(s * softmax_scale_log2 - state.rows[i].max);
            state.rows[i].sum += s;
        }
    }
    // Pᵀ as the lanes hold it becomes P: matrices of 8 rows and 8 keys, those of two row tiles at a time.
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < Shape::kKeyTiles; n++)
        for (int m = 0; m < Shape::kRowTiles; m += 2) {
            uint32_t x[4];
            for (int j = 0; j < 4; j++) {
                const float *s = &acc_s[n][m + j / 2][j % 2 * 2];
                x[j] = pack<T>(s[0], s[1]);
            }
            const int row = 8 * (m + lane_idx / 16) + lane_idx % 8;
            stmatrix_trans(x, stage.p().address(row, 64 * n + 16 * warp_idx + lane_idx / 8 % 2 * 8));
        }
    fence_proxy_async();
}

template <typename T, typename Shape> __device__ void multiply_v(TileState<Shape> &state, Stage<Shape> &stage) {
    warpgroup_arrive();
#pragma unroll
    for (int d = 0; d < Shape::kColTiles; d++)
        for (int kk = 0; kk < Shape::kBlockN / 16; kk++)
            wgmma_atbt<T>(state.acc_o[d], stage.v.rows_desc(kk, 64 * d), stage.p().columns_desc(kk), true);
    warpgroup_commit_batch();
    warpgroup_wait<0>(all_tiles(state.acc_o));
}

// The sums of all keys, in the order of the warps.
template <typename Shape> __device__ void add_sums(TileState<Shape> &state, DecodeMemory<Shape> &shared) {
#pragma unroll
    for (int i = 0; i < Shape::kLaneRows; i++)
        share(shared, i, reduce_rows(state.rows[i].sum, [](float x, float y) { return x + y; }));
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Shape::kLaneRows; i++) {
        const float4 sum = shared_numbers(shared, i);
        state.rows[i].sum = sum.x + sum.y + sum.z + sum.w;
    }
    __syncthreads();  // all sums have been read
}

template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kNumThreads, Shape::kBlocksPerSm)
    decode(const __grid_constant__ DecodeParams p, const __grid_constant__ Room room, const __grid_constant__ Line line,
           const __grid_constant__ Scores<> scores, const __grid_constant__ ScoreFactors<float> factors,
           const __grid_constant__ CacheTensors cache) {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
    __trap();
#else
    let_next_kernel_begin();
    auto &shared = shared_memory<DecodeMemory<Shape>>();
    Run<Shape> &run = shared.run;
    const bool loads = warp_uniform(threadIdx.x / 32) == 0;
    if (threadIdx.x == 0) {
        prefetch(cache.k.map), prefetch(cache.v.map);
        for (Barrier &full : shared.full) mbarrier_init(full, 1);
        fence_mbarrier_init();
    }
    wait_for_previous_kernel();
    find_first_run<Shape>(run, shared.steps_of_warps, p, room, line);
    if (loads) copy_words(shared.ahead, run);
    __syncwarp();  // the run that the first warp loads is there
    KeyBoxes<Shape> keys{{p, room, line, loads ? shared.ahead : run}};
    if (loads) {
        keys.find();
        for (int i = 0; i + 1 < Shape::kStages; i++) keys.load(shared.stages[i], cache, shared.full[i]);
    }
    int stage = 0, before = Shape::kStages - 1;  // of this step, and of the one before it, where the next copies go
    uint32_t parity = 0;                         // of the stage's barrier
    while (run.is_valid()) {
        QRows<T, Shape>(p, run).store(&shared.q, [&](int row, int vec) { return shared.q.offset(row, 8 * vec); });
        fence_proxy_async();
        __syncthreads();  // Q is there
        for (int chunk = run.chunk_begin, part_end; chunk < run.chunk_end; chunk = part_end) {
            TileState<Shape> state;
            part_end = run.part_end(chunk, room);
            const Range range = run.keys(chunk, part_end);
            for (int key = range.begin; key < range.end; key += Shape::kBlockN) {
                mbarrier_wait(shared.full[stage], parity);
                clear_unseen(shared.stages[stage], run, key);
                typename Shape::AccS acc_s;
                score<T>(acc_s, shared, shared.stages[stage], key, p, scores, factors);
                __syncthreads();  // all row maxima are there, and all warps are done with K and the step before
                if (loads) keys.load(shared.stages[before], cache, shared.full[before]);
                exponentiate<T>(acc_s, state, shared, shared.stages[stage], factors.softmax_scale_log2);
                __syncthreads();  // P is there
                multiply_v<T>(state, shared.stages[stage]);
                before = stage, stage = stage + 1 == Shape::kStages ? 0 : stage + 1, parity ^= stage == 0;
            }
            add_sums(state, shared);
            end_part<T>(p, room, line, run, state, chunk);
        }
        end_run<T>(p, room, line, run, shared.joins(), shared.is_last);
    }
    store_padding<T>(p);
#endif
}

template <typename T, typename Shape> void launch_decode(DecodeParams p) {
    static_assert(Shape::kBlocksPerSm * (sizeof(DecodeMemory<Shape>) + 1024) <= 228 << 10);  // the GPU takes 1 KB of each block
    if (p.batch_size == 0 || p.nheads == 0 || p.seqlen_q == 0) return;
    p.box_rows = cache_box_rows(p, Shape::kBlockN);
    auto tma = [&](const char *name, const Tensor &x, int head_dim) {
        return make_tma_tensor<Shape::kHeadDim>(name, x, p.num_sequences, p.nheads_k, p.page_size, head_dim,
                                                p.box_rows);
    };
    const Line line(p.nheads_k, Shape::kBlocksPerSm * num_sms());
    launch_early(decode<T, Shape>, line.shares * line.heads, Shape::kNumThreads, sizeof(DecodeMemory<Shape>), p.stream,
                 p, Room(p, Shape::kBlockM), line, Scores<>(p), ScoreFactors<float>(p),
                 CacheTensors{tma("k", p.k, p.head_dim), tma("v", p.v, p.head_dim_v)});
}

// act<Shape>() for the shape of p, whose head_dim is 128 at most.
template <typename Act> auto with_decode_shape(const DecodeParams &p, Act act) {
    auto with_rows = [&]<int kBlockM>() {
        return p.max_head_dim() <= 64 ? act.template operator()<DecodeShape<64, kBlockM>>()
                                      : act.template operator()<DecodeShape<128, kBlockM>>();
    };
    const int64_t packed_rows = int64_t(p.nheads / p.nheads_k) * p.max_seqlen_q;
    if (packed_rows <= 16) return with_rows.template operator()<16>();
    return packed_rows <= 32 ? with_rows.template operator()<32>() : with_rows.template operator()<64>();
}

int64_t decode_workspace(const DecodeParams &p) {
    return with_decode_shape(p, [&]<typename Shape>() { return workspace_bytes<Shape>(p, 2 * num_sms()); });
}

int64_t num_decode_counters(const DecodeParams &p) {
    return with_decode_shape(p, [&]<typename Shape>() { return num_counters<Shape>(p, 2 * num_sms()); });
}

void flash_decode(const DecodeParams &p) {
    if (compute_capability() != 90) throw std::runtime_error("minimal_attn: decode_sm90.cu needs a GPU of sm_90");
    with_decode_shape(p, [&]<typename Shape>() {
        p.dtype == DType::kFloat16 ? launch_decode<__half, Shape>(p) : launch_decode<__nv_bfloat16, Shape>(p);
    });
}

}  // namespace sm90
