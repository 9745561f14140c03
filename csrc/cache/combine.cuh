// Partial results of a tile, each of some of its keys, and their sum: of the warps of a block in shared memory, of the
// blocks of a cluster in distributed shared memory, of the work items of a sample in the workspace.
#pragma once

#include "cache/rows.cuh"
#include "common/softmax.cuh"
#include "ptx/memory.cuh"

namespace decoding {

// A row has kHeadDim sums, and behind them its end: row_max in units of log2, and the sum of exp2(score - row_max). The
// end of a sum of partial results lies behind that.
template <typename Shape> struct PartialResult {
    static constexpr int kEnd = Shape::kHeadDim, kEndOfSum = kEnd + (Shape::kWarpsHaveKeys ? 2 : 0);
    static constexpr int kPitch = Shape::kHeadDim + 8;  // so that neighbouring rows lie in other banks
    alignas(16) float rows[Shape::kBlockM][kPitch];

    // By a warp, which has 16 · kMTiles of the rows from row0 on.
    template <int kMTiles, int kDTiles>
    __device__ void store(const WorkItem<Shape> &item, const float (&acc_o)[kMTiles][kDTiles][4],
                          const Softmax<kMTiles> &softmax, int row0) {
        const int lane_idx = threadIdx.x % 32, col = lane_idx % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2 * kMTiles; i++) {
            const int r = row0 + lane_idx / 4 + 8 * i;
            const float sum = quad_reduce(softmax.row_sum[i], [](float x, float y) { return x + y; });
            if (r >= item.rows) continue;
#pragma unroll
            for (int d = 0; d < kDTiles; d++) {
                const float(&o)[4] = acc_o[i / 2][d];
                *reinterpret_cast<float2 *>(&rows[r][8 * d + col]) = {o[i % 2 * 2], o[i % 2 * 2 + 1]};
            }
            if (col == 0) *reinterpret_cast<float2 *>(&rows[r][kEnd]) = {softmax.row_max[i], sum};
        }
    }
};

// Four columns of a row. Partial results are added in their order.
struct RowSum {
    float row_max = -FLT_MAX, row_sum = 0.f;  // the maximum is finite: exp2(-inf - row_max) is 0, not NaN
    float4 o = {};

    // load(i, x, end) reads result i. Eight loads do not wait for one another.
    template <typename Load> __device__ void add(int count, Load load) {
        constexpr int kLoads = 8;
#pragma unroll 1
        for (int first = 0; first < count; first += kLoads) {
            float4 x[kLoads];
            float2 end[kLoads];
            float max = row_max;
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                x[i] = {}, end[i] = {-FLT_MAX, 0.f};
                if (first + i < count) load(first + i, x[i], end[i]);
            }
            for (int i = 0; i < kLoads; i++) max = fmaxf(max, end[i].x);
            scale(exp2_approx(row_max - max)), row_max = max;
#pragma unroll
            for (int i = 0; i < kLoads; i++) {
                const float beta = exp2_approx(end[i].x - max);
                row_sum = fmaf(end[i].y, beta, row_sum);
                o = {fmaf(x[i].x, beta, o.x), fmaf(x[i].y, beta, o.y), fmaf(x[i].z, beta, o.z), fmaf(x[i].w, beta, o.w)};
            }
        }
    }
    __device__ void scale(float factor) {
        row_sum *= factor, o = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
    }
    __device__ void store(float *row, int col, int end) const {
        *reinterpret_cast<float4 *>(row + col) = o;
        *reinterpret_cast<float2 *>(row + end) = {row_max, row_sum};
    }
    template <typename T, typename Shape>
    __device__ void store_output(const DecodeParams &p, const WorkItem<Shape> &item, int r, int col) {
        const PackedRow<Shape> at(item, r);
        float factor = 1.f;
        if (const float *sink = sink_of<float>(p, at.head))
            factor = add_sink(row_max, row_sum, *sink * 1.4426950408889634f);
        if (col == 0)
            static_cast<float *>(p.lse)[lse_index(p, item.seq.q_begin, item.b, at.head) + at.token] =
                row_sum == 0.f ? -INFINITY : float(row_max * 0.6931471805599453 + logf(row_sum));
        if (col >= p.head_dim_v) return;
        factor = row_sum == 0.f ? 0.f : factor / row_sum;
        *reinterpret_cast<uint2 *>(rows_of<T>(p.o, item.b, at.head, item.seq.q_begin + at.token) + col) = {
            pack<T>(o.x * factor, o.y * factor), pack<T>(o.z * factor, o.w * factor)};
    }
};

// The blocks of a cluster divide the columns of a tile's rows: act(row, column) for every fourth column of this one.
template <typename Shape, typename Act>
__device__ void for_columns(const WorkItem<Shape> &item, int cluster, int rank, Act act) {
    constexpr int kVecs = Shape::kHeadDim / 4;
    const int share = ceil_div(item.rows * kVecs, cluster), end = min(item.rows * kVecs, (rank + 1) * share);
    for (int i = rank * share + threadIdx.x; i < end; i += blockDim.x) act(i / kVecs, i % kVecs * 4);
}

// Ends a work item: adds the partial results of a block's warps, of the cluster's blocks, and of the sample's work
// items. All threads of the cluster call it.
template <typename T, typename Shape>
__device__ void combine(const DecodeParams &p, const Scheduler<Shape> &scheduler, const WorkItem<Shape> &item,
                        PartialResult<Shape> *parts) {
    using Partial = PartialResult<Shape>;
    const Splits &splits = scheduler.splits;
    const int cluster = splits.cluster, rank = scheduler.rank;
    constexpr int kHeadDim = Shape::kHeadDim, kPitch = Splits::pitch<Shape>();
    const int64_t size = int64_t(splits.rows) * kPitch, stride = p.nheads_k * size;
    float *const result = static_cast<float *>(p.workspace) + item.slot * size;  // of this work item
    auto store = [&](RowSum &sum, int r, int col) {
        // Each rank has its own end of a row: it is who will read it.
        if (item.num_splits > 1) sum.store(result + r * kPitch, col, kHeadDim + 2 * rank);
        else sum.template store_output<T>(p, item, r, col);
    };
    if (Shape::kWarpsHaveKeys || cluster == 1) {
        __syncthreads();  // the warps' results are there
        for_columns(item, 1, 0, [&](int r, int col) {
            RowSum sum;
            sum.add(Shape::kWarpsHaveKeys ? splits.num_warps : 1, [&](int i, float4 &x, float2 &end) {
                x = reinterpret_cast<const float4 &>(parts[i].rows[r][col]);
                end = reinterpret_cast<const float2 &>(parts[i].rows[r][Partial::kEnd]);
            });
            cluster == 1 ? store(sum, r, col) : sum.store(parts[0].rows[r], col, Partial::kEndOfSum);
        });
    }
    if (cluster > 1) {
        sync_cluster(cluster);  // the blocks' results are there
        for_columns(item, cluster, rank, [&](int r, int col) {
            RowSum sum;
            sum.add(cluster, [&](int i, float4 &x, float2 &end) {
                x = load_from_cluster(reinterpret_cast<const float4 &>(parts[0].rows[r][col]), i);
                end = load_from_cluster(reinterpret_cast<const float2 &>(parts[0].rows[r][Partial::kEndOfSum]), i);
            });
            store(sum, r, col);
        });
    }
    sync_cluster(cluster);  // all have read them
    if (item.num_splits == 1) return;
    // The last work item of the sample that gets here adds all of them: rank by rank, as each has its own columns.
    int &arrived = p.counters[2 + (int64_t(item.b) * p.nheads_k + item.h_k) * cluster + rank];
    if (threadIdx.x == 0) scheduler.shared.arrived = atomic_add_acq_rel(&arrived, 1);
    __syncthreads();
    const bool is_last = scheduler.shared.arrived == item.num_splits - 1;
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
