// FlashAttention forward on Hopper's tensor cores, fp16 and bf16 with fp32 sums: H100, H200 (sm_90a).
//
// A block of threads computes tiles of out, kBlockM query rows of one head each, and walks along K and V from the last
// keys that its rows see to the first, kBlockN at a time (Dao, FlashAttention-2, 2023, Algorithm 1). Its warpgroups, of
// four warps, have roles (Shah et al., FlashAttention-3, 2024, section 3): the producer asks TMA for tiles, a consumer
// multiplies, for 64 rows. They meet at barriers in shared memory, one for every buffer that is full or empty again; K
// and V have rings of kStages buffers, Q has one of kQStages for each consumer:
//
//   producer ── TMA ──▶ full[stage] ──▶ consumers ── wgmma ──▶ empty[stage] ──▶ producer
//
// A consumer has two products under way at a time, Q Kᵀ of one block and P V of the block before it, and computes the
// softmax of the first while the second runs. P goes from the accumulators of one product straight into the A operand
// of the next, as in flash_sm80.cu; while it is read from there, an instruction of any warp beside takes four cycles to
// issue (by counters on an H200, see the journal). So instructions are what there is to save, and the softmax does
// without a maximum: after a tile's first blocks row_max stays as it is, until a sum of probabilities shows that one
// has grown too large. A row's last bits may depend on that of the 15 rows that its warp has beside it.
//
// Read next: ptx_sm90.cuh for the instructions; tensor_map.h, which tells TMA where Q, K, V and out are; kernels.h.
#include <algorithm>

#include "flash.h"
#include "launch.h"
#include "mask.cuh"
#include "ptx_sm90.cuh"
#include "softmax.cuh"
#include "tensor_map.h"

namespace sm90 {

using namespace device;
using namespace ptx;

template <int kHeadDim_, int kConsumers_, int kBlockN_, int kStages_ = 2, int kQStages_ = 2> struct Tile {
    static constexpr int kHeadDim = kHeadDim_, kConsumers = kConsumers_, kBlockM = 64 * kConsumers_;
    static constexpr int kBlockN = kBlockN_, kStages = kStages_, kQStages = kQStages_;
    static constexpr int kNThreads = 128 * (kConsumers + 1);
    static_assert(!(kStages & kStages - 1) && !(kQStages & kQStages - 1), "blocks are counted modulo 2^32");
    // A tile in shared memory is made of panels of kCols columns, as wide as a swizzle.
    static constexpr int kCols = kHeadDim % 64 ? 32 : 64, kPanels = kHeadDim / kCols;
    // Registers a thread: what the producer does not need goes to the consumers.
    static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
};

// A tile of out: the rows from row0 on of head h of sample b, which see blocks of keys up to n_block_max. At least one,
// if only to be masked all over; none means that there is no tile left.
struct Work { int b, h, row0, n_block_max; };

template <typename Tile> struct SharedMemory {
    alignas(1024) uint16_t sQ[Tile::kQStages][Tile::kConsumers][Tile::kPanels][64][Tile::kCols];
    uint16_t sK[Tile::kStages][Tile::kPanels][Tile::kBlockN][Tile::kCols];
    uint16_t sV[Tile::kStages][Tile::kPanels][Tile::kBlockN][Tile::kCols];
    Barrier q_full[Tile::kConsumers][Tile::kQStages], q_empty[Tile::kConsumers][Tile::kQStages];
    Barrier k_full[Tile::kStages], k_empty[Tile::kStages], v_full[Tile::kStages], v_empty[Tile::kStages];
    Barrier work_full[4];
    Work work[4];  // tile t's place is taken again after Q of tile t + 3 was asked for: t's rows are written then
};

// A ring of n buffers: what is i-th in a stream lies in buffer i % n, until what is (i + n)-th does.
template <int n> __device__ void await(Barrier (&full)[n], uint32_t i) { mbarrier_wait(full[i % n], i / n % 2); }
template <int n> __device__ void await_room(Barrier (&empty)[n], uint32_t i) { await(empty, i + n); }

struct Params : AttnParams {
    CUtensorMap q_map, k_map, v_map, o_map;
    int num_tiles, group;  // of out; heads that are worked on together
};

// Tiles of `group` heads are neighbours, for their K and V to stay in L2; among them the last rows, which see most
// under a causal mask, go first.
template <typename Tile> __device__ Work work_of(const Params &p, int tile_idx) {
    if (tile_idx >= p.num_tiles) return {};
    const int m_blocks = (p.seqlen_q + Tile::kBlockM - 1) / Tile::kBlockM;
    const int bh0 = tile_idx / (p.group * m_blocks) * p.group, i = tile_idx - bh0 * m_blocks;
    const int heads = min(p.group, p.num_tiles / m_blocks - bh0), bh = bh0 + i % heads, b = bh / p.nheads;
    const int row0 = (m_blocks - 1 - i / heads) * Tile::kBlockM;
    return {b, bh % p.nheads, row0, max(1, Mask(p, b).n_block_max<Tile::kBlockM, Tile::kBlockN>(row0))};
}

// For each tile Q, and K and V block by block.
template <typename Tile> __device__ void produce(const Params &p, SharedMemory<Tile> &shared) {
    constexpr int kBlockN = Tile::kBlockN, kCols = Tile::kCols, kStages = Tile::kStages;
    auto load = [](auto &tile, const CUtensorMap &map, Barrier &full, int row, int h, int b) {
        mbarrier_arrive_expect_tx(full, sizeof(tile));
#pragma unroll
        for (int i = 0; i < Tile::kPanels; i++) tma_load(tile[i], map, full, i * kCols, row, h, b);
    };
    prefetch(p.q_map), prefetch(p.k_map), prefetch(p.v_map), prefetch(p.o_map);
    uint32_t tile = 0, block = 0;  // of the tiles and of the blocks so far
    for (int tile_idx = blockIdx.x;; tile++) {
        Work &work = shared.work[tile % 4];  // read anew where it is needed: the producer has few registers
        work = work_of<Tile>(p, tile_idx);
        mbarrier_arrive(shared.work_full[tile % 4]);
        if (work.n_block_max == 0) break;
        tile_idx = gridDim.x + (p.tile_counter ? atomicAdd(p.tile_counter, 1) : tile_idx);

#pragma unroll 1
        for (int c = 0; c < Tile::kConsumers; c++) {
            await_room(shared.q_empty[c], tile);
            load(shared.sQ[tile % Tile::kQStages][c], p.q_map, shared.q_full[c][tile % Tile::kQStages],
                 work.row0 + 64 * c, p.q_head_stride ? work.h : 0, p.q_batch_stride ? work.b : 0);
        }
        const int h_k = work.h / (p.nheads / p.nheads_k);
#pragma unroll 1
        for (int n_block = work.n_block_max - 1; n_block >= 0; n_block--, block++) {
            const int stage = block % kStages, row = n_block * kBlockN;
            await_room(shared.k_empty, block);
            load(shared.sK[stage], p.k_map, shared.k_full[stage], row, p.k_head_stride ? h_k : 0,
                 p.k_batch_stride ? work.b : 0);
            await_room(shared.v_empty, block);
            load(shared.sV[stage], p.v_map, shared.v_full[stage], row, p.v_head_stride ? h_k : 0,
                 p.v_batch_stride ? work.b : 0);
        }
    }
}

// 64 rows of out and lse of each tile.
template <typename T, typename Tile>
__device__ void consume(const Params &p, SharedMemory<Tile> &shared, int consumer) {
    constexpr int kHeadDim = Tile::kHeadDim, kBlockN = Tile::kBlockN, kCols = Tile::kCols, kRowBytes = 2 * kCols;
    constexpr int kNTiles = kBlockN / 8, kDTiles = kHeadDim / 8, kConsumers = Tile::kConsumers;
    constexpr int kStages = Tile::kStages, kQStages = Tile::kQStages;
    constexpr float kMaxSum = 1 << 15;  // of a lane's columns of P: less than fp16 holds
    const int warp_idx = threadIdx.x / 32 % 4, lane_idx = threadIdx.x % 32;
    uint32_t tile = 0, block = 0;  // of the tiles and of the blocks so far
    auto release = [&](Barrier &empty) {  // when all four warps have; a warp's lanes have met since they waited
        if (lane_idx == 0) mbarrier_arrive(empty);
    };

    float acc_s[1][kNTiles][4], acc_o[1][kDTiles][4], alpha[2];
    uint32_t P[kBlockN / 16][4];
    auto multiply_q_k = [&](int q_stage, int stage) {  // acc_s = Q Kᵀ
        const uint64_t a = matrix_descriptor<kRowBytes>(shared.sQ[q_stage][consumer]);
        const uint64_t b = matrix_descriptor<kRowBytes>(shared.sK[stage]);
#pragma unroll
        for (int kk = 0; kk < kHeadDim / 16; kk++) {
            const int panel = 16 * kk / kCols, bytes = 16 * kk % kCols * 2;
            wgmma<T>(acc_s[0], a + (panel * 64 * kRowBytes + bytes) / 16,
                     b + (panel * kBlockN * kRowBytes + bytes) / 16, kk > 0);
        }
        warpgroup_commit_batch();
    };
    auto multiply_p_v = [&](int stage) {  // acc_o += P V
        const uint64_t b = matrix_descriptor<kRowBytes>(shared.sV[stage], kBlockN * kRowBytes);
#pragma unroll
        for (int kk = 0; kk < kBlockN / 16; kk++) wgmma<T>(acc_o[0], P[kk], b + kk * 16 * kRowBytes / 16);
        warpgroup_commit_batch();
    };
    // Where eight elements of a tile of so many rows lie, for ldmatrix and stmatrix.
    auto address = [](const void *tile, int rows, int row, int col) {
        const uint32_t x = shared_address(tile) + ((col / kCols * rows + row) * kCols + col % kCols) * 2;
        return x ^ (x >> 3 & (kRowBytes - 16));  // swizzled
    };
    // acc_s = Q Kᵀ, by this warp alone, as flash_sm80.cu does.
    auto multiply_q_k_again = [&] {
        for (auto &x : acc_s[0]) x[0] = x[1] = x[2] = x[3] = 0.f;
#pragma unroll 1
        for (int d = 0; d < kHeadDim; d += 16) {
            uint32_t a[4], b[4];
            ldmatrix(a, address(shared.sQ[tile % kQStages][consumer], 64, 16 * warp_idx + lane_idx % 16,
                                d + lane_idx / 16 * 8));
#pragma unroll
            for (int n = 0; n < kNTiles; n += 2) {
                ldmatrix(b, address(shared.sK[block % kStages], kBlockN, 8 * n + lane_idx % 8 + lane_idx / 16 * 8,
                                    d + lane_idx / 8 % 2 * 8));
                mma<T>(acc_s[0][n], a, b[0], b[1]), mma<T>(acc_s[0][n + 1], a, b[2], b[3]);
            }
        }
    };
    auto await_v = [&](const Mask &mask, int n_block) {
        await(shared.v_full, block);
        // Rows after the sample's end may hold anything, NaN as well, which a probability of 0 does not undo. All
        // consumers clear them, those that skip the block too.
        if (const int row_end = mask.seq_len - n_block * kBlockN; row_end < kBlockN && mask.seq_len < p.seqlen_k) {
            constexpr int kThreads = 128 * kConsumers, kVecs = kRowBytes / 16;
            for (auto &panel : shared.sV[block % kStages])
                for (int i = row_end * kVecs + threadIdx.x - 128; i < kBlockN * kVecs; i += kThreads)
                    reinterpret_cast<uint4 *>(panel)[i] = uint4{};
            fence_proxy_async();
            barrier_sync(1, kThreads);
        }
    };

    for (;; tile++) {
        await(shared.work_full, tile);
        const Work &work = shared.work[tile % 4];
        int n_block = work.n_block_max - 1;
        if (n_block < 0) break;
        const int row0 = work.row0 + 64 * consumer, row = row0 + 16 * warp_idx + lane_idx / 4;  // the first of each
        const Mask mask(p, work.b);
        const int sign = (p.softmax_scale > 0) - (p.softmax_scale < 0);
        // The blocks from n_block_full on need a mask or a sign, those from n_block_max on nothing.
        const int n_block_full = sign > 0 ? mask.n_block_full<64, kBlockN>(row0) : 0;
        const int n_block_max = row0 < p.seqlen_q ? mask.n_block_max<64, kBlockN>(row0) : 0;
        Softmax<1> softmax(float(p.softmax_scale));
        for (auto &x : acc_o[0]) x[0] = x[1] = x[2] = x[3] = 0.f;
        await(shared.q_full[consumer], tile);

        for (; n_block >= n_block_max; n_block--, block++) {
            await(shared.k_full, block), __syncwarp(), release(shared.k_empty[block % kStages]);
            await_v(mask, n_block), __syncwarp(), release(shared.v_empty[block % kStages]);
        }
        const bool sees_keys = __any_sync(~0u, n_block >= 0);  // the same in a warp, as the compiler sees
        if (sees_keys) {
            await(shared.k_full, block);
            warpgroup_arrive();
            multiply_q_k(tile % kQStages, block % kStages);
            warpgroup_wait<0>(acc_s[0]);
        }
        for (bool is_first = true; sees_keys; n_block--, block++, is_first = false) {
            const uint32_t n = __shfl_sync(~0u, block, 0), t = __shfl_sync(~0u, tile, 0);
            // acc_s becomes P. row_max follows the scores of blocks with a mask, and of one without. After that it
            // stays, and if one of P may then be too large for T, which is rare, the scores are computed once more.
            if (n_block >= n_block_full) mask.apply(acc_s, row, n_block * kBlockN + lane_idx % 4 * 2, sign);
            const bool follows = n_block >= n_block_full - 1;
            bool has_grown = false;
            float sum[2];
            if (follows) has_grown = softmax.follow(acc_s, alpha);
            softmax.exponentiate(acc_s, sum);
            if (!follows && __any_sync(~0u, fmaxf(sum[0], sum[1]) > kMaxSum)) {
                multiply_q_k_again();
                has_grown = softmax.follow(acc_s, alpha);
                softmax.exponentiate(acc_s, sum);
            }
            for (int i = 0; i < 2; i++) softmax.row_sum[i] += sum[i];
            release(shared.k_empty[block % kStages]);

            warpgroup_wait<0>(acc_o[0], P);
            if (!is_first) release(shared.v_empty[(block - 1) % kStages]);
#pragma unroll
            for (int i = 0; i < 2 * kNTiles; i++)
                P[i / 4][i % 4] = pack<T>(acc_s[0][i / 2][i % 2 * 2], acc_s[0][i / 2][i % 2 * 2 + 1]);
            if (has_grown) softmax.rescale(acc_o, alpha);

            await_v(mask, n_block);
            if (n_block > 0) {
                await(shared.k_full, block + 1);
                warpgroup_arrive();
                multiply_q_k(t % kQStages, (n + 1) % kStages);
                multiply_p_v(n % kStages);
                warpgroup_wait<1>(acc_s[0]);
                continue;
            }
            warpgroup_arrive();
            multiply_p_v(n % kStages);
            warpgroup_wait<0>(acc_o[0], P);
            release(shared.v_empty[block++ % kStages]);
            break;
        }

        // out, from where Q was, as the four warps have all read it.
        softmax.finalize(acc_o);
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (row + 8 * i < p.seqlen_q && lane_idx % 4 == 0)
                static_cast<float *>(p.lse)[(int64_t(work.b) * p.nheads + work.h) * p.seqlen_q + row + 8 * i] =
                    softmax.lse(i);
        auto &sO = shared.sQ[tile % kQStages][consumer];
        barrier_sync(2 + consumer, 128);
#pragma unroll
        for (int d = 0; d < kDTiles; d += 2) {
            uint32_t x[4];
            for (int j = 0; j < 4; j++)
                x[j] = pack<T>(acc_o[0][d + j / 2][j % 2 * 2], acc_o[0][d + j / 2][j % 2 * 2 + 1]);
            stmatrix(x, address(sO, 64, 16 * warp_idx + lane_idx % 16, 8 * d + lane_idx / 16 * 8));
        }
        fence_proxy_async();
        __syncwarp();
        if (lane_idx == 0) {
            for (int i = 0; i < Tile::kPanels; i++)
                tma_store(sO[i][16 * warp_idx], p.o_map, i * kCols, row0 + 16 * warp_idx, work.h, work.b);
            tma_store_commit_and_wait_read();
        }
        release(shared.q_empty[consumer][tile % kQStages]);
    }
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::kNThreads, 1) flash_fwd(const __grid_constant__ Params p) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL) && !MINIMAL_ATTN_EMULATED
    __trap();
#else
    auto &shared = shared_memory<SharedMemory<Tile>>();
    if (threadIdx.x == 0) {
        for (int c = 0; c < Tile::kConsumers; c++)
            for (int s = 0; s < Tile::kQStages; s++)
                mbarrier_init(shared.q_full[c][s], 1), mbarrier_init(shared.q_empty[c][s], 4);
        for (int s = 0; s < Tile::kStages; s++) {
            mbarrier_init(shared.k_full[s], 1), mbarrier_init(shared.k_empty[s], 4 * Tile::kConsumers);
            mbarrier_init(shared.v_full[s], 1), mbarrier_init(shared.v_empty[s], 4 * Tile::kConsumers);
        }
        for (Barrier &full : shared.work_full) mbarrier_init(full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    const int warpgroup_idx = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the same in a warp, as the compiler sees
    if (warpgroup_idx == 0) {
        warpgroup_reg_dealloc<Tile::kProducerRegisters>();
        if (threadIdx.x == 0) produce<Tile>(p, shared);
    } else {
        warpgroup_reg_alloc<Tile::kConsumerRegisters>();
        consume<T, Tile>(p, shared, warpgroup_idx - 1);
    }
#endif
}

template <typename T, typename Tile> void launch_fwd(const AttnParams &attn) {
    static_assert(sizeof(SharedMemory<Tile>) <= 227 << 10);
    const int64_t tiles = (int64_t(attn.seqlen_q) + Tile::kBlockM - 1) / Tile::kBlockM * attn.batch_size * attn.nheads;
    const int64_t blocks = std::min<int64_t>(tiles, num_sms());
    if (tiles == 0) return;
    if (tiles + blocks > INT32_MAX) throw std::runtime_error("minimal_attn: there are too many tiles of rows");
    Params p{attn};
    encode(p.q_map, "q", p.q, p.batch_size, p.nheads, p.seqlen_q, p.head_dim, p.q_batch_stride, p.q_head_stride,
           p.q_row_stride, 64, Tile::kCols);
    encode(p.k_map, "k", p.k, p.batch_size, p.nheads_k, p.seqlen_k, p.head_dim, p.k_batch_stride, p.k_head_stride,
           p.k_row_stride, Tile::kBlockN, Tile::kCols);
    encode(p.v_map, "v", p.v, p.batch_size, p.nheads_k, p.seqlen_k, p.head_dim, p.v_batch_stride, p.v_head_stride,
           p.v_row_stride, Tile::kBlockN, Tile::kCols);
    encode(p.o_map, "out", p.o, p.batch_size, p.nheads, p.seqlen_q, p.head_dim, p.o_batch_stride, p.o_head_stride,
           p.o_row_stride, 16, Tile::kCols);
    // A block an SM. Without a mask all tiles are alike and dealt out in turn; with one, a block that is done takes the
    // next by a counter.
    p.num_tiles = int(tiles), p.group = 1;
    if (tiles == blocks) p.tile_counter = nullptr;
    if (p.tile_counter) {
        check_cuda(cudaMemsetAsync(p.tile_counter, 0, sizeof(int), static_cast<cudaStream_t>(p.stream)));
        const int64_t heads = p.nheads * p.batch_size, l2_bytes = 32 << 20;
        const double head_bytes = 4. * p.seqlen_k * p.head_dim / (p.nheads / p.nheads_k);
        while (2 * p.group * head_bytes <= l2_bytes && 2 * int64_t(p.group) <= heads) p.group *= 2;
    }
    launch(flash_fwd<T, Tile>, blocks, Tile::kNThreads, sizeof(SharedMemory<Tile>), p.stream, p);
}

// Tiles by head_dim; what lies between two is padded with zeros, by TMA. Three consumers hide one another's softmax
// better than two do and load K and V less often. A thread's share of S, P and O has to fit 160 registers then: at
// head_dim 128 that leaves 80 keys. Up to 2048 keys four buffers of 64 are faster than two of 80 (journal, Hopper).
template <typename T> void dispatch(const AttnParams &p) {
    if (p.head_dim <= 64) launch_fwd<T, Tile<64, 3, 128, 4>>(p);
    else if (p.head_dim <= 96) launch_fwd<T, Tile<96, 3, 96, 4>>(p);
    else if (p.head_dim <= 128 && p.seqlen_k <= 2048) launch_fwd<T, Tile<128, 3, 64, 4>>(p);
    else if (p.head_dim <= 128) launch_fwd<T, Tile<128, 3, 80>>(p);
    else if (p.head_dim <= 192) launch_fwd<T, Tile<192, 2, 80>>(p);
    else launch_fwd<T, Tile<256, 2, 64, 2, 1>>(p);
}

void flash_forward(const AttnParams &p) {
    if (compute_capability() != 90) throw std::runtime_error("minimal_attn: flash_sm90.cu needs a GPU of sm_90");
    if (p.dtype == DType::kFloat16) dispatch<__half>(p);
    else dispatch<__nv_bfloat16>(p);
}

}  // namespace sm90
