// Copies of keys and values to shared memory, for decode.cu.
#pragma once

#include "cache/work.cuh"
#include "ptx/memory.cuh"
#include "sm80/tiles.cuh"

namespace sm80 {

using namespace decoding;

template <typename Shape> struct Stage {
    uint16_t sK[Shape::kBlockN][Shape::kHeadDim], sV[Shape::kBlockN][Shape::kHeadDim];
};

template <typename T, typename Shape> struct KeyStream {
    static constexpr int kWarpRows = Shape::kBlockN / Shape::kNumWarps, kVecs = Shape::kHeadDim / 8;
    const DecodeParams &p;
    const WorkItem<Shape> &item;
    const int stride;   // keys from one step of this block to the next
    int key;            // first of the next step
    int sequence, row;  // of this lane in the next step, see find()

    __device__ KeyStream(const DecodeParams &p, const WorkItem<Shape> &item, int key, int stride)
        : p(p), item(item), stride(stride), key(key) {
        find();
    }

    // Every call makes one group of copies, even after the last step.
    __device__ void load(Stage<Shape> &stage) {
        if (key < item.end) {
            rows_are_neighbours() ? copy<true>(stage) : copy<false>(stage);
            key += stride;
            find();
        }
        cp_async_commit();
    }

  private:
    // A warp's rows are in one sequence or page.
    __device__ bool rows_are_neighbours() const {
        return !p.page_table || (p.page_size % kWarpRows == 0 && item.seq.k_begin % kWarpRows == 0);
    }

    // Finds the warp's first row, or one for each lane if rows are no neighbours. Nothing waits for a page's number.
    __device__ void find() {
        if (key >= item.end) return;
        const int lane_row = rows_are_neighbours() ? 0 : int(threadIdx.x) % kWarpRows;
        const int at = key + int(threadIdx.x / 32) * kWarpRows + lane_row;
        row = item.seq.k_begin + min(at, item.keys.end - 1), sequence = item.b;
        if (p.page_table) {
            const int page = unsigned(row) / unsigned(p.page_size);
            sequence = p.page_table[item.b * p.page_table_stride + page], row -= page * p.page_size;
        } else if (p.cache_batch_idx) sequence = p.cache_batch_idx[item.b];
    }

    template <bool kNeighbours> __device__ void copy(Stage<Shape> &stage) const {
        using Swizzle = sm80::Swizzle<Shape::kHeadDim>;
        constexpr int kRowStep = 32 / kVecs;
        const int lane_row = threadIdx.x % 32 / kVecs, vec = threadIdx.x % kVecs;
        const int row0 = int(threadIdx.x / 32) * kWarpRows + lane_row;
        const unsigned b = max(0, min(sequence, p.num_sequences - 1)), h = item.h_k;  // unsigned: fewer instructions
        const unsigned first_row = kNeighbours ? row + lane_row : row;
        const T *gK = rows_of<const T>(p.k, b, h, first_row), *gV = rows_of<const T>(p.v, b, h, first_row);
        if (kNeighbours) gK += 8 * vec, gV += 8 * vec;
        // Rows are counted from row0. Those outside of [first, end) become 0.
        const int first = item.keys.begin - key - row0, end = item.keys.end - key - row0;
        const int k_end = 8 * vec < p.head_dim ? end : first, v_end = 8 * vec < p.head_dim_v ? end : first;
        const uint32_t offset0 = Swizzle::offset(row0, vec);
        const uint64_t policy = evict_first();
        const uint32_t k_address = shared_address(stage.sK), v_address = shared_address(stage.sV);
#pragma unroll(kNeighbours ? kWarpRows / kRowStep : 2)
        for (int r = 0; r < kWarpRows; r += kRowStep) {
            const T *k = gK, *v = gV;
            if (kNeighbours) gK += kRowStep * p.k.row_stride, gV += kRowStep * p.v.row_stride;
            else k = of_lane(gK, r + lane_row) + 8 * vec, v = of_lane(gV, r + lane_row) + 8 * vec;
            const uint32_t offset = (offset0 ^ r % 8 * 16) + r * Swizzle::kRowBytes;  // row0 % 8 < kRowStep
            cp_async(k_address + offset, k, r >= first && r < k_end, policy);
            cp_async(v_address + offset, v, r >= first && r < v_end, policy);
        }
    }
    __device__ static const T *of_lane(const T *x, int lane) {
        return reinterpret_cast<const T *>(__shfl_sync(~0u, reinterpret_cast<uintptr_t>(x), lane));
    }
};

}  // namespace sm80
