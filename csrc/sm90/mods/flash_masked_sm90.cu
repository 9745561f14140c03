// The forward pass on Hopper with a block mask, and the kernel that makes one of a mask of bool.
#include "sm90/mods/mask_bits.cuh"
#include "sm90/mods/mask_units.cuh"
#include "sm90/mods/masked_scores.cuh"

namespace sm90 {

// A block of threads packs a unit.
struct PackMemory {
    alignas(16) uint8_t seen[Unit::kSize][Unit::kSize + 16];
    bool is_seen[4], is_hidden[4];  // some score of a warp
};
__global__ void __launch_bounds__(128)
    pack_units(Bias from, BlockMask mask, uint32_t *words, int seqlen_q, int seqlen_k) {
    auto &shared = shared_memory<PackMemory>();
    const int unit = blockIdx.x, n = unit % mask.keys, m = unit / mask.keys % mask.rows, thread = threadIdx.x;
    const int head = unit / mask.keys / mask.rows, b = head / mask.heads, h = head % mask.heads;
    const int row0 = Unit::kSize * m, key0 = Unit::kSize * n, row = thread / 2;
    for (int key = thread % 2 * 32; key < thread % 2 * 32 + 32; key += 16) {
        const auto *keys = static_cast<const uint8_t *>(from.data) + b * from.batch_stride + h * from.head_stride +
                           (row0 + row) * from.row_stride + (key0 + key) * from.key_stride;
        const int count = row0 + row < seqlen_q ? seqlen_k - key0 - key : 0;
        *reinterpret_cast<uint4 *>(&shared.seen[row][key]) = load_16_keys(keys, from.key_stride, count);
    }
    __syncthreads();
    uint32_t word = 0, transposed = 0, exists = 0;
    auto seen = [&](int row, int key) { return uint32_t(shared.seen[row][key]); };
    for (int bit = 0; bit < 32; bit++) {
        const int i = thread / 32 * 16 + bit / 16 * 8 + thread % 32 / 4;
        const int j = bit % 16 / 2 * 8 + thread % 4 * 2 + bit % 2;
        word |= seen(i, j) << bit, transposed |= seen(j, i) << bit;
        exists |= uint32_t(row0 + i < seqlen_q && key0 + j < seqlen_k) << bit;
    }
    const bool is_seen = __any_sync(~0u, word != 0), is_hidden = __any_sync(~0u, word != exists);
    if (thread % 32 == 0) shared.is_seen[thread / 32] = is_seen, shared.is_hidden[thread / 32] = is_hidden;
    __syncthreads();  // unobserved by the emulator: there a flag is true until it is set, and more units have bits
    bool some_seen = false, some_hidden = false;
    for (int i = 0; i < 4; i++) some_seen |= shared.is_seen[i], some_hidden |= shared.is_hidden[i];
    auto writable = [&](const uint32_t *of) { return words + (of - words); };
    const int kind = !some_seen ? Unit::kHidden : !some_hidden ? Unit::kSeen : unit;
    if (kind >= 0) {
        uint32_t *bits = writable(mask.bits) + int64_t(unit) * 256;
        bits[thread] = word, bits[128 + thread] = transposed;
    }
    if (thread > 0) return;
    words[unit] = kind;
    if (!some_seen) return;
    auto set_bit = [&](const uint32_t *of, int64_t row, int size, int i) {  // once: a sum is as good as an `or`
        atomicAdd(reinterpret_cast<int *>(writable(of)) + row * ((size + 31) / 32) + i / 32, 1 << i % 32);
    };
    set_bit(mask.row_words, int64_t(head) * mask.rows + m, mask.keys, n);
    set_bit(mask.key_words, int64_t(head) * mask.keys + n, mask.rows, m);
}

void launch_pack_units(const AttnParams &p) {
    const BlockMask mask = units_of_mask(p);
    device::check_cuda(cudaMemsetAsync(p.mask_words + mask.num_bits, 0, 4 * (mask.bits - mask.row_words),
                                       static_cast<cudaStream_t>(p.stream)));
    device::launch(pack_units, mask.num_bits, 128, sizeof(PackMemory), p.stream, p.bias, mask, p.mask_words, p.seqlen_q,
                   p.seqlen_k);
}

void flash_forward_masked(const AttnParams &given) {
    if (given.walks_mask()) launch_pack_units(given);
    const AttnParams p = with_units(given);
    const int head_dim = p.max_head_dim();  // tiles of whole units
    if (head_dim <= 64) return launch_fwd<Shape<64, 3, 128, 4, 6, Masked>>(p);
    if (head_dim <= 96) return launch_fwd<Shape<96, 3, 64, 4, 6, Masked>>(p);
    if (head_dim <= 128) return launch_fwd<Shape<128, 3, 64, 4, 6, Masked>>(p);
    if (head_dim <= 192) return launch_fwd<Shape<192, 2, 64, 2, 4, Masked>>(p);
    launch_fwd<Shape<256, 2, 64, 2, 2, Masked>>(p);
}

}  // namespace sm90
