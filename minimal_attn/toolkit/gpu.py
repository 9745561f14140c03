"""Facts about a GPU: its architecture, the features that kernels are chosen by, sizes.

Everything follows from the compute capability (CUDA C++ Programming Guide, "Compute Capabilities"), so no list of
product names can be out of date.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class GPUArch(Enum):
    """Architectures of NVIDIA GPUs; the value is the first compute capability of each."""

    VOLTA = "sm_70"
    TURING = "sm_75"
    AMPERE = "sm_80"  # 8.0, 8.6 and 8.7
    ADA = "sm_89"
    HOPPER = "sm_90"
    BLACKWELL = "sm_100"  # of the data centre
    BLACKWELL_RTX = "sm_120"  # of workstations: without the data centre's tensor memory
    UNKNOWN = "unknown"


ARCH_OF = {
    (7, 0): GPUArch.VOLTA, (7, 2): GPUArch.VOLTA, (7, 5): GPUArch.TURING,
    (8, 0): GPUArch.AMPERE, (8, 6): GPUArch.AMPERE, (8, 7): GPUArch.AMPERE, (8, 9): GPUArch.ADA,
    (9, 0): GPUArch.HOPPER, (10, 0): GPUArch.BLACKWELL, (10, 3): GPUArch.BLACKWELL,
    (12, 0): GPUArch.BLACKWELL_RTX, (12, 1): GPUArch.BLACKWELL_RTX,
}


@dataclass(frozen=True)
class GPUCapabilities:
    """One GPU. Sizes in bytes, but for total_memory_gb in 2^30 bytes."""

    name: str
    arch: GPUArch
    compute_capability: tuple[int, int]  # (9, 0) for sm_90
    has_tma: bool  # bulk copies of tensors to and from shared memory: from 9.0 on
    has_fp8: bool  # tensor cores take fp8: from 8.9 on
    has_warpgroup_mma: bool  # wgmma: 9.x alone
    sram_per_sm: int
    num_sms: int
    total_memory_gb: float


NO_GPU = GPUCapabilities("none", GPUArch.UNKNOWN, (0, 0), False, False, False, 0, 0, 0.0)


def detect_gpu(device_id: int = 0) -> GPUCapabilities:
    """The capabilities of a GPU, by its number in torch. arch is GPUArch.UNKNOWN for a GPU that this version does not
    know, and for GPUs of AMD, whose compute capability is (0, 0) here.

    Raises:
        RuntimeError: there is no CUDA GPU. ValueError: none of that number.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("detect_gpu: CUDA is not available: torch sees no GPU")
    if not 0 <= device_id < torch.cuda.device_count():
        raise ValueError(f"device_id must be in 0..{torch.cuda.device_count() - 1}, got {device_id}")
    gpu = torch.cuda.get_device_properties(device_id)
    # AMD's numbers are not NVIDIA's: (9, 0) is a gfx90a.
    capability = (0, 0) if torch.version.hip else (gpu.major, gpu.minor)
    return GPUCapabilities(
        name=gpu.name,
        arch=ARCH_OF.get(capability, GPUArch.UNKNOWN),
        compute_capability=capability,
        has_tma=capability >= (9, 0),
        has_fp8=capability >= (8, 9),
        has_warpgroup_mma=capability[0] == 9,
        sram_per_sm=gpu.shared_memory_per_multiprocessor,
        num_sms=gpu.multi_processor_count,
        total_memory_gb=gpu.total_memory / 2**30,
    )


def print_gpu_info(device_id: int = 0) -> None:
    """Print what detect_gpu finds, a line each, or that there is no GPU; ValueError if there is none of that number."""
    if not torch.cuda.is_available():
        print("torch sees no CUDA GPU on this machine.")
        return
    gpu = detect_gpu(device_id)
    features = ["yes" if x else "no" for x in (gpu.has_tma, gpu.has_fp8, gpu.has_warpgroup_mma)]
    major, minor = gpu.compute_capability
    print(f"GPU {device_id}:               {gpu.name}\n"
          f"Architecture:        {gpu.arch.name.lower()} (compute capability {major}.{minor})\n"
          f"Memory:              {gpu.total_memory_gb:.1f} GB\n"
          f"SMs:                 {gpu.num_sms}, {gpu.sram_per_sm // 1024} KB of shared memory each\n"
          f"TMA, fp8, wgmma:     {', '.join(features)}")


def check_hopper_features() -> dict[str, Any]:
    """Which of Hopper's features GPU 0 has: the bools "tma_available", "fp8_available" and "wgmma_available", its
    "arch", such as "hopper", and "compute_capability" (major, minor); without a GPU False, "unknown" and (0, 0)."""
    gpu = detect_gpu() if torch.cuda.is_available() else NO_GPU
    return {"tma_available": gpu.has_tma, "fp8_available": gpu.has_fp8, "wgmma_available": gpu.has_warpgroup_mma,
            "arch": gpu.arch.name.lower(), "compute_capability": gpu.compute_capability}


def supports_fp8() -> bool:
    """Whether the tensor cores of GPU 0 take fp8: Ada (8.9) and newer. False without a GPU."""
    return check_hopper_features()["fp8_available"]
