// append.cu on small cases and without torch, as driver.cpp has the other kernels: for the emulator, for the sanitizers
// of g++ and for compute-sanitizer. Results are compared with a plain loop. What the loop does not write must keep its
// bits: of the caches, and of what lies between their rows.
//
//   g++ -std=c++20 -pthread -Icsrc tests/emulator/drivers/append_driver.cpp     or     nvcc -std=c++20 -Icsrc -x cu ...
//   ./a.out [case...]     all cases if none is named; the emulator's options are those of driver.cpp
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#if MINIMAL_ATTN_EMULATED
#include "common/device.h"
#include "flash_cache.h"
#include "common/launch.h"
using namespace device;
using namespace simt;
#elif defined(__CUDACC__)
#include "common/device.cu"
#include "simt/append.cu"
using namespace simt;
#else
#include "host/append_host.cpp"  // from here on simt reads host
using namespace simt;
#endif

#include "driver_memory.h"

struct Entry { int at, page; };  // of the page table

struct Case {
    const char *name;
    DType dtype;
    int nheads, nheads_k, head_dim, head_dim_v;
    int size, pages;               // rows of a sequence; or of a page, and how many pages a sample has
    std::vector<int> seqused_k;    // one for each sample
    std::vector<int> seqlen_new;   // the same for each sample, unless packed
    bool is_packed = false;
    int rotary_dim = 0;
    bool turns_neighbours = false, q_advances = true;
    std::vector<int> rotary_seqlens = {}, batch_idx = {};
    std::vector<Entry> entries = {};    // that differ from what page_of says
    std::vector<int64_t> slots = {};    // of each new row
    bool is_interleaved = false;        // a row of K is followed by the same of V
    int shift = 0, rotary_shift = 0;    // elements before the cache, and before the tables of cos and sin

    int samples() const { return int(seqused_k.size()); }
    int capacity() const { return pages ? size * pages : size; }
};

constexpr int kPadding = 3;      // rows after the last sample of a packed batch
constexpr int kRotaryRows = 40;  // of the tables; some positions are beyond
constexpr DType f16 = DType::kFloat16, b16 = DType::kBFloat16, f32 = DType::kFloat32;
const std::vector<Case> cases = {
    // name, dtype, nheads, nheads_k, head_dim, head_dim_v, size, pages, seqused_k, seqlen_new, is_packed, rotary_dim
    {"one",          b16, 1, 1,   8,   8,   4, 0, {2}, {1}},
    {"dense",        f16, 4, 2,  64,  64,  20, 0, {0, 7, 19}, {1, 1, 1}},
    {"several",      b16, 4, 2, 128, 128,  20, 0, {0, 7}, {5, 5}},
    {"pages_1",      b16, 2, 1,  64,  64,   1, 9, {0, 5, 8}, {3, 3, 3}},
    {"pages_3",      f16, 4, 2,  40,  24,   3, 6, {2, 0, 17}, {4, 4, 4}},
    {"pages_16",     b16, 8, 2, 128, 128,  16, 3, {15, 32, 40}, {2, 2, 2}},
    {"interleaved",  b16, 4, 2,  64,  64,  16, 2, {3, 30}, {3, 3}, false, 32, false, true, {}, {}, {}, {}, true},
    {"odd",          f16, 2, 3,  33,  17,   5, 2, {4, 9}, {2, 2}, false, 16},
    {"narrow",       f16, 2, 2,  36,  36,   4, 2, {4, 7}, {2, 2}},
    {"unaligned",    b16, 2, 2,  64,  64,   5, 2, {4, 0}, {2, 2}, false, 48, true, true, {}, {}, {}, {}, false, 1},
    {"unaligned_cos", f16, 2, 2, 64,  64,   5, 2, {4, 0}, {2, 2}, false, 48, false, true, {}, {}, {}, {}, false, 0, 1},
    {"packed",       f16, 4, 2,  64,  64,  16, 2, {0, 16, 3, 31}, {1, 7, 0, 1}, true},
    {"packed_turns", b16, 4, 2,  64,  32,  30, 0, {0, 16, 3}, {3, 0, 9}, true, 64},
    {"turns",        f16, 4, 2,  64,  64,  60, 0, {0, 45, 7}, {2, 2, 2}, false, 64},
    {"turns_pairs",  b16, 4, 2, 128, 128,  16, 2, {0, 25}, {3, 3}, false, 96, true},
    {"turns_fp32",   f32, 2, 1,  20,  20,   7, 3, {3, 20}, {4, 4}, false, 16, true, false},
    {"turns_later",  b16, 2, 1,  64,  64,  30, 0, {5, 20}, {2, 2}, false, 32, false, true, {100, -1}, {1, 0}},
    {"batch_idx",    b16, 2, 2,  64,  64,   8, 0, {5, 7, 0, 1}, {2, 2, 2, 2}, false, 0, false, true, {}, {3, -1, 0, 4}},
    {"wrong_pages",  f16, 2, 2,  64,  64,   4, 3, {3, 7, 11}, {2, 2, 2}, false, 0, false, true, {}, {},
     {{1, -1}, {4, 10}, {5, 1 << 30}, {8, -(1 << 30)}}},
    {"beyond",       b16, 2, 2,  64,  64,   4, 2, {7, 8, 1 << 30, -9}, {3, 3, 3, 3}},
    {"slots",        b16, 0, 2,  64,  64,  16, 2, {0}, {6}, false, 0, false, true, {}, {}, {},
     {0, -1, 47, 48, 1ll << 40, 17}},
    {"slots_of_3",   f32, 0, 2,  40,  24,   3, 2, {0}, {3}, false, 0, false, true, {}, {}, {}, {8, -(1ll << 40), 3}},
    {"no_rows",      b16, 2, 2,  64,  64,   4, 2, {7, 3}, {0, 0}},
    {"no_samples",   b16, 2, 2,  64,  64,   4, 0, {}, {}},
    {"no_places",    b16, 2, 2,  64,  64,   0, 2, {3, 0}, {2, 2}},
};

// On the host and for the kernel.
template <typename T> struct Memory {
    std::vector<T> host;
    T *device;
    explicit Memory(std::vector<T> x) : host(x), device(static_cast<T *>(allocate(bytes()))) {
        copy(device, host.data(), bytes());
    }
    Memory(const Memory &) = delete;
    ~Memory() { release(device); }
    size_t bytes() const { return host.size() * sizeof(T); }
    void fetch() { copy(host.data(), device, bytes()); }
};

int clamp(int x, int most) { return std::max(0, std::min(x, most)); }

template <typename T> struct Call {
    const Case &c;
    std::mt19937 random;
    std::vector<int> begins;    // of the samples among the new rows, and their end. q has as many rows
    int rows;                   // with the padding
    Memory<T> k_new, v_new, q, q_rotated, cache, cos, sin;
    Memory<int> seqused_k, rotary_seqlens, batch_idx, page_table, cu_seqlens, lengths;
    Memory<int64_t> slots;
    std::vector<T> before;      // the cache
    AppendParams p{};

    explicit Call(const Case &c)
        : c(c), begins(bounds()), rows(begins.back() + (c.is_packed ? kPadding : 0)),
          k_new(numbers(rows * c.nheads_k * c.head_dim)), v_new(numbers(rows * c.nheads_k * c.head_dim_v)),
          q(numbers(rows * c.nheads * c.head_dim)), q_rotated(numbers(q.host.size())),
          cache(numbers(c.shift + num_sequences() * c.nheads_k * c.size * (c.head_dim + c.head_dim_v))),
          cos(numbers(c.rotary_shift + kRotaryRows * c.rotary_dim / 2)), sin(numbers(cos.host.size())),
          seqused_k(c.seqused_k), rotary_seqlens(c.rotary_seqlens), batch_idx(c.batch_idx), page_table(table()),
          cu_seqlens(begins), lengths(std::vector<int>(c.samples(), -1)), slots(c.slots), before(cache.host) {
        const int64_t k_row = c.nheads_k * c.head_dim, v_row = c.nheads_k * c.head_dim_v, q_row = c.nheads * c.head_dim;
        const int seqlen = c.is_packed || c.samples() == 0 ? rows : c.seqlen_new[0];
        const int64_t samples_apart = c.is_packed ? 0 : seqlen;
        p.k_new = {k_new.device, samples_apart * k_row, c.head_dim, k_row};
        p.v_new = {v_new.device, samples_apart * v_row, c.head_dim_v, v_row};
        p.k_cache = {cache.device + k_at(0, 0, 0), k_at(1, 0, 0) - k_at(0, 0, 0), k_at(0, 1, 0) - k_at(0, 0, 0),
                     k_at(0, 0, 1) - k_at(0, 0, 0)};
        p.v_cache = {cache.device + v_at(0, 0, 0), v_at(1, 0, 0) - v_at(0, 0, 0), v_at(0, 1, 0) - v_at(0, 0, 0),
                     v_at(0, 0, 1) - v_at(0, 0, 0)};
        if (c.is_packed) p.cu_seqlens_new = p.cu_seqlens_q = cu_seqlens.device;
        if (c.slots.empty()) p.seqused_k = seqused_k.device, p.lengths = lengths.device;
        else p.slot_mapping = slots.device;
        if (c.pages && c.slots.empty()) p.page_table = page_table.device, p.page_table_stride = c.pages;
        if (!c.batch_idx.empty()) p.cache_batch_idx = batch_idx.device;
        if (c.rotary_dim) {
            p.q = {q.device, samples_apart * q_row, c.head_dim, q_row};
            p.q_rotated = {q_rotated.device, samples_apart * q_row, c.head_dim, q_row};
            p.rotary_cos = cos.device + c.rotary_shift, p.rotary_sin = sin.device + c.rotary_shift;
            p.rotary_dim = c.rotary_dim;
            p.seqlen_rotary = kRotaryRows, p.nheads = c.nheads, p.seqlen_q = seqlen;
            if (!c.rotary_seqlens.empty()) p.rotary_seqlens = rotary_seqlens.device;
        }
        p.rotary_interleaved = c.turns_neighbours, p.q_advances = c.q_advances;
        p.batch_size = c.samples(), p.nheads_k = c.nheads_k, p.seqlen_new = seqlen;
        p.head_dim = c.head_dim, p.head_dim_v = c.head_dim_v, p.dtype = c.dtype;
        p.num_sequences = num_sequences(), p.page_size = c.size, p.capacity = c.capacity();
    }

    std::vector<T> numbers(size_t n) {
        std::vector<T> x(n);
        for (T &number : x) number = encode<T>((int(random() & 255) - 128) / 64.f);
        return x;
    }
    std::vector<int> bounds() const {
        std::vector<int> x{0};
        for (int n : c.seqlen_new) x.push_back(x.back() + n);
        return x;
    }
    int num_sequences() const { return c.pages ? c.samples() * c.pages + 1 : c.samples(); }
    std::vector<int> table() const {  // pages are dealt out backwards; page 0 belongs to nobody
        std::vector<int> x;
        for (int i = 0; i < c.samples() * c.pages; i++) x.push_back(num_sequences() - 1 - i);
        for (const Entry &entry : c.entries) x[entry.at] = entry.page;
        return x;
    }

    // [sequence, head, row, head_dim] of K, then of V; or rows of both in turn.
    int64_t k_at(int sequence, int h, int row) const {
        return c.shift + ((int64_t(sequence) * c.nheads_k + h) * c.size + row) *
                             (c.is_interleaved ? c.head_dim + c.head_dim_v : c.head_dim);
    }
    int64_t v_at(int sequence, int h, int row) const {
        if (c.is_interleaved) return k_at(sequence, h, row) + c.head_dim;
        return k_at(num_sequences(), 0, 0) + ((int64_t(sequence) * c.nheads_k + h) * c.size + row) * c.head_dim_v;
    }

    struct Place { int64_t sequence, row; };
    // The place of new row t of sample b. What is outside of the cache has sequence -1.
    Place place_of(int b, int t) const {
        const int64_t slot = c.slots.empty() ? 0 : c.slots[t], at = clamp(c.seqused_k[b], c.capacity()) + t;
        Place place{b, at};
        if (!c.slots.empty()) place = {slot < 0 ? -1 : slot / c.size, slot % c.size};
        else if (at >= c.capacity()) return {-1, 0};
        else if (c.pages) place = {page_table.host[b * c.pages + at / c.size], at % c.size};
        else if (!c.batch_idx.empty()) place.sequence = c.batch_idx[b];
        return place.sequence >= 0 && place.sequence < num_sequences() ? place : Place{-1, 0};
    }
    // Column `col` of a row, turned as row i of sample b is.
    double turned(const T *row, int col, int b, int i) const {
        if (col >= c.rotary_dim) return decode(row[col]);
        const int64_t first = c.rotary_seqlens.empty() ? clamp(c.seqused_k[b], c.capacity()) : c.rotary_seqlens[b];
        const int64_t position = std::max<int64_t>(0, std::min<int64_t>(first + i, kRotaryRows - 1));
        const int half = c.rotary_dim / 2, angle = c.turns_neighbours ? col / 2 : col % half;
        const bool is_first = c.turns_neighbours ? col % 2 == 0 : col < half;
        const int other = c.turns_neighbours ? col ^ 1 : is_first ? col + half : col - half;
        const int64_t at = c.rotary_shift + position * half + angle;
        const double sine = decode(sin.host[at]);
        return decode(row[col]) * decode(cos.host[at]) + (is_first ? -sine : sine) * decode(row[other]);
    }
};

void expect(const char *name, int64_t at, double x, double y, double tolerance) {
    if (std::abs(x - y) <= tolerance) return;
    char text[128];
    std::snprintf(text, sizeof(text), "%s[%lld] is %.8g, expected %.8g", name, static_cast<long long>(at), x, y);
    throw std::runtime_error(text);
}

// The row at `at` must be `from`, turned and rounded once. Products of the numbers of a case are exact in fp32.
template <typename T>
void expect_row(const char *name, const Call<T> &x, const std::vector<T> &got, int64_t at, const T *from, int b,
                int i) {
    for (int col = 0; col < x.c.head_dim; col++)
        expect(name, at + col, decode(got[at + col]), decode(encode<T>(float(x.turned(from, col, b, i)))), 0);
}

template <typename T> void check(Call<T> &x) {
    const Case &c = x.c;
    x.cache.fetch(), x.q_rotated.fetch(), x.lengths.fetch();
    std::vector<T> &now = x.cache.host;
    for (int b = 0; b < c.samples(); b++)
        for (int t = 0; t < c.seqlen_new[b]; t++) {
            const int row = x.begins[b] + t;
            for (int h = 0; h < c.nheads && c.rotary_dim; h++) {
                const int64_t at = (int64_t(row) * c.nheads + h) * c.head_dim;
                expect_row("q_rotated", x, x.q_rotated.host, at, &x.q.host[at], b, c.q_advances ? t : 0);
            }
            const auto [sequence, place] = x.place_of(b, t);
            for (int h = 0; h < c.nheads_k && sequence >= 0; h++) {
                const int64_t k = x.k_at(sequence, h, place), v = x.v_at(sequence, h, place);
                expect_row("k_cache", x, now, k, &x.k_new.host[(int64_t(row) * c.nheads_k + h) * c.head_dim], b, t);
                std::copy_n(&now[k], c.head_dim, &x.before[k]);  // is right, and leaves what must not have changed
                std::copy_n(&x.v_new.host[(int64_t(row) * c.nheads_k + h) * c.head_dim_v], c.head_dim_v, &x.before[v]);
            }
        }
    for (size_t i = 0; i < now.size(); i++)
        if (std::memcmp(&now[i], &x.before[i], sizeof(T))) expect("cache", i, decode(now[i]), decode(x.before[i]), -1);
    for (int b = 0; b < c.samples() && c.slots.empty(); b++)
        expect("lengths", b, x.lengths.host[b],
               std::min<int64_t>(c.capacity(), clamp(c.seqused_k[b], c.capacity()) + c.seqlen_new[b]), 0);
}

std::vector<std::string> schedules;

void choose_schedule([[maybe_unused]] const std::string &name) {
#if MINIMAL_ATTN_EMULATED
    const unsigned seed = std::stoul(name.substr(name.find('=') + 1));
    const auto mode = name.starts_with("--early")  ? emulator::Mode::kEarly
                      : name.starts_with("--late") ? emulator::Mode::kLate
                                                   : emulator::Mode::kRandom;
    emulator::schedule = {mode, seed};
    emulator::gpu.num_sms = int(seed % 4) + 1;
#endif
}

template <typename T> void run(const Case &c) {
    for (const std::string &name : schedules) {
        choose_schedule(name);
        Call<T> call(c);
        append_kvcache(call.p);
        check(call);
    }
}

int main(int argc, char **argv) {
    std::vector<std::string> names(argv + 1, argv + argc);
    std::erase_if(names, [](const std::string &name) {
        if (name.starts_with("--")) schedules.push_back(name);
        return name.starts_with("--");
    });
    if (schedules.empty()) schedules = {"--early=1"};
    size_t passed = 0, failed = 0;
    for (const Case &c : cases) {
        if (!names.empty() && !std::count(names.begin(), names.end(), c.name)) continue;
        try {
            c.dtype == f16 ? run<__half>(c) : c.dtype == b16 ? run<__nv_bfloat16>(c) : run<float>(c);
            passed++;
        } catch (const std::exception &error) {
            std::printf("%s: %s\n", c.name, error.what());
            failed++;
        }
    }
    std::printf("%zu passed, %zu failed\n", passed, failed);
    return failed > 0 || passed < std::max<size_t>(1, names.size());
}
