// The tensors of a case of driver.cpp, and attention and its gradients in double precision, written as plain loops.
// Include it after driver_common.h and driver_cases.h.
#pragma once

#include <array>

// [batch_size, heads, rows, head_dim], on host and device; NaN (all bits set, in any dtype) where nothing was written.
template <typename T> struct Buffer : Memory<T> {
    using Memory<T>::host, Memory<T>::device, Memory<T>::upload, Memory<T>::bytes;
    int64_t heads, head_dim, row_stride, head_stride, batch_stride, offset;

    Buffer(int batch_size, int heads_, int rows, int head_dim_, Layout layout = kHeads)
        : heads(heads_), head_dim(head_dim_),
          row_stride(layout == kRows ? heads * head_dim : head_dim + (layout == kGaps) + 8 * (layout == kSlices)),
          head_stride(layout == kRows ? head_dim : layout == kExpanded ? 0 : rows * row_stride),
          batch_stride(layout == kExpanded ? 0 : heads * rows * row_stride), offset(layout == kOffset) {
        host.resize(index(batch_size - 1, heads - 1, rows - 1) + head_dim);
        device = static_cast<T *>(allocate(bytes()));
        this->make_nan();
    }

    Tensor tensor() const { return {device + offset, batch_stride, head_stride, row_stride}; }
    int64_t index(int64_t b, int64_t h, int64_t r) const {
        return offset + b * batch_stride + h * head_stride + r * row_stride;
    }
    double at(int64_t b, int64_t h, int64_t r, int64_t d) const { return decode(host[index(b, h, r) + d]); }
    // The first sample in kHeads: zeros in all other columns.
    void set_first_column(auto value_of) {
        for (int64_t h = 0; h < heads; h++)
            for (int64_t r = 0; r < batch_stride / heads / head_dim; r++)
                for (int64_t d = 0; d < head_dim; d++) host[index(0, h, r) + d] = encode<T>(d ? 0.f : value_of(r));
        upload();
    }
    void randomize(int64_t b, int64_t begin, int64_t end, std::mt19937 &random) {
        for (int64_t h = 0; h < heads; h++)
            for (int64_t r = begin; r < end; r++) {
                T *x = &host[index(b, h, r)];
                for (int64_t d = 0; d < head_dim; d++) x[d] = random_number<T>(random);
            }
        upload();
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
                    expect(expected.name, b, h, r, d, x, y,
                           error * (1 + expected.magnitude[at + d]) + epsilon / 2 * std::abs(y));
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

// The tensors of a case, on host and device.
template <typename T> struct Tensors {
    const Case &c;
    const Layout out_layout = c.layout == kExpanded ? kHeads : c.layout;
    Buffer<T> q{c.batch_size, c.nheads, c.seqlen_q, c.head_dim, c.layout};
    Buffer<T> k{c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim, c.layout};
    Buffer<T> v{c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim_v, c.layout};
    // What belongs to rows that see no key may be read, and is then not used.
    Buffer<T> dout{c.batch_size, c.nheads, c.seqlen_q, c.head_dim_v, c.layout};
    Buffer<float> dlse{c.batch_size, c.nheads, c.seqlen_q, 1, c.layout};
    Buffer<T> o{c.batch_size, c.nheads, c.seqlen_q, c.head_dim_v, out_layout};
    Buffer<T> dq{c.batch_size, c.nheads, c.seqlen_q, c.head_dim, out_layout};
    Buffer<T> dk{c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim, out_layout};
    Buffer<T> dv{c.batch_size, c.nheads_k, c.seqlen_k, c.head_dim_v, out_layout};
    Buffer<float> max_logits{c.batch_size, c.nheads, c.seqlen_q, 1};
    Buffer<float> lse{c.batch_size, c.nheads, c.seqlen_q, 1}, delta{c.batch_size, c.nheads, c.seqlen_q, 1};
    Buffer<float> lse_log2{c.batch_size, c.nheads, c.seqlen_q, 1};
    Buffer<int> seqused_q{c.samples(), 1, 1, 1}, seqused_k{c.samples(), 1, 1, 1};
    Memory<int> tile_counter{{0, 0}};
    Buffer<int> cu_seqlens_q{c.samples() + 1, 1, 1, 1}, cu_seqlens_k{c.samples() + 1, 1, 1, 1};
    Buffer<int64_t> seed{1, 1, 1, c.is_part ? 1 + 4 * c.samples() : 1};  // and origins
    Buffer<float> sinks{1, 1, 1, c.nheads};
    Buffer<float> slopes{1, c.samples(), c.nheads, 1};
    // One element for each that is not shared. In double precision, and as the kernel reads it.
    const int64_t bias_sizes[4] = {size_of('B', c.batch_size), size_of('H', c.nheads), size_of('R', c.seqlen_q),
                                   size_of('K', c.seqlen_k)};
    std::vector<double> bias;
    std::optional<Buffer<char>> bias_bytes, mask_words;
    std::list<Buffer<int>> block_mask;
    std::optional<Buffer<float>> dbias;  // of a bias that is no mask
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
        if (c.has_block_mask) set_block_mask(random);
        set_backward_params();
        for (int b = 0; b < c.samples(); b++) {
            const Span rows = rows_of(b), keys = keys_of(b);
            q.randomize(batch_of(b), rows.begin, rows.begin + rows.valid, random);
            const int first = first_key(b);  // those before it stay NaN: no row sees them, but a block may have them
            for (Buffer<T> *x : {&k, &v})
                x->randomize(batch_of(b), keys.begin + first, keys.begin + keys.valid, random);
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
        p.seqlen_k = c.seqlen_k, p.head_dim = c.head_dim, p.head_dim_v = c.head_dim_v;
        p.dtype = c.dtype, p.sinks = c.has_sinks ? sinks.device : nullptr;
        p.set_window(c.window_left, window_right());
        p.attention_chunk = c.chunk, p.max_logits = c.has_max ? max_logits.device : nullptr;
        if (p.has_mask() || p.cu_seqlens_q || p.seqused_q || p.seqused_k)
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
            default: throw std::runtime_error("a bias of this type is not among the cases");
        }
        if (*c.bias != boolean) {
            dbias.emplace(int(bias_sizes[0]), int(nheads), int(rows), int(keys));
            p.dbias = {dbias->device, stride(0, nheads * rows * keys), stride(1, rows * keys), stride(2, keys),
                       stride(3, 1)};
        }
        p.bias = {bias_bytes->device, stride(0, nheads * rows * keys), stride(1, rows * keys), stride(2, keys),
                  stride(3, 1), *c.bias};
#if HAS_GPU
        if (const int64_t words = std::max(sm90::num_mask_words(p, false), sm90::num_mask_words(p, true)))
            p.mask_words = reinterpret_cast<uint32_t *>(mask_words.emplace(1, 1, 1, int(4 * words)).device);
#endif
    }
    // Hides scores by `bias`, which kernels do not get, and makes the mask of it.
    void set_block_mask(std::mt19937 &random) {
        const auto [samples, heads, rows, keys] = bias_sizes;
        p.bias.batch_stride = samples > 1 ? heads * rows * keys : 0, p.bias.head_stride = heads > 1 ? rows * keys : 0;
        p.bias.row_stride = keys, p.bias.key_stride = 1;
        const int64_t row_units = (rows + 63) / 64, key_units = (keys + 63) / 64;
        const int64_t row_words = (key_units + 31) / 32, key_words = (row_units + 31) / 32;
        std::vector<int> units, bits, of_rows(samples * heads * row_units * row_words);
        std::vector<int> of_keys(samples * heads * key_units * key_words);
        for (int64_t head = 0; head < samples * heads; head++) {
            bias.resize((head + 1) * rows * keys);
            for (int64_t i = 0; i < row_units * key_units; i++) {
                const int64_t m = i / key_units, n = i % key_units;
                // 0: hidden, as are 64 rows and 128 keys; 1: seen.
                const int kind = m == 2 || n / 2 == 1 ? 0 : random() % 4;
                units.push_back(kind < 2 ? kind - 2 : int(bits.size() / 256));
                if (kind > 0) {
                    of_rows[(head * row_units + m) * row_words + n / 32] |= 1 << n % 32;
                    of_keys[(head * key_units + n) * key_words + m / 32] |= 1 << m % 32;
                }
                if (kind > 1) bits.resize(bits.size() + 256);
                for (int x = 0; x < 64 * 64; x++) {
                    const int row = x / 64, key = x % 64;
                    const bool is_seen = kind == 1 || (kind > 1 && random() % 2);
                    if (64 * m + row < rows && 64 * n + key < keys)
                        bias[(head * rows + 64 * m + row) * keys + 64 * n + key] = is_seen ? 0 : -INFINITY;
                    auto add = [&](int end, int i, int j) {
                        const int thread = i / 16 * 32 + i % 8 * 4 + j % 8 / 2, bit = i / 8 % 2 * 16 + j / 8 * 2 + j % 2;
                        if (is_seen) bits.end()[thread - end] |= 1 << bit;
                    };
                    if (kind > 1) add(256, row, key), add(128, key, row);
                }
            }
        }
        auto upload = [&](const std::vector<int> &x) {
            auto &buffer = block_mask.emplace_back(1, 1, 1, int(x.size()));
            copy(buffer.device, x.data(), 4 * x.size());
            return buffer.device;
        };
        auto words = [&](const std::vector<int> &x) { return reinterpret_cast<uint32_t *>(upload(x)); };
        p.block_mask = {upload(units), words(of_rows), words(of_keys), words(bits), int(samples),
                        int(heads), int(row_units), int(key_units), int(bits.size() / 256)};
        p.tile_counter = tile_counter.device;
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
    void for_forward(auto f) {
        f("out", o), f("lse", lse);
        if (c.has_max) f("max_logits", max_logits);
    }
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
               (window_right() < 0 || key <= diagonal + window_right()) &&
               (!c.chunk || (diagonal >= 0 && key / c.chunk == diagonal / c.chunk));
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
    Expected max_logits{"max_logits", c.batch_size, c.nheads, c.seqlen_q, 1};
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

    // A row: lse, and the size of the terms of its scores, to which their rounding is proportional. ALiBi and a bias
    // may leave little of large terms.
    struct LogSum { double lse, magnitude, max_logit; };

    LogSum form_P(const Row &row) {
        const auto [b, h, h_k, i, at] = row;
        const int batch = x.batch_of(b);
        const double sink = c.has_sinks && i < x.rows_of(b).valid ? x.sinks.at(0, 0, 0, h) : -INFINITY;
        double max = -INFINITY;
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
        const double max_logit = max;
        max = std::max(max, sink);
        if (std::isinf(max)) return {max, 0, max_logit};
        double sum = std::exp(sink - max), magnitude = 0;
        for_keys(row, [&](int j, int) { sum += P[j] = std::exp(P[j] - max), magnitude += P[j] * size[j]; });
        for (double &probability : P) probability /= sum;
        const double lse = max + std::log(sum);
        return {lse, std::max(std::abs(lse), magnitude / sum), max_logit};
    }

    void forward() {
        for_rows([&](const Row &row) {
            const auto [b, h, h_k, i, at] = row;
            const int batch = x.batch_of(b);
            const auto [log_sum, magnitude, max_logit] = form_P(row);
            const bool is_empty = x.is_empty(b, i) || log_sum == -INFINITY;
            lse.add(lse.index(batch, h, at), log_sum, magnitude);
            max_logits.add(lse.index(batch, h, at), max_logit, std::max(magnitude, std::abs(max_logit)));
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
