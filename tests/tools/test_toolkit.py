"""The tools around the kernels: what a GPU can do, validation, the timer, the choice of a kernel."""

import functools
import itertools
import types

import pytest
import torch

from conftest import HAS_GPU
from minimal_attn import (AdaptiveKernelSelector, BenchmarkRunner, benchmark_fn, flash_attention, get_attention_config,
                          get_matmul_config, get_optimal_attention, get_optimal_matmul)
from minimal_attn.toolkit import benchmark, gpu
from minimal_attn.toolkit.gpu import GPUArch, check_hopper_features, detect_gpu, print_gpu_info, supports_fp8
from minimal_attn.toolkit.validation import validate_attention, validate_matmul

DEVICE = "cuda" if HAS_GPU else "cpu"
# (capability, architecture, TMA, fp8, wgmma)
GPUS = [
    ((7, 5), "TURING", False, False, False), ((8, 6), "AMPERE", False, False, False),
    ((8, 9), "ADA", False, True, False), ((9, 0), "HOPPER", True, True, True),
    ((10, 3), "BLACKWELL", True, True, False), ((12, 0), "BLACKWELL_RTX", True, True, False),
    ((13, 0), "UNKNOWN", True, True, False)]


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
def test_detect_gpu(capability, arch, tma, fp8, wgmma, pretend, capsys):
    pretend(capability)
    assert detect_gpu() == gpu.GPUCapabilities("NVIDIA Test", GPUArch[arch], capability, tma, fp8, wgmma, 228 << 10,
                                               132, 3)
    assert check_hopper_features() == {"tma_available": tma, "fp8_available": fp8, "wgmma_available": wgmma,
                                       "arch": arch.lower(), "compute_capability": capability}
    assert supports_fp8() is fp8
    print_gpu_info()
    assert "NVIDIA Test" in capsys.readouterr().out
    for device_id in (-1, 1):
        with pytest.raises(ValueError, match="device_id"):
            detect_gpu(device_id)


def test_detect_gpu_without_a_gpu(no_gpu, capsys):
    with pytest.raises(RuntimeError, match="CUDA is not available"):
        detect_gpu()
    print_gpu_info()
    assert "no CUDA GPU" in capsys.readouterr().out
    assert check_hopper_features() == {"tma_available": False, "fp8_available": False, "wgmma_available": False,
                                       "arch": "unknown", "compute_capability": (0, 0)}
    assert supports_fp8() is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_validate(dtype, capsys):
    """At the default tolerance too, which no bf16 result of this size could keep."""
    passed, difference = validate_matmul(torch.matmul, 70, 50, 300, dtype=dtype, device=DEVICE, verbose=True)
    assert passed and (difference > 1e-3) == (dtype != torch.float32)
    assert f"{difference:.2e}" in capsys.readouterr().out
    for atol in (1e-3, 3):
        shifted = validate_matmul(lambda a, b: a @ b + 2, 70, 50, 300, atol=atol, dtype=dtype, device=DEVICE)
        assert shifted[0] == (atol == 3)
    with pytest.raises(ValueError, match="shape"):
        validate_matmul(lambda a, b: (a @ b).T, 70, 50, 300, dtype=dtype, device=DEVICE)
    attend = functools.partial(flash_attention, backend="cuda")
    for causal in (False, True):
        passed, difference = validate_attention(attend, 2, 4, 70, 64, causal, dtype=dtype, device=DEVICE)
        assert passed and 0 < difference < 0.1
    wrong_scale = functools.partial(flash_attention, backend="torch", sm_scale=0.2)
    no_mask = lambda q, k, v, causal: flash_attention(q, k, v, backend="torch")  # noqa: E731
    nan = lambda q, k, v, causal: torch.full_like(q, torch.nan)  # noqa: E731
    for wrong in (wrong_scale, no_mask, nan):
        assert not validate_attention(wrong, 2, 4, 70, 64, True, dtype=dtype, device=DEVICE)[0]


def test_benchmark_fn_counts_calls_and_hands_on_arguments(monkeypatch):
    """By a clock that only the timed function lets pass, on the CPU."""
    now, calls, cpu = [0.0], [], torch.empty(0)
    monkeypatch.setattr(benchmark, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def work(x, y, *, z):
        calls.append((x, y, z))
        now[0] += 1e-3 * (len(calls) - 3 if len(calls) > 3 else 1000)  # the three that warm up are slow

    assert benchmark_fn(work, cpu, 2, z=3, warmup=3, rep=11) == pytest.approx((6, 3, 9))  # of 1, 2, ... 11 ms
    assert [(y, z) for _, y, z in calls] == [(2, 3)] * 14 and calls[0][0] is cpu
    calls.clear()
    quantiles = benchmark_fn(work, cpu, 2, z=3, warmup=3, rep=5, quantiles=[0.0, 1.0, 0.25, 0.5])
    assert quantiles == pytest.approx((1, 5, 2, 3))


def test_benchmark_runner(monkeypatch, capsys):
    """Every call takes 2 ms."""
    monkeypatch.setattr(benchmark, "time", types.SimpleNamespace(perf_counter=itertools.count(0, 2e-3).__next__))
    seen, blocks = [], {"block_m": 16, "block_n": 32, "block_k": 64}
    runner = BenchmarkRunner("cpu", warmup=0, rep=1)
    results = runner.benchmark_matmul(lambda a, b, **given: seen.append((a.shape, b.shape, given)), [(100, 40, 50)],
                                      block_configs=[blocks], dtype=torch.float32)
    assert [(r.name, r.block_config) for r in results] == [("PyTorch", None), ("Triton", blocks)]
    assert (results[1].time_ms, results[1].tflops) == pytest.approx((2, 2 * 100 * 40 * 50 / 2e-3 / 1e12))
    for causal in (False, True):
        results = runner.benchmark_attention(lambda q, k, v, causal: seen.append((q.shape, causal)), [8, 24], 2, 3, 16,
                                             causal=causal, dtype=torch.float32)
        assert results[-1].tflops == pytest.approx(4 * 2 * 3 * 24**2 * 16 / (2 if causal else 1) / 2e-3 / 1e12)
        assert seen[-1] == ((2, 3, 24, 16), causal)
    assert seen[0] == ((100, 50), (50, 40), blocks) and len(runner.results) == 10
    runner.print_comparison_table()
    assert "100×40×50" in capsys.readouterr().out


def test_benchmark_runner_without_a_gpu(no_gpu):
    with pytest.raises(RuntimeError, match="device='cuda'"):
        BenchmarkRunner().benchmark_attention(flash_attention, [8])


def test_adaptive_kernel_selector_runs():
    selector = AdaptiveKernelSelector()
    assert (selector.gpu is None) == (not HAS_GPU) and selector.device.type == DEVICE
    for attend in (selector.select_attention_kernel(), get_optimal_attention()):
        assert validate_attention(attend, 2, 4, 70, 64, True, device=DEVICE)[0]
        assert attend.keywords == {"backend": selector.get_attention_config()["backend"]}
    for multiply in (selector.select_matmul_kernel(), get_optimal_matmul()):
        assert validate_matmul(multiply, 70, 50, 300, device=DEVICE)[0]


def test_get_attention_config_without_a_gpu(no_gpu):
    assert get_attention_config() == {"backend": "torch", "kernel": "scaled_dot_product_attention"}
    assert get_attention_config(backend="cuda") == {"backend": "cuda", "kernel": "host"}
    assert get_matmul_config() == {"backend": "torch", "kernel": "torch.matmul"}
    assert get_optimal_matmul() is torch.matmul


@pytest.mark.parametrize("error, match, get_config, arguments", [
    (TypeError, "dtype", get_attention_config, dict(dtype=torch.float64, backend="triton")),
    (ValueError, "head_dim", get_attention_config, dict(head_dim=512, backend="triton")),
    (ValueError, "head_dim", get_attention_config, dict(head_dim=-1, backend="triton")),
    (TypeError, "dtype", get_matmul_config, dict(dtype=torch.float64, backend="triton")),
    (ValueError, "'cublas'", get_matmul_config, dict(backend="cublas")),
    (ValueError, "'fast'", get_attention_config, dict(backend="fast"))])
def test_get_config_bad_input(error, match, get_config, arguments):
    with pytest.raises(error, match=match):
        get_config(**arguments)
