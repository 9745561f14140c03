// FlashAttention backward on tensor cores, fp16 and bf16 with fp32 sums: Ampere (sm_80) and every newer GPU.
//
// A block of threads owns kBlockN keys of one key/value head and walks along the rows that see them, kBlockM at a time,
// of every query head that reads it (Dao, FlashAttention-2, 2023, Algorithm 2). Scores are formed transposed, and every
// warp owns whole keys, so that P and dS go from the accumulators of one product straight into the A operand of the
// next, and dK and dV stay in registers to the end:
//   acc_s = K Qᵀ                 [kWarpN, kBlockM]
//   P = exp(scale · acc_s - lse)
//   acc_dp = V dOᵀ
//   acc_dv += P dO
//   dS = P ∘ (acc_dp - delta)    to sdS as well, for all warps
//   acc_dk += dS Q
//   acc_dq = dSᵀ K               the one product across warps, added up in memory in fp32 by all blocks of keys
// Q and dO have two buffers each; a step's copies run while the step before it is computed, with two barriers a step.
// (Where that is too much memory they have one, and a third barrier.)
//
// dq_accum holds dQ in the order of acc_dq's registers, so that a warp adds 512 bytes in a row; flash_bwd_dq brings
// it into q's order and type. The additions come in any order unless `deterministic`: then blocks of keys take turns.
//
// Read next: main.cpp, where torch calls it; ../triton_ref/attention_bwd.py, which does without additions in memory.
#include <algorithm>

#include "dropout.h"
#include "flash.h"
#include "launch.h"
#include "mask.cuh"
#include "tiles_sm80.cuh"

namespace sm80 {

using namespace device;

// kDimSplit warps share their keys: each forms the scores of a part of the rows, and sums a part of the columns of dK
// and dV.
template <int kHeadDim_, int kBlockM_, int kBlockN_, int kNWarps_, int kDimSplit_, int kStages_, int kBlocksPerSM_>
struct BwdTile {
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_, kNWarps = kNWarps_;
    static constexpr int kDimSplit = kDimSplit_, kStages = kStages_, kBlocksPerSM = kBlocksPerSM_;
    static constexpr int kNThreads = 32 * kNWarps;
    static constexpr int kWarpN = kBlockN * kDimSplit / kNWarps;       // keys of a warp
    static constexpr int kSub = std::min(32, kBlockM / kDimSplit);  // rows whose scores it forms at a time
    // acc_dq: of 32 rows, and of kHeadDim / kDqSplit columns.
    static constexpr int kDqSplit = kNWarps / (kBlockM / 32), kDqTiles = kHeadDim / kDqSplit / 8;
    static_assert(kWarpN % 16 == 0 && kBlockM % 32 == 0 && kDqTiles % 2 == 0 && kHeadDim % (16 * kDimSplit) == 0);
    static_assert(kNWarps % (kBlockM / 32) == 0 && kNThreads >= kBlockM && kStages <= 2);
    static_assert(kDimSplit == 1 || kSub * kDimSplit == kBlockM);  // each forms its part in one go
};

// A block's shared memory: rows of 16-bit elements, swizzled.
template <typename Tile> struct BwdSharedMemory {
    struct Step {
        alignas(128) uint16_t sQ[Tile::kBlockM][Tile::kHeadDim], sdO[Tile::kBlockM][Tile::kHeadDim];
    };
    alignas(128) uint16_t sK[Tile::kBlockN][Tile::kHeadDim], sV[Tile::kBlockN][Tile::kHeadDim];  // dK, dV at the end
    Step steps[Tile::kStages];
    alignas(128) uint16_t sdS[Tile::kDimSplit > 1 ? 2 : 1][Tile::kBlockN][Tile::kBlockM];  // sP in its second half
    float lse[Tile::kStages][Tile::kBlockM], delta[Tile::kStages][Tile::kBlockM];
};

// Global memory beyond the tensors: dq_accum [batch_size, nheads, m_blocks, kBlockM · kHeadDim], and if deterministic
// the turns [batch_size, nheads, m_blocks, kNWarps] and a ticket for every block of threads.
template <typename Tile> struct Workspace {
    int m_blocks;
    int64_t tiles;
    explicit __host__ __device__ Workspace(const AttnBackwardParams &p)
        : m_blocks((p.seqlen_q + Tile::kBlockM - 1) / Tile::kBlockM), tiles(p.batch_size * p.nheads * m_blocks) {}
    __host__ __device__ int64_t floats() const { return tiles * (Tile::kBlockM * Tile::kHeadDim); }
    __host__ __device__ int64_t bytes(bool deterministic) const {
        return 4 * (floats() + (deterministic ? tiles * Tile::kNWarps + 1 : 0));
    }
    // The tile of a row block of head bh. Fragment i of a warp's 2 · kDqTiles begins 128 floats after the one before.
    __device__ float *dq_accum(const AttnBackwardParams &p, int bh, int m_block) const {
        const int64_t tile = int64_t(bh) * m_blocks + m_block;
        return static_cast<float *>(p.workspace) + tile * (Tile::kBlockM * Tile::kHeadDim);
    }
    __device__ int *turn(const AttnBackwardParams &p, int bh, int m_block) const {
        return static_cast<int *>(p.workspace) + floats() + (int64_t(bh) * m_blocks + m_block) * Tile::kNWarps;
    }
    __device__ int *ticket(const AttnBackwardParams &p) const {
        return static_cast<int *>(p.workspace) + floats() + tiles * Tile::kNWarps;
    }
};

// acc += A Bᵀ: A [16·kMTiles, kK] and B [8·kNTiles, kK] in shared memory, each `offset` bytes after its address.
template <typename T, int kK, int kMTiles, int kNTiles>
__device__ void multiply_abt(float (&acc)[kMTiles][kNTiles][4], uint32_t a_address, int a_offset, uint32_t b_address,
                             int b_offset) {
    using Swizzle = sm80::Swizzle<kK>;
#pragma unroll
    for (int kk = 0; kk < kK / 16; kk++) {
        uint32_t a[kMTiles][4], b[4];
        for (int m = 0; m < kMTiles; m++) ldmatrix(a[m], Swizzle::move(a_address, 16 * m, kk) + a_offset);
#pragma unroll
        for (int n = 0; n < kNTiles; n += 2) {
            ldmatrix(b, Swizzle::move(b_address, 8 * n, kk) + b_offset);
            for (int m = 0; m < kMTiles; m++) {
                mma<T>(acc[m][n], a[m], b[0], b[1]);
                mma<T>(acc[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// acc += A B for 16 terms: A in registers, B [16, 8·kNTiles] in shared memory, from column 8·n0 on.
template <typename T, typename Swizzle, int kMTiles, int kNTiles>
__device__ void multiply_ab(float (&acc)[kMTiles][kNTiles][4], const uint32_t (&a)[kMTiles][4], uint32_t b_address,
                            int b_offset, int n0 = 0) {
#pragma unroll
    for (int n = 0; n < kNTiles; n += 2) {
        uint32_t b[4];
        ldmatrix_trans(b, Swizzle::move(b_address, 0, (n0 + n) / 2) + b_offset);
        for (int m = 0; m < kMTiles; m++) {
            mma<T>(acc[m][n], a[m], b[0], b[1]);
            mma<T>(acc[m][n + 1], a[m], b[2], b[3]);
        }
    }
}

// Dropout's words for scores that are formed transposed: of the rows row + 8·i + j, i and j < 2, and the key `col`, as
// word[i][j]. A call of Dropout::words has them for two keys, those of lanes that are 4 apart: each of the two calls
// for one j, and they trade halves.
__device__ inline void words_transposed(const Dropout &dropout, uint32_t (&word)[2][2], int row, int col) {
    uint32_t x[4];
    const bool odd = col % 2;
    dropout.words(x, row + odd, col - odd);
    for (int i = 0; i < 2; i++) {
        const uint32_t mine = odd ? x[2 * i + 1] : x[2 * i];
        const uint32_t theirs = __shfl_xor_sync(~0u, odd ? x[2 * i] : x[2 * i + 1], 4);
        word[i][0] = odd ? theirs : mine, word[i][1] = odd ? mine : theirs;
    }
}

template <typename T, typename Tile, bool kDropout>
__global__ void __launch_bounds__(Tile::kNThreads, Tile::kBlocksPerSM)
    flash_bwd(const __grid_constant__ AttnBackwardParams p) {
#if __CUDA_ARCH__ < 800  // of a build for several GPUs, the part for those that have no such instructions
    __trap();
#else
    constexpr int kHeadDim = Tile::kHeadDim, kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN;
    constexpr int kNThreads = Tile::kNThreads, kWarpN = Tile::kWarpN;
    constexpr int kMTiles = kWarpN / 16, kDTiles = kHeadDim / Tile::kDimSplit / 8, kSub = Tile::kSub;
    using Swizzle = sm80::Swizzle<kHeadDim>;
    using SwizzleS = sm80::Swizzle<kBlockM>;
    auto &shared = shared_memory<BwdSharedMemory<Tile>>();
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;

    // Blocks of one head are neighbours, to share its Q and dO in L2; of them, the keys that most rows see go first.
    // Where blocks wait for their turn they are numbered as they start, so that none waits for one that cannot.
    int block_idx = blockIdx.x;
    if (p.deterministic && p.dq) {
        int &ticket = reinterpret_cast<int &>(shared.sdS);
        if (threadIdx.x == 0) ticket = atomicAdd(Workspace<Tile>(p).ticket(p), 1);
        __syncthreads();
        block_idx = ticket;
    }
    const int n_blocks = (p.seqlen_k + kBlockN - 1) / kBlockN, x = block_idx % n_blocks;
    const int n_block = p.deterministic && p.is_causal ? n_blocks - 1 - x : x, col0 = n_block * kBlockN;
    const int b = block_idx / n_blocks / p.nheads_k, h_k = block_idx / n_blocks % p.nheads_k;
    const Mask mask(p, b);

    // Row blocks that see a key of this block; from m_block_full on they see all of them.
    const int m_block_min = (p.is_causal ? max(0, col0 - mask.shift) : 0) / kBlockM;
    const int m_block_max = col0 < mask.seq_len ? (min(mask.row_end, p.seqlen_q) + kBlockM - 1) / kBlockM : 0;
    const int m_block_full = col0 + kBlockN > mask.seq_len ? INT_MAX
                             : p.is_causal ? (max(0, col0 + kBlockN - 1 - mask.shift) + kBlockM - 1) / kBlockM
                                           : 0;
    const int group = p.nheads / p.nheads_k, h_end = m_block_min < m_block_max ? (h_k + 1) * group : 0;

    auto load = [&]<int kRows>(uint16_t(&tile)[kRows][kHeadDim], const void *from, int64_t offset, int64_t row_stride,
                               int begin, int end) {
        const int row = thread_idx() / Swizzle::kVecs, vec = thread_idx() % Swizzle::kVecs;
        const T *x = static_cast<const T *>(from) + offset + row * row_stride + vec * 8;
        const uint32_t to = shared_address(tile) + Swizzle::offset(row, vec);
        load_tile<kRows, kHeadDim, kNThreads>(to, x, row_stride, end - row, p.head_dim - vec * 8, begin - row);
    };
    // Rows that see no key of any block are not read: everything about them is 0, and they add nothing.
    auto load_rows = [&](int stage, int64_t h, int64_t row0) {
        const Mask mask(p, b);  // made anew, and so where it is used below, not to be kept in registers
        const int begin = (p.is_causal ? max(0, -mask.shift) : 0) - row0, end = min(mask.row_end, p.seqlen_q) - row0;
        load(shared.steps[stage].sQ, p.q, b * p.q_batch_stride + h * p.q_head_stride + row0 * p.q_row_stride,
             p.q_row_stride, begin, end);
        load(shared.steps[stage].sdO, p.dout,
             b * p.dout_batch_stride + h * p.dout_head_stride + row0 * p.dout_row_stride, p.dout_row_stride, begin,
             end);
        const int64_t row_sums = (b * p.nheads + h) * p.seqlen_q + row0;
        const int r = thread_idx();
        if (r < kBlockM) {
            const bool inside = r >= begin && r < end;
            cp_async_4(&shared.lse[stage][r], static_cast<const float *>(p.lse) + row_sums + r, inside);
            cp_async_4(&shared.delta[stage][r], static_cast<const float *>(p.delta) + row_sums + r, inside);
        }
        cp_async_commit();
    };
    if (h_end > 0) {
        load(shared.sK, p.k, b * p.k_batch_stride + h_k * p.k_head_stride + col0 * p.k_row_stride, p.k_row_stride, 0,
             mask.seq_len - col0);
        load(shared.sV, p.v, b * p.v_batch_stride + h_k * p.v_head_stride + col0 * p.v_row_stride, p.v_row_stride, 0,
             mask.seq_len - col0);
        load_rows(0, h_k * group, int64_t(m_block_min) * kBlockM);
    }

    // What a lane names to ldmatrix: of the four 8×8 matrices of a 16×16 tile, the order goes down first, or across.
    const uint32_t down = Swizzle::offset(lane_idx % 16, lane_idx / 16);
    const uint32_t across = Swizzle::offset(lane_idx / 16 * 8 + lane_idx % 8, lane_idx / 8 % 2);
    const int key0 = warp_idx / Tile::kDimSplit * kWarpN;  // the warp's first, in the block
    const int part = warp_idx % Tile::kDimSplit, dim0 = part * kDTiles;  // the first of its columns of dK and dV, by 8
    const uint32_t k_address = shared_address(shared.sK[key0]) + down;
    constexpr int kToV = sizeof(shared.sK), kToDO = sizeof(shared.steps[0].sQ), kToP = sizeof(shared.sdS[0]);
    constexpr int kRowBytes = Swizzle::kRowBytes;
    const uint32_t ds_address = shared_address(shared.sdS);
    const uint32_t ds_write = ds_address + SwizzleS::offset(key0 + lane_idx / 4, 0) + lane_idx % 4 * 4;
    const uint32_t ds_down = SwizzleS::offset(lane_idx % 16, lane_idx / 16);
    const uint32_t ds_across = SwizzleS::offset(lane_idx / 16 * 8 + lane_idx % 8, lane_idx / 8 % 2);
    const int dq_row0 = warp_idx / Tile::kDqSplit * 32, dq_dim0 = warp_idx % Tile::kDqSplit * Tile::kDqTiles;
    const float scale_log2 = float(p.softmax_scale) * 1.4426950408889634f;

    float acc_dk[kMTiles][kDTiles][4] = {}, acc_dv[kMTiles][kDTiles][4] = {};
    for (int h = h_k * group, m_block = m_block_min, stage = 0; h < h_end; stage ^= Tile::kStages - 1) {
        cp_async_wait<0>();
        __syncthreads();  // the step's tiles have arrived; sdS, sP and the other stage have been read
        const bool next_head = m_block + 1 == m_block_max;
        auto load_next = [&] {
            if (h + next_head < h_end)
                load_rows(stage ^ (Tile::kStages - 1), h + next_head,
                          int64_t(next_head ? m_block_min : m_block + 1) * kBlockM);
        };
        if (Tile::kStages == 2) load_next();
        const uint32_t q_across = shared_address(shared.steps[stage].sQ) + across;
        const uint32_t q_down = Swizzle::move(shared_address(shared.steps[stage].sQ) + down, 0, dim0 / 2);

#pragma unroll 1
        for (int row0 = part * kSub; row0 < kBlockM; row0 += kSub * Tile::kDimSplit) {
            // A lane has the keys r and r + 8 of every 16, and the rows 2c and 2c + 1 of every 8. acc_dp begins with
            // -delta, unless dropout comes in between.
            const int r = lane_idx / 4, c = lane_idx % 4 * 2;
            float acc_s[kMTiles][kSub / 8][4] = {}, acc_dp[kMTiles][kSub / 8][4];
#pragma unroll
            for (int n = 0; n < kSub / 8; n++) {
                const float2 delta = *reinterpret_cast<const float2 *>(&shared.delta[stage][row0 + 8 * n + c]);
                for (int m = 0; m < kMTiles; m++)
                    for (int e = 0; e < 4; e++) acc_dp[m][n][e] = kDropout ? 0.f : -(e % 2 ? delta.y : delta.x);
            }
            multiply_abt<T, kHeadDim>(acc_s, k_address, 0, q_across, row0 * kRowBytes);
            multiply_abt<T, kHeadDim>(acc_dp, k_address, kToV, q_across, row0 * kRowBytes + kToDO);
#pragma unroll
            for (int n = 0; n < kSub / 8; n++) {
                const float2 lse = *reinterpret_cast<const float2 *>(&shared.lse[stage][row0 + 8 * n + c]);
                const float2 lse_log2 = {lse.x * 1.4426950408889634f, lse.y * 1.4426950408889634f};
                for (int m = 0; m < kMTiles; m++)
                    for (int e = 0; e < 4; e++)
                        acc_s[m][n][e] = exp2_approx(acc_s[m][n][e] * scale_log2 - (e % 2 ? lse_log2.y : lse_log2.x));
            }
            if (m_block < m_block_full) {
                const Mask mask(p, b);
#pragma unroll
                for (int j = 0; j < 2 * kMTiles; j++) {
                    const int key = col0 + key0 + 8 * j + r;
                    // The first of the lane's rows that sees the key.
                    const int begin = (key >= mask.seq_len ? INT_MAX : p.is_causal ? key - mask.shift : 0) -
                                      (key >= mask.seq_len ? 0 : m_block * kBlockM + row0 + c);
#pragma unroll
                    for (int n = 0; n < kSub / 8; n++)
                        for (int e = 0; e < 2; e++)
                            if (8 * n + e < begin) acc_s[j / 2][n][j % 2 * 2 + e] = 0.f;
                }
            }
            if constexpr (kDropout) {  // what is dropped of P stays for dS, with another sign
                const Dropout dropout(p, b, h);
                const float keep_scale = float(p.keep_scale);
#pragma unroll
                for (int kk = 0; kk < kSub / 16; kk++)
#pragma unroll
                    for (int j = 0; j < 2 * kMTiles; j++) {
                        uint32_t word[2][2];
                        words_transposed(dropout, word, m_block * kBlockM + row0 + 16 * kk + c,
                                         col0 + key0 + 8 * j + r);
                        for (int half = 0; half < 2; half++) {
                            const int n = 2 * kk + half;
                            const float *pair = &shared.delta[stage][row0 + 8 * n + c];
                            const float2 delta = *reinterpret_cast<const float2 *>(pair);
                            for (int e = 0; e < 2; e++) {
                                float &s = acc_s[j / 2][n][j % 2 * 2 + e], &dp = acc_dp[j / 2][n][j % 2 * 2 + e];
                                const bool kept = word[half][e] >= dropout.threshold;
                                dp = (kept ? dp * keep_scale : 0.f) - (e ? delta.y : delta.x);
                                s = kept ? s : -s;
                            }
                        }
                    }
            }
#pragma unroll
            for (int kk = 0; kk < kSub / 16; kk++) {
                uint32_t P[kMTiles][4], dS[kMTiles][4];
                for (int m = 0; m < kMTiles; m++)
                    for (int j = 0; j < 4; j++) {
                        const int n = 2 * kk + j / 2, e = j % 2 * 2;
                        const float x = acc_s[m][n][e], y = acc_s[m][n][e + 1];
                        P[m][j] = kDropout ? pack<T>(x < 0.f ? 0.f : x, y < 0.f ? 0.f : y) : pack<T>(x, y);
                        dS[m][j] = pack<T>(fabsf(x) * acc_dp[m][n][e], fabsf(y) * acc_dp[m][n][e + 1]);
                        const uint32_t at = SwizzleS::move(ds_write, 16 * m + j % 2 * 8, 0) ^ (row0 / 8 + n) * 16;
                        store_shared(at, dS[m][j]);
                        if (Tile::kDimSplit > 1) store_shared(at + kToP, P[m][j]);
                    }
                multiply_ab<T, Swizzle>(acc_dv, P, q_down, (row0 + 16 * kk) * kRowBytes + kToDO);
                multiply_ab<T, Swizzle>(acc_dk, dS, q_down, (row0 + 16 * kk) * kRowBytes);
            }
        }
        __syncthreads();  // dS and P are there
        if constexpr (Tile::kDimSplit > 1)  // the rows of the other warps
#pragma unroll
            for (int x = 1; x < Tile::kDimSplit; x++)
#pragma unroll
                for (int kk = 0; kk < kSub / 16; kk++) {
                    const int row0 = (part + x) % Tile::kDimSplit * kSub + 16 * kk;
                    uint32_t P[kMTiles][4], dS[kMTiles][4];
                    for (int m = 0; m < kMTiles; m++) {
                        ldmatrix(P[m], SwizzleS::move(ds_address + kToP + ds_down, key0 + 16 * m, row0 / 16));
                        ldmatrix(dS[m], SwizzleS::move(ds_address + ds_down, key0 + 16 * m, row0 / 16));
                    }
                    multiply_ab<T, Swizzle>(acc_dv, P, q_down, row0 * kRowBytes + kToDO);
                    multiply_ab<T, Swizzle>(acc_dk, dS, q_down, row0 * kRowBytes);
                }

        if (p.dq) {
            float acc_dq[2][Tile::kDqTiles][4] = {};
#pragma unroll
            for (int kk = 0; kk < kBlockN / 16; kk++) {
                uint32_t dS[2][4];
                for (int m = 0; m < 2; m++)
                    ldmatrix_trans(dS[m], SwizzleS::move(ds_address + ds_across, 16 * kk, dq_row0 / 16 + m));
                multiply_ab<T, Swizzle>(acc_dq, dS, shared_address(shared.sK) + down, 16 * kk * kRowBytes, dq_dim0);
            }
            // A warp's part of dq_accum is its own, and so are its turns. Under a causal mask the last block of keys
            // that sees these rows goes first: it begins with them.
            const Mask mask(p, b);
            const Workspace<Tile> workspace(p);
            const int last = min(mask.seq_len - 1, (m_block + 1) * kBlockM - 1 + mask.shift) / kBlockN;
            const int turn = p.is_causal ? last - n_block : n_block;
            if (p.deterministic) {
                if (lane_idx == 0)
                    while (load_acquire(workspace.turn(p, b * p.nheads + h, m_block) + warp_idx) != turn) {}
                __syncwarp();
            }
            float *dq_accum = workspace.dq_accum(p, b * p.nheads + h, m_block);
            dq_accum += warp_idx * (256 * Tile::kDqTiles) + lane_idx * 4;
#pragma unroll
            for (int j = 0; j < 2 * Tile::kDqTiles; j++) red_add(dq_accum + 128 * j, acc_dq[j % 2][j / 2]);
            if (p.deterministic) {
                __syncwarp();
                if (lane_idx == 0)
                    store_release(workspace.turn(p, b * p.nheads + h, m_block) + warp_idx, turn + 1);
            }
        }
        if (Tile::kStages == 1) {
            __syncthreads();  // the step has been read
            load_next();
        }
        h += next_head, m_block = next_head ? m_block_min : m_block + 1;
    }

    // dK and dV go by way of sK and sV to be written 16 bytes a lane, each warp its own.
    __syncthreads();  // sK has been read
    auto store = [&](const float(&acc)[kMTiles][kDTiles][4], float scale, uint16_t(&tile)[kBlockN][kHeadDim], void *to,
                     int64_t batch_stride, int64_t head_stride, int64_t row_stride) {
        char *s = reinterpret_cast<char *>(tile);
#pragma unroll
        for (int j = 0; j < 2 * kMTiles; j++)
#pragma unroll
            for (int d = 0; d < kDTiles; d++)
                *reinterpret_cast<uint32_t *>(s + Swizzle::offset(key0 + 8 * j + lane_idx / 4, dim0 + d) +
                                              lane_idx % 4 * 4) =
                    pack<T>(acc[j / 2][d][j % 2 * 2] * scale, acc[j / 2][d][j % 2 * 2 + 1] * scale);
        __syncwarp();
        T *x = static_cast<T *>(to) + b * batch_stride + h_k * head_stride + col0 * row_stride;
#pragma unroll
        for (int j = lane_idx; j < kWarpN * kDTiles; j += 32) {
            const int r = key0 + j / kDTiles, d = dim0 + j % kDTiles;
            if (col0 + r >= p.seqlen_k || d * 8 >= p.head_dim) continue;
            const bool is_key = col0 + r < Mask(p, b).seq_len;  // of others 0, where a sum of 0 · NaN is not
            *reinterpret_cast<uint4 *>(x + r * row_stride + d * 8) =
                is_key ? *reinterpret_cast<const uint4 *>(s + Swizzle::offset(r, d)) : uint4{};
        }
    };
    const float keep_scale = kDropout ? float(p.keep_scale) : 1.f;
    store(acc_dk, float(p.softmax_scale), shared.sK, p.dk, p.dk_batch_stride, p.dk_head_stride, p.dk_row_stride);
    store(acc_dv, keep_scale, shared.sV, p.dv, p.dv_batch_stride, p.dv_head_stride, p.dv_row_stride);
#endif
}

// dq of kBlockM rows: dq_accum times softmax_scale, by way of shared memory into rows of q's type.
template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::kNThreads) flash_bwd_dq(const __grid_constant__ AttnBackwardParams p) {
#if __CUDA_ARCH__ < 800
    __trap();
#else
    using Swizzle = sm80::Swizzle<Tile::kHeadDim>;
    __shared__ alignas(128) char sdQ[Tile::kBlockM * Swizzle::kRowBytes];
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const Workspace<Tile> workspace(p);
    const int m_block = blockIdx.x % workspace.m_blocks, bh = blockIdx.x / workspace.m_blocks;
    const float *dq_accum = workspace.dq_accum(p, bh, m_block) + warp_idx * (256 * Tile::kDqTiles) + lane_idx * 4;
    const float scale = float(p.softmax_scale);
#pragma unroll
    for (int j = 0; j < 2 * Tile::kDqTiles; j++) {
        const float4 x = *reinterpret_cast<const float4 *>(dq_accum + 128 * j);
        const int row = warp_idx / Tile::kDqSplit * 32 + j % 2 * 16 + lane_idx / 4;
        const int vec = warp_idx % Tile::kDqSplit * Tile::kDqTiles + j / 2;
        const uint32_t to = shared_address(sdQ) + lane_idx % 4 * 4;
        store_shared(to + Swizzle::offset(row, vec), pack<T>(x.x * scale, x.y * scale));
        store_shared(to + Swizzle::offset(row + 8, vec), pack<T>(x.z * scale, x.w * scale));
    }
    __syncthreads();
    const int row0 = m_block * Tile::kBlockM;
    T *gdQ = static_cast<T *>(p.dq) + bh / p.nheads * p.dq_batch_stride + bh % p.nheads * p.dq_head_stride;
    for (int i = threadIdx.x; i < Tile::kBlockM * Tile::kHeadDim / 8; i += Tile::kNThreads) {
        const int row = i / (Tile::kHeadDim / 8), vec = i % (Tile::kHeadDim / 8);
        if (row0 + row >= p.seqlen_q || vec * 8 >= p.head_dim) continue;
        // Of rows without a key 0, where a sum of 0 · NaN is not.
        const bool is_empty = static_cast<const float *>(p.lse)[int64_t(bh) * p.seqlen_q + row0 + row] == -INFINITY;
        *reinterpret_cast<uint4 *>(gdQ + (row0 + row) * p.dq_row_stride + vec * 8) =
            is_empty ? uint4{} : *reinterpret_cast<const uint4 *>(sdQ + Swizzle::offset(row, vec));
    }
#endif
}

template <typename T, typename Tile> void launch_bwd(const AttnBackwardParams &p) {
    const Workspace<Tile> workspace(p);
    constexpr int kSharedBytes = sizeof(BwdSharedMemory<Tile>), kPerSM = 164 << 10;  // of sm_80, 1 KB of it for a block
    static_assert(Tile::kBlocksPerSM * (kSharedBytes + 1024) <= kPerSM);
    auto *stream = static_cast<cudaStream_t>(p.stream);
    if (p.dq) check_cuda(cudaMemsetAsync(p.workspace, 0, workspace.bytes(p.deterministic), stream));
    const int64_t blocks = (int64_t(p.seqlen_k) + Tile::kBlockN - 1) / Tile::kBlockN * p.batch_size * p.nheads_k;
    auto *kernel = p.dropout_seed ? flash_bwd<T, Tile, true> : flash_bwd<T, Tile, false>;
    launch(kernel, blocks, Tile::kNThreads, kSharedBytes, p.stream, p);
    if (p.dq) launch(flash_bwd_dq<T, Tile>, workspace.tiles, Tile::kNThreads, 0, p.stream, p);
}

// The tiles for sm_86, sm_89 and sm_120, where a block may have 99 KB.
using BwdTile128Narrow = BwdTile<128, 32, 64, 4, 1, 2, 1>;
using BwdTile256Narrow = BwdTile<256, 32, 32, 4, 2, 1, 1>;
static_assert(sizeof(BwdSharedMemory<BwdTile128Narrow>) <= 99 << 10);
static_assert(sizeof(BwdSharedMemory<BwdTile256Narrow>) <= 99 << 10);

// Calls f with the tile for p. {kHeadDim, kBlockM, kBlockN, kNWarps, kDimSplit, kStages, kBlocksPerSM}
template <typename F> auto with_tile(const AttnBackwardParams &p, F f) {
    const bool narrow = max_shared_memory() < 160 << 10;
    // 32 keys a warp: what it loads of Q and dO feeds two products.
    if (p.head_dim <= 64) return f.template operator()<BwdTile<64, 64, 128, 4, 1, 2, 2>>();
    if (p.head_dim <= 96) return f.template operator()<BwdTile<96, 64, 64, 4, 1, 2, 2>>();
    // 32 keys for two warps, a half of dK and dV each, which take 128 of 255 registers. 128 keys a block, twice those
    // of smaller tiles, halve what is added up in memory.
    if (p.head_dim <= 128)
        return narrow ? f.template operator()<BwdTile128Narrow>()
                      : f.template operator()<BwdTile<128, 64, 128, 8, 2, 2, 1>>();
    return narrow ? f.template operator()<BwdTile256Narrow>()
                  : f.template operator()<BwdTile<256, 32, 64, 8, 2, 2, 1>>();
}

int64_t backward_workspace(const AttnBackwardParams &p) {
    return with_tile(p, [&]<typename Tile> { return Workspace<Tile>(p).bytes(p.deterministic); });
}

void flash_backward(const AttnBackwardParams &p) {
    simt::row_sums(p);
    with_tile(p, [&]<typename Tile> {
        if (p.dtype == DType::kFloat16) launch_bwd<__half, Tile>(p);
        else launch_bwd<__nv_bfloat16, Tile>(p);
    });
}

}  // namespace sm80
