// The CUDA driver as sm90/tiles.cuh of csrc needs it, for the emulator: its types, and the function that encodes
// tensor maps, with the driver's requirements. A tensor map is its arguments.
//
// Read next: sm90/tiles.cuh of csrc, which calls it; ptx/sm90.cuh, which copies by such maps.
#pragma once

#include <cstdint>
#include <cstring>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_INVALID_CONTEXT = 201 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle {
    CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct alignas(64) CUtensorMap {
    const char *address;
    cuuint64_t sizes[4], strides[4];  // in elements, innermost first; in bytes
    cuuint32_t box[4];
    int swizzle_bytes;  // 16 if nothing is swizzled
};

// "cuTensorMapEncodeTiled" in the CUDA driver API, its requirements in their order.
inline CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t rank, void *address,
                                       const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const int swizzle_bytes = 16 << swizzle;
    bool ok = rank == 4 && address && uintptr_t(address) % 16 == 0 && uintptr_t(map) % 64 == 0;
    for (int i = 0; i < 4; i++) ok = ok && sizes[i] > 0 && sizes[i] <= 1ull << 32;
    for (int i = 0; i < 3; i++) ok = ok && strides[i] > 0 && strides[i] % 16 == 0 && strides[i] < 1ull << 40;
    for (int i = 0; i < 4; i++) ok = ok && box[i] > 0 && box[i] <= 256 && steps[i] == 1;
    ok = ok && box[0] * 2 % 16 == 0 && (swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || int(box[0]) * 2 <= swizzle_bytes);
    if (!ok) return CUDA_ERROR_INVALID_VALUE;
    map->address = static_cast<const char *>(address), map->swizzle_bytes = swizzle_bytes, map->strides[0] = 2;
    for (int i = 0; i < 4; i++) map->sizes[i] = sizes[i], map->box[i] = box[i];
    for (int i = 0; i < 3; i++) map->strides[i + 1] = strides[i];
    return CUDA_SUCCESS;
}
