"""The tools around the kernels: what a GPU can do, and validation."""

import functools
import types

import pytest
import torch

from conftest import HAS_GPU
from minimal_attn import flash_attention, gpu
from minimal_attn.gpu import GPUArch, check_hopper_features, detect_gpu, print_gpu_info, supports_fp8
from minimal_attn.validation import validate_attention, validate_matmul

# (capability, architecture, TMA, fp8, wgmma)
GPUS = [
    ((7, 0), "VOLTA", False, False, False), ((7, 5), "TURING", False, False, False),
    ((8, 0), "AMPERE", False, False, False), ((8, 6), "AMPERE", False, False, False),
    ((8, 9), "ADA", False, True, False), ((9, 0), "HOPPER", True, True, True),
    ((10, 0), "BLACKWELL", True, True, False), ((10, 3), "BLACKWELL", True, True, False),
    ((12, 0), "BLACKWELL_RTX", True, True, False), ((6, 1), "UNKNOWN", False, False, False),
    ((11, 0), "UNKNOWN", True, True, False), ((9, 9), "UNKNOWN", True, True, True),
    ((13, 0), "UNKNOWN", True, True, False),
]


@pytest.fixture
def pretend(monkeypatch):
    """Another GPU than the one at hand, or one where there is none."""
    def set_capability(capability):
        properties = types.SimpleNamespace(name="NVIDIA Test", major=capability[0], minor=capability[1],
                                           shared_memory_per_multiprocessor=228 << 10, multi_processor_count=132,
                                           total_memory=3 << 30)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return set_capability


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("capability, arch, tma, fp8, wgmma", GPUS, ids=str)
def test_what_a_gpu_can_do(capability, arch, tma, fp8, wgmma, pretend, capsys):
    pretend(capability)
    assert detect_gpu() == gpu.GPUCapabilities("NVIDIA Test", GPUArch[arch], capability, tma, fp8, wgmma, 228 << 10,
                                               132, 3)
    assert check_hopper_features() == {"tma_available": tma, "fp8_available": fp8, "wgmma_available": wgmma,
                                       "arch": arch.lower(), "compute_capability": capability}
    assert supports_fp8() is fp8
    print_gpu_info()
    printed = capsys.readouterr().out
    for part in ("NVIDIA Test", arch.lower(), "{}.{}".format(*capability), "3.0 GB", "132, 228 KB"):
        assert part in printed


def test_the_values_of_the_architectures():
    values = ["sm_70", "sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "unknown"]
    assert [arch.value for arch in GPUArch] == values


def test_without_a_gpu(no_gpu):
    for call in (detect_gpu, print_gpu_info):
        with pytest.raises(RuntimeError, match="CUDA is not available"):
            call()
    assert check_hopper_features() == {"tma_available": False, "fp8_available": False, "wgmma_available": False,
                                       "arch": "unknown", "compute_capability": (0, 0)}
    assert supports_fp8() is False


@pytest.mark.parametrize("device_id", [-1, 1])
def test_a_gpu_that_is_not_there(device_id, pretend):
    pretend((9, 0))
    with pytest.raises(ValueError, match=f"device_id must be in 0..0, got {device_id}"):
        detect_gpu(device_id)


@pytest.mark.gpu
def test_the_gpu_at_hand():
    caps = detect_gpu()
    assert caps.name == torch.cuda.get_device_name() and caps.compute_capability == torch.cuda.get_device_capability()
    assert caps.num_sms > 0 and caps.sram_per_sm >= 64 << 10 and caps.total_memory_gb > 1


DEVICE = "cuda" if HAS_GPU else "cpu"
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@each_dtype
def test_what_is_right_is_valid(dtype, capsys):
    """At the default tolerance too, which no bf16 result of this size could keep."""
    passed, difference = validate_matmul(torch.matmul, 70, 50, 300, dtype=dtype, device=DEVICE, verbose=True)
    assert passed and (difference > 1e-3) == (dtype != torch.float32)
    assert f"passed, max difference {difference:.2e}" in capsys.readouterr().out
    attend = functools.partial(flash_attention, backend="cuda")
    for causal in (False, True):
        passed, difference = validate_attention(attend, 2, 4, 70, 64, causal, dtype=dtype, device=DEVICE, verbose=True)
        assert passed and 0 < difference < 0.1
    assert "attention (2,4,70,64)" in capsys.readouterr().out


@each_dtype
def test_what_is_wrong_is_not(dtype, capsys):
    wrong_scale = functools.partial(flash_attention, backend="torch", sm_scale=0.2)
    no_mask = lambda q, k, v, causal: flash_attention(q, k, v, backend="torch")  # noqa: E731
    nan = lambda q, k, v, causal: torch.full_like(q, torch.nan)  # noqa: E731
    for wrong in (wrong_scale, no_mask, nan):
        assert not validate_attention(wrong, 2, 4, 70, 64, True, dtype=dtype, device=DEVICE)[0]
    assert not validate_matmul(lambda a, b: a @ b * 1.02, 70, 50, 300, dtype=dtype, device=DEVICE, verbose=True)[0]
    assert "FAILED" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"the result has shape \(50, 70\), expected \(70, 50\)"):
        validate_matmul(lambda a, b: (a @ b).T, 70, 50, 300, dtype=dtype, device=DEVICE)


def test_a_wider_tolerance_is_taken():
    shifted = lambda a, b: a @ b + 0.5  # noqa: E731
    assert not validate_matmul(shifted, 20, 20, 20, dtype=torch.float32, device=DEVICE)[0]
    assert validate_matmul(shifted, 20, 20, 20, atol=0.6, dtype=torch.float32, device=DEVICE)[0]
