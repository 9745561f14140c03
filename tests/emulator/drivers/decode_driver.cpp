// decode.cu, decode_sm90.cu and prefill_sm90.cu, on small cases and without torch, as driver.cpp
// has the other kernels, for the emulator and compute-sanitizer. Results are compared with attention in double
// precision. What no row sees of a cache is NaN. With num_splits every sample is computed in its batch and alone, and
// must have the same bits.
//
//   nvcc -std=c++20 -Icsrc -x cu tests/emulator/drivers/decode_driver.cpp     test_emulator.py builds it for the emulator
//
// driver_common.h has the options.
#include <climits>
#include <memory>

#if MINIMAL_ATTN_EMULATED
#include "common/device.h"
#include "flash_cache.h"
#include "common/launch.h"
using namespace device;
#else
#include "common/device.cu"
#include "cache/decode.cu"
#include "cache/decode_sm90.cu"
#include "cache/prefill_sm90.cu"
using namespace device;
#endif
#include "driver_common.h"
#include "ops/cache_launches.h"

struct Case {
    const char *name;
    DType dtype;
    int nheads, nheads_k, seqlen_q, head_dim, head_dim_v;
    int size, pages;               // keys of a sequence; or of a page, and how many pages a sample has
    std::vector<int> seqused_k;    // one for each sample
    int left = -1, right = -1;     // the window
    std::vector<int> leftpad_k = {}, cu_seqlens_q = {}, seqused_q = {};
    double softcap = 0, scale = 1;
    bool has_alibi = false, has_sinks = false, has_batch_idx = false, is_interleaved = false;
    int num_splits = 0;
    int max_seqlen_q = 0;          // 0: the largest
    enum Tree { kNone, kBranches, kCausal } tree = kNone;  // the tree mask; kCausal is the causal mask as one
    int tall = INT_MAX, prefill = INT_MAX;  // from so many rows on decode_sm90.cu and prefill_sm90.cu serve a sample
    int chunk = 0;

    int samples() const { return int(seqused_k.size()); }
    int capacity() const { return pages ? size * pages : size; }
};

Case chunks(Case c, int chunk) { return c.chunk = chunk, c; }
Case prefill(Case c, int rows = 1) { return c.prefill = rows, c; }
Case tall(Case c, int rows = 1, int prefill = INT_MAX) { return c.tall = rows, c.prefill = prefill, c; }
Case splits(Case c, int num_splits) { return c.num_splits = num_splits, c; }
Case tree(Case c, Case::Tree tree = Case::kBranches) { return c.tree = tree, c; }
Case longest(Case c, int max_seqlen_q) { return c.max_seqlen_q = max_seqlen_q, c; }

constexpr int kPadding = 19;  // rows after the last sample of a packed batch
const std::vector<Case> cases = {
    // name, dtype, nheads, nheads_k, seqlen_q, head_dim, head_dim_v, size, pages, seqused_k, left, right
    {"one",        b16,  1, 1, 1,   8,   8,    1, 0, {1}},
    {"d64",        f16,  4, 1, 1,  64,  64,  300, 0, {300, 1, 0, 129}},
    {"d128",       b16,  8, 2, 1, 128, 128,  330, 0, {330, 65, 64}},
    {"d256",       f16,  4, 2, 1, 256, 256,  150, 0, {150, 80}},
    {"narrow",     b16,  2, 1, 1,  40,  24,  200, 0, {200, 17}},
    {"wide_v",     f16,  3, 1, 1, 104, 192,  100, 0, {100, 99}},
    {"mqa",        b16, 20, 1, 1, 128, 128,  200, 0, {200, 70}},
    {"mqa_256",    b16, 20, 1, 1, 160, 160,  100, 0, {100, 5}},
    {"tokens",     b16,  4, 2, 5, 128, 128,  300, 0, {300, 130, 3}, -1, 0},
    {"many_rows",  f16,  6, 1, 9,  64,  64,  260, 0, {260, 8, 100}, -1, 0},
    {"pages_16",   b16,  4, 2, 1, 128, 128,   16, 9, {130, 16, 0, 144}},
    {"pages_1",    f16,  4, 1, 2,  64,  64,    1, 90, {90, 33}, -1, 0},
    {"pages_3",    b16,  2, 2, 1, 128, 128,    3, 40, {120, 77, 1}},
    {"interleaved", b16, 8, 2, 1, 128, 128,   16, 6, {96, 50}, -1, 0, {}, {}, {}, 0, 1, false, false, false, true},
    {"leftpad",    b16,  4, 2, 3, 128, 128,  200, 0, {200, 150, 40}, -1, 0, {0, 100, 40}},
    {"leftpad_pages", f16, 4, 2, 1, 64, 64,   16, 8, {128, 50}, -1, -1, {5, 33}},
    {"batch_idx",  b16,  4, 2, 1,  64,  64,  150, 0, {150, 20, 0}, -1, -1, {}, {}, {}, 0, 1, false, false, true},
    {"window",     b16,  4, 2, 4, 128, 128,  400, 0, {400, 100, 2}, 70, 0},
    {"window_both", f16, 2, 1, 6,  64,  64,  300, 0, {300, 20}, 100, 2},
    chunks({"chunks", b16, 4, 2, 4, 128, 128, 400, 0, {400, 100, 2, 258}, -1, 0}, 128),
    tall(chunks({"tall_chunks", b16, 8, 1, 6, 64, 64, 400, 0, {400, 130}, -1, 0}, 128)),
    {"softcap",    b16,  4, 2, 1, 128, 128,  200, 0, {200, 60}, -1, -1, {}, {}, {}, 2},
    {"alibi",      f16,  4, 2, 3,  64,  64,   16, 12, {180, 60}, -1, 0, {}, {}, {}, 0, 1, true},
    {"sinks",      b16,  4, 2, 1, 128, 128,  200, 0, {200, 0, 64}, -1, -1, {}, {}, {}, 0, 1, false, true},
    {"everything", b16,  4, 2, 3, 104,  64,   16, 13, {200, 90, 7}, 150, 0, {3, 0, 1}, {}, {}, 3, -1, true, true},
    longest({"packed_long", b16, 4, 1, 0, 128, 128, 200, 0, {180, 200}, -1, 0, {}, {0, 1, 30}}, 1),
    {"packed_shapes", b16, 16, 1, 0, 128, 128, 1300, 0, {1300, 1200, 100}, -1, 0, {}, {0, 1, 2, 4}},
    {"packed_joins", b16, 4, 1, 0, 128, 128, 1300, 0, {1300, 1200, 1100}, -1, 0, {}, {0, 1, 3, 8}},
    {"packed_padding", f16, 4, 1, 0,  64,  64,  300, 0, {300, 300}, -1, 0, {}, {0, 1, 6}},
    {"tiny_scale", f16,  2, 1, 1,  64,  64,  100, 0, {100}, -1, -1, {}, {}, {}, 0, 1e-38},
    {"packed_ones", b16, 4, 1, 0, 128, 128,   16, 20, {300, 200, 310}, -1, 0, {}, {0, 1, 2, 3}},
    {"seqused_q",  b16,  4, 2, 3,  64,  64,  200, 0, {200, 90}, -1, 0, {}, {}, {1, 3}},
    splits({"no_splits", f16, 4, 2, 1, 64, 64, 300, 0, {300, 100}}, 1),
    splits({"tiles_and_splits", f16, 20, 1, 4, 64, 64, 500, 0, {500, 300}, -1, 0}, 5),
    splits({"three_splits", b16, 4, 2, 2, 128, 128, 400, 0, {400, 300, 10}, -1, 0}, 3),
    {"scale_30",   b16,  2, 1, 1, 128, 128,  300, 0, {300, 70}, -1, -1, {}, {}, {}, 0, 30},
    {"clamped",    f16,  2, 1, 1,  64,  64,   16, 4, {1 << 30, -5}},
    tree({"tree", b16, 4, 2, 5, 128, 128, 300, 0, {300, 66, 5, 3}}),
    tree({"tree_tiles", f16, 6, 1, 9, 64, 64, 16, 20, {260, 8, 100}, -1, -1, {3, 0, 50}, {}, {9, 4, 7}, 0, 1, false,
          true}),
    tree(splits({"tree_64", b16, 2, 1, 64, 64, 64, 200, 0, {200, 70}}, 3)),
    tree({"tree_causal", f16, 4, 2, 7, 64, 64, 260, 0, {260, 100, 7}, -1, 0}, Case::kCausal),
    {"many",       f16,  2, 1, 1,  64,  64,   16, 3, std::vector<int>(300, 40)},
    {"uneven",     b16,  2, 1, 1, 128, 128, 3000, 0, {100, 3000, 5, 0, 64, 70}},  // one sample has later work items
    {"uneven_heads", f16, 4, 2, 3, 64, 64,  5000, 0, {4900, 30, 70, 4000}, -1, 0},
    // A sample has more rows than max_seqlen_q, another none.
    longest({"uneven_packed", b16, 1, 1, 0, 128, 128, 9000, 0, {9000, 8000, 50, 60}, -1, 0, {}, {0, 1, 11, 11, 12}}, 1),
    {"uneven_clusters", b16, 1, 1, 1, 128, 128, 9000, 0, {9000, 100}},
    {"uneven_256", f16,  2, 1, 1, 256, 256,   16, 90, {1400, 30, 200}},
    prefill({"prefill", b16, 4, 2, 200, 128, 128, 330, 0, {330, 205, 64}, -1, 0}),
    prefill({"prefill_pages", f16, 2, 1, 70, 64, 64, 16, 20, {300, 77, 0, 320}, -1, 0}),
    prefill({"prefill_pages_192", b16, 2, 1, 33, 192, 128, 16, 7, {110, 40}, -1, 0}),
    prefill({"prefill_pages_256", f16, 2, 1, 130, 256, 192, 256, 2, {300, 256}}),
    prefill({"prefill_interleaved", b16, 2, 1, 40, 128, 128, 16, 6, {96, 50}, -1, 0, {}, {}, {}, 0, 1, false, true,
             false, true}),
    prefill({"prefill_leftpad", b16, 4, 2, 30, 128, 128, 200, 0, {200, 150, 40}, -1, 0, {0, 100, 40}}),
    prefill({"prefill_batch_idx", f16, 2, 1, 20, 64, 64, 150, 0, {150, 20, 0}, -1, -1, {}, {}, {}, 0, 1, false, false,
             true}),
    prefill({"prefill_clamped", f16, 2, 1, 9, 64, 64, 16, 4, {1 << 30, -5}}),
    prefill({"mixed", b16, 4, 2, 0, 128, 128, 16, 14, {200, 180, 100, 224, 5}, -1, 0, {}, {0, 1, 90, 92, 300, 300}},
            20),
    prefill({"mixed_lengths", f16, 2, 1, 80, 64, 64, 200, 0, {200, 150, 180}, -1, 0, {}, {}, {80, 3, 7}}, 7),
    tall({"tall_64", f16, 4, 1, 5, 64, 64, 300, 0, {300, 1, 0, 129}, -1, 0}),
    tall({"tall_narrow", b16, 2, 1, 1, 40, 24, 200, 0, {200, 17}}),
    tall({"tall_mqa", f16, 70, 1, 2, 64, 104, 200, 0, {200, 70}}),
    tall({"tall_rows", b16, 6, 1, 40, 128, 128, 260, 0, {260, 8, 100}, -1, 0}),
    tall({"tall_pages", b16, 4, 2, 5, 128, 128, 16, 9, {130, 16, 0, 144}, -1, 0}),
    tall({"tall_everything", b16, 4, 2, 3, 104, 64, 200, 0, {200, 90, 7}, 150, 0, {3, 0, 1}, {}, {}, 3, 3, true, true}),
    tall({"tall_batch_idx", f16, 4, 2, 5, 64, 64, 150, 0, {150, 20, 0}, -1, -1, {}, {}, {}, 0, 1, false, false, true}),
    tall({"tall_seqused_q", b16, 4, 2, 9, 64, 64, 200, 0, {200, 90}, -1, 0, {}, {}, {1, 9}}, 5),
    tall(splits({"tall_splits", b16, 4, 2, 5, 128, 128, 400, 0, {400, 300, 10}, -1, 0}, 3)),
    tall({"tall_clamped", f16, 2, 1, 5, 64, 64, 16, 4, {1 << 30, -5}}),
    tall({"tall_uneven", b16, 2, 1, 5, 128, 128, 3000, 0, {100, 3000, 5, 0, 64, 70}, -1, 0}),
    tall(longest({"tall_tiles", b16, 4, 1, 0, 128, 128, 200, 0, {180, 200}, -1, 0, {}, {0, 1, 30}}, 1)),
    tree(tall({"tall_tree", f16, 6, 1, 9, 64, 64, 16, 20, {260, 8, 100}, -1, -1, {}, {}, {9, 4, 7}, 0, 1, false,
               true})),
    tall({"all_kernels", b16, 4, 2, 0, 128, 128, 16, 14, {200, 180, 100, 224, 5}, -1, 0, {}, {0, 1, 90, 97, 300, 300}},
         5, 50),
    prefill({"mixed_padding", b16, 2, 1, 0, 64, 64, 32, 5, {150, 150}, -1, 0, {}, {0, 5, 100}}, 20),
};

// As append.cu does, while the next kernel may have begun.
__global__ void store_lengths(int *to, const int *from, int count) {
    let_next_kernel_begin();
    for (int b = threadIdx.x; b < count; b += blockDim.x) to[b] = from[b];
}

// A case, or one sample of it (only >= 0), in memory.
template <typename T> struct Call {
    const Case &c;
    const int samples, first, rows;
    std::mt19937 random;
    int64_t row_stride, v_row_stride;
    Memory<T> q, kv, o;
    Memory<float> lse, slopes, sinks;
    Memory<int> lengths, seqused_k, seqused_q, leftpad_k, batch_idx, page_table, cu_seqlens_q;
    Memory<uint64_t> tree_mask;
    DecodeParams p{};
    bool is_mixed = false;  // known when it has run

    Call(const Case &c, int only)
        : c(c), samples(only < 0 ? c.samples() : 1), first(std::max(only, 0)),
          rows(c.cu_seqlens_q.empty() ? c.seqlen_q * samples
               : only < 0             ? c.cu_seqlens_q.back() + kPadding
                                      : c.cu_seqlens_q[first + 1] - c.cu_seqlens_q[first]),
          row_stride(c.is_interleaved ? c.head_dim + c.head_dim_v : c.head_dim),
          v_row_stride(c.is_interleaved ? row_stride : c.head_dim_v), q(numbers(rows * c.nheads * c.head_dim)),
          kv(cache()), o(std::vector<T>(rows * c.nheads * c.head_dim_v)), lse(std::vector<float>(rows * c.nheads)),
          slopes(floats(c.nheads)), sinks(floats(c.nheads)), lengths(of_samples(c.seqused_k)), seqused_k(lengths.host),
          seqused_q(of_samples(c.seqused_q)), leftpad_k(of_samples(c.leftpad_k)), batch_idx(of_samples(indices())),
          page_table(tables()), cu_seqlens_q(bounds()), tree_mask(words()) {
        // Rows of q are those of the whole batch.
        std::mt19937 of_q(7);
        std::vector<T> whole = random_numbers((c.cu_seqlens_q.empty() ? c.samples() * c.seqlen_q
                                                                       : c.cu_seqlens_q.back() + kPadding) *
                                                  c.nheads * c.head_dim, of_q);
        const int row0 = c.cu_seqlens_q.empty() ? first * c.seqlen_q : first ? c.cu_seqlens_q[first] : 0;
        std::copy_n(whole.begin() + row0 * c.nheads * c.head_dim, q.host.size(), q.host.begin());
        q.upload();
        set_params();
    }

    std::vector<T> random_numbers(size_t n, std::mt19937 &generator) {
        std::vector<T> x(n);
        for (T &number : x) number = random_number<T>(generator);
        return x;
    }
    std::vector<T> numbers(size_t n) { return random_numbers(n, random); }
    std::vector<float> floats(int n) {
        std::mt19937 generator(n);
        std::vector<float> x(n);
        for (float &number : x) number = float(generator() & 255) / 128;
        return x;
    }
    std::vector<int> of_samples(const std::vector<int> &x) {
        return x.empty() ? std::vector<int>{0} : std::vector<int>(x.begin() + first, x.begin() + first + samples);
    }
    std::vector<int> indices() {
        std::vector<int> x;
        for (int b = 0; b < c.samples(); b++) x.push_back(c.has_batch_idx ? (b + 1) % c.samples() : b);
        return x;
    }
    int num_sequences() const { return c.pages ? c.samples() * c.pages + 1 : c.samples(); }
    // Page 0 is shared by all samples, as their first one. The others are dealt out backwards.
    int page_of(int b, int i) const { return i == 0 ? 0 : num_sequences() - 1 - (b * c.pages + i); }
    std::vector<int> tables() {
        std::vector<int> x{0};
        for (int b = first; b < first + samples && c.pages; b++)
            for (int i = 0; i < c.pages; i++) {
                if (b == first && i == 0) x.clear();
                // What lies beyond the keys of a sample is not read.
                x.push_back(i * c.size < std::clamp(c.seqused_k[b], 0, c.capacity()) ? page_of(b, i) : 1 << 30);
            }
        return x;
    }
    std::vector<int> bounds() {
        if (c.cu_seqlens_q.empty()) return {0};
        return samples == c.samples() ? c.cu_seqlens_q : std::vector<int>{0, rows};
    }

    // K and V in one allocation; [sequence, head, row, head_dim], or rows of K and V in turn.
    int64_t v_offset() const {
        return c.is_interleaved ? c.head_dim : int64_t(num_sequences()) * c.nheads_k * c.size * c.head_dim;
    }
    int64_t k_at(int sequence, int h, int row) const {
        return ((int64_t(sequence) * c.nheads_k + h) * c.size + row) * row_stride;
    }
    int64_t v_at(int sequence, int h, int row) const {
        return v_offset() + ((int64_t(sequence) * c.nheads_k + h) * c.size + row) * v_row_stride;
    }
    struct Place { int sequence, row; };
    Place place_of(int b, int key) const {  // of a key of the whole case
        if (!c.leftpad_k.empty()) key += c.leftpad_k[b];
        if (c.pages) return {page_of(b, key / c.size), key % c.size};
        return {c.has_batch_idx ? (b + 1) % c.samples() : b, key};
    }
    int keys_of(int b) const {
        return std::max(0, std::clamp(c.seqused_k[b], 0, c.capacity()) - (c.leftpad_k.empty() ? 0 : c.leftpad_k[b]));
    }
    int rows_of_sample(int b) const {
        if (!c.cu_seqlens_q.empty()) return c.cu_seqlens_q[b + 1] - c.cu_seqlens_q[b];
        return c.seqused_q.empty() ? c.seqlen_q : c.seqused_q[b];
    }
    // A token of a tree sees its parent, all that this one sees, and itself. The causal tree has one branch.
    bool tree_sees(int b, int row, int new_key) const {
        while (row > new_key) row = c.tree == Case::kCausal ? row - 1 : (row - 1) / (2 + b);
        return row == new_key;
    }
    std::vector<uint64_t> words() {
        std::vector<uint64_t> x(std::max(1, samples * c.seqlen_q));
        for (int b = 0; b < samples && c.tree; b++)
            for (int row = 0; row < c.seqlen_q; row++)
                for (int j = 0; j <= row; j++)
                    x[b * c.seqlen_q + row] |= uint64_t(tree_sees(first + b, row, j)) << j;
        return x;
    }
    bool sees(int b, int row, int key) const {
        const int diagonal = row + keys_of(b) - rows_of_sample(b);
        if (c.tree == Case::kBranches && key >= keys_of(b) - rows_of_sample(b))
            return tree_sees(b, row, key - (keys_of(b) - rows_of_sample(b)));
        return (c.left < 0 || key >= diagonal - c.left) && (c.right < 0 || key <= diagonal + c.right) &&
               (!c.chunk || (diagonal >= 0 && key / c.chunk == diagonal / c.chunk));
    }
    // NaN but for what some row sees.
    std::vector<T> cache() {
        std::vector<T> x(num_sequences() * int64_t(c.nheads_k) * c.size * (c.head_dim + c.head_dim_v));
        std::memset(static_cast<void *>(x.data()), 0xff, x.size() * sizeof(T));
        std::mt19937 generator(3);
        for (int b = 0; b < c.samples(); b++)
            for (int key = 0; key < keys_of(b); key++) {
                bool is_seen = false;
                for (int row = 0; row < rows_of_sample(b); row++) is_seen |= sees(b, row, key);
                const auto [sequence, at] = place_of(b, key);
                for (int h = 0; h < c.nheads_k && is_seen; h++) {
                    const std::vector<T> k = random_numbers(c.head_dim, generator);
                    const std::vector<T> v = random_numbers(c.head_dim_v, generator);
                    std::copy(k.begin(), k.end(), x.begin() + k_at(sequence, h, at));
                    std::copy(v.begin(), v.end(), x.begin() + v_at(sequence, h, at));
                }
            }
        return x;
    }

    void set_params() {
        const bool is_packed = !c.cu_seqlens_q.empty();
        const int64_t q_row = int64_t(c.nheads) * c.head_dim, o_row = int64_t(c.nheads) * c.head_dim_v;
        p.q = {q.device, is_packed ? 0 : c.seqlen_q * q_row, c.head_dim, q_row};
        p.o = {o.device, is_packed ? 0 : c.seqlen_q * o_row, c.head_dim_v, o_row};
        p.k = {kv.device, c.nheads_k * c.size * row_stride, c.size * row_stride, row_stride};
        p.v = {kv.device + v_offset(), c.nheads_k * c.size * v_row_stride, c.size * v_row_stride, v_row_stride};
        p.seqlen_q = is_packed ? rows : c.seqlen_q, p.seqlen_k = c.capacity();
        p.lse = lse.device, p.lse_batch_stride = is_packed ? 0 : int64_t(c.nheads) * c.seqlen_q;
        p.batch_size = samples, p.nheads = c.nheads, p.nheads_k = c.nheads_k;
        p.head_dim = c.head_dim, p.head_dim_v = c.head_dim_v, p.dtype = c.dtype, p.softcap = c.softcap;
        p.softmax_scale = float(c.scale / std::sqrt(double(c.head_dim)));
        c.tree ? p.set_window(-1, -1) : p.set_window(c.left, c.right);
        p.attention_chunk = c.chunk;
        p.seqused_k = lengths.device;
        if (is_packed) p.cu_seqlens_q = cu_seqlens_q.device;
        if (!c.seqused_q.empty()) p.seqused_q = seqused_q.device;
        if (!c.leftpad_k.empty()) p.leftpad_k = leftpad_k.device;
        if (c.has_batch_idx || (!c.pages && samples < c.samples())) p.cache_batch_idx = batch_idx.device;
        if (c.has_alibi) p.alibi_slopes = slopes.device;
        if (c.has_sinks) p.sinks = sinks.device;
        if (c.tree) p.tree_mask = tree_mask.device, p.tree_batch_stride = c.seqlen_q;
        if (c.pages) p.page_table = page_table.device, p.page_table_stride = c.pages;
        p.num_sequences = num_sequences(), p.page_size = c.size, p.num_splits = c.num_splits;
        int longest = c.seqlen_q;
        for (size_t b = 1; b < c.cu_seqlens_q.size(); b++)
            longest = std::max(longest, c.cu_seqlens_q[b] - c.cu_seqlens_q[b - 1]);
        p.max_seqlen_q = c.max_seqlen_q ? c.max_seqlen_q : longest;
    }

    // The first of two launches that share the tiles of prompts takes all here, as launches do not overlap. Without it
    // the second one takes all.
    void run(bool has_first_prefill = true) {
        o.make_nan(), lse.make_nan();
        Memory<int> tile_counter({0});
        p.tile_counter = tile_counter.device;
        std::vector<std::unique_ptr<Memory<char>>> workspaces;  // until all launches have ended
        std::vector<std::unique_ptr<Memory<int>>> counters;     // of each launch, and nothing to spare
        auto decode = [&](DecodeParams launched, DecodeSizes sizes, void (*flash_decode)(const DecodeParams &)) {
            // Gaps in it are read, and what is read there is ignored.
            const std::vector<char> gaps(sizes.workspace_bytes + 1, char(0xff));
            const Memory<char> &workspace = *workspaces.emplace_back(std::make_unique<Memory<char>>(gaps));
            const std::vector<int> zeros(sizes.num_counters + 1);
            counters.push_back(std::make_unique<Memory<int>>(zeros));
            launched.workspace = workspace.device, launched.counters = counters.back()->device;
            if (launched.phase == Phase::kAlone) {
                lengths.make_nan();
                launch(store_lengths, 1, 32, 0, nullptr, lengths.device, seqused_k.device, samples);
            }
            flash_decode(launched);
        };
        launch_by_rows(
            p, FewestRows{c.tall, c.prefill}, num_sms(), true,
            [&](const DecodeParams &p) {
                is_mixed = p.phase != Phase::kAlone;
                if (p.phase != Phase::kPrefill || has_first_prefill) sm90::flash_prefill(p);
            },
            [&](const DecodeParams &p) { decode(p, sm90::decode_sizes(p), sm90::flash_decode); },
            [&](const DecodeParams &p) { decode(p, sm80::decode_sizes(p), sm80::flash_decode); });
        o.fetch(), lse.fetch();
        for (auto &x : counters)
            if (x->fetch(); std::count(x->host.begin(), x->host.end(), 0) != std::ssize(x->host))
                throw std::runtime_error("counters are not 0 again");
    }

    // The place of row i of sample b of the whole case, in o and lse of this call.
    int64_t row_at(int b, int i) const {
        return c.cu_seqlens_q.empty() ? int64_t(b - first) * c.seqlen_q + i
                                      : c.cu_seqlens_q[b] - c.cu_seqlens_q[first] + i;
    }
    int64_t lse_at(int b, int h, int i) const {
        return c.cu_seqlens_q.empty() ? (int64_t(b - first) * c.nheads + h) * c.seqlen_q + i : h * rows + row_at(b, i);
    }
};

template <typename T> void check(const Call<T> &x, double epsilon) {
    const Case &c = x.c;
    for (int b = 0; b < c.samples(); b++)
        for (int h = 0; h < c.nheads; h++)
            for (int i = 0; i < (c.cu_seqlens_q.empty() ? c.seqlen_q : x.rows_of_sample(b)); i++) {
                const int keys = i < x.rows_of_sample(b) ? x.keys_of(b) : 0, h_k = h / (c.nheads / c.nheads_k);
                const double sink = c.has_sinks && i < x.rows_of_sample(b) ? x.sinks.host[h] : -INFINITY;
                std::vector<double> scores(keys, -INFINITY);
                double max = sink, sum = 0;
                const T *q = &x.q.host[(x.row_at(b, i) * c.nheads + h) * c.head_dim];
                for (int j = 0; j < keys; j++) {
                    if (!x.sees(b, i, j)) continue;
                    const auto [sequence, row] = x.place_of(b, j);
                    double s = 0;
                    for (int d = 0; d < c.head_dim; d++)
                        s += decode(q[d]) * decode(x.kv.host[x.k_at(sequence, h_k, row) + d]);
                    s *= x.p.softmax_scale;
                    if (c.softcap) s = c.softcap * std::tanh(s / c.softcap);
                    if (c.has_alibi) s -= x.slopes.host[h] * std::abs(i + keys - x.rows_of_sample(b) - j);
                    scores[j] = s, max = std::max(max, s);
                }
                std::vector<double> out(c.head_dim_v), size(c.head_dim_v);
                if (max > -INFINITY) {
                    sum = std::exp(sink - max);
                    for (double &s : scores) sum += s = std::exp(s - max);
                }
                for (int j = 0; j < keys; j++) {
                    if (!x.sees(b, i, j)) continue;
                    const auto [sequence, row] = x.place_of(b, j);
                    for (int d = 0; d < c.head_dim_v; d++) {
                        const double term = scores[j] / sum * decode(x.kv.host[x.v_at(sequence, h_k, row) + d]);
                        out[d] += term, size[d] += std::abs(term);
                    }
                }
                const double lse = sum ? max + std::log(sum) : -INFINITY;
                expect("lse", b, h, i, 0, x.lse.host[x.lse_at(b, h, i)], lse,
                       (c.softcap ? 1e-3 * c.softcap : 5e-6) * (1 + std::abs(lse)) + 5e-6 * 4 * c.scale);
                for (int d = 0; d < c.head_dim_v; d++)
                    expect("out", b, h, i, d, decode(x.o.host[(x.row_at(b, i) * c.nheads + h) * c.head_dim_v + d]),
                           out[d], epsilon * (1 + size[d]) + epsilon / 2 * std::abs(out[d]));
            }
}

// Rows that are no sample's get 0 and -inf.
template <typename T> void check_padding(const Call<T> &x) {
    const Case &c = x.c;
    for (int row = c.cu_seqlens_q.empty() ? x.rows : c.cu_seqlens_q.back(); row < x.rows; row++)
        for (int h = 0; h < c.nheads; h++) {
            expect("lse of padding", 0, h, row, 0, x.lse.host[h * x.rows + row], -INFINITY, 0);
            for (int d = 0; d < c.head_dim_v; d++)
                expect("padding", 0, h, row, d, decode(x.o.host[(row * c.nheads + h) * c.head_dim_v + d]), 0, 0);
        }
}

template <typename T> void check_alone(const Call<T> &x, int b) {
    const Case &c = x.c;
    Call<T> alone(c, b);
    // By its own rows, unless the case says otherwise. Of a padded batch, all samples have as many.
    alone.p.max_seqlen_q = c.max_seqlen_q ? c.max_seqlen_q : x.rows_of_sample(b) ? alone.p.seqlen_q : 1;
    if (alone.rows == 0) return;
    alone.run();
    for (int i = 0; i < x.rows_of_sample(b); i++)
        for (int h = 0; h < c.nheads; h++) {
            auto o = [&](const Call<T> &call) {
                return &call.o.host[(call.row_at(b, i) * c.nheads + h) * c.head_dim_v];
            };
            auto lse = [&](const Call<T> &call) { return &call.lse.host[call.lse_at(b, h, i)]; };
            if (std::memcmp(o(x), o(alone), c.head_dim_v * sizeof(T)) || std::memcmp(lse(x), lse(alone), 4))
                throw std::runtime_error("sample " + std::to_string(b) + " has other bits without its batch");
        }
}

// The causal mask, by which the call was a tree mask, gives the same bits.
template <typename T> void check_causal(const Call<T> &x) {
    Case c = x.c;
    c.tree = Case::kNone;
    Call<T> causal(c, -1);
    causal.run();
    if (std::memcmp(x.o.host.data(), causal.o.host.data(), x.o.bytes()) ||
        std::memcmp(x.lse.host.data(), causal.lse.host.data(), x.lse.bytes()))
        throw std::runtime_error("the causal mask gives other bits than the tree mask");
}

// With num_splits a sample's bits depend on it alone, not on its batch, the schedule or the size of the GPU.
template <typename T> void run(const Case &c, double epsilon, const std::vector<std::string> &schedules) {
    std::vector<T> bits;
    for_schedules(schedules, [&](const std::string &name) {
        // Two stages fit 99 KB, as a GPU of compute capability 8.6 has them, and three fit 227 KB.
        choose_schedule(name, name.starts_with("--late") ? 99 << 10 : 227 << 10);
#if MINIMAL_ATTN_EMULATED
        // A larger GPU has room for clusters, and for several work items of a sample.
        emulator::gpu.num_sms *= name.starts_with("--early") ? 2 : name.starts_with("--late") ? 4 : 1;
#endif
        Call<T> call(c, -1);
        for (bool has_first_prefill : {true, false}) {
            if (!has_first_prefill && !call.is_mixed) break;
            call.run(has_first_prefill);
            check(call, epsilon);
            check_padding(call);
        }
        if (c.tree == Case::kCausal) check_causal(call);
        if (c.num_splits == 0) return;
        if (!bits.empty() && std::memcmp(bits.data(), call.o.host.data(), call.o.bytes()))
            throw std::runtime_error("out has other bits than by " + schedules[0]);
        bits = call.o.host;
        if (c.samples() <= 4)
            for (int b = 0; b < c.samples(); b++) check_alone(call, b);
    });
}

// Without num_splits, and with it.
template <typename T> void run(Case c, double epsilon) {
    run<T>(c, epsilon, schedules);
    if (c.num_splits) return;
    c.num_splits = 16;
    run<T>(c, epsilon, {schedules.back()});
}

int main(int argc, char **argv) {
    return run_cases(argc, argv, cases, [](const Case &) { return true; }, [](const Case &c) {
        c.dtype == f16 ? run<__half>(c, 0x1p-10) : run<__nv_bfloat16>(c, 0x1p-7);
    });
}
