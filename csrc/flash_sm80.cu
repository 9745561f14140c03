// FlashAttention forward on tensor cores, fp16 and bf16 with fp32 sums: Ampere (sm_80) and every newer GPU.
//
// A block of threads owns kBlockM query rows of one head and walks along K and V, kBlockN keys at a time (Dao,
// FlashAttention-2, 2023, Algorithm 1). Every warp owns whole rows, so its softmax concerns no other warp:
//   acc_s = Q Kᵀ       fragments of sQ and sK by ldmatrix
//   P = softmax(acc_s)  from the accumulators of one product straight into the A operand of the next
//   acc_o += P V       fragments of sV, transposed by ldmatrix on the way
// K and V have one buffer each. Tensor cores and copies take turns on them, with a barrier at every change:
//   tensor cores                    Q K(0)ᵀ    P V(0)         Q K(1)ᵀ        P V(1)     ...
//   cp.async       Q, K(0), V(0)               K(1) → sK      V(1) → sV      K(2) → sK  ...
// The other block on the same SM fills the gaps. Deeper rings were slower or no faster, and halve what fits an SM.
//
// Read next: flash_dmma.cu, the same for fp32; kernels.h, which chooses between them; main.cpp, where torch calls them.
#include <algorithm>

#include "dropout.h"
#include "flash.h"
#include "launch.h"
#include "mask.cuh"
#include "ptx_sm80.cuh"
#include "softmax.cuh"
#include "tiles_sm80.cuh"

namespace sm80 {

using namespace device;
using namespace ptx;

template <int kHeadDim_, int kBlockM_, int kBlockN_> struct Tile {
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_, kNWarps = 4;
    static constexpr int kNThreads = 32 * kNWarps;
};

// A block's shared memory: rows of 16-bit elements, swizzled.
template <typename Tile> struct SharedMemory {
    alignas(128) uint16_t sQ[Tile::kBlockM][Tile::kHeadDim];  // O at the end
    uint16_t sK[Tile::kBlockN][Tile::kHeadDim], sV[Tile::kBlockN][Tile::kHeadDim];
};

template <typename T, typename Tile, bool kDropout>
__global__ void __launch_bounds__(Tile::kNThreads, 2)  // two blocks an SM: up to 255 registers a thread
    flash_fwd(const __grid_constant__ AttnParams p) {
#if __CUDA_ARCH__ < 800  // of a build for several GPUs, the part for those that have no such instructions
    __trap();
#else
    constexpr int kHeadDim = Tile::kHeadDim, kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN;
    constexpr int kNThreads = Tile::kNThreads, kWarpM = kBlockM / Tile::kNWarps;
    constexpr int kMTiles = kWarpM / 16, kNTiles = kBlockN / 8, kDTiles = kHeadDim / 8;
    static_assert(kMTiles * 16 == kWarpM && kBlockN % 64 == 0 && kHeadDim % 32 == 0);
    using Swizzle = sm80::Swizzle<kHeadDim>;
    auto &[sQ, sK, sV] = shared_memory<SharedMemory<Tile>>();
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;

    // Blocks of one head are neighbours, to share its K and V in L2; of them, the rows that see most go first.
    const int m_blocks = (p.seqlen_q + kBlockM - 1) / kBlockM, row0 = (m_blocks - 1 - blockIdx.x % m_blocks) * kBlockM;
    const int bh = blockIdx.x / m_blocks, b = bh / p.nheads, h = bh % p.nheads, h_k = h / (p.nheads / p.nheads_k);
    const T *gQ = static_cast<const T *>(p.q) + b * p.q_batch_stride + h * p.q_head_stride + row0 * p.q_row_stride;
    const T *gK = static_cast<const T *>(p.k) + b * p.k_batch_stride + h_k * p.k_head_stride;
    const T *gV = static_cast<const T *>(p.v) + b * p.v_batch_stride + h_k * p.v_head_stride;

    Softmax<kMTiles> softmax(float(p.softmax_scale));
    const Mask mask(p, b);
    const Dropout dropout(p, b, h);
    const int n_block_max = mask.n_block_max<kBlockM, kBlockN>(row0);
    // The scores of the blocks before this one need neither a mask nor a sign.
    const int n_block_masked = p.softmax_scale > 0 ? mask.n_block_full<kBlockM, kBlockN>(row0) : 0;

    // This thread's first copy of every tile. The limit is not spelled p.head_dim - 8 * vec, which would keep vec in
    // registers.
    const int row = threadIdx.x / Swizzle::kVecs, vec = threadIdx.x % Swizzle::kVecs;
    const int cols = p.head_dim - int(threadIdx.x * 8 % (8 * Swizzle::kVecs));
    const uint32_t copy_offset = Swizzle::offset(row, vec);
    gQ += row * p.q_row_stride + vec * 8, gK += row * p.k_row_stride + vec * 8, gV += row * p.v_row_stride + vec * 8;
    auto load_q = [&] {
        load_tile<kBlockM, kHeadDim, kNThreads>(shared_address(sQ) + copy_offset, gQ, p.q_row_stride,
                                                min(p.seqlen_q, mask.row_end) - row0 - row, cols);
    };
    auto load_kv = [&](auto &tile, const T *&from, int64_t row_stride, int n_block) {
        load_tile<kBlockN, kHeadDim, kNThreads>(shared_address(tile) + copy_offset, from, row_stride,
                                                mask.seq_len - n_block * kBlockN - row, cols);
    };

    // What a lane names to ldmatrix. The four 8×8 matrices of 16×16 elements of Q, and of Vᵀ, go down first; of K,
    // across.
    const uint32_t q_offset = Swizzle::offset(lane_idx % 16, lane_idx / 16), v_offset = q_offset;
    const uint32_t k_offset = Swizzle::offset(lane_idx / 16 * 8 + lane_idx % 8, lane_idx / 8 % 2);
    const uint32_t q_address = shared_address(sQ[warp_idx * kWarpM]) + q_offset;
    const uint32_t k_address = shared_address(sK) + k_offset, v_address = shared_address(sV) + v_offset;

    float acc_o[kMTiles][kDTiles][4] = {};
    if (n_block_max > 0) load_q(), load_kv(sK, gK, p.k_row_stride, 0), load_kv(sV, gV, p.v_row_stride, 0);
    cp_async_wait<1>();
    __syncthreads();  // Q and K have arrived
    for (int n_block = 0; n_block < n_block_max; n_block++) {
        float acc_s[kMTiles][kNTiles][4] = {};
#pragma unroll
        for (int n0 = 0; n0 < kNTiles; n0 += 8)  // 64 keys at a time: more would be in flight than registers hold
#pragma unroll
            for (int kk = 0; kk < kHeadDim / 16; kk++) {
                uint32_t q[kMTiles][4], k[4];
                for (int m = 0; m < kMTiles; m++) ldmatrix(q[m], Swizzle::move(q_address, m * 16, kk));
#pragma unroll
                for (int n = n0; n < n0 + 8; n += 2) {
                    ldmatrix(k, Swizzle::move(k_address, n * 8, kk));
                    for (int m = 0; m < kMTiles; m++) {
                        mma<T>(acc_s[m][n], q[m], k[0], k[1]);
                        mma<T>(acc_s[m][n + 1], q[m], k[2], k[3]);
                    }
                }
            }

        cp_async_wait<0>();
        __syncthreads();  // V has arrived, K has been read
        if (n_block + 1 < n_block_max) load_kv(sK, gK, p.k_row_stride, n_block + 1);

        if (n_block >= n_block_masked)
            mask.apply(acc_s, row0 + warp_idx * kWarpM + lane_idx / 4, n_block * kBlockN + lane_idx % 4 * 2,
                       (p.softmax_scale > 0) - (p.softmax_scale < 0));
        softmax.update(acc_s, acc_o);
#pragma unroll
        for (int kk = 0; kk < kBlockN / 16; kk++) {
            uint32_t P[kMTiles][4], v[4];
            for (int m = 0; m < kMTiles; m++) {
                softmax.template probabilities<T>(P[m], acc_s[m], m, kk);
                if constexpr (kDropout)
                    dropout.apply(P[m], row0 + warp_idx * kWarpM + 16 * m + lane_idx / 4,
                                  n_block * kBlockN + 16 * kk + lane_idx % 4 * 2);
            }
#pragma unroll
            for (int d = 0; d < kDTiles; d += 2) {
                ldmatrix_trans(v, Swizzle::move(v_address, kk * 16, d / 2));
                for (int m = 0; m < kMTiles; m++) {
                    mma<T>(acc_o[m][d], P[m], v[0], v[1]);
                    mma<T>(acc_o[m][d + 1], P[m], v[2], v[3]);
                }
            }
        }
        cp_async_wait<0>();
        __syncthreads();  // K has arrived, V has been read
        if (n_block + 1 < n_block_max) load_kv(sV, gV, p.v_row_stride, n_block + 1);
    }

    // O goes by way of its warp's own rows of sQ, to be written 16 bytes a lane.
    softmax.finalize(acc_o, kDropout ? float(p.keep_scale) : 1.f);
    char *sO = reinterpret_cast<char *>(sQ);
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; i++) {
        const int r = warp_idx * kWarpM + 8 * i + lane_idx / 4;
        if (row0 + r < p.seqlen_q && lane_idx % 4 == 0)
            static_cast<float *>(p.lse)[int64_t(bh) * p.seqlen_q + row0 + r] = softmax.lse(i);
#pragma unroll
        for (int d = 0; d < kDTiles; d++)
            *reinterpret_cast<uint32_t *>(sO + Swizzle::offset(r, d) + lane_idx % 4 * 4) =
                pack<T>(acc_o[i / 2][d][i % 2 * 2], acc_o[i / 2][d][i % 2 * 2 + 1]);
    }
    __syncwarp();
    T *gO = static_cast<T *>(p.o) + b * p.o_batch_stride + h * p.o_head_stride + row0 * p.o_row_stride;
#pragma unroll
    for (int i = lane_idx; i < kWarpM * kDTiles; i += 32) {
        const int r = warp_idx * kWarpM + i / kDTiles, d = i % kDTiles;
        if (row0 + r < p.seqlen_q && d * 8 < p.head_dim)
            *reinterpret_cast<uint4 *>(gO + r * p.o_row_stride + d * 8) =
                *reinterpret_cast<const uint4 *>(sO + Swizzle::offset(r, d));
    }
#endif
}

template <typename T, typename Tile> void launch_fwd(const AttnParams &p) {
    static_assert(sizeof(SharedMemory<Tile>) <= 99 << 10);  // what a block may have on sm_86, sm_89 and sm_120
    const int64_t blocks = (int64_t(p.seqlen_q) + Tile::kBlockM - 1) / Tile::kBlockM * p.batch_size * p.nheads;
    auto *kernel = p.dropout_seed ? flash_fwd<T, Tile, true> : flash_fwd<T, Tile, false>;
    launch(kernel, blocks, Tile::kNThreads, sizeof(SharedMemory<Tile>), p.stream, p);
}

// Tiles by head_dim; what lies between two is padded with zeros, on chip. Up to 128 a warp has 32 rows, so that what it
// loads of K and V feeds two products; beyond, only 16 rows of acc_o fit its registers.
template <typename T> void dispatch(const AttnParams &p) {
    if (p.head_dim <= 64) launch_fwd<T, Tile<64, 128, 128>>(p);  // half the barriers of 64 keys: 4 % faster
    else if (p.head_dim <= 96) launch_fwd<T, Tile<96, 128, 64>>(p);
    else if (p.head_dim <= 128) launch_fwd<T, Tile<128, 128, 64>>(p);  // acc_o and acc_s take 192 of 255 registers
    else if (p.head_dim <= 192) launch_fwd<T, Tile<192, 64, 64>>(p);
    else launch_fwd<T, Tile<256, 64, 64>>(p);  // 96 KB: two blocks an SM of 228 KB, one of 100 or 164
}

void flash_forward(const AttnParams &p) {
    if (p.dtype == DType::kFloat16) dispatch<__half>(p);
    else dispatch<__nv_bfloat16>(p);
}

}  // namespace sm80

int compute_capability() {
    return device::once_per_device([](int device) {
        int major, minor;
        cudaFuncAttributes kernel;
        device::check_cuda(cudaFuncGetAttributes(&kernel, sm80::flash_fwd<__half, sm80::Tile<64, 128, 128>, false>));
        device::check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
        device::check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
        return std::min(10 * major + minor, kernel.ptxVersion);
    });
}
