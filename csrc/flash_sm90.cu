// FlashAttention forward on Hopper's tensor cores, fp16 and bf16 with fp32 sums: H100, H200 (sm_90a).
//
// A block of threads computes tiles of out, kBlockM query rows of one head each, and walks along K and V from the last
// keys that its rows see to the first, kBlockN at a time (Dao, FlashAttention-2, 2023, Algorithm 1). Its warpgroups, of
// four warps, have roles (Shah et al., FlashAttention-3, 2024, section 3): the producer asks TMA for tiles, a consumer
// multiplies, for 64 rows. They meet at barriers in shared memory, one for every buffer that is full or empty again; K
// and V have rings of kStages buffers, Q has one for each consumer:
//
//   producer ── TMA ──▶ full[stage] ──▶ consumers ── wgmma ──▶ empty[stage] ──▶ producer
//
// A consumer has two products under way at a time, Q Kᵀ of one block and P V of the block before it, and computes the
// softmax of the first while the second runs, from one tile on to the next. P goes from the accumulators of one product
// straight into the A operand of the next, as in flash_sm80.cu.
//
// Read next: ptx_sm90.cuh for the instructions; tensor_map.h, which tells TMA where Q, K and V are; kernels.h.
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

template <int kHeadDim_, int kConsumers_, int kBlockN_, int kStages_ = 2, bool kPingPong_ = false> struct Tile {
    static constexpr int kHeadDim = kHeadDim_, kConsumers = kConsumers_, kBlockM = 64 * kConsumers_;
    static constexpr int kBlockN = kBlockN_, kStages = kStages_, kNThreads = 128 * (kConsumers + 1);
    static constexpr bool kPingPong = kPingPong_;
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
    alignas(1024) uint16_t sQ[Tile::kConsumers][Tile::kPanels][64][Tile::kCols];
    uint16_t sK[Tile::kStages][Tile::kPanels][Tile::kBlockN][Tile::kCols];
    uint16_t sV[Tile::kStages][Tile::kPanels][Tile::kBlockN][Tile::kCols];
    Barrier q_full[Tile::kConsumers], q_empty[Tile::kConsumers];
    Barrier k_full[Tile::kStages], k_empty[Tile::kStages], v_full[Tile::kStages], v_empty[Tile::kStages];
    Barrier work_full[2];
    Work work[2];  // a tile's is read before its Q, and so before there is room for the next tile's
};

// The place in a ring of buffers, and the parity of its round.
template <int kStages> struct Ring {
    int stage = 0;
    uint32_t phase = 0;
    __device__ void advance() {
        if (++stage == kStages) stage = 0, phase ^= 1;
    }
};

struct Params : AttnParams {
    CUtensorMap q_map, k_map, v_map;
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

// For each tile Q, and K and V block by block, V one block behind K, as the consumers take them.
template <typename Tile> __device__ void produce(const Params &p, SharedMemory<Tile> &shared) {
    constexpr int kBlockN = Tile::kBlockN, kCols = Tile::kCols;
    Ring<2> next;
    Ring<1> q;
    Ring<Tile::kStages> k, v;
    auto load = [](auto &tile, const CUtensorMap &map, Barrier &full, Barrier &empty, uint32_t phase, int row, int h,
                   int b) {
        mbarrier_wait(empty, phase ^ 1);
        mbarrier_arrive_expect_tx(full, sizeof(tile));
#pragma unroll
        for (int i = 0; i < Tile::kPanels; i++) tma_load(tile[i], map, full, i * kCols, row, h, b);
    };
    prefetch(p.q_map), prefetch(p.k_map), prefetch(p.v_map);
    for (int tile_idx = blockIdx.x;; next.advance()) {
        Work &work = shared.work[next.stage];  // read anew where it is needed: the producer has few registers
        work = work_of<Tile>(p, tile_idx);
        mbarrier_arrive(shared.work_full[next.stage]);
        if (work.n_block_max == 0) break;
        tile_idx = gridDim.x + (p.tile_counter ? atomicAdd(p.tile_counter, 1) : tile_idx);

        const int h_k = work.h / (p.nheads / p.nheads_k);
#pragma unroll 1
        for (int n_block = work.n_block_max - 1; n_block >= -1; n_block--) {
            if (n_block >= 0) {
                load(shared.sK[k.stage], p.k_map, shared.k_full[k.stage], shared.k_empty[k.stage], k.phase,
                     n_block * kBlockN, p.k_head_stride ? h_k : 0, p.k_batch_stride ? work.b : 0);
                k.advance();
            }
            if (n_block == work.n_block_max - 1) {  // after K, for which there is room before there is for Q
#pragma unroll 1
                for (int c = 0; c < Tile::kConsumers; c++)
                    load(shared.sQ[c], p.q_map, shared.q_full[c], shared.q_empty[c], q.phase, work.row0 + 64 * c,
                         p.q_head_stride ? work.h : 0, p.q_batch_stride ? work.b : 0);
                q.advance();
            } else {
                load(shared.sV[v.stage], p.v_map, shared.v_full[v.stage], shared.v_empty[v.stage], v.phase,
                     (n_block + 1) * kBlockN, p.v_head_stride ? h_k : 0, p.v_batch_stride ? work.b : 0);
                v.advance();
            }
        }
    }
}

// 64 rows of out and lse of each tile.
template <typename T, typename Tile>
__device__ void consume(const Params &p, SharedMemory<Tile> &shared, int consumer) {
    constexpr int kHeadDim = Tile::kHeadDim, kBlockN = Tile::kBlockN, kCols = Tile::kCols, kRowBytes = 2 * kCols;
    constexpr int kNTiles = kBlockN / 8, kDTiles = kHeadDim / 8, kConsumers = Tile::kConsumers;
    const int warp_idx = threadIdx.x / 32 % 4, lane_idx = threadIdx.x % 32;
    const int first_row = 64 * consumer + 16 * warp_idx + lane_idx / 4;  // of this lane's, in the tile
    Ring<2> next;
    Ring<1> q;
    Ring<Tile::kStages> k, v;
    auto release = [&](Barrier &empty) {  // when all four warps have
        if (lane_idx == 0) mbarrier_arrive(empty);
    };
    // Turns at the tensor cores: a consumer issues its products when the one before it has issued its own.
    auto await_turn = [&] {
        if (Tile::kPingPong) barrier_sync(1 + consumer, 256);
    };
    auto pass_turn = [&] {
        if (Tile::kPingPong) barrier_arrive(1 + (consumer + 1) % kConsumers, 256);
    };
    auto take_work = [&] {
        mbarrier_wait(shared.work_full[next.stage], next.phase);
        Work work = shared.work[next.stage];
        work.n_block_max = __reduce_max_sync(~0u, work.n_block_max);  // for ptxas to see that a warp goes one way
        next.advance();
        return work;
    };

    float acc_s[1][kNTiles][4], acc_o[1][kDTiles][4] = {}, alpha[2];
    uint32_t P[kBlockN / 16][4];
    auto multiply_q_k = [&] {  // acc_s = Q Kᵀ
        const uint64_t a = matrix_descriptor<kRowBytes>(shared.sQ[consumer]);
        const uint64_t b = matrix_descriptor<kRowBytes>(shared.sK[k.stage]);
#pragma unroll
        for (int kk = 0; kk < kHeadDim / 16; kk++) {
            const int panel = 16 * kk / kCols, bytes = 16 * kk % kCols * 2;
            wgmma<T>(acc_s[0], a + (panel * 64 * kRowBytes + bytes) / 16,
                     b + (panel * kBlockN * kRowBytes + bytes) / 16, kk > 0);
        }
        warpgroup_commit_batch();
    };
    auto multiply_p_v = [&] {  // acc_o += P V
        const uint64_t b = matrix_descriptor<kRowBytes>(shared.sV[v.stage], kBlockN * kRowBytes);
#pragma unroll
        for (int kk = 0; kk < kBlockN / 16; kk++) wgmma<T>(acc_o[0], P[kk], b + kk * 16 * kRowBytes / 16);
        warpgroup_commit_batch();
    };
    const int sign = (p.softmax_scale > 0) - (p.softmax_scale < 0);
    auto round_p = [&] {
#pragma unroll
        for (int i = 0; i < 2 * kNTiles; i++)
            P[i / 4][i % 4] = pack<T>(acc_s[0][i / 2][i % 2 * 2], acc_s[0][i / 2][i % 2 * 2 + 1]);
    };
    auto await_v = [&](const Mask &mask, int n_block) {
        mbarrier_wait(shared.v_full[v.stage], v.phase);
        // Rows after the sample's end may hold anything, NaN as well, which a probability of 0 does not undo.
        if (const int row_end = mask.seq_len - n_block * kBlockN; row_end < kBlockN && mask.seq_len < p.seqlen_k) {
            constexpr int kThreads = 128 * kConsumers, kVecs = kRowBytes / 16;
            for (auto &panel : shared.sV[v.stage])
                for (int i = row_end * kVecs + threadIdx.x - 128; i < kBlockN * kVecs; i += kThreads)
                    reinterpret_cast<uint4 *>(panel)[i] = uint4{};
            fence_proxy_async();
            barrier_sync(1 + kConsumers, kThreads);
        }
    };
    // The scores of the blocks before this one need neither a mask nor a sign.
    auto first_masked = [&](const Mask &mask, int row0) {
        return sign > 0 ? mask.n_block_full<64, kBlockN>(row0 + 64 * consumer) : 0;
    };
    // acc_s becomes P; whether acc_o is to be rescaled.
    auto attend = [&](Softmax<1> &softmax, const Mask &mask, int row0, int n_block, int n_block_masked) {
        if (n_block >= n_block_masked)
            mask.apply(acc_s, row0 + first_row, n_block * kBlockN + lane_idx % 4 * 2, sign);
        const bool has_grown = softmax.follow(acc_s, alpha);
        softmax.exponentiate(acc_s);
        return has_grown;
    };
    // The four lanes of a quad hold two columns each of every eight of a row. They trade, so that of four times eight
    // columns each writes eight, 16 bytes.
    auto write_out = [&](Softmax<1> &softmax, const Work &work) {
        softmax.finalize(acc_o);
        T *gO = static_cast<T *>(p.o) + work.b * p.o_batch_stride + work.h * p.o_head_stride;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = work.row0 + first_row + 8 * i;
            if (row < p.seqlen_q && lane_idx % 4 == 0)
                static_cast<float *>(p.lse)[(int64_t(work.b) * p.nheads + work.h) * p.seqlen_q + row] = softmax.lse(i);
#pragma unroll
            for (int d0 = 0; d0 < kDTiles; d0 += 4) {
                uint32_t x[4];
                for (int j = 0; j < 4; j++) x[j] = pack<T>(acc_o[0][d0 + j][2 * i], acc_o[0][d0 + j][2 * i + 1]);
                quad_transpose(x);
                const int col = 8 * (d0 + lane_idx % 4);
                if (row < p.seqlen_q && col < p.head_dim)
                    store_global(gO + row * p.o_row_stride + col, x);
            }
        }
    };

    if (Tile::kPingPong && consumer == kConsumers - 1) pass_turn();
    Work work = take_work();
    Mask mask(p, work.b);
    int n_block = work.n_block_max - 1, n_block_masked = first_masked(mask, work.row0);
    Softmax<1> softmax(float(p.softmax_scale));
    mbarrier_wait(shared.q_full[consumer], q.phase), q.advance();
    mbarrier_wait(shared.k_full[k.stage], k.phase);
    warpgroup_arrive();
    multiply_q_k();
    warpgroup_wait<0>(acc_s[0]);
    release(shared.k_empty[k.stage]), k.advance();
    if (n_block == 0) release(shared.q_empty[consumer]);
    attend(softmax, mask, work.row0, n_block, n_block_masked);
    round_p();
    // P V of a block beside Q Kᵀ and the softmax of the next, which may be the first of the next tile.
    while (true) {
        const bool is_last = n_block == 0;
        Work next_work = work;
        await_v(mask, n_block--);
        if (is_last) {
            next_work = take_work();
            if (next_work.n_block_max == 0) break;
            mask = Mask(p, next_work.b);
            n_block = next_work.n_block_max - 1, n_block_masked = first_masked(mask, next_work.row0);
            mbarrier_wait(shared.q_full[consumer], q.phase), q.advance();
        }
        mbarrier_wait(shared.k_full[k.stage], k.phase);
        await_turn();
        warpgroup_arrive();
        multiply_q_k();
        multiply_p_v();
        pass_turn();
        warpgroup_wait<1>(acc_s[0]);
        release(shared.k_empty[k.stage]), k.advance();
        if (n_block == 0) release(shared.q_empty[consumer]);
        Softmax<1> done = softmax;
        if (is_last) softmax = Softmax<1>(float(p.softmax_scale));
        const bool has_grown = attend(softmax, mask, next_work.row0, n_block, n_block_masked);
        // Never so: without a branch that hangs on the softmax ptxas 13.0 waits before it, and nothing overlaps
        if (__any_sync(~0u, fminf(softmax.row_sum[0], softmax.row_sum[1]) < 0.f)) __trap();
        warpgroup_wait<0>(acc_o[0], P);
        release(shared.v_empty[v.stage]), v.advance();
        round_p();
        if (is_last) {
            write_out(done, work);
            for (auto &x : acc_o[0]) x[0] = x[1] = x[2] = x[3] = 0.f;
            work = next_work;
        } else if (has_grown) {
            softmax.rescale(acc_o, alpha);
        }
    }
    warpgroup_arrive();
    multiply_p_v();
    warpgroup_wait<0>(acc_o[0], P);
    release(shared.v_empty[v.stage]);
    write_out(softmax, work);
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::kNThreads, 1) flash_fwd(const __grid_constant__ Params p) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL) && !MINIMAL_ATTN_EMULATED
    __trap();
#else
    auto &shared = shared_memory<SharedMemory<Tile>>();
    if (threadIdx.x == 0) {
        for (int c = 0; c < Tile::kConsumers; c++)
            mbarrier_init(shared.q_full[c], 1), mbarrier_init(shared.q_empty[c], 4);
        for (int s = 0; s < Tile::kStages; s++) {
            mbarrier_init(shared.k_full[s], 1), mbarrier_init(shared.k_empty[s], 4 * Tile::kConsumers);
            mbarrier_init(shared.v_full[s], 1), mbarrier_init(shared.v_empty[s], 4 * Tile::kConsumers);
        }
        for (int s = 0; s < 2; s++) mbarrier_init(shared.work_full[s], 1);
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
    encode(p.q_map, p.q, p.batch_size, p.nheads, p.seqlen_q, p.head_dim, p.q_batch_stride, p.q_head_stride,
           p.q_row_stride, 64, Tile::kCols);
    encode(p.k_map, p.k, p.batch_size, p.nheads_k, p.seqlen_k, p.head_dim, p.k_batch_stride, p.k_head_stride,
           p.k_row_stride, Tile::kBlockN, Tile::kCols);
    encode(p.v_map, p.v, p.batch_size, p.nheads_k, p.seqlen_k, p.head_dim, p.v_batch_stride, p.v_head_stride,
           p.v_row_stride, Tile::kBlockN, Tile::kCols);
    // A block an SM. Without a mask all tiles are alike and dealt out in turn; with one, a block that is done takes the
    // next by a counter.
    p.num_tiles = int(tiles), p.group = 1;
    if (tiles == blocks) p.tile_counter = nullptr;
    if (p.tile_counter) {
        check_cuda(cudaMemsetAsync(p.tile_counter, 0, sizeof(int), static_cast<cudaStream_t>(p.stream)));
        const int64_t head_bytes = 4 * int64_t(p.seqlen_k) * p.head_dim / (p.nheads / p.nheads_k), l2_bytes = 32 << 20;
        while (2 * p.group * head_bytes <= l2_bytes && 2 * p.group <= p.nheads * p.batch_size) p.group *= 2;
    }
    launch(flash_fwd<T, Tile>, blocks, Tile::kNThreads, sizeof(SharedMemory<Tile>), p.stream, p);
}

// Tiles by head_dim; what lies between two is padded with zeros, by TMA.
template <typename T> void dispatch(const AttnParams &p) {
    if (p.head_dim <= 64) launch_fwd<T, Tile<64, 3, 128>>(p);
    else if (p.head_dim <= 96) launch_fwd<T, Tile<96, 2, 160>>(p);
    else if (p.head_dim <= 128) p.is_causal ? launch_fwd<T, Tile<128, 2, 128>>(p) : launch_fwd<T, Tile<128, 2, 176>>(p);
    else if (p.head_dim <= 192) launch_fwd<T, Tile<192, 2, 112>>(p);
    else launch_fwd<T, Tile<256, 2, 80>>(p);
}

void flash_forward(const AttnParams &p) {
    if (p.dtype == DType::kFloat16) dispatch<__half>(p);
    else dispatch<__nv_bfloat16>(p);
}

}  // namespace sm90
