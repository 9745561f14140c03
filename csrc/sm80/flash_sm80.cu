// FlashAttention forward on tensor cores, fp16 and bf16 with fp32 sums: Ampere (sm_80) and every newer GPU.
// A block of threads owns kBlockM query rows of a head and walks along K and V, kBlockN keys at a time (Dao,
// FlashAttention-2, 2023, Algorithm 1). A warp owns whole rows, so its softmax needs no other warp:
//   acc_s = Q Kᵀ
//   P = softmax(acc_s)  from accumulators straight into the A operand
//   acc_o += P V
// Tensor cores and copies take turns at one buffer each of K and V, with barriers between:
//   tensor cores                    Q K(0)ᵀ    P V(0)         Q K(1)ᵀ        P V(1)     ...
//   cp.async       Q, K(0), V(0)               K(1) → sK      V(1) → sV      K(2) → sK  ...
// The SM's other block fills the gaps. Deeper rings were no faster, and leave room for one block.
#include "common/launch.h"
#include "common/mask.cuh"
#include "common/scheduler.cuh"
#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "flash.h"
#include "mods/dropout.h"
#include "mods/score_mods.cuh"
#include "sm80/tiles.cuh"

namespace sm80 {

using namespace device;

template <int kHeadDim_, int kBlockM_, int kBlockN_> struct Shape {
    static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_, kNWarps = 4;
    static constexpr int kNThreads = 32 * kNWarps;
};

template <typename Shape, typename Mask> struct SharedMemory {
    alignas(128) uint16_t sQ[Shape::kBlockM][Shape::kHeadDim];  // O at the end
    uint16_t sK[Shape::kBlockN][Shape::kHeadDim], sV[Shape::kBlockN][Shape::kHeadDim];
    Mask mask;  // the loop has no register for it
};

// kMods: changed scores or attention_chunk, perhaps with dropout. kMax: also the largest score of each row.
template <typename T, typename Shape, bool kDropout, bool kMods, bool kMax = false>
__global__ void __launch_bounds__(Shape::kNThreads, 2)  // 255 registers a thread
    flash_fwd(const __grid_constant__ AttnParams p) {
#if __CUDA_ARCH__ < 800  // a build for several GPUs
    __trap();
#else
    constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN;
    constexpr int kNThreads = Shape::kNThreads, kWarpM = kBlockM / Shape::kNWarps;
    constexpr int kMTiles = kWarpM / 16, kNTiles = kBlockN / 8, kDTiles = kHeadDim / 8;
    static_assert(kMTiles * 16 == kWarpM && kBlockN % 64 == 0 && kHeadDim % 32 == 0);
    using Swizzle = sm80::Swizzle<kHeadDim>;
    using Mask = MaskOf<kMods>;
    auto &[sQ, sK, sV, mask] = shared_memory<SharedMemory<Shape, Mask>>();
    const int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;

    const Tile tile = RowTiles<kBlockM>::at(p, blockIdx.x);
    const Sequence seq(p, tile.b);
    if (threadIdx.x == 0) mask = Mask(seq, p);
    const Scores<> scores(p);
    const ScoreMods<T, ptx::tanh_approx> mods(p, seq.seqlen_q, seq.seqlen_k, tile.b, tile.h);
    const Dropout dropout(p, tile.b, tile.h);
    const int row0 = tile.block * kBlockM, warp_row = row0 + warp_idx * kWarpM + lane_idx / 4;  // this lane's first row
    BlockRange blocks = Mask(seq, p).template key_blocks<kBlockM, kBlockN>(row0);
    if (kMods || !scores.is_raw) blocks.full_end = 0;  // no block is left as it is
    const HeadMask block_mask(p.block_mask, tile.b, tile.h);
    auto block_from = [&](int n_block) {  // the first that a block mask does not hide
        if (!kMods || !p.block_mask.rows) return n_block;
        constexpr int kUnitsM = kBlockM / Unit::kSize, kUnitsN = kBlockN / Unit::kSize;
        return block_mask.template keys_of<kUnitsM, kUnitsN>(tile.block * kUnitsM).first(n_block, blocks.end);
    };
    blocks.begin = block_from(blocks.begin);

    const int row = thread_idx() / Swizzle::kVecs, vec = threadIdx.x % Swizzle::kVecs;
    const uint32_t copy_offset = Swizzle::offset(row, vec);
    const T *gQ = rows_of<const T>(p.q, tile.b, tile.h, seq.q_begin + row0 + row) + vec * 8;
    const int key0 = blocks.begin * kBlockN;
    const T *gK = rows_of<const T>(p.k, tile.b, tile.h_k, seq.k_begin + key0 + row) + vec * 8;
    const T *gV = rows_of<const T>(p.v, tile.b, tile.h_k, seq.k_begin + key0 + row) + vec * 8;
    // thread_idx(), or vec would stay in a register.
    auto cols = [&](int head_dim) { return head_dim - int(thread_idx() % Swizzle::kVecs * 8); };
    auto load_kv = [&](auto &to, const T *&from, int64_t row_stride, int head_dim, int n_block, int begin = INT_MIN) {
        load_tile<kBlockN, kHeadDim, kNThreads>(shared_address(to) + copy_offset, from, row_stride,
                                                seq.seqlen_k - n_block * kBlockN - row, cols(head_dim), begin);
    };
    // After the block before that, gK and gV are at `at`.
    auto load_k = [&](int n_block, int at) {
        gK += int64_t(n_block - at) * kBlockN * p.k.row_stride;
        load_kv(sK, gK, p.k.row_stride, p.head_dim, n_block);
    };
    auto load_v = [&](int n_block, int at, int begin = INT_MIN) {
        gV += int64_t(n_block - at) * kBlockN * p.v.row_stride;
        load_kv(sV, gV, p.v.row_stride, p.head_dim_v, n_block, begin);
    };

    const uint32_t q_address = shared_address(sQ[warp_idx * kWarpM]) + Swizzle::down(lane_idx);
    const uint32_t k_address = shared_address(sK) + Swizzle::across(lane_idx);
    const uint32_t v_address = shared_address(sV) + Swizzle::down(lane_idx);
    float acc_o[kMTiles][kDTiles][4] = {};
    float max_score[2 * kMTiles];
    for (float &x : max_score) x = -INFINITY;
    Softmax<kMTiles> softmax(kMods ? mods.softmax_scale_log2 : scores.softmax_scale_log2);
    if (blocks.begin < blocks.end) {
        load_tile<kBlockM, kHeadDim, kNThreads>(shared_address(sQ) + copy_offset, gQ, p.q.row_stride,
                                                seq.seqlen_q - row0 - row, cols(p.head_dim));
        load_k(blocks.begin, blocks.begin);
        const int first_key = Mask(seq, p).keys(row0).begin;  // V of unseen keys becomes 0: 0 · NaN is NaN
        if (first_key <= key0) load_v(blocks.begin, blocks.begin);
        else load_v(blocks.begin, blocks.begin, first_key - key0 - row);
    }
    cp_async_wait<1>();
    __syncthreads();  // Q and K have arrived
    for (int n_block = blocks.begin, next; n_block < blocks.end; n_block = next) {
        next = block_from(n_block + 1);
        float acc_s[kMTiles][kNTiles][4] = {};
        multiply_abt<T, kHeadDim>(acc_s, q_address, k_address);

        cp_async_wait<0>();
        __syncthreads();  // V has arrived, K has been read
        if (next < blocks.end) load_k(next, n_block + 1);

        if (!blocks.is_full(n_block)) {
            if constexpr (kMods)
                mods.apply(score_tile(acc_s, warp_row, n_block * kBlockN + lane_idx % 4 * 2));
            else scores.apply(acc_s);
            mask.apply(acc_s, blocks, n_block, warp_row, n_block * kBlockN + lane_idx % 4 * 2);
            if (kMods && p.block_mask.rows)
                for (int m = 0; m < kMTiles; m++) {
                    const int row = row0 + warp_idx * kWarpM + 16 * m;
                    hide_unseen(acc_s[m], 0, block_mask.word_of_16(row, n_block * kBlockN, lane_idx));
                }
        }
        if constexpr (kMax)
            for (int i = 0; i < 2 * kMTiles; i++)
                for (auto &s : acc_s[i / 2]) max_score[i] = fmaxf(max_score[i], fmaxf(s[i % 2 * 2], s[i % 2 * 2 + 1]));
        float alpha[2 * kMTiles];
        if (softmax.update_row_max(acc_s, alpha)) softmax.rescale(acc_o, alpha);
#pragma unroll
        for (int kk = 0; kk < kBlockN / 16; kk++) {
            uint32_t P[kMTiles][4];
            for (int m = 0; m < kMTiles; m++) {
                softmax.template probabilities<T>(P[m], acc_s[m], m, kk);
                if (kDropout && (!kMods || p.dropout_seed))
                    dropout.apply(P[m], warp_row + 16 * m, n_block * kBlockN + 16 * kk + lane_idx % 4 * 2);
            }
            multiply_ab<T, kHeadDim>(acc_o, P, v_address, kk * 16 * Swizzle::kRowBytes);
        }
        cp_async_wait<0>();
        __syncthreads();  // K has arrived, V has been read
        if (next < blocks.end) load_v(next, n_block + 1);
    }

    if constexpr (kMax) {
        for (float &x : max_score) x *= softmax.softmax_scale_log2;
        store_max_logits(p, max_score, softmax.row_sum, seq, tile.b, tile.h, warp_row);
    }
    float *gLse = static_cast<float *>(p.lse) + lse_index(p, seq.q_begin, tile.b, tile.h);
    softmax.finalize(acc_o, gLse, seq, warp_row, sink_of<float>(p, tile.h),
                     kDropout && p.dropout_seed ? float(p.keep_scale) : 1.f);
    store_tile<T>(acc_o, 1.f, sQ, warp_idx * kWarpM, 0, rows_of<T>(p.o, tile.b, tile.h, seq.q_begin + row0),
                  p.o.row_stride, seq.padded_q - row0, p.head_dim_v, [](int) { return false; });
#endif
}

template <typename T, typename Shape, bool kMods = false> void launch_fwd(const AttnParams &p) {
    constexpr size_t kSharedBytes = sizeof(SharedMemory<Shape, MaskOf<kMods>>);
    static_assert(kSharedBytes <= 99 << 10);  // the most on sm_86, sm_89 and sm_120
    auto *kernel = p.dropout_seed ? flash_fwd<T, Shape, true, kMods> : flash_fwd<T, Shape, kMods, kMods>;
    if constexpr (kMods)
        if (p.max_logits) kernel = flash_fwd<T, Shape, true, true, true>;
    launch(kernel, RowTiles<Shape::kBlockM>::count(p), Shape::kNThreads, kSharedBytes, p.stream, p);
}

// {kHeadDim, kBlockM, kBlockN}. Up to 128 a warp has 32 rows: loads of K and V feed two products. Above, registers hold
// only 16 rows of acc_o. A head_dim between is padded with zeros on chip.
template <typename T, bool kMods> void dispatch(const AttnParams &p) {
    const int head_dim = p.max_head_dim();
    // 128 keys: half the barriers of 64, 4 % faster.
    if (head_dim <= 64) launch_fwd<T, Shape<64, 128, kMods ? 64 : 128>, kMods>(p);
    else if (head_dim <= 96) launch_fwd<T, Shape<96, 128, 64>, kMods>(p);
    else if (head_dim <= 128) launch_fwd<T, Shape<128, 128, 64>, kMods>(p);  // acc_o and acc_s take 192 registers
    else if (head_dim <= 192) launch_fwd<T, Shape<192, 64, 64>, kMods>(p);
    else launch_fwd<T, Shape<256, 64, 64>, kMods>(p);  // 96 KB: two blocks an SM of 228 KB, one of 100 or 164
}

template <typename T> void dispatch(const AttnParams &p) {
    p.has_mods() || p.max_logits ? dispatch<T, true>(p) : dispatch<T, false>(p);
}

void flash_forward(const AttnParams &p) {
    p.dtype == DType::kFloat16 ? dispatch<__half>(p) : dispatch<__nv_bfloat16>(p);
}

}  // namespace sm80
