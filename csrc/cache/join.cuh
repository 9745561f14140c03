// Combines the partial results of a tile.
#pragma once

#include "cache/result.cuh"
#include "ptx/memory.cuh"

namespace decoding {

// Without num_splits, at most one tile that begins in a share goes on in later shares.
template <typename Shape>
__device__ TileCounters &counters_of(const DecodeParams &p, const Room &room, const Line &line,
                                     const Run<Shape> &run) {
    const int64_t i = room.splits ? (int64_t(run.b) * p.nheads_k + run.h_k) * room.tiles + run.tile
                                  : run.first_share() * line.heads + line.head();
    return reinterpret_cast<TileCounters *>(p.counters)[i];
}

// A thread has four columns of kThreadRows rows. Instructions bound the time, as a warp alone on its scheduler issues
// one in about five cycles: so each copies many bytes, and rows do not wait for others.
template <typename Shape, int kThreadRows_> struct JoinStage {
    static constexpr int kThreadRows = kThreadRows_;
    static constexpr int kCount = 1024 / Shape::kNumThreads / kThreadRows;  // 16 KB of acc_o
    static constexpr int kVecs = Shape::kHeadDim / 4, kRowStep = Shape::kNumThreads / kVecs;
    static constexpr int kRows = kThreadRows * kRowStep;
    float x[kCount][kRows][Shape::kHeadDim];
    float ends[kCount][kRows][4];  // row_max and row_sum

    // Missing results and rows become 0.
    __device__ void load(const Results &results, int first, int row0, int rows) {
        const int r = threadIdx.x / kVecs;
#pragma unroll
        for (int j = 0; j < kCount; j++) {
            const bool is_there = first + j < results.count;
            const float *from = results.at(is_there ? first + j : 0) + row0 * Shape::kHeadDim + 4 * threadIdx.x;
            for (int i = 0; i < kThreadRows; i++) {
                const bool is_valid = is_there && row0 + r + i * kRowStep < rows;
                cp_async(shared_address(x[j][i * kRowStep]) + 16 * threadIdx.x,
                         is_valid ? from + i * kRowStep * Shape::kHeadDim : results.first, is_valid);
            }
        }
        const int j = threadIdx.x / kRows, end_row = row0 + threadIdx.x % kRows;
        if (j >= kCount) return;
        const bool is_valid = first + j < results.count && end_row < rows;
        const float *from = results.at(is_valid ? first + j : 0) + results.ends + 4 * end_row;
        cp_async(shared_address(ends) + 16 * threadIdx.x, is_valid ? from : results.first, is_valid);
    }
    // Results are added two at a time, so that a row's bits do not depend on kCount.
    __device__ void add_to(RowState &row, float (&o)[4], int r, int count) const {
        static_assert(kCount % 2 == 0);
        const int col = threadIdx.x % kVecs * 4;
#pragma unroll
        for (int pair = 0; pair < kCount; pair += 2) {
            float2 ends[2];
            float4 x[2];
            float max = row.max;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                ends[j] = *reinterpret_cast<const float2 *>(this->ends[pair + j][r]);
                x[j] = *reinterpret_cast<const float4 *>(&this->x[pair + j][r][col]);
                max = fmaxf(max, pair + j < count ? ends[j].x : -FLT_MAX);
            }
            const float alpha = exp2_approx(row.max - max);
            row = {max, row.sum * alpha};
            for (float &o : o) o *= alpha;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float beta = exp2_approx(pair + j < count ? ends[j].x - max : -FLT_MAX);
                row.sum = fmaf(ends[j].y, beta, row.sum);
                for (int e = 0; e < 4; e++) o[e] = fmaf((&x[j].x)[e], beta, o[e]);
            }
        }
    }
};

template <typename T, typename Stage, typename Shape>
__device__ void join_results(void *memory, const DecodeParams &p, const Run<Shape> &run, const Results &results,
                             int row0) {
    static_assert(3 * sizeof(Stage) <= 2 * 32 << 10);  // the least that stages of keys have
    Stage *const stages = static_cast<Stage *>(memory);
    const int rows = run.valid_rows(), r = threadIdx.x / Stage::kVecs, col = threadIdx.x % Stage::kVecs * 4;
    int first = 0, to = 0;
    auto load = [&] {
        if (first < results.count) stages[to].load(results, first, row0, rows);
        cp_async_commit();
        to = to == 2 ? 0 : to + 1, first += Stage::kCount;
    };
    load(), load();
    int stage = 0;
    RowState state[Stage::kThreadRows];
    float o[Stage::kThreadRows][4] = {};
#pragma unroll 1
    for (int left = results.count; left > 0; left -= Stage::kCount) {
        cp_async_wait<1>();
        __syncthreads();  // these results are there, and the last ones have been used
        load();
#pragma unroll
        for (int i = 0; i < Stage::kThreadRows; i++)
            stages[stage].add_to(state[i], o[i], r + i * Stage::kRowStep, left);
        stage = stage == 2 ? 0 : stage + 1;
    }
#pragma unroll
    for (int i = 0; i < Stage::kThreadRows; i++) {
        const int row = row0 + r + i * Stage::kRowStep;
        if (row >= rows) continue;
        const OutputRow<T> output(p, run, row, state[i], col);
        output.store(p, col, o[i][0], o[i][1]), output.store(p, col + 2, o[i][2], o[i][3]);
    }
    __syncthreads();  // the last ones have been used
}

// Shapes with one group of rows have no code for more.
template <typename Shape> using GroupStage = JoinStage<Shape, 512 / Shape::kNumThreads>;
template <typename Shape> __device__ int num_groups(const Run<Shape> &run) {
    constexpr int kRows = GroupStage<Shape>::kRows;
    return Shape::kBlockM > kRows ? ceil_div(run.valid_rows(), kRows) : 1;
}

// Tells other blocks that the results of the first and last tile are stored.
template <typename Shape>
__device__ void arrive(const DecodeParams &p, const Room &room, const Line &line, Runs<Shape> &runs, int num_runs) {
    __syncthreads();  // the results are stored
    if (threadIdx.x < 2) {
        const Run<Shape> &run = runs[threadIdx.x * (num_runs - 1)];
        bool has_all = false;
        if (threadIdx.x < num_runs && !run.has_whole_tile()) {
            int &chunks = counters_of(p, room, line, run).chunks;
            has_all = atomic_add_acq_rel(&chunks, run.num_chunks()) + run.num_chunks() == run.cut.num_chunks;
            if (has_all && num_groups(run) == 1) chunks = 0;  // no other block reads it
        }
        runs.joins[threadIdx.x].has_all = has_all;
    }
    __syncthreads();
}

// Waits for the last result, but gives up soon: a block that has not begun may need this one's place. The last block
// always finds all results.
__device__ inline void take_group(Join &join, TileCounters &counters, int num_chunks) {
    constexpr int kTries = 64;
    for (int i = 0; i < kTries && !join.has_all; i++) {
        join.has_all = load_acquire(&counters.chunks) == num_chunks;
        if (!join.has_all) sleep_briefly();
    }
    join.group = join.has_all ? atomicAdd(&counters.groups, 1) : INT_MAX;
}

// A tile's blocks share several groups of rows; a single group is left to the last block.
template <typename T, typename Shape>
__device__ void join_tile(void *memory, const DecodeParams &p, const Room &room, const Line &line,
                          const Run<Shape> &run, Join &join) {
    const int groups = num_groups(run);
    const bool is_alone = run.has_whole_tile(), is_shared = !is_alone && groups > 1;
    if (!is_alone && !is_shared && !join.has_all) return;
    TileCounters *const counters = is_shared ? &counters_of(p, room, line, run) : nullptr;
    const Results results = results_of(p, room, line, run);
#pragma unroll 1
    for (int group = 0;; group++) {
        if (is_shared) {
            if (threadIdx.x == 0) take_group(join, *counters, run.cut.num_chunks);
            __syncthreads();  // it is known
            group = join.group;
        }
        if (group >= groups) break;
        using Few = JoinStage<Shape, 1>;
        using Group = GroupStage<Shape>;
        run.valid_rows() <= Few::kRows ? join_results<T, Few>(memory, p, run, results, 0)
                                       : join_results<T, Group>(memory, p, run, results, group * Group::kRows);
    }
    if (!is_shared || threadIdx.x > 0) return;
    const int left = atomic_add_acq_rel(&counters->left, run.num_chunks()) + run.num_chunks();
    if (left == run.cut.num_chunks) *counters = {};
}

// Called after a share's last step: earlier, the next run would wait for memory. Without num_splits, only the first and
// last tile may have several results. With it, other tiles may too, so all runs are found again.
template <typename T, typename Shape>
__device__ void end_share(void *memory, const DecodeParams &p, const Room &room, const Line &line, const Call &call,
                          Runs<Shape> &runs, int num_runs) {
    if (num_runs == 0) return;
    arrive(p, room, line, runs, num_runs);
    const bool has_splits = room.splits > 1;
#pragma unroll 1
    for (int i = 0; i < num_runs; i++) {
        if (!has_splits && i > 0) i = num_runs - 1;
        Run<Shape> &run = has_splits ? runs[1] : runs[i];
        if (has_splits) {
            if (threadIdx.x == 0) i == 0 ? void(run = runs[0]) : run.next(call);
            __syncthreads();  // the run is there
        }
        if (!run.has_one_result(room)) join_tile<T>(memory, p, room, line, run, runs.joins[i > 0]);
        if (has_splits) __syncthreads();  // all warps have left the run
    }
}

}  // namespace decoding
