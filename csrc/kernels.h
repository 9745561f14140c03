// Which kernel serves a call on a GPU: one function of dtype, head_dim, alignment and the GPU. Not of how many samples
// and heads there are, so that a sample's bits do not depend on its batch.
//
// Read next: main.cpp, which asks.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include "flash.h"

// flash.cu, flash_sm80.cu, flash_sm90.cu, flash_dmma.cu, flash.cu on the CPU
enum class Kernel { kSimt, kSm80, kSm90, kDmma, kHost };
constexpr const char *kKernelNames[] = {"simt", "sm80", "sm90", "dmma", "host"};

struct Gpu {
    int capability;  // 90 for Hopper; of the code that this build holds for it, if that is older
    bool fast_fp64;  // half as fast as fp32, not a small fraction
};

// Why a kernel that loads 16 bytes at a time cannot serve p, or nullptr.
inline const char *why_not_16_bytes(const AttnParams &p) {
    const int64_t n = p.dtype == DType::kFloat32 ? 4 : 8;  // elements
    if (p.head_dim % n) return "head_dim is not a multiple of 16 bytes";
    if (uintptr_t(p.q) % 16) return "q does not start at a multiple of 16 bytes";
    if (uintptr_t(p.k) % 16) return "k does not start at a multiple of 16 bytes";
    if (uintptr_t(p.v) % 16) return "v does not start at a multiple of 16 bytes";
    if ((p.q_batch_stride | p.q_head_stride | p.q_row_stride) % n) return "a stride of q is not a multiple of 16 bytes";
    if ((p.k_batch_stride | p.k_head_stride | p.k_row_stride) % n) return "a stride of k is not a multiple of 16 bytes";
    if ((p.v_batch_stride | p.v_head_stride | p.v_row_stride) % n) return "a stride of v is not a multiple of 16 bytes";
    return nullptr;
}

// Why flash_sm80.cu cannot serve p, or nullptr.
inline const char *why_not_sm80(const AttnParams &p, Gpu gpu) {
    if (gpu.capability < 80) return "the GPU, or what this build holds for it, is older than sm_80";
    if (p.dtype == DType::kFloat32) return "the dtype is float32, which its tensor cores would round";
    return why_not_16_bytes(p);
}

// Why flash_sm90.cu cannot serve p, or nullptr.
inline const char *why_not_sm90(const AttnParams &p, Gpu gpu) {
    if (gpu.capability != 90) return "the GPU, or what this build holds for it, is not sm_90";
    if (p.dtype == DType::kFloat32) return "the dtype is float32, which its tensor cores would round";
    if (p.dropout_seed) return "it has no dropout";
    // TMA takes what is not empty, rows that follow one another, and strides below 2^40 bytes.
    if (p.seqlen_k == 0) return "there are no keys";
    if (p.seqlen_q > 1 && p.q_row_stride < p.head_dim) return "rows of q overlap";
    if (p.seqlen_k > 1 && p.k_row_stride < p.head_dim) return "rows of k overlap";
    if (p.seqlen_k > 1 && p.v_row_stride < p.head_dim) return "rows of v overlap";
    if ((p.q_batch_stride | p.q_head_stride | p.q_row_stride | p.k_batch_stride | p.k_head_stride | p.k_row_stride |
         p.v_batch_stride | p.v_head_stride | p.v_row_stride) >> 39)
        return "a stride is 2^40 bytes or more";
    return why_not_16_bytes(p);
}

// Whether flash_bwd_sm80.cu, which serves the backward pass of what flash_sm80.cu serves, can load dout.
inline bool is_dout_aligned(const AttnBackwardParams &p) {
    return uintptr_t(p.dout) % 16 == 0 && (p.dout_batch_stride | p.dout_head_stride | p.dout_row_stride) % 8 == 0;
}

// Why flash_dmma.cu cannot serve p, or nullptr.
inline const char *why_not_dmma(const AttnParams &p, Gpu gpu) {
    if (gpu.capability != 90) return "the GPU, or what this build holds for it, is not sm_90";
    if (p.dtype != DType::kFloat32) return "the dtype is not float32";
    if (p.head_dim > 128) return "head_dim is over 128";
    if (p.dropout_seed) return "it has no dropout";
    return why_not_16_bytes(p);
}

struct Choice {
    Kernel kernel;
    const char *slow_because;  // what it is about 16-bit tensors that costs them the tensor cores, or nullptr
};

// The kernel that MINIMAL_ATTN_KERNEL names, if any. Throws std::invalid_argument if it is none for a GPU.
inline std::optional<Kernel> kernel_of(const char *name) {
    const std::string wanted(name ? name : "");
    if (wanted.empty()) return std::nullopt;
    for (Kernel kernel : {Kernel::kSimt, Kernel::kSm80, Kernel::kSm90, Kernel::kDmma})
        if (wanted == kKernelNames[int(kernel)]) return kernel;
    throw std::invalid_argument("MINIMAL_ATTN_KERNEL is '" + wanted + "': there are simt, sm80, sm90 and dmma");
}

// Throws std::invalid_argument if the forced kernel cannot serve p.
inline Choice choose_kernel(const AttnParams &p, Gpu gpu, std::optional<Kernel> forced) {
    const char *not_sm80 = why_not_sm80(p, gpu), *not_sm90 = why_not_sm90(p, gpu), *not_dmma = why_not_dmma(p, gpu);
    if (forced) {
        const char *why_not = forced == Kernel::kSm80   ? not_sm80
                              : forced == Kernel::kSm90 ? not_sm90
                              : forced == Kernel::kDmma ? not_dmma
                                                        : nullptr;
        if (!why_not) return {*forced, nullptr};
        throw std::invalid_argument(std::string("MINIMAL_ATTN_KERNEL=") + kKernelNames[int(*forced)] +
                                    " cannot serve: " + why_not);
    }
    if (!not_sm90) return {Kernel::kSm90, nullptr};
    if (!not_sm80) return {Kernel::kSm80, nullptr};
    // Up to 32 flash.cu multiplies less of what pads head_dim to 64.
    if (!not_dmma && gpu.fast_fp64 && p.head_dim > 32) return {Kernel::kDmma, nullptr};
    return {Kernel::kSimt, gpu.capability < 80 || p.dtype == DType::kFloat32 ? nullptr : not_sm80};
}

// The same of the backward pass, of which sm90 and dmma have none: sm80 and simt serve what they serve.
inline Choice choose_kernel(const AttnBackwardParams &p, Gpu gpu, std::optional<Kernel> forced) {
    const AttnParams &forward = p;
    if (forced == Kernel::kSm90) forced = Kernel::kSm80;
    if (forced == Kernel::kDmma) forced = Kernel::kSimt;
    Choice choice = choose_kernel(forward, gpu, forced);
    if (choice.kernel == Kernel::kSm90) choice.kernel = Kernel::kSm80;
    if (choice.kernel == Kernel::kDmma) choice.kernel = Kernel::kSimt;
    return choice;
}
