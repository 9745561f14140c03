// The folder ops/ has the ops of torch as functions for both bindings. Order: kernels.h, aten.h, stable.h, params.h,
// forward.h, ops.h, ops.cpp, cache_launches.h, decode_op.cpp, append_op.cpp.
//
// The choice of a kernel does not depend on the number of samples: a sample has the same bits in every batch.
#pragma once

#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>

#include "flash.h"

enum class Kernel { kSimt, kSm80, kSm90, kDmma, kHost };  // kHost: flash.cu on the CPU
constexpr const char *kKernelNames[] = {"simt", "sm80", "sm90", "dmma", "host"};

// Tests and benchmarks set it, for all calls of the process.
inline std::atomic<std::optional<Kernel>> forced_kernel;

struct Gpu {
    int capability;  // see compute_capability()
    bool fast_fp64;
};

// Why something cannot be done. Without a value it can.
using Reason = std::optional<std::string>;

inline int64_t all_strides(const auto &x) { return x.batch_stride | x.head_stride | x.row_stride; }

// n: the elements in 16 bytes.
inline Reason why_not_16_bytes(const std::string &name, const Tensor &x, int n) {
    if (uintptr_t(x.data) % 16) return name + " does not start at a multiple of 16 bytes";
    if (all_strides(x) % n) return "a stride of " + name + " is not a multiple of 16 bytes";
    return {};
}

// Heads and samples may overlap.
inline Reason why_not_tma(const std::string &name, const Tensor &x, int rows, int head_dim) {
    if (rows > 1 && x.row_stride < head_dim) return "rows of " + name + " overlap";
    if (all_strides(x) >> 39) return "a stride of " + name + " is 2^40 bytes or more";
    return {};
}

inline Reason why_not_tma(const Bias &x, int seqlen_k) {
    if (x.dtype == DType::kBool) return {};  // pack_mask() reads any strides
    if (x.dtype == DType::kFloat32) return "attn_bias is float32";
    if ((x.key_stride != 1 && seqlen_k > 1) || (x.row_stride && x.row_stride < seqlen_k))
        return "rows of attn_bias are not contiguous";
    if (uintptr_t(x.data) % 16 || all_strides(x) % 8) return "rows of attn_bias start at no multiple of 16 bytes";
    if (all_strides(x) >> 39) return "a stride of attn_bias is 2^39 or more";
    return {};
}

// How many of these kinds of options a call has. The fast path leaves calls with any to the checks in Python.
constexpr const char *kNamesOfMods =
    "dropout; softcap, alibi_slopes and attn_bias; attention_chunk and max_logits; block_mask";
inline int num_mods(const AttnParams &p) {
    return bool(p.dropout_seed) + p.has_score_mods() + (p.attention_chunk || p.return_max_logits) +
           bool(p.block_mask.rows);
}

inline Reason why_not(Kernel kernel, const AttnParams &p, Gpu gpu, bool is_backward) {
    const bool is_sm80 = kernel == Kernel::kSm80, is_sm90 = kernel == Kernel::kSm90, is_dmma = kernel == Kernel::kDmma;
    if (kernel == Kernel::kSimt) return {};
    if (is_sm80 && gpu.capability < 80) return "the GPU, or what this build holds for it, is older than sm_80";
    if (!is_sm80 && gpu.capability != 90) return "the GPU, or what this build holds for it, is not sm_90";
    const bool is_fp32 = p.dtype == DType::kFloat32;
    if (is_fp32 && !is_dmma) return "the dtype is float32, which its tensor cores would round";
    if (!is_fp32 && is_dmma) return "the dtype is not float32";
    if (is_dmma && (p.sinks || num_mods(p) > 0)) return std::string("it has no sinks, and none of: ") + kNamesOfMods;
    if (is_sm90 && !is_backward && num_mods(p) > 1)  // it has a kernel for each kind
        return std::string("its forward pass takes no two of: ") + kNamesOfMods;
    if (is_sm90 && is_backward && p.block_mask.rows && num_mods(p) > 1)
        return "beside a block_mask, its backward pass takes no dropout, and no change of the scores";
    if (is_sm90 && is_backward && p.bias.data && !p.has_mask_alone()) return "its backward pass has no attn_bias";
    if (is_sm90 && is_backward && (p.softcap > 0 || p.alibi_slopes) && p.max_head_dim() > 128)
        return "its backward pass has no softcap or alibi_slopes for a head_dim over 128";
    if (is_sm90 && p.bias.data)
        if (const Reason reason = why_not_tma(p.bias, p.seqlen_k)) return reason;
    if (p.max_head_dim() > 128 && is_dmma) return "head_dim is over 128";
    if (p.seqlen_k == 0 && is_sm90) return "there are no keys";  // TMA takes no empty tensor

    const int n = is_fp32 ? 4 : 8;
    if (p.head_dim % n || p.head_dim_v % n) return "head_dim is not a multiple of 16 bytes";
    auto why_not_load = [&](const char *name, const Tensor &x, int rows, int head_dim) {
        const Reason reason = is_sm90 ? why_not_tma(name, x, rows, head_dim) : Reason();
        return reason ? reason : why_not_16_bytes(name, x, n);
    };
    if (const Reason reason = why_not_load("q", p.q, p.seqlen_q, p.head_dim)) return reason;
    if (const Reason reason = why_not_load("k", p.k, p.seqlen_k, p.head_dim)) return reason;
    return why_not_load("v", p.v, p.seqlen_k, p.head_dim_v);
}

struct Choice {
    Kernel kernel;
    Reason slow_because = {};  // of 16-bit tensors without tensor cores
};

// A forced dmma or sm90 that lacks the backward pass becomes simt or sm80.
inline Choice choose_kernel(const AttnParams &p, Gpu gpu, bool is_backward) {
    if (std::optional<Kernel> forced = forced_kernel) {
        if (is_backward && *forced == Kernel::kSm90 && why_not(*forced, p, gpu, true)) forced = Kernel::kSm80;
        if (is_backward && *forced == Kernel::kDmma) forced = Kernel::kSimt;
        if (const Reason reason = why_not(*forced, p, gpu, is_backward))
            throw std::invalid_argument(std::string("the forced kernel ") + kKernelNames[int(*forced)] +
                                        " cannot serve: " + *reason);
        return {*forced};
    }
    if (!why_not(Kernel::kSm90, p, gpu, is_backward)) return {Kernel::kSm90};
    const Reason not_sm80 = why_not(Kernel::kSm80, p, gpu, is_backward);
    if (!not_sm80) return {Kernel::kSm80};
    // dmma pads head_dim to 64: up to 32, flash.cu is faster.
    const bool is_dmma_fast = gpu.fast_fp64 && p.max_head_dim() > 32;
    if (!is_backward && is_dmma_fast && !why_not(Kernel::kDmma, p, gpu, false)) return {Kernel::kDmma};
    const bool is_expected = gpu.capability < 80 || p.dtype == DType::kFloat32;
    return {Kernel::kSimt, is_expected ? Reason() : not_sm80};
}
