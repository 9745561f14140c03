// The kernels of csrc on small cases and without torch, for tools that see more of a program of its own: ASan, UBSan
// and TSan on the CPU, compute-sanitizer on the GPU. Every buffer is an allocation with nothing to spare; every result
// is compared with attention spelled out in double. The kernels are included, not linked, so that every size of tiles
// can be called on any GPU and with short sequences. test_sanitizers.py builds and runs this:
//
//   g++ -std=c++20 -pthread -Icsrc tests/driver.cpp     or     nvcc -std=c++20 -Icsrc -x cu tests/driver.cpp
//   ./a.out [case...]      all cases if none is named
//     --overrun            declare one key row more than is allocated: a fault that the tools must see
//     --valid-only         leave the q, k and v that must not be read uninitialized, for initcheck, instead of NaN
//
// With MINIMAL_ATTN_LINKED=1 it is linked with the objects of csrc's kernels, so that a change of one compiles that one
// alone; cases that name their tiles fail there. With MINIMAL_ATTN_EMULATED=1 as well it is for flash_sm90.cu
// alone, on the CPU: test_emulator.py.
//     --early=1 --late=2 --random=3 ...    when copies and products happen, and a seed
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#if MINIMAL_ATTN_LINKED
#include "flash.h"
#include "launch.h"
using namespace device;
template <typename> using Sum = float;
#elif defined(__CUDACC__)
#include "flash.cu"
#include "flash_sm80.cu"
#include "flash_sm90.cu"
#include "flash_dmma.cu"
#include "flash_bwd.cu"
#include "flash_bwd_sm80.cu"
using namespace simt;
#else
#include "flash_host.cpp"  // from here on simt reads host
using namespace simt;
#endif
#ifdef __CUDACC__
template <typename T> T encode(float x) { return T(x); }
template <typename T> double decode(T x) { return float(x); }
void *allocate(size_t bytes) { void *p; return check_cuda(cudaMalloc(&p, bytes)), p; }
void release(void *p) { cudaFree(p); }
void copy(void *to, const void *from, size_t bytes) { check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault)); }
#else
template <typename T> T encode(float x) { return from_float<T>(x); }
template <typename T> double decode(T x) { return to_float(x); }
void *allocate(size_t bytes) { return std::malloc(bytes); }
void release(void *p) { std::free(p); }
void copy(void *to, const void *from, size_t bytes) { std::memcpy(to, from, bytes); }
#endif

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
    std::vector<int> seq_lens = {};
    Tiling tiling = kBest;  // of the forward pass
    double dropout_p = 0;
    double scale = 1;  // of the scores, beside 1 / sqrt(head_dim)
};

constexpr DType f64 = DType::kFloat64, f32 = DType::kFloat32, f16 = DType::kFloat16, b16 = DType::kBFloat16;
const std::vector<Case> cases = {
    // name, dtype, batch_size, nheads, nheads_k, seqlen_q, seqlen_k, head_dim, is_causal, ...
#if !MINIMAL_ATTN_EMULATED
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
    {"fp32_64_wide",      f32, 1, 2, 1, 140, 140,  64, false, kRows,     {133}, kWide},
    {"fp32_128_wide",     f32, 1, 1, 1, 129, 130, 128, true,  kHeads,    {},   kWide},
    {"fp32_256_wide",     f32, 1, 1, 1,  65, 129, 253, false, kGaps,     {},   kWide},
#ifdef __CUDACC__
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
    {"sm80_128_narrow",   f16, 1, 2, 1,  70, 130, 120, true,  kHeads,    {},   kSm80Narrow, 0.25},
    {"sm80_256_narrow",   b16, 1, 2, 1,  70,  70, 200, true,  kRows,     {65}, kSm80Narrow},
    {"sm80_one",          b16, 1, 1, 1,   1,   1,   8, true,  kHeads,    {},   kSm80},
    {"dmma_64",           f32, 2, 4, 2, 140, 140,  40, false, kRows,     {3, 129}, kDmma},
    {"dmma_64_causal",    f32, 1, 1, 1,  66, 130,  64, true,  kHeads,    {},   kDmma},
    {"dmma_128",          f32, 1, 2, 1,  70,  70, 100, false, kRows,     {65}, kDmma},
    {"dmma_128_causal",   f32, 1, 2, 1, 129,  65, 128, true,  kRows,     {},   kDmma},
    {"dmma_one",          f32, 1, 1, 1,   1,   1,   4, true,  kHeads,    {},   kDmma},
#endif
#ifndef __CUDACC__
    {"fp64_64",           f64, 2, 2, 1,  67,  67,  20, true,  kGaps,     {66, 5}, kBest, 0.25},
    {"fp64_128",          f64, 1, 1, 1,  33,  40,  70, false, kOffset},
    {"fp64_256",          f64, 1, 2, 2,  40,  33, 130, true,  kRows},
#endif
    // What else the interface allows.
    {"gqa",               f32, 2, 6, 2,   3,  70,  16, true,  kRows},
    {"dropout",           f32, 2, 4, 2,  83,  70,  20, true,  kRows,     {}, kBest, 0.1},
    {"dropout_all",       f32, 1, 1, 1,   5,   5,   8, false, kGaps,     {}, kBest, 1},
    {"seq_lens_clamped",  f32, 4, 1, 1,  67,  67,  20, false, kHeads,    {1 << 30, 66, 0, -5}},
    {"rows_without_keys", f32, 1, 1, 1, 130,  60,  16, true},
    {"one",               f32, 1, 1, 1,   1,   1,   1, true},
#endif
#if defined(__CUDACC__) || MINIMAL_ATTN_EMULATED
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
#if MINIMAL_ATTN_EMULATED  // a backward pass is not asked for these
    {"sm90_no_rows",      f16, 1, 2, 1,   0, 200,  64, false, kHeads,    {},   kSm90},
#endif
};

// [batch_size, heads, rows, head_dim], on host and device; NaN (all bits set, in any dtype) where nothing was written.
template <typename T> struct Tensor {
    int64_t heads, head_dim, row_stride, head_stride, batch_stride, offset;
    std::vector<T> host;
    T *device;
    bool poison;  // NaN on the device too, where nothing was written

    Tensor(int batch_size, int heads_, int rows, int head_dim_, Layout layout = kHeads, bool poison = true)
        : heads(heads_), head_dim(head_dim_),
          row_stride(layout == kRows ? heads * head_dim : head_dim + (layout == kGaps) + 8 * (layout == kSlices)),
          head_stride(layout == kRows ? head_dim : layout == kExpanded ? 0 : rows * row_stride),
          batch_stride(layout == kExpanded ? 0 : heads * rows * row_stride), offset(layout == kOffset),
          host(index(batch_size - 1, heads - 1, rows - 1) + head_dim),
          device(static_cast<T *>(allocate(host.size() * sizeof(T)))), poison(poison) {
        make_nan(poison);
    }
    ~Tensor() { release(device); }
    void make_nan(bool on_device = true) {
        std::memset(static_cast<void *>(host.data()), 0xff, host.size() * sizeof(T));
        if (on_device) copy(device, host.data(), host.size() * sizeof(T));
    }
    int64_t index(int64_t b, int64_t h, int64_t r) const {
        return offset + b * batch_stride + h * head_stride + r * row_stride;
    }
    double at(int64_t b, int64_t h, int64_t r, int64_t d) const { return decode(host[index(b, h, r) + d]); }
    void randomize(int64_t b, int64_t begin, int64_t end, std::mt19937 &random) {
        for (int64_t h = 0; h < heads; h++)
            for (int64_t r = begin; r < end; r++) {
                T *x = &host[index(b, h, r)];  // multiples of 1/64 in [-2, 2): exact in every dtype
                for (int64_t d = 0; d < head_dim; d++) x[d] = encode<T>((int(random() & 255) - 128) / 64.f);
                if (!poison) copy(device + index(b, h, r), x, head_dim * sizeof(T));
            }
        if (poison) copy(device, host.data(), host.size() * sizeof(T));
    }
};

// A result spelled out in double: [batch_size, heads, rows, head_dim], and the sum of the magnitudes of its terms, to
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
};

// got, which is copied from the device, has rounded once to its own epsilon and before that to error · magnitude.
template <typename T> void check(Tensor<T> &got, const Expected &expected, double error, double epsilon) {
    std::vector<T> rows(got.host.size());
    copy(rows.data(), got.device, rows.size() * sizeof(T));
    std::swap(got.host, rows);
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
                std::memcpy(static_cast<void *>(&rows[got.index(b, h, r)]), &got.host[got.index(b, h, r)],
                            expected.head_dim * sizeof(T));
            }
    if (std::memcmp(rows.data(), got.host.data(), rows.size() * sizeof(T)))  // rows holds what was there before
        throw std::runtime_error(std::string("something was written between the rows of ") + expected.name);
}

constexpr int64_t kSeed = 0x123456789abcdef;

// dropout.h once more, for one element: Philox-4x32-10.
bool keeps(uint32_t threshold, uint32_t b, uint32_t h, uint32_t row, uint32_t col) {
    uint32_t x[4] = {row / 16 * 8 + row % 8, col / 2, h, b}, key[2] = {uint32_t(kSeed), uint32_t(kSeed >> 32)};
    for (int round = 0; round < 10; round++, key[0] += 0x9e3779b9, key[1] += 0xbb67ae85) {
        const uint64_t product0 = 0xd2511f53ull * x[0], product1 = 0xcd9e8d57ull * x[2];
        x[0] = product1 >> 32 ^ x[1] ^ key[0], x[2] = product0 >> 32 ^ x[3] ^ key[1];
        x[1] = product1, x[3] = product0;
    }
    return x[row / 8 % 2 * 2 + col % 2] >= threshold;
}

bool is_sm80(const Case &c) { return c.tiling == kSm80 || c.tiling == kSm80Narrow; }

// By the tiles that a case names, on any GPU: those for less shared memory, and those for long sequences.
#if MINIMAL_ATTN_LINKED
template <typename T> void named_forward(const Case &, const AttnParams &) {
    throw std::runtime_error("a linked driver has no tiles to name");
}
template <typename T> void narrow_backward(const Case &c, const AttnBackwardParams &p) { named_forward<T>(c, p); }
#else
template <typename T> void named_forward(const Case &c, const AttnParams &p) {
    if constexpr (!std::is_same_v<T, double>)
        if (c.tiling == kNarrow)
            return c.head_dim <= 128 ? launch_fwd<T, Tiles128Narrow>(p) : launch_fwd<T, Tiles256Narrow>(p);
    if constexpr (std::is_same_v<T, float>) {
        if (c.head_dim <= 64) return launch_fwd<T, Tiles64Wide>(p);
        return c.head_dim <= 128 ? launch_fwd<T, Tiles128Wide>(p) : launch_fwd<T, Tiles256Wide>(p);
    }
    throw std::runtime_error("there are no such tiles of this type");
}
#ifdef __CUDACC__
template <typename T> void narrow_backward(const Case &c, const AttnBackwardParams &p) {
    if constexpr (sizeof(T) == 2) {
        simt::row_sums(p);
        c.head_dim <= 128 ? sm80::launch_bwd<T, sm80::BwdTile128Narrow>(p)
                          : sm80::launch_bwd<T, sm80::BwdTile256Narrow>(p);
    }
}
#endif
#endif

#if MINIMAL_ATTN_EMULATED
std::vector<std::string> schedules;

// "--late=7" and the like. There are few SMs, so that a block takes several tiles.
emulator::Schedule schedule_of(const std::string &name) {
    const unsigned seed = std::stoul(name.substr(name.find('=') + 1));
    return {name.starts_with("--early")  ? emulator::Mode::kEarly
            : name.starts_with("--late") ? emulator::Mode::kLate
                                         : emulator::Mode::kRandom, seed, int(seed % 3) + 1};
}
#else
template <typename T> void forward(const Case &c, const AttnParams &p) {
#ifdef __CUDACC__
    if (is_sm80(c)) return sm80::flash_forward(p);
    if (c.tiling == kSm90) return sm90::flash_forward(p);
    if (c.tiling == kDmma) return dmma::flash_forward(p);
#endif
    c.tiling == kBest ? simt::flash_forward(p) : named_forward<T>(c, p);
}
#endif

template <typename T> void run(const Case &c, double epsilon) {
    using S = Sum<T>;
    const bool poison = !valid_only;
    Tensor<T> q(c.batch_size, c.nheads, c.seqlen_q, c.head_dim, c.layout, poison);
    Tensor<T> k(c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim, c.layout, poison);
    Tensor<T> v(c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim, c.layout, poison);
    // What belongs to rows that see no key may be read, and is then not used.
    Tensor<T> dout(c.batch_size, c.nheads, c.seqlen_q, c.head_dim, c.layout);
    Tensor<S> dlse(c.batch_size, c.nheads, c.seqlen_q, 1, c.layout);
    const Layout out_layout = c.layout == kExpanded ? kHeads : c.layout;
    Tensor<T> o(c.batch_size, c.nheads, c.seqlen_q, c.head_dim, out_layout);
    Tensor<T> dq(c.batch_size, c.nheads, c.seqlen_q, c.head_dim, out_layout);
    Tensor<T> dk(c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim, out_layout);
    Tensor<T> dv(c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim, out_layout);
    Tensor<S> lse(c.batch_size, c.nheads, c.seqlen_q, 1), delta(c.batch_size, c.nheads, c.seqlen_q, 1);
    Tensor<int> seq_lens(c.batch_size, 1, 1, 1);
    Tensor<int64_t> seed(1, 1, 1, 1);
    if (!c.seq_lens.empty()) copy(seq_lens.device, c.seq_lens.data(), c.batch_size * sizeof(int));
    copy(seed.device, &kSeed, sizeof(kSeed));
    auto valid = [&](int b, int rows) { return c.seq_lens.empty() ? rows : std::clamp(c.seq_lens[b], 0, rows); };
    std::mt19937 random;
    for (int b = 0; b < c.batch_size; b++) {
        for (Tensor<T> *x : {&q, &k, &v}) x->randomize(b, 0, valid(b, x == &q ? c.seqlen_q : c.seqlen_k), random);
        const int first = c.is_causal ? std::max(0, c.seqlen_q - c.seqlen_k) : 0;  // row that sees a key
        dout.randomize(b, first, valid(b, c.seqlen_q), random), dlse.randomize(b, first, valid(b, c.seqlen_q), random);
    }

    AttnBackwardParams p{};
    p.q = q.device + q.offset, p.k = k.device + k.offset, p.v = v.device + v.offset, p.o = o.device + o.offset;
    p.lse = lse.device, p.seq_lens = c.seq_lens.empty() ? nullptr : seq_lens.device;
    Tensor<int> tile_counter(1, 1, 1, 1);
    if (c.is_causal || p.seq_lens) p.tile_counter = tile_counter.device;
    p.q_batch_stride = q.batch_stride, p.q_head_stride = q.head_stride, p.q_row_stride = q.row_stride;
    p.k_batch_stride = k.batch_stride, p.k_head_stride = k.head_stride, p.k_row_stride = k.row_stride;
    p.v_batch_stride = v.batch_stride, p.v_head_stride = v.head_stride, p.v_row_stride = v.row_stride;
    p.o_batch_stride = o.batch_stride, p.o_head_stride = o.head_stride, p.o_row_stride = o.row_stride;
    p.batch_size = c.batch_size, p.nheads = c.nheads, p.nheads_k = c.nheads_k, p.seqlen_q = c.seqlen_q;
    p.seqlen_k = c.seqlen_k + overrun, p.head_dim = c.head_dim, p.is_causal = c.is_causal, p.dtype = c.dtype;
    p.softmax_scale = (c.layout == kGaps ? -c.scale : c.scale) / std::sqrt(double(c.head_dim));  // of any sign
    if (c.dropout_p > 0) p.dropout_seed = seed.device;
    p.drop_threshold = std::min(std::round(c.dropout_p * 0x1p32), 0x1p32 - 1);
    p.keep_scale = c.dropout_p == 1 ? 0 : 1 / (1 - c.dropout_p);

    p.dout = dout.device + dout.offset, p.dlse = c.layout == kHeads ? nullptr : dlse.device + dlse.offset;
    p.dq = dq.device + dq.offset, p.dk = dk.device + dk.offset, p.dv = dv.device + dv.offset, p.delta = delta.device;
    p.dout_batch_stride = dout.batch_stride, p.dout_head_stride = dout.head_stride;
    p.dout_row_stride = dout.row_stride;
    p.dlse_batch_stride = dlse.batch_stride, p.dlse_head_stride = dlse.head_stride;
    p.dlse_row_stride = dlse.row_stride;
    p.dq_batch_stride = dq.batch_stride, p.dq_head_stride = dq.head_stride, p.dq_row_stride = dq.row_stride;
    p.dk_batch_stride = dk.batch_stride, p.dk_head_stride = dk.head_stride, p.dk_row_stride = dk.row_stride;
    p.dv_batch_stride = dv.batch_stride, p.dv_head_stride = dv.head_stride, p.dv_row_stride = dv.row_stride;

    Expected expected_o("out", c.batch_size, c.nheads, c.seqlen_q, c.head_dim);
    Expected expected_lse("lse", c.batch_size, c.nheads, c.seqlen_q, 1);
    std::vector<double> P(c.seqlen_k), scale(c.seqlen_k);  // scale: of what dropout keeps, 0 of what it drops
    auto visible = [&](int b, int i) {
        const int end = i < valid(b, c.seqlen_q) ? valid(b, c.seqlen_k) : 0;
        return c.is_causal ? std::clamp(i + 1 + c.seqlen_k - c.seqlen_q, 0, end) : end;
    };
    auto form_P = [&](int b, int h, int h_k, int i) {  // and return its logarithm of sums
        double sum = 0;  // small scores: no maximum to subtract
        for (int j = 0; j < visible(b, i); j++) {
            double score = 0;
            for (int d = 0; d < c.head_dim; d++) score += q.at(b, h, i, d) * k.at(b, h_k, j, d);
            sum += P[j] = std::exp(score * p.softmax_scale);
            scale[j] = !p.dropout_seed ? 1 : keeps(p.drop_threshold, b, h, i, j) ? p.keep_scale : 0;
        }
        for (double &x : P) x /= sum;
        return std::log(sum);
    };
    auto for_rows = [&](auto work) {
        for (int b = 0; b < c.batch_size; b++)
            for (int h = 0; h < c.nheads; h++)
                for (int i = 0; i < c.seqlen_q; i++) work(b, h, h / (c.nheads / c.nheads_k), i);
    };
    for_rows([&](int b, int h, int h_k, int i) {
        const double log_sum = form_P(b, h, h_k, i);
        expected_lse.add(expected_lse.index(b, h, i), log_sum, std::isinf(log_sum) ? 0 : log_sum);
        for (int j = 0; j < visible(b, i); j++)
            for (int d = 0; d < c.head_dim; d++) {
                const double term = P[j] * scale[j] * v.at(b, h_k, j, d);
                expected_o.add(expected_o.index(b, h, i) + d, term, term);
            }
    });
    // Sums are fp32, or fp64; tensor cores take P and dS rounded to T.
    const double error = c.dtype == f64 ? 1e-13 : is_sm80(c) || c.tiling == kSm90 ? epsilon : 2e-6;
    auto check_forward = [&] {
        check(lse, expected_lse, c.dtype == f64 ? 1e-13 : 5e-6, 0);
        check(o, expected_o, error, epsilon);
    };
#if MINIMAL_ATTN_EMULATED
    for (const std::string &name : schedules) {
        emulator::schedule = schedule_of(name);
        o.make_nan(), lse.make_nan();
        try {
            sm90::flash_forward(p);
            check_forward();
        } catch (const std::exception &error) {
            throw std::runtime_error(name + ": " + error.what());
        }
    }
#else
    forward<T>(c, p);
#ifdef __CUDACC__
    p.deterministic = c.dropout_p == 0;  // of each some
    Tensor<char> workspace(1, 1, 1, is_sm80(c) ? sm80::backward_workspace(p) : 1);  // enough for narrow tiles too
    p.workspace = workspace.device;
    if (c.tiling == kSm80) sm80::flash_backward(p);
    else if (c.tiling == kSm80Narrow) narrow_backward<T>(c, p);
    else
#endif
    simt::flash_backward(p);

    check_forward();

    Expected expected_delta("delta", c.batch_size, c.nheads, c.seqlen_q, 1);
    Expected expected_dq("dq", c.batch_size, c.nheads, c.seqlen_q, c.head_dim);
    Expected expected_dk("dk", c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim);
    Expected expected_dv("dv", c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim);
    for_rows([&](int b, int h, int h_k, int i) {
        if (!visible(b, i)) return;
        form_P(b, h, h_k, i);
        double row_sum = 0, row_size = 0;  // delta, of the rounded out, which the backward pass is given
        for (int d = 0; d < c.head_dim; d++) {
            const double term = dout.at(b, h, i, d) * o.at(b, h, i, d);
            row_sum += term, row_size += std::abs(term);
        }
        if (p.dlse) row_sum -= dlse.at(b, h, i, 0), row_size += std::abs(dlse.at(b, h, i, 0));
        expected_delta.add(expected_delta.index(b, h, i), row_sum, row_size);
        for (int j = 0; j < visible(b, i); j++) {
            double dP = 0, dP_size = 0;
            for (int d = 0; d < c.head_dim; d++) {
                const double term = scale[j] * dout.at(b, h, i, d) * v.at(b, h_k, j, d);
                dP += term, dP_size += std::abs(term);
            }
            const double dS = p.softmax_scale * P[j] * (dP - row_sum);
            const double dS_size = std::abs(p.softmax_scale) * P[j] * (dP_size + row_size);
            for (int d = 0; d < c.head_dim; d++) {
                const double x_q = q.at(b, h, i, d), x_k = k.at(b, h_k, j, d);
                const double term = P[j] * scale[j] * dout.at(b, h, i, d);
                expected_dq.add(expected_dq.index(b, h, i) + d, dS * x_k, dS_size * x_k);
                expected_dk.add(expected_dk.index(b, h_k, j) + d, dS * x_q, dS_size * x_q);
                expected_dv.add(expected_dv.index(b, h_k, j) + d, term, term);
            }
        }
    });
    if (!is_sm80(c)) check(delta, expected_delta, error, 0);  // which does with its workspace what it likes
    check(dq, expected_dq, error, epsilon);
    check(dk, expected_dk, error, epsilon);
    check(dv, expected_dv, error, epsilon);
#endif
}

int main(int argc, char **argv) {
    std::vector<std::string> names(argv + 1, argv + argc);
    overrun = std::erase(names, "--overrun"), valid_only = std::erase(names, "--valid-only");
#if MINIMAL_ATTN_EMULATED
    const auto named = std::ranges::stable_partition(names, [](auto &name) { return !name.starts_with("--"); });
    schedules.assign(named.begin(), named.end());
    names.erase(named.begin(), named.end());
    if (schedules.empty()) schedules = {"--early=1", "--late=2", "--random=3", "--random=4"};
#endif
    size_t passed = 0, failed = 0;
    for (const Case &c : cases) {
        if (!names.empty() && !std::count(names.begin(), names.end(), c.name)) continue;
#ifdef __CUDACC__
        const bool is_hopper = c.tiling == kSm90 || c.tiling == kDmma;
        if (is_hopper && compute_capability() != 90) { passed++; continue; }
#endif
        try {
#if !defined(__CUDACC__) && !MINIMAL_ATTN_EMULATED
            if (c.dtype == f64) run<double>(c, 0x1p-52); else
#endif
#if !MINIMAL_ATTN_EMULATED
            if (c.dtype == f32) run<float>(c, 0x1p-23); else
#endif
            if (c.dtype == f16) run<__half>(c, 0x1p-10);
            else run<__nv_bfloat16>(c, 0x1p-7);
            passed++;
        } catch (const std::exception &error) {
            std::printf("%s: %s\n", c.name, error.what());
            failed++;
        }
    }
    std::printf("%zu passed, %zu failed\n", passed, failed);
    return passed != (names.empty() ? cases.size() : names.size());
}
