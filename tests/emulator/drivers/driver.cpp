// The kernels of csrc on small cases and without torch, for tools that see more of a program of its own: ASan, UBSan
// and TSan on the CPU, compute-sanitizer on the GPU, the emulator. Every buffer is an allocation with nothing to spare;
// every result is compared with attention in double precision, written as plain loops. test_sanitizers.py builds and
// runs this for the CPU and the GPU, test_emulator.py for the emulator:
//
//   g++ -std=c++20 -pthread -Icsrc tests/emulator/drivers/driver.cpp     or     nvcc -std=c++20 -Icsrc -x cu tests/emulator/drivers/driver.cpp
//   ./a.out [case...]      all cases if none is named
//     --overrun            declare one key row more than is allocated: a fault that the tools must see
//     --valid-only         leave the q, k and v that must not be read uninitialized, for initcheck, instead of NaN
//     --part=0/4           every fourth case from the first on
//     --forward-only       no backward passes
//
// There the kernels are included, not linked, so that every size of tiles can be called on any GPU and with short
// sequences. With MINIMAL_ATTN_LINKED=1 the driver is linked with the objects of csrc's kernels, so that a change of
// one compiles that one alone; cases that name their tiles fail there. With MINIMAL_ATTN_EMULATED=1 it is linked as
// well, and with the emulator; then it takes
//     --early=1 --late=2 --random=3 ...    when copies and products happen, and a seed
//     --without=17                         leave the 17th statement that synchronizes out (faults.py), and stop at the
//                                          first case that shows it
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#if MINIMAL_ATTN_LINKED || MINIMAL_ATTN_EMULATED
#include "device.h"
#include "flash.h"
#include "launch.h"
using namespace device;
template <typename> using Sum = float;
#elif defined(__CUDACC__)
#include "device.cu"
#include "flash.cu"
#include "flash_sm80.cu"
#include "flash_sm90.cu"
#include "flash_dmma.cu"
#include "flash_bwd.cu"
#include "flash_bwd_bias.cu"
#include "flash_bwd_sm80.cu"
#include "flash_bwd_sm90.cu"
#include "flash_bwd_wide_sm90.cu"
using namespace simt;
#else
#include "flash_host.cpp"  // from here on simt reads host
#include "flash_bwd_host.cpp"
using namespace simt;
#endif
#if defined(__CUDACC__) || MINIMAL_ATTN_EMULATED
#define HAS_GPU 1  // a real one, or that of the emulator
#endif

#include "driver_memory.h"

bool overrun = false, valid_only = false;

enum Layout {
    kHeads,   // [batch, head, row, head_dim]
    kRows,    // [batch, row, head, head_dim]
    kGaps,    // kHeads with an element after every row that is neither to be read nor written; rows lie unaligned
    kOffset,  // kHeads from the second element of the allocation on: the pointer is unaligned
    kSlices,  // kHeads with 8 elements after every row, as slices have, which leave it aligned
    kExpanded,  // one head of one sample for all, strides of 0; the output is kHeads
};

enum Tiling { kBest, kNarrow, kWide, kSm80, kSm80Narrow, kSm90, kDmma };  // the size of tiles, or another kernel

struct Case {
    const char *name;
    DType dtype;
    int batch_size, nheads, nheads_k, seqlen_q, seqlen_k, head_dim;
    bool is_causal;
    Layout layout = kHeads;
    std::vector<int> seq_lens = {};  // of rows, and of keys if they have no other
    Tiling tiling = kBest;  // of the forward pass
    double dropout_p = 0;
    double scale = 1;  // of the scores, beside 1 / sqrt(head_dim)
    int window_left = -1, window_right = -1;  // of a causal case window_right is 0
    std::vector<int> cu_seqlens_q = {}, cu_seqlens_k = {};  // of a packed batch, whose batch_size is 1
    std::vector<int> seqused_k = {};
    int head_dim_v = head_dim;
    bool has_sinks = false;
    double softcap = 0;
    bool has_alibi = false;
    std::optional<DType> bias = {};
    std::string bias_shape = "BHRK";  // a dimension that is missing is shared
    bool is_part = false;  // of a larger problem, whose dropout it has
    bool in_any_order = false;  // dQ is summed in any order, as it always is with dropout
    std::vector<int> spike = {};  // the keys [begin, end) whose scores are alike and far above those of all others

    int max_head_dim() const { return std::max(head_dim, head_dim_v); }
    bool is_packed() const { return !cu_seqlens_q.empty(); }
    int samples() const { return is_packed() ? int(cu_seqlens_q.size()) - 1 : batch_size; }
};

Case window(Case c, int left, int right) {
    c.window_left = left, c.window_right = right;
    return c;
}
// The tensors have nine rows and nine keys more than the samples, if the case does not say otherwise.
Case packed(Case c, std::vector<int> cu_seqlens_q, std::vector<int> cu_seqlens_k, std::vector<int> seqused_k = {}) {
    c.cu_seqlens_q = cu_seqlens_q, c.cu_seqlens_k = cu_seqlens_k, c.seqused_k = seqused_k;
    if (!c.seqlen_q) c.seqlen_q = cu_seqlens_q.back() + 9;
    if (!c.seqlen_k) c.seqlen_k = cu_seqlens_k.back() + 9;
    return c;
}
Case head_dim_of_v(Case c, int head_dim_v) {
    c.head_dim_v = head_dim_v;
    return c;
}
Case with_spike(Case c, int begin, int end) {
    c.spike = {begin, end};
    return c;
}
Case in_any_order(Case c) {
    c.in_any_order = true;
    return c;
}
Case part_of_more(Case c) {
    c.is_part = true;
    return c;
}
Case with_sinks(Case c) {
    c.has_sinks = true;
    return c;
}
Case with_mods(Case c, double softcap, bool has_alibi, std::optional<DType> bias = {}, std::string shape = "BHRK") {
    c.softcap = softcap, c.has_alibi = has_alibi, c.bias = bias, c.bias_shape = shape;
    return c;
}
Case lengths_of_keys(Case c, std::vector<int> seqused_k) {
    c.seqused_k = seqused_k;
    return c;
}

constexpr DType f64 = DType::kFloat64, boolean = DType::kBool, f32 = DType::kFloat32;
constexpr DType f16 = DType::kFloat16, b16 = DType::kBFloat16;
const std::vector<Case> cases = {
    // name, dtype, batch_size, nheads, nheads_k, seqlen_q, seqlen_k, head_dim, is_causal, ...
    // Every tile in every dtype, with at least two blocks of rows and two of keys.
    {"fp32_64",           f32, 1, 1, 1,  70, 130,  64, false},
    {"fp32_128",          f32, 1, 1, 1,  65,  66, 128, true},
    {"fp32_256",          f32, 1, 1, 1,  33,  47, 253, false},
    {"fp32_128_narrow",   f32, 1, 1, 1,  66,  65, 100, true,  kRows,     {}, kNarrow},
    {"fp32_256_narrow",   f32, 1, 1, 1,  33,  18, 132, false, kHeads,    {}, kNarrow, 0.5},
    {"fp16_64",           f16, 1, 2, 1,  66,  65,  36, false, kOffset,   {}, kBest, 0.5},
    {"fp16_128",          f16, 1, 2, 1,  75,  75,  72, false, kRows,     {70}},
    {"fp16_256",          f16, 1, 1, 1,  34,  33, 200, true,  kRows},
    {"fp16_128_narrow",   f16, 1, 1, 1,  65,  40, 128, false, kHeads,    {}, kNarrow},
    {"fp16_256_narrow",   f16, 1, 2, 1,  33,  33, 256, true,  kRows,     {20}, kNarrow},
    {"bf16_64",           b16, 1, 1, 1,  65,  66,  64, true},
    {"bf16_128",          b16, 1, 2, 2,  65, 100, 127, true},
    {"bf16_256",          b16, 1, 1, 1,  33,  40, 256, false, kGaps},
    {"bf16_128_narrow",   b16, 1, 2, 1,  65,  65,  68, false, kGaps,     {33}, kNarrow},
    {"bf16_256_narrow",   b16, 1, 1, 1,  33,  17, 160, true,  kHeads,    {}, kNarrow},
#if MINIMAL_ATTN_EMULATED  // tiles for long sequences can be named in a driver that includes them
    {"fp32_64_long",      f32, 1, 1, 1, 520,  70,  64, false, kRows},
    {"fp32_128_long",     f32, 1, 1, 1, 514,  40, 128, true,  kHeads},
    {"fp32_256_long",     f32, 1, 1, 1, 513,  20, 136, false, kGaps},
#else
    {"fp32_64_wide",      f32, 1, 2, 1, 140, 140,  64, false, kRows,     {133}, kWide},
    {"fp32_128_wide",     f32, 1, 1, 1, 129, 130, 128, true,  kHeads,    {},   kWide},
    {"fp32_256_wide",     f32, 1, 1, 1,  65, 129, 253, false, kGaps,     {},   kWide},
#endif
#if HAS_GPU
    {"sm80_fp16_64",      f16, 1, 2, 1, 130, 150,  64, true,  kHeads,    {},   kSm80, 0.25},
    {"sm80_fp16_96",      f16, 1, 1, 1, 129,  70,  88, false, kRows,     {},   kSm80},
    {"sm80_fp16_128",     f16, 1, 2, 2, 140, 140, 128, true,  kRows,     {133}, kSm80},
    {"sm80_fp16_192",     f16, 1, 1, 1,  66,  90, 160, true,  kHeads,    {},   kSm80},
    {"sm80_fp16_256",     f16, 1, 2, 1,  70,  70, 256, false, kRows,     {65}, kSm80, 0.1},
    {"sm80_bf16_64",      b16, 2, 4, 2, 140, 140,  40, false, kRows,     {3, 129}, kSm80},
    {"sm80_bf16_96",      b16, 1, 1, 1, 130, 130,  96, true,  kHeads,    {},   kSm80},
    {"sm80_bf16_128",     b16, 1, 2, 1, 129,  65, 104, true,  kRows,     {},   kSm80, 0.5},
    {"sm80_bf16_192",     b16, 1, 2, 1,  65,  65, 192, false, kRows,     {64}, kSm80},
    {"sm80_bf16_256",     b16, 1, 1, 1,  66, 100, 200, true,  kHeads,    {},   kSm80},
    // 20 heads that share keys: the tile of the first sample is split in two, that of the second is not.
    {"sm80_splits",       b16, 2, 20, 1, 110, 110, 64, true,  kRows,     {110, 40}, kSm80},
    part_of_more({"sm80_splits_drop", f16, 1, 20, 1, 105, 70, 104, false, kHeads, {}, kSm80, 0.25}),
    {"sm80_128_narrow",   f16, 1, 2, 1,  70, 130, 120, true,  kHeads,    {},   kSm80Narrow, 0.25},
    {"sm80_256_narrow",   b16, 1, 2, 1,  70,  70, 200, true,  kRows,     {65}, kSm80Narrow},
    {"sm80_one",          b16, 1, 1, 1,   1,   1,   8, true,  kHeads,    {},   kSm80},
    {"dmma_64",           f32, 2, 4, 2, 140, 140,  40, false, kRows,     {3, 129}, kDmma},
    {"dmma_64_causal",    f32, 1, 1, 1,  66, 130,  64, true,  kHeads,    {},   kDmma},
    {"dmma_128",          f32, 1, 2, 1,  70,  70, 100, false, kRows,     {65}, kDmma},
    {"dmma_128_causal",   f32, 1, 2, 1, 129,  65, 128, true,  kRows,     {},   kDmma},
    {"dmma_one",          f32, 1, 1, 1,   1,   1,   4, true,  kHeads,    {},   kDmma},
    // Three blocks of keys or more, whose order shows in the bits of dq.
    {"sm80_order",        b16, 1, 2, 1,  70, 200,  96, false, kHeads,    {},   kSm80},
    {"sm80_order_causal", f16, 1, 1, 1, 130, 260,  80, true,  kRows,     {},   kSm80},
    {"sm80_order_narrow", f16, 1, 1, 1,  40, 130, 136, true,  kRows,     {},   kSm80Narrow},
#else
    {"fp64_64",           f64, 2, 2, 1,  67,  67,  20, true,  kGaps,     {66, 5}, kBest, 0.25},
    {"fp64_128",          f64, 1, 1, 1,  33,  40,  70, false, kOffset},
    {"fp64_256",          f64, 1, 2, 2,  40,  33, 130, true,  kRows},
#endif
    // What else the interface allows.
    {"gqa",               f32, 2, 6, 2,   3,  70,  16, true,  kRows},
    {"dropout",           f32, 2, 4, 2,  83,  70,  20, true,  kRows,     {}, kBest, 0.1},
    part_of_more({"dropout_part", f32, 2, 4, 2, 83, 70, 20, true, kRows, {}, kBest, 0.1}),
    {"dropout_all",       f32, 1, 1, 1,   5,   5,   8, false, kGaps,     {}, kBest, 1},
    {"seq_lens_clamped",  f32, 4, 1, 1,  67,  67,  20, false, kHeads,    {1 << 30, 66, 0, -5}},
    {"rows_without_keys", f32, 1, 1, 1, 130,  60,  16, true},
    {"one",               f32, 1, 1, 1,   1,   1,   1, true},
#if HAS_GPU
    // Every tile in both dtypes; lengths about those of the blocks, several blocks of rows and of keys.
    {"sm90_64",           f16, 1, 2, 1, 193, 257,  64, false, kHeads,    {},   kSm90},
    {"sm90_64_causal",    b16, 1, 1, 1, 385, 384,  64, true,  kRows,     {},   kSm90},
    {"sm90_40",           b16, 1, 1, 1, 191, 127,  40, false, kSlices,   {},   kSm90},
    {"sm90_96",           b16, 1, 1, 1, 193, 289,  96, false, kRows,     {},   kSm90},
    {"sm90_80_causal",    f16, 1, 2, 2, 192, 193,  80, true,  kSlices,   {},   kSm90},
    {"sm90_128",          f16, 1, 1, 1, 193, 321, 128, false, kHeads,    {},   kSm90},
    {"sm90_128_causal",   b16, 1, 2, 1, 257, 513, 128, true,  kRows,     {},   kSm90},
    {"sm90_104",          b16, 1, 1, 1, 191, 127, 104, false, kSlices,   {},   kSm90},
    {"sm90_128_long",     f16, 1, 1, 1,  70, 2049, 128, false, kRows,    {},   kSm90},
    {"sm90_128_long_causal", b16, 2, 1, 1, 70, 2060, 128, true, kHeads,  {},   kSm90},
    {"sm90_192",          b16, 1, 1, 1, 129, 241, 192, false, kHeads,    {},   kSm90},
    {"sm90_136_causal",   f16, 1, 1, 1, 128,  81, 136, true,  kSlices,   {},   kSm90},
    {"sm90_256",          f16, 1, 1, 1, 129, 193, 256, false, kRows,     {},   kSm90},
    {"sm90_200_causal",   b16, 1, 1, 1, 127, 257, 200, true,  kHeads,    {},   kSm90},
    // The backward pass: dropout, heads that share keys and are split, many blocks of keys that take turns.
    {"sm90_drop_64",      b16, 1, 2, 1, 200, 260,  64, true,  kRows,     {},   kSm90, 0.25},
    part_of_more({"sm90_drop_128", f16, 1, 2, 1, 130, 140, 104, false, kHeads, {}, kSm90, 0.25}),
    {"sm90_splits",       b16, 5, 20, 1, 110, 110, 64, true,  kRows,     {110, 40, 30, 110, 20}, kSm90},
    lengths_of_keys({"sm90_splits_turns", b16, 2, 20, 1, 110, 260, 64, false, kRows, {110, 40}, kSm90}, {260, 260}),
    window({"sm90_unseen", b16, 1, 20, 1, 110, 500, 64, false, kRows, {}, kSm90}, 100, 64),
    in_any_order(window({"sm90_unseen_128", f16, 2, 2, 1, 70, 620, 120, false, kHeads, {}, kSm90}, 100, 64)),
    {"sm90_splits_drop",  f16, 1, 20, 1, 105,  70, 104, false, kHeads,   {},   kSm90, 0.25},
    part_of_more({"sm90_drop_192", b16, 2, 2, 1, 130, 200, 192, true, kHeads, {130, 77}, kSm90, 0.25}),
    {"sm90_drop_256",     f16, 1, 2, 1,  75, 140, 200, false, kSlices,   {},   kSm90, 0.25},
    {"sm90_turns",        b16, 1, 2, 1, 200, 700,  64, false, kRows,     {},   kSm90},
    // Pairs of blocks.
    in_any_order({"sm90_pair",        f16, 1, 1, 1, 129, 193, 256, false, kRows,   {},   kSm90}),
    in_any_order({"sm90_pair_causal", b16, 2, 4, 2, 200, 300, 200, true,  kHeads,  {},   kSm90}),
    in_any_order({"sm90_pair_192",    b16, 1, 2, 1, 150, 270, 192, true,  kSlices, {},   kSm90}),
    in_any_order({"sm90_pair_rows",   f16, 1, 1, 1, 330,  70, 256, false, kRows,   {},   kSm90}),
    in_any_order({"sm90_pair_lens",   b16, 3, 1, 1, 170, 170, 256, true,  kSlices, {64, 129, 128}, kSm90}),
    in_any_order(packed({"sm90_pair_packed", f16, 1, 2, 1, 0, 0, 256, true, kRows, {}, kSm90}, {0, 1, 130, 131, 200},
                        {0, 90, 90, 193, 330})),
    in_any_order(window({"sm90_pair_window", b16, 1, 1, 1, 70, 400, 256, false, kHeads, {}, kSm90}, 100, 64)),
    in_any_order(with_spike({"sm90_pair_low", b16, 1, 1, 1, 65, 100, 256, false, kHeads, {}, kSm90, 0, -600}, 0, 100)),
    {"sm90_turns_128",    f16, 1, 2, 2, 450, 400, 128, false, kHeads,    {},   kSm90},
    {"sm90_turns_causal", f16, 1, 1, 1, 200, 700, 128, true,  kRows,     {},   kSm90},
    {"sm90_many_192",     b16, 2, 4, 2, 200, 140, 192, true,  kHeads,    {},   kSm90},
    {"sm90_256_rows",     f16, 1, 1, 1, 330,  70, 256, false, kRows,     {},   kSm90},
    {"sm90_long",         b16, 1, 2, 2, 2090, 200, 128, true,  kRows,     {},   kSm90},
    in_any_order({"sm90_long_late", f16, 1, 2, 2, 2090, 200, 120, false, kHeads, {},  kSm90}),
    in_any_order({"sm90_many_late", b16, 1, 4, 2, 385, 130,  64, true,  kHeads,  {},   kSm90}),
    // Samples that end where a block does, a row later, in the first row or before it, or only say so.
    {"sm90_lens_64",      f16, 6, 1, 1, 260, 260,  64, false, kHeads,    {1, 128, 129, 0, 256, 1 << 30}, kSm90},
    {"sm90_lens_40",      b16, 4, 2, 1, 200, 200,  40, true,  kRows,     {192, 193, 128, -5}, kSm90},
    {"sm90_lens_96",      f16, 3, 1, 1, 330, 330,  96, true,  kSlices,   {192, 289, 1}, kSm90},
    {"sm90_lens_128",     b16, 4, 1, 1, 360, 360, 128, false, kRows,     {1, 192, 193, 321}, kSm90},
    {"sm90_lens_192",     f16, 3, 1, 1, 230, 230, 192, false, kHeads,    {80, 161, 64}, kSm90},
    {"sm90_lens_256",     b16, 3, 1, 1, 170, 170, 256, true,  kSlices,   {64, 129, 128}, kSm90},
    // Persistent blocks, which take tiles in turn, or by a counter those of several heads at a time.
    {"sm90_many",         f16, 3, 4, 2,  70, 140,  64, false, kRows,     {},   kSm90},
    {"sm90_many_causal",  b16, 1, 8, 4, 385, 130,  64, true,  kHeads,    {},   kSm90},
    in_any_order({"sm90_waves",       b16, 1, 130, 65, 200, 200, 64, true, kRows,  {},   kSm90}),
    {"sm90_many_pairs",   f16, 1, 12, 1, 150, 180, 128, true,  kRows,    {},   kSm90},
    {"sm90_many_lens",    b16, 5, 4, 1, 200, 200,  48, true,  kRows,     {0, 200, 5, 129, 0}, kSm90},
    // What else the interface allows.
    {"sm90_one",          b16, 1, 1, 1,   1,   1,   8, true,  kHeads,    {},   kSm90},
    {"sm90_one_row",      f16, 2, 4, 1,   1, 400, 128, true,  kRows,     {},   kSm90},
    {"sm90_no_keys_yet",  b16, 1, 2, 1, 300,  60, 128, true,  kHeads,    {},   kSm90},
    {"sm90_expanded",     f16, 2, 4, 2, 130, 200,  64, false, kExpanded, {},   kSm90},
    {"sm90_scale_0",      f16, 1, 1, 1,  70, 200,  64, true,  kHeads,    {},   kSm90, 0, 0},
    {"sm90_scale_below_0", b16, 2, 1, 1, 200, 200, 128, false, kRows,    {190, 177}, kSm90, 0, -1},
    {"sm90_scale_below_0_causal", f16, 1, 1, 1, 70, 400, 256, true, kRows, {}, kSm90, 0, -1},
    // Scores that grow by more than 15 binary orders from one block without a mask to the next.
    {"sm90_scale_30",     f16, 1, 2, 1, 150, 400,  64, false, kHeads,    {},   kSm90, 0, 30},
    {"sm90_scale_30_causal", b16, 2, 1, 1, 300, 300, 96, true, kRows,    {299, 170}, kSm90, 0, 30},
    {"sm90_scale_30_96",  f16, 1, 1, 1,  70, 289,  88, false, kSlices,   {},   kSm90, 0, 30},
    {"sm90_scale_30_128", b16, 1, 1, 1,  70, 257, 128, false, kHeads,    {},   kSm90, 0, 30},
    {"sm90_scale_30_192", b16, 1, 1, 1,  70, 241, 192, false, kHeads,    {},   kSm90, 0, 30},
    {"sm90_scale_30_256", f16, 1, 1, 1,  70, 193, 256, false, kRows,     {},   kSm90, 0, 30},
#endif
    // Windows: wider than a block of keys, narrower, and of one key. Blocks may be cut at both ends.
    window({"simt_window",      f32, 1, 2, 1, 150, 170,  36, false, kGaps}, 30, 20),
    window({"simt_window_one",  f32, 2, 1, 1,  70,  70, 100, false, kRows}, 0, 0),
#if HAS_GPU
    window({"dmma_window",      f32, 1, 1, 1, 130, 200,  64, false, kHeads,  {}, kDmma}, 40, 0),
    window({"sm80_window",      f16, 1, 2, 1, 200, 300,  64, false, kHeads,  {}, kSm80}, 150, 0),
    window({"sm80_window_both", b16, 2, 2, 2, 150, 150, 128, false, kRows,   {}, kSm80, 0.25}, 20, 33),
    window({"sm80_window_one",  b16, 1, 4, 1, 140, 200, 160, false, kRows,   {}, kSm80}, 0, 0),
    window({"sm80_window_left", f16, 1, 1, 1, 300, 100,  96, false, kHeads,  {}, kSm80}, 10, -1),
    window({"sm80_window_below_0", f16, 1, 1, 1, 300, 300, 64, false, kHeads, {}, kSm80, 0, -1}, 280, 0),
    window({"sm80_window_scale_0", f16, 1, 1, 1,  70, 300, 64, false, kHeads, {}, kSm80, 0, 0}, 150, 0),
    window({"dmma_window_below_0", f32, 1, 1, 1, 130, 200, 64, false, kHeads, {}, kDmma, 0, -1}, 40, 0),
    window({"sm90_window",      f16, 1, 2, 1, 400, 500,  64, false, kHeads,  {}, kSm90}, 200, 0),
    window({"sm90_window_both", b16, 2, 2, 2, 250, 250, 128, false, kRows,   {}, kSm90}, 20, 33),
    window({"sm90_window_one",  b16, 1, 4, 1, 200, 300, 192, false, kRows,   {}, kSm90}, 0, 0),
    window({"sm90_window_left", f16, 1, 1, 1, 400, 150,  96, false, kSlices, {}, kSm90}, 70, -1),
    window({"sm90_window_256",  b16, 1, 1, 1,  70, 400, 256, false, kHeads,  {}, kSm90}, 100, 64),
    window({"sm90_window_drop", f16, 1, 2, 1, 150, 270, 136, false, kRows,   {}, kSm90, 0.25}, 90, 33),
    window({"sm90_window_long", f16, 1, 1, 1,  70, 2100, 128, false, kRows,  {}, kSm90}, 2060, 0),
    window({"sm90_window_scale_30", f16, 1, 1, 1, 70, 500, 64, false, kHeads, {}, kSm90, 0, 30}, 300, 0),
    // A block that is cut on the left has the largest scores, also of keys that are hidden.
    window(with_spike({"sm90_window_spike", f16, 1, 1, 1, 400, 400, 64, false, kHeads, {}, kSm90, 0, 30}, 128, 256),
           200, 0),
    window({"sm90_window_below_0", f16, 1, 1, 1, 70, 300, 64, false, kHeads, {}, kSm90, 0, -1}, 150, 0),
#endif
    // Packed batches: samples of no rows, of no keys, of one row, and longer than a tile.
    packed({"simt_packed",        f32, 1, 2, 1, 0, 0,  40, false, kRows}, {0, 70, 70, 71, 100, 109},
           {0, 5, 70, 71, 71, 170}),
    packed({"simt_packed_causal", f32, 1, 2, 2, 0, 0,  72, true,  kHeads}, {0, 3, 90, 130}, {0, 60, 61, 140}),
    packed({"simt_packed_drop",   f16, 1, 2, 1, 0, 0,  40, false, kRows, {}, kBest, 0.25}, {0, 40, 61}, {0, 20, 90}),
#if HAS_GPU
    packed({"dmma_packed",        f32, 1, 2, 1, 0, 0,  64, true,  kRows,  {}, kDmma}, {0, 70, 70, 71, 150},
           {0, 5, 70, 71, 230}),
    packed({"sm80_packed",        f16, 1, 2, 1, 0, 0,  64, false, kRows,  {}, kSm80}, {0, 150, 150, 151, 200, 330},
           {0, 5, 70, 71, 71, 300}),
    packed({"sm80_packed_causal", b16, 1, 4, 2, 0, 0, 128, true,  kRows,  {}, kSm80}, {0, 70, 199, 200, 330},
           {0, 70, 199, 200, 430}),
    part_of_more(packed({"sm80_packed_drop", b16, 1, 2, 2, 0, 0, 200, true, kHeads, {}, kSm80, 0.25}, {0, 33, 70, 140},
                        {0, 33, 70, 140})),
    packed({"sm90_packed",        f16, 1, 2, 1, 0, 0,  64, false, kRows,  {}, kSm90}, {0, 250, 250, 251, 300, 530},
           {0, 5, 70, 71, 71, 300}),
    packed({"sm90_packed_turns",  b16, 1, 4, 4, 0, 0, 128, false, kRows,  {}, kSm90}, {0, 70, 400}, {0, 70, 600}),
    packed({"sm90_packed_causal", b16, 1, 4, 2, 0, 0, 128, true,  kRows,  {}, kSm90}, {0, 70, 199, 200, 430},
           {0, 70, 199, 200, 630}),
    packed({"sm90_packed_96",     b16, 1, 1, 1, 0, 0,  88, true,  kSlices, {}, kSm90}, {0, 192, 385, 400},
           {0, 96, 289, 300}),
    packed({"sm90_packed_256",    f16, 1, 1, 1, 0, 0, 256, false, kRows,  {}, kSm90}, {0, 1, 130, 131},
           {0, 64, 64, 193}),
    part_of_more(packed({"sm90_packed_drop", b16, 1, 4, 2, 0, 0, 256, true, kHeads, {}, kSm90, 0.25}, {0, 33, 33, 170},
                        {0, 33, 50, 190})),
#endif
    // Rows and keys with lengths of their own, in both layouts. The keys of packed samples may then overlap.
    lengths_of_keys({"simt_lengths", f32, 3, 2, 1,  70, 130,  40, true, kRows,  {70, 33, 0}}, {130, 5, 60}),
    packed({"simt_overlap",       f32, 1, 2, 1, 0, 0,  40, true,  kRows,  {33, 50, 10}}, {0, 40, 90, 100},
           {0, 0, 30, 130}, {60, 130, 9}),
#if HAS_GPU
    lengths_of_keys({"sm80_lengths", f16, 3, 4, 1, 150, 300,  64, true, kRows,  {150, 65, 0}, kSm80}, {300, 5, 60}),
    // The first sample has the most splits, more than the padded lengths would give it without a limit.
    lengths_of_keys({"sm80_splits_short", b16, 2, 20, 1, 110, 200, 64, true, kRows, {110, 110}, kSm80}, {40, 200}),
    lengths_of_keys({"sm90_lengths", b16, 3, 4, 1, 250, 400, 128, true, kRows,  {250, 65, 0}, kSm90}, {400, 5, 60}),
    packed({"sm90_overlap",       f16, 1, 2, 1, 0, 0, 104, false, kSlices, {190, 66, 1}, kSm90}, {0, 200, 290, 300},
           {0, 0, 30, 330}, {160, 330, 9}),
    // What cu_seqlens holds beyond the tensors is clamped.
    packed({"sm80_clamped",       f16, 1, 1, 1, 99, 139, 64, true, kHeads, {}, kSm80}, {-7, 50, 60, 1 << 30},
           {3, 50, 139, 1 << 30}),
    packed({"sm90_clamped",       f16, 1, 1, 1, 99, 139, 64, true, kHeads, {}, kSm90}, {-7, 50, 60, 1 << 30},
           {3, 90, 140, 1 << 30}),
#endif
    // V, and out, of another head_dim; sinks, also of rows without keys and of rows beyond the end of a sample.
    head_dim_of_v({"simt_wide_v",  f32, 1, 2, 1,  70,  70,  20, true,  kRows,  {65}}, 72),
    head_dim_of_v({"simt_narrow_v", f16, 1, 1, 1, 66,  65,  72, false, kGaps,  {}, kBest, 0.25}, 5),
    with_sinks({"simt_sinks",      f32, 2, 2, 1,  70,  40,  20, true,  kRows,  {70, 33}}),
    packed(with_sinks({"simt_packed_sinks", f32, 1, 2, 1, 0, 0, 40, true, kRows}), {0, 40, 40, 61}, {0, 20, 30, 90}),
#if HAS_GPU
    head_dim_of_v({"dmma_wide_v",   f32, 1, 1, 1,  66, 130,  40, true,  kHeads, {}, kDmma}, 100),
    head_dim_of_v({"sm80_wide_v",   b16, 2, 4, 2, 140, 140,  40, true,  kRows,  {3, 129}, kSm80, 0.25}, 104),
    head_dim_of_v({"sm80_narrow_v", f16, 1, 2, 1,  70, 130, 192, false, kSlices, {}, kSm80}, 128),
    head_dim_of_v({"sm80_splits_v", b16, 2, 20, 1, 110, 110, 64, true,  kRows,  {110, 40}, kSm80}, 24),
    with_sinks({"sm80_sinks",       f16, 2, 4, 2, 140, 100,  64, true,  kRows,  {140, 65}, kSm80}),
    with_sinks({"sm80_sinks_drop",  b16, 1, 2, 1, 130,  65, 128, true,  kHeads, {}, kSm80, 0.25}),
    head_dim_of_v({"sm90_wide_v",   b16, 2, 4, 2, 250, 250,  40, true,  kRows,  {3, 229}, kSm90}, 104),
    head_dim_of_v({"sm90_narrow_v", f16, 1, 2, 1, 150, 260, 192, true,  kSlices, {}, kSm90}, 128),
    packed(head_dim_of_v({"sm90_packed_v", b16, 1, 2, 1, 0, 0, 96, true, kRows, {}, kSm90}, 40), {0, 70, 199, 200},
           {0, 70, 199, 200}),
    with_sinks({"sm90_sinks",       f16, 2, 4, 2, 200, 130,  64, true,  kRows,  {200, 165}, kSm90}),
    packed(with_sinks({"sm90_packed_sinks", b16, 1, 2, 1, 0, 0, 128, true, kRows, {}, kSm90}), {0, 70, 70, 271},
           {0, 70, 99, 100}),
#endif
    // Softcap, ALiBi, biases of several dtypes and shapes, masks.
    with_mods({"simt_softcap",      f32, 1, 2, 1,  70, 130,  40, true,  kGaps}, 2, false),
    with_mods({"simt_alibi",        f16, 2, 2, 1, 140,  70,  72, false, kRows, {}, kBest, 0.25}, 0, true),
    with_mods({"simt_bias",         f32, 2, 2, 2,  66,  65, 130, false, kRows, {66, 33}}, 3, true, f32, "HRK"),
    part_of_more(with_mods({"simt_bias_of_keys", b16, 2, 2, 1, 66, 70, 40, true, kHeads, {}, kBest, 0.25}, 0, false,
                           b16, "BK")),
    with_mods({"simt_mask",         f32, 2, 4, 2,  70,  66,  20, false, kRows}, 0, false, boolean, "BRK"),
    packed(with_mods({"simt_packed_mods", f32, 1, 2, 1, 0, 0, 40, true, kRows}, 4, true), {0, 40, 40, 61},
           {0, 20, 30, 90}),
    with_sinks(with_mods({"simt_mask_sinks", f32, 1, 2, 1, 70, 66, 20, true, kRows}, 0, true, boolean, "HRK")),
#if HAS_GPU
    with_mods({"sm80_softcap",      f16, 1, 2, 1, 130, 150,  64, true,  kHeads, {}, kSm80}, 2, false),
    part_of_more(with_mods({"sm80_softcap_drop", b16, 1, 4, 1, 130, 100, 128, false, kRows, {}, kSm80, 0.25}, 2,
                           false)),
    with_mods({"sm80_alibi",        b16, 2, 4, 2, 140, 140, 128, true,  kRows,  {3, 129}, kSm80}, 0, true),
    with_mods({"sm80_bias",         f16, 2, 2, 1, 140, 200,  96, false, kRows,  {}, kSm80, 0.25}, 3, true, f16, "HRK"),
    with_mods({"sm80_bias_fp32",    b16, 1, 2, 1,  70,  70, 192, true,  kRows,  {}, kSm80}, 0, false, f32, "BHRK"),
    with_mods({"sm80_mask",         f16, 2, 4, 2, 130, 140, 256, false, kHeads, {}, kSm80}, 0, false, boolean, "BK"),
    with_mods({"sm80_mask_narrow",  b16, 2, 2, 1,  70,  70, 136, true,  kRows,  {65, 70}, kSm80Narrow}, 0, true, boolean,
              "BRK"),
    packed(with_mods({"sm80_packed_mods", f16, 1, 2, 1, 0, 0, 64, true, kRows, {}, kSm80}, 4, true), {0, 70, 70, 199},
           {0, 70, 99, 200}),
    window(with_mods({"sm80_window_mods", b16, 1, 20, 1, 110, 110, 64, false, kRows, {}, kSm80}, 3, false, b16, "RK"), 20,
           33),
    with_mods({"sm90_mods_drop",    b16, 1, 2, 1, 150, 150,  64, true,  kRows,  {}, kSm90, 0.25}, 2, true),
    with_mods({"sm90_mods_drop_128", f16, 1, 2, 1, 100, 150, 128, false, kHeads, {}, kSm90, 0.25}, 3, false),
    // All scores are far below 0, and the last tile of keys is padded.
    with_spike({"sm90_low_64",      b16, 1, 1, 1, 100, 192,  64, false, kHeads, {}, kSm90, 0, -300}, 0, 192),
    with_spike({"sm90_low_128",     f16, 1, 1, 1,  65, 192, 128, true,  kHeads, {}, kSm90, 0, -400}, 0, 192),
    with_spike({"sm90_low_256",     b16, 1, 1, 1,  65, 100, 256, false, kHeads, {}, kSm90, 0, -600}, 0, 100),
    with_mods({"sm90_softcap",      f16, 1, 2, 1, 250, 300,  64, true,  kHeads, {}, kSm90}, 2, false),
    with_mods({"sm90_alibi",        b16, 2, 4, 2, 200, 200, 128, true,  kRows,  {3, 129}, kSm90}, 0, true),
    with_mods({"sm90_bias",         f16, 2, 2, 1, 200, 304,  96, false, kRows,  {}, kSm90}, 3, true, f16, "HRK"),
    with_mods({"sm90_bias_of_keys", b16, 1, 2, 1, 150, 176, 192, true,  kRows,  {}, kSm90}, 0, false, b16, "BHK"),
    with_mods({"sm90_mask",         f16, 2, 4, 2, 130, 241, 256, false, kHeads, {}, kSm90}, 0, false, boolean, "BK"),
    with_mods({"sm90_mask_rows",    b16, 2, 2, 1, 270, 208, 128, true,  kSlices, {265, 208}, kSm90}, 0, true, boolean,
              "BRK"),
    with_mods({"sm90_mods_scale_30", b16, 1, 2, 1, 150, 400, 128, false, kHeads, {}, kSm90, 0, 30}, 0, true, b16, "HRK"),
    with_mods({"sm90_mask_scale_30", f16, 1, 2, 1, 200, 477, 64, true, kHeads, {}, kSm90, 0, 30}, 9, false, boolean, "RK"),
    // With ALiBi the walk along the keys begins in the middle; samples that share a bias take turns.
    with_mods({"sm90_mask_alibi",   b16, 2, 2, 1, 300, 500, 128, false, kHeads, {}, kSm90}, 0, true, boolean, "HRK"),
    lengths_of_keys(with_mods({"sm90_alibi_no_keys", b16, 3, 1, 1, 200, 200, 128, false, kRows, {}, kSm90}, 0, true),
                    {200, 0, 90}),
    with_mods({"sm90_mask_all",     f16, 2, 2, 1, 200, 300,  96, false, kRows,  {}, kSm90}, 0, false, boolean),
    window(with_mods({"sm90_mask_window", b16, 1, 2, 1, 210, 312, 192, false, kRows, {}, kSm90}, 0, false, boolean, "HR"),
           20, 33),
    with_mods({"sm90_bias_samples", b16, 3, 4, 2, 200, 208,  64, true,  kRows,  {}, kSm90}, 0, false, b16, "HRK"),
    packed(with_mods({"sm90_packed_mods", f16, 1, 2, 1, 0, 0, 64, true, kRows, {}, kSm90}, 4, true), {0, 70, 70, 299},
           {0, 70, 99, 400}),
    window(with_mods({"sm90_window_mods", b16, 1, 4, 1, 210, 312, 40, false, kRows, {}, kSm90}, 3, false, b16, "RK"), 20,
           33),
#endif
#if MINIMAL_ATTN_EMULATED  // a backward pass is not asked for it
    {"sm90_no_rows",      f16, 1, 2, 1,   0, 200,  64, false, kHeads,    {},   kSm90},
#endif
};

// [batch_size, heads, rows, head_dim], on host and device; NaN (all bits set, in any dtype) where nothing was written.
template <typename T> struct Buffer {
    int64_t heads, head_dim, row_stride, head_stride, batch_stride, offset;
    std::vector<T> host;
    T *device;
    bool poison;  // NaN on the device too, where nothing was written

    Buffer(int batch_size, int heads_, int rows, int head_dim_, Layout layout = kHeads, bool poison = true)
        : heads(heads_), head_dim(head_dim_),
          row_stride(layout == kRows ? heads * head_dim : head_dim + (layout == kGaps) + 8 * (layout == kSlices)),
          head_stride(layout == kRows ? head_dim : layout == kExpanded ? 0 : rows * row_stride),
          batch_stride(layout == kExpanded ? 0 : heads * rows * row_stride), offset(layout == kOffset),
          host(index(batch_size - 1, heads - 1, rows - 1) + head_dim), device(static_cast<T *>(allocate(bytes()))),
          poison(poison) {
        make_nan(poison);
    }
    Buffer(const Buffer &) = delete;
    ~Buffer() { release(device); }

    Tensor tensor() const { return {device + offset, batch_stride, head_stride, row_stride}; }
    size_t bytes() const { return host.size() * sizeof(T); }
    int64_t index(int64_t b, int64_t h, int64_t r) const {
        return offset + b * batch_stride + h * head_stride + r * row_stride;
    }
    double at(int64_t b, int64_t h, int64_t r, int64_t d) const { return decode(host[index(b, h, r) + d]); }
    void fetch() { copy(host.data(), device, bytes()); }
    void make_nan(bool on_device = true) {
        std::memset(static_cast<void *>(host.data()), 0xff, bytes());
        if (on_device) copy(device, host.data(), bytes());
    }
    // Of the first sample in kHeads: zeros in all other columns.
    void set_first_column(auto value_of) {
        for (int64_t h = 0; h < heads; h++)
            for (int64_t r = 0; r < batch_stride / heads / head_dim; r++)
                for (int64_t d = 0; d < head_dim; d++) host[index(0, h, r) + d] = encode<T>(d ? 0.f : value_of(r));
        copy(device, host.data(), bytes());
    }
    void randomize(int64_t b, int64_t begin, int64_t end, std::mt19937 &random) {
        for (int64_t h = 0; h < heads; h++)
            for (int64_t r = begin; r < end; r++) {
                T *x = &host[index(b, h, r)];  // multiples of 1/64 in [-2, 2): exact in every dtype
                for (int64_t d = 0; d < head_dim; d++) x[d] = encode<T>((int(random() & 255) - 128) / 64.f);
            }
        upload(b, begin, end);
    }
    void upload(int64_t b, int64_t begin, int64_t end) {
        if (poison) return copy(device, host.data(), bytes());
        for (int64_t h = 0; h < heads; h++)
            for (int64_t r = begin; r < end; r++)
                copy(device + index(b, h, r), &host[index(b, h, r)], head_dim * sizeof(T));
    }
};

// A result in double precision: [batch_size, heads, rows, head_dim], and the sum of the magnitudes of its terms, to
// which rounding errors are proportional.
struct Expected {
    const char *name;
    int batch_size, heads, rows, head_dim;
    std::vector<double> value, magnitude;

    Expected(const char *name, int batch_size, int heads, int rows, int head_dim)
        : name(name), batch_size(batch_size), heads(heads), rows(rows), head_dim(head_dim),
          value(size_t(batch_size) * heads * rows * head_dim), magnitude(value) {}
    size_t index(int b, int h, int r) const { return ((size_t(b) * heads + h) * rows + r) * head_dim; }
    void add(size_t at, double x, double size) { value[at] += x, magnitude[at] += std::abs(size); }
    void add(size_t at, double x) { add(at, x, x); }
};

// got has rounded once to its own epsilon, and before that to error · magnitude.
template <typename T> void check(Buffer<T> &got, const Expected &expected, double error, double epsilon) {
    got.fetch();
    std::vector<T> rest = got.host;
    for (int b = 0; b < expected.batch_size; b++)
        for (int h = 0; h < expected.heads; h++)
            for (int r = 0; r < expected.rows; r++) {
                const size_t at = expected.index(b, h, r);
                for (int d = 0; d < expected.head_dim; d++) {
                    const double x = got.at(b, h, r, d), y = expected.value[at + d];
                    const double tolerance = error * (1 + expected.magnitude[at + d]) + epsilon / 2 * std::abs(y);
                    if (x == y || std::abs(x - y) <= tolerance) continue;  // a NaN is neither
                    char text[128];
                    std::snprintf(text, sizeof(text), "%s[%d][%d][%d][%d] is %.8g, expected %.8g ± %.2g", expected.name,
                                  b, h, r, d, x, y, tolerance);
                    throw std::runtime_error(text);
                }
                std::memset(static_cast<void *>(&rest[got.index(b, h, r)]), 0xff, expected.head_dim * sizeof(T));
            }
    const auto *bytes = reinterpret_cast<const unsigned char *>(rest.data());
    if (!std::all_of(bytes, bytes + got.bytes(), [](unsigned char x) { return x == 0xff; }))
        throw std::runtime_error(std::string("something was written between the rows of ") + expected.name);
}

constexpr int64_t kSeed = 0x123456789abcdef;

// Where the rows, keys and heads of sample b begin in a larger problem, and its number there.
std::array<int64_t, 4> origin_of(const Case &c, int b) {
    if (!c.is_part) return {0, 0, 0, b};
    return {16 * (b + 3), 16 * (5 * b + 7), 2 * b + 11, 40 - 3 * b};
}

// dropout.h once more, for one element: Philox-4x32-7.
bool keeps(uint32_t keep_count, uint32_t b, uint32_t h, uint32_t row, uint32_t col) {
    uint32_t x[4] = {row / 16 * 8 + row % 8, col / 16 * 4 + col % 8 / 2, h, b};
    uint32_t key[2] = {uint32_t(kSeed), uint32_t(kSeed >> 32)};
    for (int round = 0; round < 7; round++, key[0] += 0x9e3779b9, key[1] += 0xbb67ae85) {
        const uint64_t product0 = 0xd2511f53ull * x[0], product1 = 0xcd9e8d57ull * x[2];
        x[0] = product1 >> 32 ^ x[1] ^ key[0], x[2] = product0 >> 32 ^ x[3] ^ key[1];
        x[1] = product1, x[3] = product0;
    }
    const uint32_t word = x[row / 8 % 2 + col / 8 % 2 * 2], number = (col % 2 ? word >> 16 : word) % 0x8000;
    return number + keep_count >= 0x8000;
}

bool is_sm90_backward(const Case &c) {
    if (c.tiling != kSm90 || c.bias || (c.seqlen_q == 0 && !c.is_packed())) return false;
    return c.max_head_dim() <= 128 || (c.softcap == 0 && !c.has_alibi);
}
bool is_sm80(const Case &c) { return c.tiling == kSm80 || c.tiling == kSm80Narrow; }

// By the tiles that a case names, on any GPU: those for less shared memory, and those for long sequences. The emulator
// has as little shared memory instead.
#if MINIMAL_ATTN_LINKED || MINIMAL_ATTN_EMULATED
template <typename T> void named_forward(const Case &, const AttnParams &) {
    throw std::runtime_error("a linked driver has no tiles to name");
}
template <typename T> void narrow_backward(const Case &c, const AttnBackwardParams &p) { named_forward<T>(c, p); }
#else
template <typename T> void named_forward(const Case &c, const AttnParams &p) {
    if constexpr (!std::is_same_v<T, double>)
        if (c.tiling == kNarrow)
            return c.max_head_dim() <= 128 ? launch_fwd<T, Tiles128Narrow>(p) : launch_fwd<T, Tiles256Narrow>(p);
    if constexpr (std::is_same_v<T, float>) {
        if (c.max_head_dim() <= 64) return launch_fwd<T, Tiles64Wide>(p);
        return c.max_head_dim() <= 128 ? launch_fwd<T, Tiles128Wide>(p) : launch_fwd<T, Tiles256Wide>(p);
    }
    throw std::runtime_error("there are no such tiles of this type");
}
#ifdef __CUDACC__
template <typename T> void narrow_backward(const Case &c, const AttnBackwardParams &p) {
    if constexpr (sizeof(T) == 2) {
        simt::preprocess_backward(p);
        c.max_head_dim() <= 128 ? sm80::launch_bwd<T, sm80::BwdShape128Narrow>(p)
                          : sm80::launch_bwd<T, sm80::BwdShape256Narrow>(p);
    }
}
#endif
#endif

#if MINIMAL_ATTN_EMULATED
std::vector<std::string> schedules;

// "--late=7" and the like, on a GPU with shared memory for the tiles that a case is about. There are few SMs, so that a
// persistent block takes several tiles.
void choose_schedule(const std::string &name, const Case &c) {
    const unsigned seed = std::stoul(name.substr(name.find('=') + 1));
    const auto mode = name.starts_with("--early")  ? emulator::Mode::kEarly
                      : name.starts_with("--late") ? emulator::Mode::kLate
                                                   : emulator::Mode::kRandom;
    const size_t shared_memory = c.tiling == kNarrow ? 64 << 10 : c.tiling == kSm80Narrow ? 99 << 10 : 227 << 10;
    emulator::schedule = {mode, seed};
    emulator::gpu = {.num_sms = int(seed % 4) + 1, .max_shared_memory = shared_memory};
}
bool names_tiles(const Case &) { return false; }
#else
bool names_tiles(const Case &c) { return c.tiling == kNarrow || c.tiling == kWide || c.tiling == kSm80Narrow; }
#endif

template <typename T> void forward(const Case &c, const AttnParams &p) {
#if HAS_GPU
    if (is_sm80(c) || (c.tiling == kSm90 && c.dropout_p > 0 && p.has_score_mods())) return sm80::flash_forward(p);
    if (c.tiling == kSm90) return sm90::flash_forward(p);
    if (c.tiling == kDmma) return dmma::flash_forward(p);
#endif
    names_tiles(c) ? named_forward<T>(c, p) : simt::flash_forward(p);
}

template <typename T> void backward(const Case &c, const AttnBackwardParams &p) {
#if HAS_GPU
    if (is_sm80(c)) return names_tiles(c) ? narrow_backward<T>(c, p) : sm80::flash_backward(p);
    if (is_sm90_backward(c)) return sm90::flash_backward(p);
#endif
    simt::flash_backward(p);
}

bool needs_hopper(const Case &c) { return c.tiling == kSm90 || c.tiling == kDmma; }

// Hopper's kernels are for the forward pass; simt's backward pass follows them. Not in the emulator, where it is slow
// and other cases have it.
bool forward_only = false;
bool has_backward(const Case &c) {
    if (forward_only) return false;
#if MINIMAL_ATTN_EMULATED
    if (needs_hopper(c) && !is_sm90_backward(c)) return false;
#endif
    return !c.is_packed() || c.seqused_k.empty();  // no gradients of keys that overlap
}

// The tensors of a case, on host and device.
template <typename T> struct Tensors {
    using S = Sum<T>;
    const Case &c;
    const Layout out_layout = c.layout == kExpanded ? kHeads : c.layout;
    const bool poison = !valid_only;
    Buffer<T> q{c.batch_size, c.nheads, c.seqlen_q, c.head_dim, c.layout, poison};
    Buffer<T> k{c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim, c.layout, poison};
    Buffer<T> v{c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim_v, c.layout, poison};
    // What belongs to rows that see no key may be read, and is then not used.
    Buffer<T> dout{c.batch_size, c.nheads, c.seqlen_q, c.head_dim_v, c.layout};
    Buffer<S> dlse{c.batch_size, c.nheads, c.seqlen_q, 1, c.layout};
    Buffer<T> o{c.batch_size, c.nheads, c.seqlen_q, c.head_dim_v, out_layout};
    Buffer<T> dq{c.batch_size, c.nheads, c.seqlen_q, c.head_dim, out_layout};
    Buffer<T> dk{c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim, out_layout};
    Buffer<T> dv{c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim_v, out_layout};
    Buffer<S> lse{c.batch_size, c.nheads, c.seqlen_q, 1}, delta{c.batch_size, c.nheads, c.seqlen_q, 1};
    Buffer<float> lse_log2{c.batch_size, c.nheads, c.seqlen_q, 1};
    Buffer<int> seqused_q{c.samples(), 1, 1, 1}, seqused_k{c.samples(), 1, 1, 1}, tile_counter{1, 1, 1, 1};
    Buffer<int> cu_seqlens_q{c.samples() + 1, 1, 1, 1}, cu_seqlens_k{c.samples() + 1, 1, 1, 1};
    Buffer<int64_t> seed{1, 1, 1, c.is_part ? 1 + 4 * c.samples() : 1};  // and origins
    Buffer<S> sinks{1, 1, 1, c.nheads};
    Buffer<float> slopes{1, c.samples(), c.nheads, 1};
    // One element for each that is not shared. In double precision, and as the kernel reads it.
    const int64_t bias_sizes[4] = {size_of('B', c.batch_size), size_of('H', c.nheads), size_of('R', c.seqlen_q),
                                   size_of('K', c.seqlen_k)};
    std::vector<double> bias;
    std::optional<Buffer<char>> bias_bytes, mask_words;
    std::optional<Buffer<S>> dbias;  // of a bias that is no mask
    std::optional<Buffer<char>> workspace;
    AttnBackwardParams p{};

    explicit Tensors(const Case &c) : c(c) {
        set_forward_params();
        std::vector<int64_t> numbers{kSeed};
        for (int b = 0; c.is_part && b < c.samples(); b++)
            for (int64_t number : origin_of(c, b)) numbers.push_back(number);
        copy(seed.device, numbers.data(), numbers.size() * sizeof(int64_t));
        std::mt19937 random;
        if (c.has_sinks) sinks.randomize(0, 0, 1, random);
        if (c.has_alibi) slopes.randomize(0, 0, c.nheads, random), p.alibi_slopes = slopes.device;
        p.alibi_batch_stride = c.nheads, p.softcap = c.softcap;
        if (c.bias) set_bias(random);
        set_backward_params();
        for (int b = 0; b < c.samples(); b++) {
            const Span rows = rows_of(b), keys = keys_of(b);
            q.randomize(batch_of(b), rows.begin, rows.begin + rows.valid, random);
            const int first = first_key(b);  // those before it stay NaN: no row sees them, but a block may have them
            for (Buffer<T> *x : {&k, &v}) {
                x->upload(batch_of(b), keys.begin, keys.begin + first);
                x->randomize(batch_of(b), keys.begin + first, keys.begin + keys.valid, random);
            }
            for (int i = 0; i < rows.valid; i++) {
                const bool sees_none = is_empty(b, i);
                if (!sees_none) dout.randomize(batch_of(b), rows.begin + i, rows.begin + i + 1, random);
                if (!sees_none || c.has_sinks) dlse.randomize(batch_of(b), rows.begin + i, rows.begin + i + 1, random);
            }
        }
        if (c.spike.empty()) return;
        q.set_first_column([](int64_t) { return 2.f; });
        k.set_first_column([&](int64_t key) { return key >= c.spike[0] && key < c.spike[1] ? 2.f : 0.f; });
    }

    void set_forward_params() {
        p.q = q.tensor(), p.k = k.tensor(), p.v = v.tensor(), p.o = o.tensor();
        auto uploaded = [](Buffer<int> &to, const std::vector<int> &from) -> const int * {
            if (from.empty()) return nullptr;
            copy(to.device, from.data(), from.size() * sizeof(int));
            return to.device;
        };
        p.cu_seqlens_q = uploaded(cu_seqlens_q, c.cu_seqlens_q), p.cu_seqlens_k = uploaded(cu_seqlens_k, c.cu_seqlens_k);
        p.seqused_q = uploaded(seqused_q, c.seq_lens);
        p.seqused_k = uploaded(seqused_k, c.seqused_k.empty() ? c.seq_lens : c.seqused_k);
        p.lse = lse.device, p.lse_batch_stride = c.is_packed() ? 0 : int64_t(c.nheads) * c.seqlen_q;
        p.batch_size = c.samples(), p.nheads = c.nheads, p.nheads_k = c.nheads_k, p.seqlen_q = c.seqlen_q;
        p.seqlen_k = c.seqlen_k + overrun, p.head_dim = c.head_dim, p.head_dim_v = c.head_dim_v;
        p.dtype = c.dtype, p.sinks = c.has_sinks ? sinks.device : nullptr;
        p.set_window(c.window_left, window_right());
        if (p.has_left_bound() || p.has_right_bound() || p.cu_seqlens_q || p.seqused_q || p.seqused_k)
            p.tile_counter = tile_counter.device;
        const double scale = c.layout == kGaps ? -c.scale : c.scale;  // of any sign
        p.softmax_scale = float(scale / std::sqrt(double(c.head_dim)));
        if (c.dropout_p > 0) p.dropout_seed = seed.device, p.has_dropout_origins = c.is_part;
        if (c.is_packed())
            for (Tensor *x : {&p.q, &p.k, &p.v, &p.o}) x->batch_stride = 0;
        p.keep_count = 0x1p15 - std::nearbyint(c.dropout_p * 0x1p15);
        p.keep_scale = p.keep_count ? 0x1p15 / p.keep_count : 0;
    }

    int64_t size_of(char dim, int64_t size) const { return c.bias_shape.find(dim) != std::string::npos ? size : 1; }
    void set_bias(std::mt19937 &random) {
        for (int64_t n = bias_sizes[0] * bias_sizes[1] * bias_sizes[2] * bias_sizes[3]; n > 0; n--)
            bias.push_back(*c.bias == boolean ? (random() % 4 ? 0 : -INFINITY) : (int(random() & 127) - 64) / 64.);
        const auto &[_, nheads, rows, keys] = bias_sizes;
        auto stride = [&](int dim, int64_t step) { return bias_sizes[dim] == 1 ? 0 : step; };
        if (*c.bias == boolean) std::fill_n(bias.begin() + (rows > 5 ? 5 * keys : 0), keys, -INFINITY);  // a whole row
        auto upload = [&]<typename E>(E, auto encoded) {
            std::vector<E> elements;
            for (double x : bias) elements.push_back(encoded(x));
            copy(bias_bytes.emplace(1, 1, 1, int(elements.size() * sizeof(E))).device, elements.data(),
                 elements.size() * sizeof(E));
        };
        switch (*c.bias) {
            case boolean: upload(uint8_t(), [](double x) { return uint8_t(x == 0); }); break;
            case f16: upload(__half(), encode<__half>); break;
            case b16: upload(__nv_bfloat16(), encode<__nv_bfloat16>); break;
            case f32: upload(float(), encode<float>); break;
            case f64: throw std::runtime_error("a bias of fp64 is not among the cases");
        }
        if (*c.bias != boolean) {
            dbias.emplace(int(bias_sizes[0]), int(nheads), int(rows), int(keys));
            p.dbias = {dbias->device, stride(0, nheads * rows * keys), stride(1, rows * keys), stride(2, keys),
                       stride(3, 1)};
        }
        p.bias = {bias_bytes->device, stride(0, nheads * rows * keys), stride(1, rows * keys), stride(2, keys),
                  stride(3, 1), *c.bias};
#if HAS_GPU
        if (const int64_t words = sm90::num_mask_words(p))
            p.mask_words = reinterpret_cast<uint32_t *>(mask_words.emplace(1, 1, 1, int(4 * words)).device);
#endif
    }
    double bias_at(int64_t b, int64_t h, int64_t row, int64_t key) const {
        return bias.empty() ? 0
                            : bias[b * p.bias.batch_stride + h * p.bias.head_stride + row * p.bias.row_stride +
                                   key * p.bias.key_stride];
    }

    void set_backward_params() {
        p.dout = dout.tensor(), p.dq = dq.tensor(), p.dk = dk.tensor(), p.dv = dv.tensor(), p.delta = delta.device;
        if (c.layout != kHeads) p.dlse = dlse.tensor();
        if (c.is_packed())
            for (Tensor *x : {&p.dout, &p.dlse, &p.dq, &p.dk, &p.dv}) x->batch_stride = 0;
        p.deterministic = c.dropout_p == 0 && !c.in_any_order;  // of each some
#if HAS_GPU
        if (!is_sm80(c) && !is_sm90_backward(c)) return;
        p.lse_log2 = lse_log2.device;
        const int64_t bytes = is_sm80(c) ? sm80::backward_workspace(p) : sm90::backward_workspace(p);
        if (bytes) p.workspace = workspace.emplace(1, 1, 1, bytes).device;  // enough for sm80's narrow tiles too
#endif
    }

    // Calls f with the name of each result of a pass and its buffer.
    void for_forward(auto f) { f("out", o), f("lse", lse); }
    void for_backward(auto f) {
        f("dq", dq), f("dk", dk), f("dv", dv), f("delta", delta), f("lse_log2", lse_log2);
        if (dbias) f("dbias", *dbias);
    }

    struct Span { int begin, valid, padded; };  // of a sample's rows or keys in the buffers
    static Span span(const std::vector<int> &cu_seqlens, const std::vector<int> &seqused, int b, int size,
                     bool may_overlap) {
        Span x{0, size, size};
        if (!cu_seqlens.empty()) {
            x.begin = b ? std::clamp(cu_seqlens[b], 0, size) : 0;
            x.valid = std::max(std::clamp(cu_seqlens[b + 1], 0, size) - x.begin, 0);
            x.padded = b + 2 == int(cu_seqlens.size()) ? size - x.begin : x.valid;
        }
        if (!seqused.empty()) x.valid = std::clamp(seqused[b], 0, may_overlap ? size - x.begin : x.valid);
        return x;
    }
    Span rows_of(int b) const { return span(c.cu_seqlens_q, c.seq_lens, b, c.seqlen_q, false); }
    Span keys_of(int b) const {
        return span(c.cu_seqlens_k, c.seqused_k.empty() ? c.seq_lens : c.seqused_k, b, c.seqlen_k, true);
    }
    int first_key(int b) const {
        const int valid = keys_of(b).valid;
        for (int j = 0; j < valid; j++)
            for (int i = 0; i < rows_of(b).valid; i++)
                if (sees(b, i, j)) return j;
        return valid;
    }
    int batch_of(int b) const { return c.is_packed() ? 0 : b; }  // where the sample is in the buffers
    bool sees(int b, int row, int key) const {
        const int seqlen_q = rows_of(b).valid, seqlen_k = keys_of(b).valid, diagonal = row + seqlen_k - seqlen_q;
        const bool is_valid = row < seqlen_q && key < seqlen_k;
        return is_valid && (c.window_left < 0 || key >= diagonal - c.window_left) &&
               (window_right() < 0 || key <= diagonal + window_right());
    }
    int window_right() const { return c.is_causal ? 0 : c.window_right; }
    bool is_empty(int b, int row) const {
        for (int j = 0; j < keys_of(b).valid; j++)
            if (sees(b, row, j)) return false;
        return true;
    }
    bool is_hidden(int b, int h, int row) const {  // by a mask, or empty
        for (int j = 0; j < keys_of(b).valid; j++)
            if (sees(b, row, j) && bias_at(b, h, row, j) != -INFINITY) return false;
        return true;
    }
};

// Attention and its gradients in double precision, row by row.
template <typename T> struct Reference {
    const Tensors<T> &x;
    const Case &c = x.c;
    std::vector<double> P = std::vector<double>(c.seqlen_k);
    std::vector<double> scale = P;  // of a probability: 0 where dropout drops it
    std::vector<double> slope = P;  // of a score as a function of q·k
    std::vector<double> size = P;   // of a score's terms
    Expected out{"out", c.batch_size, c.nheads, c.seqlen_q, c.head_dim_v};
    Expected lse{"lse", c.batch_size, c.nheads, c.seqlen_q, 1};
    Expected lse_log2{"lse_log2", c.batch_size, c.nheads, c.seqlen_q, 1};
    Expected delta{"delta", c.batch_size, c.nheads, c.seqlen_q, 1};
    Expected dq{"dq", c.batch_size, c.nheads, c.seqlen_q, c.head_dim};
    Expected dk{"dk", c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim};
    Expected dv{"dv", c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim_v};
    Expected dbias{"dbias", int(x.bias_sizes[0]), int(x.bias_sizes[1]), int(x.bias_sizes[2]), int(x.bias_sizes[3])};

    struct Row { int b, h, h_k, i, at; };  // sample, heads, row of the sample, and of the buffers

    void for_rows(auto work) {
        for (int b = 0; b < c.samples(); b++)
            for (int h = 0; h < c.nheads; h++)
                for (int i = 0; i < x.rows_of(b).padded; i++)
                    work(Row{b, h, h / (c.nheads / c.nheads_k), i, x.rows_of(b).begin + i});
    }
    // The keys that a row sees: of the sample, and of the buffers.
    void for_keys(const Row &row, auto work) {
        const auto keys = x.keys_of(row.b);
        for (int j = 0; j < keys.valid; j++)
            if (x.sees(row.b, row.i, j) && x.bias_at(row.b, row.h, row.i, j) != -INFINITY) work(j, keys.begin + j);
    }

    // Of a row: lse, and the size of the terms of its scores, to which their rounding is proportional. ALiBi and a bias
    // may leave little of large terms.
    struct LogSum { double lse, magnitude; };

    LogSum form_P(const Row &row) {
        const auto [b, h, h_k, i, at] = row;
        const int batch = x.batch_of(b);
        const double sink = c.has_sinks && i < x.rows_of(b).valid ? x.sinks.at(0, 0, 0, h) : -INFINITY;
        double max = sink;
        for_keys(row, [&](int j, int key) {
            double score = 0;
            for (int d = 0; d < c.head_dim; d++) score += x.q.at(batch, h, at, d) * x.k.at(batch, h_k, key, d);
            score *= x.p.softmax_scale, slope[j] = x.p.softmax_scale;
            if (c.softcap) {
                score = c.softcap * std::tanh(score / c.softcap);
                slope[j] *= 1 - score * score / (c.softcap * c.softcap);
            }
            const int distance = i + x.keys_of(b).valid - x.rows_of(b).valid - j;
            const double alibi = c.has_alibi ? x.slopes.at(0, b, h, 0) * std::abs(distance) : 0;
            const double bias = x.bias_at(b, h, i, j);
            P[j] = score - alibi + bias, size[j] = std::abs(score) + std::abs(alibi) + std::abs(bias);
            max = std::max(max, P[j]);
            const auto [row0, key0, head0, sample] = origin_of(c, b);
            const bool is_kept = keeps(x.p.keep_count, sample, head0 + h, row0 + i, key0 + j);
            scale[j] = !x.p.dropout_seed ? 1 : is_kept ? x.p.keep_scale : 0;
        });
        if (std::isinf(max)) return {max, 0};
        double sum = std::exp(sink - max), magnitude = 0;
        for_keys(row, [&](int j, int) { sum += P[j] = std::exp(P[j] - max), magnitude += P[j] * size[j]; });
        for (double &probability : P) probability /= sum;
        const double lse = max + std::log(sum);
        return {lse, std::max(std::abs(lse), magnitude / sum)};
    }

    void forward() {
        for_rows([&](const Row &row) {
            const auto [b, h, h_k, i, at] = row;
            const int batch = x.batch_of(b);
            const auto [log_sum, magnitude] = form_P(row);
            const bool is_empty = x.is_hidden(b, h, i);
            lse.add(lse.index(batch, h, at), log_sum, magnitude);
            const double log2_sum = is_empty ? INFINITY : log_sum / std::log(2.);
            lse_log2.add(lse.index(batch, h, at), log2_sum, is_empty ? 0 : magnitude);
            for_keys(row, [&](int j, int key) {
                for (int d = 0; d < c.head_dim_v; d++)
                    out.add(out.index(batch, h, at) + d, P[j] * scale[j] * x.v.at(batch, h_k, key, d));
            });
        });
    }

    // From the rounded out, which the backward pass is given.
    void backward() {
        for_rows([&](const Row &row) {
            const auto [b, h, h_k, i, at] = row;
            const int batch = x.batch_of(b);
            const size_t of_row = delta.index(batch, h, at);
            if (x.is_hidden(b, h, i)) {
                if (c.has_sinks && x.p.dlse.data && i < x.rows_of(b).valid)
                    delta.add(of_row, -x.dlse.at(batch, h, at, 0));
                return;
            }
            form_P(row);
            for (int d = 0; d < c.head_dim_v; d++) delta.add(of_row, x.dout.at(batch, h, at, d) * x.o.at(batch, h, at, d));
            if (x.p.dlse.data) delta.add(of_row, -x.dlse.at(batch, h, at, 0));
            for_keys(row, [&](int j, int key) {
                double dP = 0, dP_size = 0;
                for (int d = 0; d < c.head_dim_v; d++) {
                    const double term = scale[j] * x.dout.at(batch, h, at, d) * x.v.at(batch, h_k, key, d);
                    dP += term, dP_size += std::abs(term);
                }
                const double dscore = P[j] * (dP - delta.value[of_row]), dS = slope[j] * dscore;
                const double dscore_size = P[j] * (dP_size + delta.magnitude[of_row]);
                const double dS_size = std::abs(slope[j]) * dscore_size;
                if (x.p.dbias.data) {
                    const auto &d = x.p.dbias;
                    const int64_t of_bias = b * d.batch_stride + h * d.head_stride + i * d.row_stride + j * d.key_stride;
                    dbias.add(of_bias, dscore, dscore_size);
                }
                for (int d = 0; d < c.head_dim; d++) {
                    const double x_q = x.q.at(batch, h, at, d), x_k = x.k.at(batch, h_k, key, d);
                    dq.add(dq.index(batch, h, at) + d, dS * x_k, dS_size * x_k);
                    dk.add(dk.index(batch, h_k, key) + d, dS * x_q, dS_size * x_q);
                }
                for (int d = 0; d < c.head_dim_v; d++)
                    dv.add(dv.index(batch, h_k, key) + d, P[j] * scale[j] * x.dout.at(batch, h, at, d));
            });
        });
    }
};

template <typename T> void run_and_check(Tensors<T> &x, Reference<T> &expected, double epsilon) {
    const Case &c = x.c;
    // Sums are fp32, or fp64; tensor cores take P and dS rounded to T.
    const bool is_rounded = is_sm80(c) || c.tiling == kSm90;
    const double error = c.dtype == f64 ? 1e-13 : is_rounded ? epsilon : 2e-6;
    double lse_error = c.dtype == f64 ? 1e-13 : 5e-6;
#if !MINIMAL_ATTN_EMULATED
    if (is_rounded && c.softcap) lse_error = 0x1p-11;  // of tanh_approx, relative to each score
#endif
    forward<T>(c, x.p);
    check(x.lse, expected.lse, lse_error, 0);
    check(x.o, expected.out, error, epsilon);
    if (!has_backward(c)) return;
    backward<T>(c, x.p);
    if (expected.delta.magnitude == std::vector<double>(expected.delta.magnitude.size())) expected.backward();
    check(x.delta, expected.delta, 2e-6, 0);
    if (x.p.lse_log2) check(x.lse_log2, expected.lse_log2, lse_error, 0);
    check(x.dq, expected.dq, error, epsilon);
    check(x.dk, expected.dk, error, epsilon);
    check(x.dv, expected.dv, error, epsilon);
    if (x.p.dbias.data) check(*x.dbias, expected.dbias, 2e-5, 0);
}

#if MINIMAL_ATTN_EMULATED
// By every schedule. Their results must have the same bits, but for sums in any order.
template <typename T> void run(const Case &c, double epsilon) {
    choose_schedule(schedules[0], c);
    Tensors<T> x(c);
    Reference<T> expected{x};
    expected.forward();
    std::map<std::string, std::string> bits;
    for (const std::string &name : schedules) try {
            choose_schedule(name, c);
            auto make_nan = [](const char *, auto &result) { result.make_nan(); };
            x.for_forward(make_nan), x.for_backward(make_nan);
            run_and_check(x, expected, epsilon);
            auto compare = [&](const std::string &result, auto &buffer) {
                if (result == "dq" && !x.p.deterministic) return;
                const std::string now(reinterpret_cast<const char *>(buffer.host.data()), buffer.bytes());
                if (bits.emplace(result, now).first->second != now)
                    throw std::runtime_error(result + " has other bits than by " + schedules[0]);
            };
            x.for_forward(compare), x.for_backward(compare);
            if (!x.workspace || !x.p.deterministic) continue;
            x.workspace->fetch();
            if (c.tiling == kSm90) std::fill_n(x.workspace->host.begin(), 128, 0);  // depends on the schedule
            compare("dq before it is rounded", *x.workspace);
        } catch (const std::exception &error) {
            throw std::runtime_error(name + ": " + error.what());
        }
}
#else
template <typename T> void run(const Case &c, double epsilon) {
    Tensors<T> x(c);
    Reference<T> expected{x};
    expected.forward();
    run_and_check(x, expected, epsilon);
}
#endif

void run(const Case &c) {
#if HAS_GPU
    if (c.dtype == f64) throw std::runtime_error("float64 is for the CPU");
#else
    if (c.dtype == f64) return run<double>(c, 0x1p-52);
#endif
    if (c.dtype == f32) return run<float>(c, 0x1p-23);
    c.dtype == f16 ? run<__half>(c, 0x1p-10) : run<__nv_bfloat16>(c, 0x1p-7);
}

// The cases that are named, or all.
std::vector<const Case *> selected(const std::vector<std::string> &names) {
    std::vector<const Case *> found;
    for (const Case &c : cases)
        if (names.empty() || std::count(names.begin(), names.end(), c.name)) found.push_back(&c);
    if (!names.empty() && found.size() != names.size()) throw std::runtime_error("a case is named that there is not");
    return found;
}

size_t part = 0, parts = 1;

bool take_option(const std::string &argument) {
    const std::string value = argument.substr(argument.find('=') + 1);
    if (argument == "--overrun") overrun = true;
    else if (argument == "--valid-only") valid_only = true;
    else if (argument == "--forward-only") forward_only = true;
    else if (argument.starts_with("--part="))
        part = std::stoul(value), parts = std::stoul(value.substr(value.find('/') + 1));
#if MINIMAL_ATTN_EMULATED
    else if (argument.starts_with("--without=")) emulator::left_out = std::stoi(value);
    else if (argument.starts_with("--")) schedules.push_back(argument);
#endif
    else return false;
    return true;
}

#if MINIMAL_ATTN_EMULATED
bool can_run(const Case &) { return true; }
bool is_enough(size_t failed) { return failed && emulator::left_out >= 0; }
#else
#ifdef __CUDACC__
bool can_run(const Case &c) { return !needs_hopper(c) || compute_capability() == 90; }
#else
bool can_run(const Case &) { return true; }
#endif
bool is_enough(size_t) { return false; }
#endif

int main(int argc, char **argv) {
    std::vector<std::string> names(argv + 1, argv + argc);
    std::erase_if(names, take_option);
#if MINIMAL_ATTN_EMULATED
    if (schedules.empty()) schedules = {"--early=1", "--late=2", "--random=3"};
#endif
    size_t passed = 0, failed = 0, i = 0;
    for (const Case *c : selected(names)) {
        if (i++ % parts != part || !can_run(*c)) continue;
        try {
            run(*c);
            passed++;
        } catch (const std::exception &error) {
            std::printf("%s: %s\n", c->name, error.what());
            failed++;
        }
        if (is_enough(failed)) break;
    }
    std::printf("%zu passed, %zu failed\n", passed, failed);
    return failed > 0;
}
