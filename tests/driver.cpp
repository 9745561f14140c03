// The kernels of csrc on small cases and without torch, for tools that see more of a program of its own: ASan, UBSan
// and TSan on the CPU, compute-sanitizer on the GPU. Every buffer is an allocation with nothing to spare; every result
// is compared with attention spelled out in double. The kernels are included, not linked, so that every size of tiles
// can be called on any GPU and with short sequences. test_sanitizers.py builds and runs this:
//
//   g++ -std=c++20 -pthread -Icsrc tests/driver.cpp     or     nvcc -std=c++20 -Icsrc -x cu tests/driver.cpp
//   ./a.out [case...]      all cases if none is named
//     --overrun            declare one key row more than is allocated: a fault that the tools must see
//     --valid-only         leave what must not be read uninitialized, for initcheck, instead of making it NaN
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef __CUDACC__
#include "flash.cu"
#include "flash_sm80.cu"
#include "flash_dmma.cu"
using namespace simt;
template <typename T> T encode(float x) { return T(x); }
template <typename T> float decode(T x) { return float(x); }
void *allocate(size_t bytes) { void *p; return check_cuda(cudaMalloc(&p, bytes)), p; }
void release(void *p) { cudaFree(p); }
void copy(void *to, const void *from, size_t bytes) { check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault)); }
#else
#include "flash_host.cpp"  // from here on simt reads host
using namespace simt;
template <typename T> T encode(float x) { return from_float<T>(x); }
template <typename T> float decode(T x) { return to_float(x); }
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
};

enum Tiling { kBest, kNarrow, kWide, kSm80, kDmma };  // the size of flash.cu's tiles, or another kernel

struct Case {
    const char *name;
    DType dtype;
    int batch_size, nheads, nheads_k, seqlen_q, seqlen_k, head_dim;
    bool is_causal;
    Layout layout = kHeads;
    std::vector<int> seq_lens = {};
    Tiling tiling = kBest;
};

constexpr DType f32 = DType::kFloat32, f16 = DType::kFloat16, b16 = DType::kBFloat16;
const std::vector<Case> cases = {
    // name, dtype, batch_size, nheads, nheads_k, seqlen_q, seqlen_k, head_dim, is_causal, ...
    // Every tile in every dtype, with at least two blocks of rows and two of keys.
    {"fp32_64",           f32, 1, 1, 1,  70, 130,  64, false},
    {"fp32_128",          f32, 1, 1, 1,  65,  66, 128, true},
    {"fp32_256",          f32, 1, 1, 1,  33,  47, 253, false},
    {"fp32_128_narrow",   f32, 1, 1, 1,  66,  65, 100, true,  kRows,     {}, kNarrow},
    {"fp32_256_narrow",   f32, 1, 1, 1,  33,  18, 132, false, kHeads,    {}, kNarrow},
    {"fp16_64",           f16, 1, 2, 1,  66,  65,  36, false, kOffset},
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
    {"sm80_fp16_64",      f16, 1, 2, 1, 130, 150,  64, true,  kHeads,    {},   kSm80},
    {"sm80_fp16_96",      f16, 1, 1, 1, 129,  70,  88, false, kRows,     {},   kSm80},
    {"sm80_fp16_128",     f16, 1, 2, 2, 140, 140, 128, true,  kRows,     {133}, kSm80},
    {"sm80_fp16_192",     f16, 1, 1, 1,  66,  90, 160, true,  kHeads,    {},   kSm80},
    {"sm80_fp16_256",     f16, 1, 2, 1,  70,  70, 256, false, kRows,     {65}, kSm80},
    {"sm80_bf16_64",      b16, 2, 4, 2, 140, 140,  40, false, kRows,     {3, 129}, kSm80},
    {"sm80_bf16_96",      b16, 1, 1, 1, 130, 130,  96, true,  kHeads,    {},   kSm80},
    {"sm80_bf16_128",     b16, 1, 2, 1, 129,  65, 104, true,  kRows,     {},   kSm80},
    {"sm80_bf16_192",     b16, 1, 2, 1,  65,  65, 192, false, kRows,     {64}, kSm80},
    {"sm80_bf16_256",     b16, 1, 1, 1,  66, 100, 200, true,  kHeads,    {},   kSm80},
    {"sm80_one",          b16, 1, 1, 1,   1,   1,   8, true,  kHeads,    {},   kSm80},
    {"dmma_64",           f32, 2, 4, 2, 140, 140,  40, false, kRows,     {3, 129}, kDmma},
    {"dmma_64_causal",    f32, 1, 1, 1,  66, 130,  64, true,  kHeads,    {},   kDmma},
    {"dmma_128",          f32, 1, 2, 1,  70,  70, 100, false, kRows,     {65}, kDmma},
    {"dmma_128_causal",   f32, 1, 2, 1, 129,  65, 128, true,  kRows,     {},   kDmma},
    {"dmma_one",          f32, 1, 1, 1,   1,   1,   4, true,  kHeads,    {},   kDmma},
#endif
    // What else the interface allows.
    {"gqa",               f32, 2, 6, 2,   3,  70,  16, true,  kRows},
    {"seq_lens_clamped",  f32, 4, 1, 1,  67,  67,  20, false, kHeads,    {1 << 30, 66, 0, -5}},
    {"rows_without_keys", f32, 1, 1, 1, 130,  60,  16, true},
    {"one",               f32, 1, 1, 1,   1,   1,   1, true},
};

// [batch_size, heads, rows, head_dim], on host and device; NaN (all bits set, in any dtype) where nothing was written.
template <typename T> struct Tensor {
    int64_t heads, head_dim, row_stride, head_stride, batch_stride, offset;
    std::vector<T> host;
    T *device;

    Tensor(int batch_size, int heads_, int rows, int head_dim_, Layout layout = kHeads, bool poison = true)
        : heads(heads_), head_dim(head_dim_),
          row_stride(layout == kRows ? heads * head_dim : head_dim + (layout == kGaps)),
          head_stride(layout == kRows ? head_dim : rows * row_stride), batch_stride(heads * rows * row_stride),
          offset(layout == kOffset), host(index(batch_size - 1, heads - 1, rows - 1) + head_dim),
          device(static_cast<T *>(allocate(host.size() * sizeof(T)))) {
        std::memset(static_cast<void *>(host.data()), 0xff, host.size() * sizeof(T));
        if (poison) copy(device, host.data(), host.size() * sizeof(T));
    }
    ~Tensor() { release(device); }
    int64_t index(int64_t b, int64_t h, int64_t r) const {
        return offset + b * batch_stride + h * head_stride + r * row_stride;
    }
    float at(int64_t b, int64_t h, int64_t r, int64_t d) const { return decode(host[index(b, h, r) + d]); }
    void randomize(int64_t b, int64_t rows, std::mt19937 &random) {
        for (int64_t h = 0; h < heads; h++)
            for (int64_t r = 0; r < rows; r++) {
                T *x = &host[index(b, h, r)];  // multiples of 1/64 in [-2, 2): exact in every dtype
                for (int64_t d = 0; d < head_dim; d++) x[d] = encode<T>((int(random() & 255) - 128) / 64.f);
                copy(device + index(b, h, r), x, head_dim * sizeof(T));
            }
    }
};

void check(const char *what, double got, double expected, double tolerance, int b, int h, int i) {
    if (got == expected || std::abs(got - expected) <= tolerance) return;  // a NaN is neither
    char text[128];
    std::snprintf(text, sizeof(text), "%s[%d][%d][%d] is %.8g, expected %.8g", what, b, h, i, got, expected);
    throw std::runtime_error(text);
}

template <typename T> void run(const Case &c, double epsilon) {
    Tensor<T> q(c.batch_size, c.nheads, c.seqlen_q, c.head_dim, c.layout, !valid_only);
    Tensor<T> k(c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim, c.layout, !valid_only);
    Tensor<T> v(c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim, c.layout, !valid_only);
    Tensor<T> o(c.batch_size, c.nheads, c.seqlen_q, c.head_dim, c.layout);
    Tensor<float> lse(c.batch_size, c.nheads, c.seqlen_q, 1);
    Tensor<int> seq_lens(c.batch_size, 1, 1, 1);
    if (!c.seq_lens.empty()) copy(seq_lens.device, c.seq_lens.data(), c.batch_size * sizeof(int));
    auto valid = [&](int b, int rows) { return c.seq_lens.empty() ? rows : std::clamp(c.seq_lens[b], 0, rows); };
    std::mt19937 random;
    for (int b = 0; b < c.batch_size; b++)
        for (Tensor<T> *x : {&q, &k, &v}) x->randomize(b, valid(b, x == &q ? c.seqlen_q : c.seqlen_k), random);

    const AttnParams p{
        .q = q.device + q.offset, .k = k.device + k.offset, .v = v.device + v.offset,
        .o = o.device + o.offset, .lse = lse.device, .seq_lens = c.seq_lens.empty() ? nullptr : seq_lens.device,
        .q_batch_stride = q.batch_stride, .q_head_stride = q.head_stride, .q_row_stride = q.row_stride,
        .k_batch_stride = k.batch_stride, .k_head_stride = k.head_stride, .k_row_stride = k.row_stride,
        .v_batch_stride = v.batch_stride, .v_head_stride = v.head_stride, .v_row_stride = v.row_stride,
        .o_batch_stride = o.batch_stride, .o_head_stride = o.head_stride, .o_row_stride = o.row_stride,
        .batch_size = c.batch_size, .nheads = c.nheads, .nheads_k = c.nheads_k, .seqlen_q = c.seqlen_q,
        .seqlen_k = c.seqlen_k + overrun, .head_dim = c.head_dim, .softmax_scale = 1 / std::sqrt(float(c.head_dim)),
        .is_causal = c.is_causal, .dtype = c.dtype, .stream = nullptr};
#ifdef __CUDACC__
    if (c.tiling == kSm80) sm80::flash_forward(p); else
    if (c.tiling == kDmma) dmma::flash_forward(p); else
#endif
    if (c.tiling == kNarrow) c.head_dim <= 128 ? launch_fwd<T, Tiles128Narrow>(p) : launch_fwd<T, Tiles256Narrow>(p);
    else if (c.tiling == kBest) simt::flash_forward(p);
    else if constexpr (!std::is_same_v<T, float>) throw std::runtime_error("the wide tiles are for fp32");
    else if (c.head_dim <= 64) launch_fwd<T, Tiles64Wide>(p);
    else c.head_dim <= 128 ? launch_fwd<T, Tiles128Wide>(p) : launch_fwd<T, Tiles256Wide>(p);

    std::vector<T> out(o.host);
    copy(out.data(), o.device, out.size() * sizeof(T));
    copy(lse.host.data(), lse.device, lse.host.size() * sizeof(float));
    std::vector<double> P(c.seqlen_k);
    for (int b = 0; b < c.batch_size; b++)
        for (int h = 0; h < c.nheads; h++)
            for (int i = 0; i < c.seqlen_q; i++) {
                const int h_k = h / (c.nheads / c.nheads_k);
                int visible = i < valid(b, c.seqlen_q) ? valid(b, c.seqlen_k) : 0;
                if (c.is_causal) visible = std::clamp(i + 1 + c.seqlen_k - c.seqlen_q, 0, visible);
                double sum = 0;  // small scores: no maximum to subtract
                for (int j = 0; j < visible; j++) {
                    double score = 0;
                    for (int d = 0; d < c.head_dim; d++) score += double(q.at(b, h, i, d)) * k.at(b, h_k, j, d);
                    sum += P[j] = std::exp(score * p.softmax_scale);
                }
                check("lse", lse.at(b, h, i, 0), std::log(sum), 1e-5, b, h, i);
                T *row = &out[o.index(b, h, i)];
                for (int d = 0; d < c.head_dim; d++) {
                    double expected = 0;
                    for (int j = 0; j < visible; j++) expected += P[j] / sum * v.at(b, h_k, j, d);
                    // Tensor cores take P rounded to T, and |V| is at most 2.
                    const double tolerance = 1e-5 + epsilon / 2 * (std::abs(expected) + (c.tiling == kSm80 ? 1 : 0));
                    check("out", decode(row[d]), expected, tolerance, b, h, i);
                }
                std::memset(static_cast<void *>(row), 0xff, c.head_dim * sizeof(T));
            }
    if (std::memcmp(out.data(), o.host.data(), out.size() * sizeof(T)))
        throw std::runtime_error("something was written between the rows of out");
}

int main(int argc, char **argv) {
    std::vector<std::string> names(argv + 1, argv + argc);
    overrun = std::erase(names, "--overrun"), valid_only = std::erase(names, "--valid-only");
    size_t passed = 0, failed = 0;
    for (const Case &c : cases) {
        if (!names.empty() && !std::count(names.begin(), names.end(), c.name)) continue;
#ifdef __CUDACC__
        if (c.tiling == kDmma && compute_capability() != 90) { passed++; continue; }  // for Hopper alone
#endif
        try {
            if (c.dtype == f32) run<float>(c, 0x1p-23);
            else if (c.dtype == f16) run<__half>(c, 0x1p-10);
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
