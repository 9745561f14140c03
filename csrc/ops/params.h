// AttnParams from a call's tensors and options. An option stands in OPTIONS, and with its check in set_options(). These
// checks give memory safety; minimal_attn/checks.py has those that speak to users. A CPU-only torch compiles this too.
#pragma once

#if MINIMAL_ATTN_STABLE
#include "ops/stable.h"
#else
#include "ops/aten.h"
#endif

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "flash.h"
#include "ops/kernels.h"

namespace minimal_attn {

using OptionalTensor = std::optional<TorchTensor>;

// The arguments of flash_forward after q, k and v: X(type, name), or X(type, name, =default).
#define SCORE_TENSORS(X) X(OptionalTensor, sinks) X(OptionalTensor, alibi_slopes)
#define SCORE_NUMBERS(X) X(double, softmax_scale) X(double, softcap) X(int64_t, window_left) X(int64_t, window_right) \
    X(int64_t, attention_chunk)
#define OPTIONS(X)                                                                                                    \
    X(OptionalTensor, cu_seqlens_q) X(OptionalTensor, cu_seqlens_k) X(OptionalTensor, seqused_q)                      \
    X(OptionalTensor, seqused_k) SCORE_TENSORS(X) X(OptionalTensor, attn_bias) SCORE_NUMBERS(X)                       \
    X(double, dropout_p, =0.0) X(OptionalTensor, dropout_seed, =None) X(bool, return_max_logits, =False)              \
    X(OptionalTensor, mask_units, =None) X(OptionalTensor, mask_row_words, =None)                                     \
    X(OptionalTensor, mask_key_words, =None) X(OptionalTensor, mask_bits, =None)                                      \
    X(bool, deterministic, =False)

#define AS_MEMBER(type, name, ...) type name{};
#define AS_PARAMETER(type, name, ...) , type name
#define AS_ARGUMENT(type, name, ...) , options.name
#define AS_ASSIGNMENT(type, name, ...) options.name = std::move(name);
#define AS_VISIT(type, name, ...) visit(options.name);
#define AS_SCHEMA(type, name, ...) ", " SCHEMA_##type " " #name #__VA_ARGS__
#define SCHEMA_OptionalTensor "Tensor?"
#define SCHEMA_double "float"
#define SCHEMA_int64_t "int"
#define SCHEMA_bool "bool"

struct Options { OPTIONS(AS_MEMBER) };

template <typename SomeOptions, typename Visit> void for_each_option(SomeOptions &options, Visit visit) {
    OPTIONS(AS_VISIT)
}

// Dimensions of q, k, v and out. batch is -1 if there is none, or if k and v are a cache of other sequences.
struct Layout { int batch, head, row, head_dim; };
constexpr Layout kBHSD{0, 1, 2, 3}, kBSHD{0, 2, 1, 3}, kTHD{-1, 1, 0, 2}, kCache{-1, 1, 2, 3};

constexpr double kMaxScale = 2.3586e38;  // · log2(e) is finite in fp32; also in checks.py
constexpr int64_t kMaxLength = INT32_MAX - 256;

inline std::optional<DType> dtype_of(const TorchTensor &x) {
    switch (x.scalar_type()) {
        case ScalarType::Float: return DType::kFloat32;
        case ScalarType::Half: return DType::kFloat16;
        case ScalarType::BFloat16: return DType::kBFloat16;
        case ScalarType::Double: return x.is_cpu() ? std::optional(DType::kFloat64) : std::nullopt;
        default: return {};
    }
}

inline ScalarType lse_dtype(const TorchTensor &q) {
    return q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check_value(bool is_right, const char *fault) { if (!is_right) throw_value_error(fault); }
inline void check_value(const Reason &fault) { if (fault) throw_value_error(*fault); }

inline Reason find_type_fault(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v) {
    if (!dtype_of(q)) return "Unsupported dtype: float32, float16, bfloat16 and, on the CPU, float64 are supported";
    if (k.scalar_type() != q.scalar_type() || v.scalar_type() != q.scalar_type()) return "dtypes must match";
    return {};
}
inline void check_types(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v) {
    if (const Reason fault = find_type_fault(q, k, v)) throw_type_error(*fault);
}

inline bool has_contiguous_rows(const TorchTensor &x) {
    return x.stride(x.dim() - 1) == 1 || x.size(x.dim() - 1) <= 1;
}

inline Reason find_fault(const TorchTensor &q, const TorchTensor &k, const TorchTensor &v, Layout dim) {
    const int last = dim.head_dim, ndim = last + 1;
    if (q.dim() != ndim || k.dim() != ndim || v.dim() != ndim)
        return "q, k and v must be " + std::to_string(ndim) + "D";
    const int64_t head_dim = q.size(last), head_dim_v = v.size(last), nheads_k = k.size(dim.head);
    if (!k.sizes().slice(0, last).equals(v.sizes().slice(0, last)) || k.size(last) != head_dim ||
        (dim.batch == 0 && k.size(0) != q.size(0)))
        return "the shapes of q, k and v do not match";
    if (nheads_k == 0 || q.size(dim.head) % nheads_k) return "nheads must be a multiple of nheads_k";
    if (std::min(head_dim, head_dim_v) < 1 || std::max(head_dim, head_dim_v) > 256)
        return "Unsupported head_dim: 1 to 256 is supported";
    if (std::max(q.size(dim.head), q.size(dim.row) + k.size(dim.row)) > kMaxLength)
        return "there are over 2^31 - 257 heads, or rows and keys together";
    for (const TorchTensor *x : {&q, &k, &v}) {
        if (x->device() != q.device()) return "q, k and v must be on the same device";
        if (!has_contiguous_rows(*x)) return "the last dimension must be contiguous";
    }
    return {};
}

enum class Strides { kAny, kRows, kContiguous };  // kRows: the last dimension is contiguous

inline Reason find_fault(const char *name, const TorchTensor &x, Sizes sizes, ScalarType dtype, const TorchTensor &q,
                         Strides strides = Strides::kContiguous) {
    if (x.sizes().equals(sizes) && x.scalar_type() == dtype && x.device() == q.device() &&
        (strides != Strides::kContiguous || x.is_contiguous()) && (strides != Strides::kRows || has_contiguous_rows(x)))
        return {};
    std::string shape;
    for (const int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    constexpr const char *kStrides[] = {"", " with a contiguous last dimension,", " contiguous,"};
    const char *type = dtype == ScalarType::Int    ? "int32"
                       : dtype == ScalarType::Long ? "int64"
                                                   : toString(dtype);
    return std::string(name) + " must be " + type + " of shape (" + shape + ")," + kStrides[int(strides)] +
           " on the device of the other tensors";
}

template <typename T>
constexpr ScalarType kScalarType = std::is_same_v<T, float> ? ScalarType::Float
                                   : sizeof(T) == 8         ? ScalarType::Long
                                                            : ScalarType::Int;

struct Checks {  // keeps the first fault
    const TorchTensor &q;
    Reason fault = {};

    void require(bool is_right, const char *text) { if (!is_right && !fault) fault = text; }

    template <typename T>
    void set(const T *&data, const char *name, const OptionalTensor &x, Sizes sizes, ScalarType dtype = kScalarType<T>,
             Strides strides = Strides::kContiguous) {
        if (x && !fault) fault = find_fault(name, *x, sizes, dtype, q, strides);
        if (x && !fault) data = static_cast<const T *>(x->const_data_ptr());
    }
    template <typename T>
    void set_rows(const T *&data, int64_t &row_stride, const char *name, const OptionalTensor &x, Sizes sizes) {
        set(data, name, x, sizes, kScalarType<T>, Strides::kRows);
        if (x && !fault) row_stride = x->stride(0);
    }
};

// A single row gets the row stride 0. A single sample or head keeps its stride: the kernel is chosen as for many.
inline ::Tensor tensor_of(const TorchTensor &x, Layout dim, bool is_packed = false) {
    const int64_t row_stride = x.size(dim.row) > 1 ? x.stride(dim.row) : 0;
    const int64_t batch_stride = is_packed || dim.batch < 0 ? 0 : x.stride(dim.batch);
    return {const_cast<void *>(x.const_data_ptr()), batch_stride, x.stride(dim.head), row_stride};
}

inline Bias bias_of(const TorchTensor &x) {
    auto stride = [&](int dim) { return x.size(dim) == 1 ? 0 : x.stride(dim); };
    const DType dtype = x.scalar_type() == ScalarType::Bool     ? DType::kBool
                        : x.scalar_type() == ScalarType::Double ? DType::kFloat64
                                                                : *dtype_of(x);
    return {const_cast<void *>(x.const_data_ptr()), stride(0), stride(1), stride(2), stride(3), dtype};
}

inline void set_inputs(AttnParams &p, const TorchTensor &q, const TorchTensor &k, const TorchTensor &v, Layout dim) {
    p.q = tensor_of(q, dim), p.k = tensor_of(k, dim), p.v = tensor_of(v, dim);
    p.batch_size = dim.batch < 0 ? 1 : q.size(dim.batch);
    p.head_dim = int(q.size(dim.head_dim)), p.head_dim_v = int(v.size(dim.head_dim));
    p.nheads = int(q.size(dim.head)), p.nheads_k = int(k.size(dim.head));
    p.seqlen_q = int(q.size(dim.row)), p.seqlen_k = int(k.size(dim.row));
    p.lse_batch_stride = int64_t(p.nheads) * p.seqlen_q;
    p.dtype = *dtype_of(q);
    if (q.is_cuda()) p.stream = current_stream(q);
}

// After set_inputs(). Lengths are read on the GPU alone, where kernels clamp them.
inline Reason set_options(AttnParams &p, const TorchTensor &q, const Options &options) {
    Checks checks{q};
    if (options.cu_seqlens_q) {
        checks.require(p.batch_size == 1, "a packed batch is one sample to q, k and v");
        checks.require(options.cu_seqlens_q->numel() >= 2, "cu_seqlens_q must have at least two elements");
        p.batch_size = options.cu_seqlens_q->numel() - 1, p.q.batch_stride = p.lse_batch_stride = 0;
    }
    if (options.cu_seqlens_k) p.k.batch_stride = p.v.batch_stride = 0;
    checks.set(p.cu_seqlens_q, "cu_seqlens_q", options.cu_seqlens_q, {p.batch_size + 1});
    checks.set(p.cu_seqlens_k, "cu_seqlens_k", options.cu_seqlens_k, {p.batch_size + 1});
    checks.set(p.seqused_q, "seqused_q", options.seqused_q, {p.batch_size});
    checks.set(p.seqused_k, "seqused_k", options.seqused_k, {p.batch_size});
    checks.set(p.sinks, "sinks", options.sinks, {p.nheads}, lse_dtype(q));

    const OptionalTensor &slopes = options.alibi_slopes;
    const int64_t slopes_shape[] = {p.batch_size, p.nheads};
    const bool is_shared = !slopes || slopes->dim() == 1;
    checks.set(p.alibi_slopes, "alibi_slopes", slopes, Sizes(slopes_shape).slice(is_shared));
    p.alibi_batch_stride = is_shared ? 0 : p.nheads;

    // Rounded: a scale of 0 in fp32 is 0 for every kernel.
    checks.require(std::abs(options.softmax_scale) <= kMaxScale, "softmax_scale must be in -2.3586e38..2.3586e38");
    p.softmax_scale = p.dtype == DType::kFloat64 ? options.softmax_scale : float(options.softmax_scale);
    checks.require(options.softcap >= 0 && options.softcap <= kMaxScale, "softcap must be at least 0 and finite");
    p.softcap = options.softcap;
    checks.require(std::min(options.window_left, options.window_right) >= -1,
                   "window_left and window_right must be at least 0, or -1 for no bound");
    p.set_window(options.window_left, options.window_right);
    checks.require(options.attention_chunk >= 0, "attention_chunk must be at least 0, which is no chunk");
    p.attention_chunk = int(std::min(options.attention_chunk, kMaxLength));
    p.return_max_logits = options.return_max_logits;

    if (const OptionalTensor &bias = options.attn_bias) {
        const ScalarType dtype = bias->scalar_type();
        checks.require(!options.cu_seqlens_q, "attn_bias cannot be given with cu_seqlens_q and cu_seqlens_k");
        checks.require(bias->device() == q.device() && bias->dim() == 4 &&
                           (dtype == ScalarType::Bool || dtype == q.scalar_type() || dtype == lse_dtype(q)),
                       "attn_bias must be 4D on the device of q, of bool, of the dtype of q or of that of lse");
        const int64_t shape[] = {p.batch_size, p.nheads, p.seqlen_q, p.seqlen_k};
        for (int i = 0; i < 4 && !checks.fault; i++)
            checks.require(bias->size(i) == 1 || bias->size(i) == shape[i],
                           "attn_bias must broadcast to (batch_size, nheads, seqlen_q, seqlen_k)");
        if (!checks.fault) p.bias = bias_of(*bias);
    }

    if (const OptionalTensor &units = options.mask_units) {
        BlockMask x{};
        checks.require(!options.cu_seqlens_q, "a block mask cannot be given with cu_seqlens_q and cu_seqlens_k");
        checks.require(options.mask_row_words && options.mask_key_words && options.mask_bits && units->dim() == 4,
                       "mask_units must be 4D, and go with mask_row_words, mask_key_words and mask_bits");
        if (checks.fault) return checks.fault;
        x.samples = units->size(0) == 1 ? 1 : int(p.batch_size), x.heads = units->size(1) == 1 ? 1 : p.nheads;
        x.rows = (p.seqlen_q + 63) / 64, x.keys = (p.seqlen_k + 63) / 64, x.num_bits = int(options.mask_bits->size(0));
        checks.set(x.units, "mask_units", units, {x.samples, x.heads, x.rows, x.keys});
        checks.set(x.row_words, "mask_row_words", options.mask_row_words,
                   {x.samples, x.heads, x.rows, (x.keys + 31) / 32});
        checks.set(x.key_words, "mask_key_words", options.mask_key_words,
                   {x.samples, x.heads, x.keys, (x.rows + 31) / 32});
        checks.set(x.bits, "mask_bits", options.mask_bits, {x.num_bits, 2, 128});
        p.block_mask = x;
    }

    checks.require(options.dropout_p >= 0 && options.dropout_p <= 1, "dropout_p must be in [0, 1]");
    if (checks.fault || options.dropout_p == 0) return checks.fault;
    const OptionalTensor &seed = options.dropout_seed;
    const int64_t seeds = seed ? seed->numel() : 0;
    if (seeds != 1 && seeds != 1 + 4 * p.batch_size) return "dropout_seed must be one int64, or that and four a sample";
    checks.set(p.dropout_seed, "dropout_seed", seed, seed->sizes());
    p.has_dropout_origins = seeds > 1;
    p.keep_count = uint32_t(0x1p15 - std::nearbyint(options.dropout_p * 0x1p15));  // as in dropout.py
    p.keep_scale = p.keep_count ? 0x1p15 / p.keep_count : 0;
    return checks.fault;
}

// After find_type_fault(). The outputs are still to come.
inline Reason set_params(AttnParams &p, const TorchTensor &q, const TorchTensor &k, const TorchTensor &v,
                         const Options &options, Layout dim) {
    if (const Reason fault = find_fault(q, k, v, dim)) return fault;
    if (options.cu_seqlens_q.has_value() != options.cu_seqlens_k.has_value())
        return "cu_seqlens_q and cu_seqlens_k go together";
    set_inputs(p, q, k, v, dim);
    return set_options(p, q, options);
}

}  // namespace minimal_attn
