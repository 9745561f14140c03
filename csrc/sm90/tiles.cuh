// Tiles of 16 bits in shared memory on Hopper: TMA's copies, wgmma's products.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "common/launch.h"
#include "sm90/pipeline.cuh"

namespace sm90 {

// [kRows, kHeadDim] in panels as wide as a swizzle.
template <int kRows, int kHeadDim> struct SmemTile {
    static constexpr int kCols = kHeadDim % 64 == 0 ? 64 : 32;
    static constexpr int kPanels = kHeadDim / kCols, kRowBytes = 2 * kCols;
    alignas(1024) uint16_t panel[kPanels][kRows][kCols];

    // Columns [16·kk, 16·kk + 16), for a product that sums over them.
    __device__ uint64_t columns_desc(int kk, int row = 0) const {
        const int bytes = 16 * kk / kCols * (kRows * kRowBytes) + 16 * kk % kCols * 2 + row * kRowBytes;
        return make_smem_desc<kRowBytes>(panel) + bytes / 16;
    }
    // Rows [16·kk, 16·kk + 16), for a product that sums over them.
    __device__ uint64_t rows_desc(int kk, int col = 0) const {
        return make_smem_desc<kRowBytes>(panel, kRows * kRowBytes) +
               (col / kCols * kRows + 16 * kk) * kRowBytes / 16;
    }
    __device__ uint32_t address(int row, int col) const { return shared_address(panel) + offset(row, col); }
    template <typename Vec> __device__ const Vec &at(int row, int col) const {
        return *reinterpret_cast<const Vec *>(reinterpret_cast<const char *>(panel) + offset(row, col));
    }

    __device__ static uint32_t offset(int row, int col) {  // in bytes
        const uint32_t x = ((col / kCols * kRows + row) * kCols + col % kCols) * 2;
        return x ^ (x >> 3 & (kRowBytes - 16));  // swizzled, as `panel` is aligned to 1024 bytes
    }
};

// acc [64, kN] = A Bᵀ, a group of wgmma.
template <typename T, int kN, int kHeadDim>
__device__ void multiply_abt(float (&acc)[kN / 8][4], const SmemTile<64, kHeadDim> &a,
                             const SmemTile<kN, kHeadDim> &b, bool accumulate = false) {
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; kk++)
        wgmma<T>(acc, a.columns_desc(kk), b.columns_desc(kk), accumulate || kk > 0);
    warpgroup_commit_batch();
}

// acc [64, kHeadDim] += A B, a group, with A [64, kN] in registers.
template <typename T, typename A, int kN, int kHeadDim>
__device__ void multiply_ab(float (&acc)[kHeadDim / 8][4], A &&a, const SmemTile<kN, kHeadDim> &b) {
#pragma unroll
    for (int kk = 0; kk < kN / 16; kk++) wgmma<T>(acc, a[kk], b.rows_desc(kk));
    warpgroup_commit_batch();
}

// A tensor [batch_size, heads, rows, head_dim]. TMA copies a box of rows of one head.
struct TmaTensor {
    CUtensorMap map;
    int head_step, batch_step;  // 1, or 0 if expanded: the map then has size 1
};

// Copies a box from `row` on to a tile, with zeros for what lies outside of the tensor.
template <int kRows, int kHeadDim>
__device__ void load_bytes(SmemTile<kRows, kHeadDim> &tile, const TmaTensor &x, Barrier &full, int row, int h, int b,
                           int tile_row = 0) {
#pragma unroll
    for (int i = 0; i < tile.kPanels; i++)
        tma_load(tile.panel[i][tile_row], x.map, full, i * tile.kCols, row, h * x.head_step, b * x.batch_step);
}
template <int kRows, int kHeadDim>
__device__ void load_tile(SmemTile<kRows, kHeadDim> &tile, const TmaTensor &x, Barrier &full, int row, int h, int b) {
    mbarrier_arrive_expect_tx(full, kRows * kHeadDim * 2);
    load_bytes(tile, x, full, row, h, b);
}

template <int kRows, int kHeadDim>
__device__ void store_rows(const SmemTile<kRows, kHeadDim> &tile, int tile_row, const TmaTensor &x, int row, int h,
                           int b) {
    for (int i = 0; i < tile.kPanels; i++)
        tma_store(tile.panel[i][tile_row], x.map, i * tile.kCols, row, h * x.head_step, b * x.batch_step);
}

// Copies the first `rows` of 16 rows, by a warp. All lanes take every step: the compiler sees that they stay together.
template <int kRows, int kHeadDim>
__device__ void store_some_rows(const SmemTile<kRows, kHeadDim> &tile, int tile_row, uint16_t *to, int64_t row_stride,
                                int rows, int head_dim) {
    for (int step = 0; step < kHeadDim / 16; step++) {
        // By thread_idx(), or all of this stays in registers for all tiles.
        const int i = 32 * step + thread_idx() % 32, row = i / (kHeadDim / 8), col = i % (kHeadDim / 8) * 8;
        if (row < rows && col < head_dim)
            *reinterpret_cast<uint4 *>(to + row * row_stride + col) = tile.template at<uint4>(tile_row + row, col);
    }
}

template <int kThreads, int kRows, int kHeadDim>
__device__ void clear_outside(SmemTile<kRows, kHeadDim> &tile, int thread_idx, int begin, int end) {
    constexpr int kVecs = SmemTile<kRows, kHeadDim>::kRowBytes / 16;
    for (auto &panel : tile.panel)
        for (int i = thread_idx; i < kRows * kVecs; i += kThreads)
            if (i / kVecs < begin || i / kVecs >= end) reinterpret_cast<uint4 *>(panel)[i] = uint4{};
}
// Rows outside of [begin, end), which nothing sees, become 0 before wgmma reads them: they may be NaN, and 0 · NaN is
// NaN. Rows beyond the tensor are 0 already. By kThreads threads.
template <int kThreads, int kRows, typename... Tiles>
__device__ void clear_unseen(int thread_idx, int barrier, int begin, int end, Tiles &...tiles) {
    if (begin <= 0 && end >= kRows) return;
    (clear_outside<kThreads>(tiles, thread_idx, begin, end), ...);
    fence_proxy_async();
    barrier_sync(barrier, kThreads);
}

// The driver's function for tensor maps, looked up on first use: a machine without a GPU has no libcuda to link.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
    static decltype(&cuTensorMapEncodeTiled) const encode = [] {
        const char *name = "cuTensorMapEncodeTiled";
        void *function = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        device::check_cuda(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
#else
        device::check_cuda(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found));
#endif
        if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("minimal_attn: the driver has no TMA");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    return encode;
}

inline TmaTensor make_tma_tensor(const char *name, const Tensor &x, int64_t batch_size, int heads, int rows, int cols,
                                 int box_cols, int box_rows, CUtensorMapSwizzle swizzle) {
    auto size = [](int64_t n, int64_t stride) { return cuuint64_t(stride ? n : 1); };
    auto bytes = [=](int64_t stride) { return cuuint64_t(2 * (stride ? stride : (cols + 7) / 8 * 8)); };
    const cuuint64_t sizes[] = {cuuint64_t(cols), size(rows, x.row_stride), size(heads, x.head_stride),
                                size(batch_size, x.batch_stride)};
    const cuuint64_t strides[] = {bytes(x.row_stride), bytes(x.head_stride), bytes(x.batch_stride)};
    const cuuint32_t box[] = {cuuint32_t(box_cols), cuuint32_t(box_rows), 1, 1}, steps[] = {1, 1, 1, 1};
    TmaTensor tensor{{}, x.head_stride != 0, x.batch_stride != 0};
    auto encode = [&] {
        return tensor_map_encoder()(&tensor.map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, x.data, sizes, strides, box, steps,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult result = encode();
    if (result == CUDA_ERROR_INVALID_CONTEXT) device::make_context(), result = encode();
    if (result == CUDA_SUCCESS) return tensor;
    throw std::runtime_error("minimal_attn: TMA cannot take " + std::string(name) + ": CUDA error " +
                             std::to_string(int(result)));
}

// With boxes of a SmemTile's panels.
template <int kHeadDim>
TmaTensor make_tma_tensor(const char *name, const Tensor &x, int64_t batch_size, int heads, int rows, int head_dim,
                          int box_rows) {
    constexpr int kCols = SmemTile<64, kHeadDim>::kCols;
    static_assert(kCols > 16);
    return make_tma_tensor(name, x, batch_size, heads, rows, head_dim, kCols, box_rows,
                           kCols == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
}

}  // namespace sm90
