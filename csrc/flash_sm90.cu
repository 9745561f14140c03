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
// softmax of the first while the second runs. P goes from the accumulators of one product straight into the A operand of
// the next, as in flash_sm80.cu.
//
// Read next: ptx_sm90.cuh for the instructions; tensor_map.h, which tells TMA where Q, K and V are; kernels.h.
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

template <typename Tile> struct SharedMemory {
    alignas(1024) uint16_t sQ[Tile::kConsumers][Tile::kPanels][64][Tile::kCols];
    uint16_t sK[Tile::kStages][Tile::kPanels][Tile::kBlockN][Tile::kCols];
    uint16_t sV[Tile::kStages][Tile::kPanels][Tile::kBlockN][Tile::kCols];
    Barrier q_full[Tile::kConsumers], q_empty[Tile::kConsumers];
    Barrier k_full[Tile::kStages], k_empty[Tile::kStages], v_full[Tile::kStages], v_empty[Tile::kStages];
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
    int num_tiles, chunk;
};

// The n-th tile of out that this block computes, if there is one. Tiles of one head are neighbours, to share its K and V
// in L2. The last rows of a head, which see most under a causal mask, come first; in chunks of two, a tile that sees
// much and one that sees little go together.
template <typename Tile> struct Work {
    int bh, b, h, row0, n_block_max;
    bool exists;
    __device__ Work(const Params &p, int n) {
        const int m_blocks = (p.seqlen_q + Tile::kBlockM - 1) / Tile::kBlockM;
        const int64_t tile_idx = (blockIdx.x + n / p.chunk * int64_t(gridDim.x)) * p.chunk + n % p.chunk;
        exists = tile_idx < p.num_tiles;
        bh = int(tile_idx) / m_blocks, b = bh / p.nheads, h = bh % p.nheads;
        int m_block = int(tile_idx) % m_blocks;
        if (p.chunk == 2) m_block = m_block % 2 ? m_blocks - 1 - m_block / 2 : m_block / 2;
        row0 = (m_blocks - 1 - m_block) * Tile::kBlockM;
        n_block_max = exists ? Mask(p, b).n_block_max<Tile::kBlockM, Tile::kBlockN>(row0) : 0;
    }
    __device__ explicit operator bool() const { return exists; }
};

// For each tile Q, then K and V block by block, V one block behind K, as the consumers take them.
template <typename Tile> __device__ void produce(const Params &p, SharedMemory<Tile> &shared) {
    constexpr int kBlockN = Tile::kBlockN, kCols = Tile::kCols;
    Ring<Tile::kStages> k, v;
    Ring<1> q;
    auto load = [](auto &tile, const CUtensorMap &map, Barrier &full, Barrier &empty, uint32_t phase, int row, int h,
                   int b) {
        mbarrier_wait(empty, phase ^ 1);
        mbarrier_arrive_expect_tx(full, sizeof(tile));
#pragma unroll
        for (int i = 0; i < Tile::kPanels; i++) tma_load(tile[i], map, full, i * kCols, row, h, b);
    };
    for (int n = 0; const Work<Tile> work{p, n}; n++) {
        if (work.n_block_max == 0) continue;
        const int h_k = work.h / (p.nheads / p.nheads_k);
        for (int c = 0; c < Tile::kConsumers; c++)
            load(shared.sQ[c], p.q_map, shared.q_full[c], shared.q_empty[c], q.phase, work.row0 + 64 * c,
                 p.q_head_stride ? work.h : 0, p.q_batch_stride ? work.b : 0);
        q.advance();
        for (int n_block = work.n_block_max - 1; n_block >= -1; n_block--) {
            if (n_block >= 0) {
                load(shared.sK[k.stage], p.k_map, shared.k_full[k.stage], shared.k_empty[k.stage], k.phase,
                     n_block * kBlockN, p.k_head_stride ? h_k : 0, p.k_batch_stride ? work.b : 0);
                k.advance();
            }
            if (n_block < work.n_block_max - 1) {
                load(shared.sV[v.stage], p.v_map, shared.v_full[v.stage], shared.v_empty[v.stage], v.phase,
                     (n_block + 1) * kBlockN, p.v_head_stride ? h_k : 0, p.v_batch_stride ? work.b : 0);
                v.advance();
            }
        }
    }
}

// 64 rows of out and lse of each tile.
template <typename T, typename Tile> __device__ void consume(const Params &p, SharedMemory<Tile> &shared, int consumer) {
    constexpr int kHeadDim = Tile::kHeadDim, kBlockN = Tile::kBlockN, kCols = Tile::kCols, kRowBytes = 2 * kCols;
    constexpr int kNTiles = kBlockN / 8, kDTiles = kHeadDim / 8, kConsumers = Tile::kConsumers;
    const int warp_idx = threadIdx.x / 32 % 4, lane_idx = threadIdx.x % 32;
    Ring<Tile::kStages> k, v;
    Ring<1> q;
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
    if (Tile::kPingPong && consumer == kConsumers - 1) pass_turn();

    for (int n = 0; const Work<Tile> work{p, n}; n++) {
        const Mask mask(p, work.b);
        Softmax<1> softmax(float(p.softmax_scale));
        const int row = work.row0 + 64 * consumer + 16 * warp_idx + lane_idx / 4;
        // The scores of the blocks before this one need neither a mask nor a sign.
        const int n_block_masked =
            p.softmax_scale > 0 ? mask.n_block_full<64, kBlockN>(work.row0 + 64 * consumer) : 0;
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
        auto await_v = [&](int n_block) {
            mbarrier_wait(shared.v_full[v.stage], v.phase);
            // Rows after the sample's end may hold anything, NaN as well, which a probability of 0 does not undo. All
            // consumers write these zeros, so that none waits for another.
            if (const int row_end = mask.seq_len - n_block * kBlockN; row_end < kBlockN && mask.seq_len < p.seqlen_k) {
                const int threads = 128, vecs = kRowBytes / 16;
                for (auto &panel : shared.sV[v.stage])
                    for (int i = row_end * vecs + threadIdx.x % threads; i < kBlockN * vecs; i += threads)
                        reinterpret_cast<uint4 *>(panel)[i] = uint4{};
                fence_proxy_async();
                barrier_sync(1 + kConsumers + consumer, threads);
            }
        };
        auto attend = [&](int n_block) {  // acc_s becomes P
            if (n_block >= n_block_masked)
                mask.apply(acc_s, row, n_block * kBlockN + lane_idx % 4 * 2,
                           (p.softmax_scale > 0) - (p.softmax_scale < 0));
            const bool has_grown = softmax.follow(acc_s, alpha);
            softmax.exponentiate(acc_s);
            return has_grown;
        };
        auto round_p = [&] {
#pragma unroll
            for (int i = 0; i < 2 * kNTiles; i++)
                P[i / 4][i % 4] = pack<T>(acc_s[0][i / 2][i % 2 * 2], acc_s[0][i / 2][i % 2 * 2 + 1]);
        };

        if (work.n_block_max > 0) {
            mbarrier_wait(shared.q_full[consumer], q.phase);
            mbarrier_wait(shared.k_full[k.stage], k.phase);
            warpgroup_arrive();
            multiply_q_k();
            warpgroup_wait<0>(acc_s[0]);
            release(shared.k_empty[k.stage]), k.advance();
            attend(work.n_block_max - 1);
            round_p();
            for (int n_block = work.n_block_max - 2; n_block >= 0; n_block--) {
                mbarrier_wait(shared.k_full[k.stage], k.phase);
                await_turn();
                warpgroup_arrive();
                multiply_q_k();
                await_v(n_block + 1);
                multiply_p_v();
                pass_turn();
                warpgroup_wait<1>(acc_s[0]);
                release(shared.k_empty[k.stage]), k.advance();
                const bool has_grown = attend(n_block);
                warpgroup_wait<0>(acc_o[0], P);
                release(shared.v_empty[v.stage]), v.advance();
                round_p();
                if (has_grown) softmax.rescale(acc_o, alpha);
            }
            release(shared.q_empty[consumer]), q.advance();
            await_v(0);
            warpgroup_arrive();
            multiply_p_v();
            warpgroup_wait<0>(acc_o[0], P);
            release(shared.v_empty[v.stage]), v.advance();
        }

        // The four lanes of a quad hold two columns each of every eight of a row. They trade, so that of four times
        // eight columns each writes eight, 16 bytes.
        softmax.finalize(acc_o);
        T *gO = static_cast<T *>(p.o) + work.b * p.o_batch_stride + work.h * p.o_head_stride;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = row + 8 * i;
            if (r < p.seqlen_q && lane_idx % 4 == 0)
                static_cast<float *>(p.lse)[int64_t(work.bh) * p.seqlen_q + r] = softmax.lse(i);
#pragma unroll
            for (int d0 = 0; d0 < kDTiles; d0 += 4) {
                uint32_t x[4];
                for (int j = 0; j < 4; j++) x[j] = pack<T>(acc_o[0][d0 + j][2 * i], acc_o[0][d0 + j][2 * i + 1]);
                quad_transpose(x);
                const int col = 8 * (d0 + lane_idx % 4);
                if (r < p.seqlen_q && col < p.head_dim)
                    *reinterpret_cast<uint4 *>(gO + r * p.o_row_stride + col) = uint4{x[0], x[1], x[2], x[3]};
            }
        }
    }
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::kNThreads, 1) flash_fwd(const __grid_constant__ Params p) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL) && !MINIMAL_ATTN_EMULATED
    __trap();
#else
    auto &shared = shared_memory<SharedMemory<Tile>>();
    if (threadIdx.x == 0) {
        for (int c = 0; c < Tile::kConsumers; c++) mbarrier_init(shared.q_full[c], 1), mbarrier_init(shared.q_empty[c], 4);
        for (int s = 0; s < Tile::kStages; s++) {
            mbarrier_init(shared.k_full[s], 1), mbarrier_init(shared.k_empty[s], 4 * Tile::kConsumers);
            mbarrier_init(shared.v_full[s], 1), mbarrier_init(shared.v_empty[s], 4 * Tile::kConsumers);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    const int warpgroup_idx = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the same for a whole warp, as the compiler sees
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
    if (tiles > INT32_MAX) throw std::runtime_error("minimal_attn: there are more than 2^31 - 1 tiles of rows");
    if (tiles == 0) return;
    Params p{attn};
    p.q_map = tensor_map(p.q, p.batch_size, p.nheads, p.seqlen_q, p.head_dim, p.q_batch_stride, p.q_head_stride,
                         p.q_row_stride, 64, Tile::kCols);
    p.k_map = p.v_map = p.q_map;  // TMA has no map of an empty tensor; without keys it loads none
    if (p.seqlen_k > 0) {
        p.k_map = tensor_map(p.k, p.batch_size, p.nheads_k, p.seqlen_k, p.head_dim, p.k_batch_stride, p.k_head_stride,
                             p.k_row_stride, Tile::kBlockN, Tile::kCols);
        p.v_map = tensor_map(p.v, p.batch_size, p.nheads_k, p.seqlen_k, p.head_dim, p.v_batch_stride, p.v_head_stride,
                             p.v_row_stride, Tile::kBlockN, Tile::kCols);
    }
    // A block an SM, which loads its next tile's Q and K while it ends one. Under a causal mask tiles differ: where pairs
    // of them do not even that out, a block each, as the hardware finds room.
    const int sms = num_sms();
    p.num_tiles = int(tiles), p.chunk = 1;
    int64_t blocks = std::min<int64_t>(tiles, sms);
    if (p.is_causal && tiles >= 8 * sms) p.chunk = 2;
    else if (p.is_causal) blocks = tiles;
    launch(flash_fwd<T, Tile>, blocks, Tile::kNThreads, sizeof(SharedMemory<Tile>), p.stream, p);
}

// Tiles by head_dim; what lies between two is padded with zeros, by TMA.
template <typename T> void dispatch(const AttnParams &p) {
    if (p.head_dim <= 64) launch_fwd<T, Tile<64, 3, 128>>(p);
    else if (p.head_dim <= 96) launch_fwd<T, Tile<96, 2, 160>>(p);
    else if (p.head_dim <= 128) launch_fwd<T, Tile<128, 2, 176>>(p);
    else if (p.head_dim <= 192) launch_fwd<T, Tile<192, 2, 112>>(p);
    else launch_fwd<T, Tile<256, 2, 80>>(p);
}

void flash_forward(const AttnParams &p) {
    if (p.dtype == DType::kFloat16) dispatch<__half>(p);
    else dispatch<__nv_bfloat16>(p);
}

}  // namespace sm90
