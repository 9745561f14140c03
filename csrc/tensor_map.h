// Tensor maps: how TMA knows a tensor in global memory, and the box that one copy takes from it. The driver encodes
// them; its function is looked up on first use, so that nothing links libcuda and a machine without a GPU loads this.
//
// Read next: flash_sm90.cu.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "launch.h"

namespace device {

inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
    static decltype(&cuTensorMapEncodeTiled) const encode = [] {
        const char *name = "cuTensorMapEncodeTiled";
        void *function = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        check_cuda(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
#else
        check_cuda(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found));
#endif
        if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("minimal_attn: the driver has no TMA");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    return encode;
}

// Of a tensor [batch_size, nheads, rows, cols] of 16-bit elements with these strides in elements, cols contiguous.
// A copy takes box_rows rows of one head, box_cols columns of 128 or 64 bytes a row, which is also how they are
// swizzled. Where a stride is 0, all is one: the coordinate along it must be 0. L2 fetches 256 bytes at a time.
inline void encode(CUtensorMap &map, const char *name, const void *x, int64_t batch_size, int nheads, int rows,
                   int cols, int64_t batch_stride, int64_t head_stride, int64_t row_stride, int box_rows,
                   int box_cols) {
    auto size = [](int64_t n, int64_t stride) { return cuuint64_t(stride ? n : 1); };
    auto bytes = [cols](int64_t stride) { return cuuint64_t(2 * (stride ? stride : cols)); };
    const cuuint64_t sizes[] = {cuuint64_t(cols), size(rows, row_stride), size(nheads, head_stride),
                                size(batch_size, batch_stride)};
    const cuuint64_t strides[] = {bytes(row_stride), bytes(head_stride), bytes(batch_stride)};
    const cuuint32_t box[] = {cuuint32_t(box_cols), cuuint32_t(box_rows), 1, 1}, steps[] = {1, 1, 1, 1};
    const CUresult result = tensor_map_encoder()(
        &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void *>(x), sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, box_cols == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw std::runtime_error("minimal_attn: TMA cannot take " + std::string(name) + ": CUDA error " +
                                 std::to_string(int(result)));
}

}  // namespace device
