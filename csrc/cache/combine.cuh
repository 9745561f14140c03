// The state of a tile after some of its keys, and the sum of such partial results: of the blocks of a cluster through
// distributed shared memory, then of the work items of a sample through the workspace.
#pragma once

#include "cache/rows.cuh"
#include "common/softmax.cuh"
#include "ptx/memory.cuh"

namespace decoding {

// row_max in units of log2, and the sum of exp2(score - row_max).
struct RowState {
    float max = -FLT_MAX, sum = 0.f;  // max is finite: exp2(-inf - max) is 0, not NaN
};

// This lane's rows and pairs of columns.
template <typename Shape> struct TileState {
    typename Shape::AccO acc_o = {};
    RowState rows[Shape::kLaneRows];

    template <typename Act> __device__ void for_pairs(int i, Act act) {
#pragma unroll
        for (int j = 0; j < Shape::kLaneCols; j += 2)
            act(reinterpret_cast<float2 &>(Shape::at(acc_o, i, j)), Shape::col_of_lane(j));
    }
    __device__ void grow(int i, float max) {
        const float alpha = exp2_approx(rows[i].max - max);
        rows[i].max = max, rows[i].sum *= alpha;
        for_pairs(i, [&](float2 &o, int) { o = {o.x * alpha, o.y * alpha}; });
    }
};

// A row has kHeadDim sums, and its maximum and sum behind them.
template <typename Shape> struct PartialResult {
    alignas(16) float rows[Shape::kBlockM][Shape::kPitch];

    __device__ void store(const WorkItem<Shape> &item, TileState<Shape> &state) {
#pragma unroll
        for (int i = 0; i < Shape::kLaneRows; i++) {
            const int r = Shape::row_of_lane(i);
            if (r >= item.rows) continue;
            state.for_pairs(i, [&](float2 o, int col) { *reinterpret_cast<float2 *>(&rows[r][col]) = o; });
            if (Shape::col_of_lane(0) == 0)
                *reinterpret_cast<float2 *>(&rows[r][Shape::kHeadDim]) = {state.rows[i].max, state.rows[i].sum};
        }
    }
};

// Four columns of a row. Partial results are added in their order.
struct RowSum {
    RowState row;
    float4 o = {};

    // load(i, x, end) reads result i. Loads do not wait for one another.
    template <typename Load> __device__ void add(int count, Load load) {
        constexpr int kLoads = 8;
#pragma unroll 1
        for (int first = 0; first < count; first += kLoads) {
            float4 x[kLoads];
            float2 end[kLoads];
            float max = row.max;
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                x[i] = {}, end[i] = {-FLT_MAX, 0.f};
                if (first + i < count) load(first + i, x[i], end[i]);
            }
            for (int i = 0; i < kLoads; i++) max = fmaxf(max, end[i].x);
            scale(exp2_approx(row.max - max)), row.max = max;
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                const float beta = exp2_approx(end[i].x - max);
                row.sum = fmaf(end[i].y, beta, row.sum);
                o = {fmaf(x[i].x, beta, o.x), fmaf(x[i].y, beta, o.y), fmaf(x[i].z, beta, o.z), fmaf(x[i].w, beta, o.w)};
            }
        }
    }
    __device__ void scale(float factor) {
        row.sum *= factor, o = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
    }
    template <typename T, typename Shape>
    __device__ void store_output(const DecodeParams &p, const WorkItem<Shape> &item, int r, int col) {
        const PackedRow<Shape> at(item, r);
        if (const float *sink = sink_of<float>(p, at.head)) {
            const float factor = add_sink(row.max, row.sum, *sink * 1.4426950408889634f);
            o = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
        }
        if (col == 0)
            static_cast<float *>(p.lse)[lse_index(p, item.seq.q_begin, item.b, at.head) + at.token] =
                row.sum == 0.f ? -INFINITY : float(row.max * 0.6931471805599453 + logf(row.sum));
        if (col >= p.head_dim_v) return;
        const float factor = row.sum == 0.f ? 0.f : 1.f / row.sum;
        *reinterpret_cast<uint2 *>(rows_of<T>(p.o, item.b, at.head, item.seq.q_begin + at.token) + col) = {
            pack<T>(o.x * factor, o.y * factor), pack<T>(o.z * factor, o.w * factor)};
    }
};

// The blocks of a cluster divide the columns of a tile's rows: act(row, column) for every fourth column of this one.
template <typename Shape, typename Act>
__device__ void for_columns(const WorkItem<Shape> &item, int cluster, int rank, Act act) {
    constexpr int kVecs = Shape::kHeadDim / 4;
    const int share = ceil_div(item.rows * kVecs, cluster), end = min(item.rows * kVecs, (rank + 1) * share);
    for (int i = rank * share + threadIdx.x; i < end; i += Shape::kNumThreads) act(i / kVecs, i % kVecs * 4);
}

// Ends a work item. All threads of the cluster call it, each block with its partial result in shared memory.
template <typename T, typename Shape>
__device__ void combine(const DecodeParams &p, const Scheduler<Shape> &scheduler, const WorkItem<Shape> &item,
                        const PartialResult<Shape> &partial) {
    const Splits &splits = scheduler.splits;
    const int cluster = splits.cluster, rank = scheduler.rank;
    constexpr int kHeadDim = Shape::kHeadDim, kPitch = Splits::pitch<Shape>();
    const int64_t size = int64_t(splits.rows) * kPitch, stride = p.nheads_k * size;
    float *const result = static_cast<float *>(p.workspace) + item.slot * size;  // of this work item
    sync_cluster(cluster);  // all partial results are there
    for_columns(item, cluster, rank, [&](int r, int col) {
        RowSum sum;
        sum.add(cluster, [&](int i, float4 &x, float2 &end) {
            x = load_from_cluster(reinterpret_cast<const float4 &>(partial.rows[r][col]), i);
            end = load_from_cluster(reinterpret_cast<const float2 &>(partial.rows[r][kHeadDim]), i);
        });
        if (item.num_splits == 1) return sum.template store_output<T>(p, item, r, col);
        *reinterpret_cast<float4 *>(result + r * kPitch + col) = sum.o;
        // A place for each rank, since that is who will read it.
        *reinterpret_cast<float2 *>(result + r * kPitch + kHeadDim + 2 * rank) = {sum.row.max, sum.row.sum};
    });
    sync_cluster(cluster);  // all have read them
    if (item.num_splits == 1) return;
    // The last work item of the sample that gets here adds all of them: block by block, as each needs its own columns.
    int &arrived = p.counters[2 + (int64_t(item.b) * p.nheads_k + item.h_k) * cluster + rank];
    if (threadIdx.x == 0) scheduler.shared.item = atomic_add_acq_rel(&arrived, 1);
    __syncthreads();
    const bool is_last = scheduler.shared.item == item.num_splits - 1;
    __syncthreads();  // all have read it
    if (!is_last) return;
    const float *const first = result - item.split * stride;
    for_columns(item, cluster, rank, [&](int r, int col) {
        RowSum sum;
        sum.add(item.num_splits, [&](int i, float4 &x, float2 &end) {
            x = *reinterpret_cast<const float4 *>(first + i * stride + r * kPitch + col);
            end = *reinterpret_cast<const float2 *>(first + i * stride + r * kPitch + kHeadDim + 2 * rank);
        });
        sum.template store_output<T>(p, item, r, col);
    });
    if (threadIdx.x == 0) arrived = 0;
}

// Rows outside of samples get 0 and -inf.
template <typename T> __device__ void store_padding(const DecodeParams &p) {
    if (!p.cu_seqlens_q && !p.seqused_q) return;
    const int warp_idx = threadIdx.x / 32, col = threadIdx.x % 32 * 8;
    for (int b = blockIdx.x; b < p.batch_size; b += gridDim.x) {
        const Sequence seq(p, b);
        if (!seq.is_served(p)) continue;
        const int64_t count = int64_t(seq.padded_q - seq.seqlen_q) * p.nheads;
        for (int64_t i = warp_idx; i < count; i += blockDim.x / 32) {
            const int row = seq.seqlen_q + int(i / p.nheads), h = int(i % p.nheads);
            if (col == 0) static_cast<float *>(p.lse)[lse_index(p, seq.q_begin, b, h) + row] = -INFINITY;
            if (col < p.head_dim_v)
                *reinterpret_cast<uint4 *>(rows_of<T>(p.o, b, h, seq.q_begin + row) + col) = uint4{};
        }
    }
}

}  // namespace decoding
