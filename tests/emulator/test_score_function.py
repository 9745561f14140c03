"""score_mod in csrc on the emulator: functions are printed as CUDA, compiled with the kernels of both passes, and
compared with the reference."""
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from conftest import made_once
from minimal_attn import create_block_mask, flash_attention
from minimal_attn.score_function import read
from minimal_attn.score_library import source, struct
from faults import CSRC
from test_emulator import CUDA, CXX, EMULATOR, FLAGS, PARTS, SCHEDULES, compiled, emulated
from test_score_mod import FUNCTIONS as SHARED
from test_score_mod import captured_of

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(300)]

B, H, HK, SQ, SK = 2, 4, 2, 150, 200
OF_MAIN_LIBRARY = "simt/flash_bwd.cu", "simt/flash_bwd_bias.cu"  # what a library of a function calls
DTYPES = {torch.float16: 1, torch.bfloat16: 2}  # as in csrc/flash.h


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def no_change():
    return lambda score, b, h, q_idx, kv_idx: score


def relative_bias():
    table = randn(H, SQ + SK - 1, seed=6).requires_grad_()
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + SK - 1]


def documents_and_slopes():
    document, slopes = torch.arange(SK) // 70, randn(H, seed=7).requires_grad_()

    def f(score, b, h, q_idx, kv_idx):
        distance = (q_idx - kv_idx).abs()
        return torch.where(document[q_idx] == document[kv_idx], score - slopes[h].exp() * distance, -math.inf)

    return f


def rows_times_keys():
    rows, keys = randn(B, SQ, seed=8).requires_grad_(), randn(SK, seed=9, dtype=torch.float16).requires_grad_()
    return lambda score, b, h, q_idx, kv_idx: torch.tanh(score * rows[b, -1 - q_idx]) * 3 + keys[kv_idx] / 2


def numbers():
    """Also with int64, buckets by a quotient, and what is not finite behind the last row and key of a tile."""
    large, period, buckets = torch.tensor([2 ** 40 + 3, 5]), torch.tensor([7, 1 << 33]), randn(8, seed=4)

    def f(score, b, h, q_idx, kv_idx):
        far = abs(q_idx - kv_idx) // 16 % 5 - (kv_idx - 100) % period[0] * 0.125 + (q_idx + large[b]) % period[1] * 1e-3
        far = far + buckets[((kv_idx.float() / 41).long())] + torch.log(0.01 * (SK - kv_idx))
        score = score + torch.sqrt(1.0 * (SQ - q_idx)) * 0.125
        return torch.sigmoid(score) * torch.minimum(score, far + 0.5) + torch.sqrt(1 + score ** 2) / (2 + b + h)

    return f


def growing():
    """Scores grow along the walk of a tile, from its last keys to the first, so that row_max does."""
    return lambda score, b, h, q_idx, kv_idx: score - 3.0 * kv_idx


FUNCTIONS = {f.__name__: f for f in (no_change, relative_bias, documents_and_slopes, rows_times_keys, numbers, growing)}


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """emulated(), with the objects of what the kernels need."""
    def make(csrc):
        compiled(emulated(csrc), csrc / "objects", sources=[*PARTS, *OF_MAIN_LIBRARY])
        return csrc

    return made_once(tmp_path_factory, "score_function", make)


def run(csrc, folder, f, head_dim, dtype, schedule, tensors, sinks, window, block_mask):
    """(out, lse, dq, dk, dv, gradients of what f captures) by the driver."""
    graph, root, captured = read(f)
    main = folder / "main.cpp"
    main.write_text(source(graph, root, [x.dtype for x in captured], 64 if head_dim <= 64 else 128,
                           block_mask is not None)
                    + '#include "drivers/function_driver.cpp"\n')
    program = folder / "driver"
    objects = [csrc / f"objects/{Path(part).stem}.o" for part in (*PARTS, *OF_MAIN_LIBRARY)]
    done = subprocess.run([CXX, *FLAGS, "-O1", *CUDA, "-I", csrc, main, *objects, "-o", program], capture_output=True,
                          text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    q, k, v, dout = tensors
    captured_sizes = [[*x.shape, *(1,) * (4 - x.ndim)] for x in captured]
    ints = [DTYPES[dtype], B, H, HK, SQ, SK, head_dim, *window, sinks is not None]
    ints += [-1 if block_mask is None else len(block_mask.bits)]
    ints += [x.nbytes for x in captured] + [0] * (4 - len(captured))
    ints += [n for size in captured_sizes for n in size] + [0] * (4 * (4 - len(captured)))
    header = np.array(ints, np.int32).tobytes() + np.float32(head_dim ** -0.5).tobytes()
    of_mask = [] if block_mask is None else [getattr(block_mask, x) for x in ("units", "row_words", "key_words", "bits")]
    arrays = [header, *(x.detach().contiguous().view(torch.uint8).numpy().tobytes() for x in (
        q, k, v, dout, torch.zeros(H) if sinks is None else sinks, *of_mask, *captured))]
    lse, results = torch.zeros(B, H, SQ), [torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)]
    results = [torch.zeros_like(q), lse, *results, *(torch.zeros(x.shape) for x in captured)]
    arrays += [x.view(torch.uint8).numpy().tobytes() for x in results]
    file = folder / "call"
    file.write_bytes(b"".join(x + b"\0" * (-len(x) % 128) for x in arrays))
    done = subprocess.run([program, file, schedule], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    data, at = file.read_bytes(), 0
    for x in results:
        x.view(torch.uint8).view(-1).copy_(torch.frombuffer(bytearray(data[at:at + x.nbytes]), dtype=torch.uint8))
        at += -(-x.nbytes // 128) * 128
    return results


@pytest.mark.slow
@pytest.mark.parametrize("schedule, name, head_dim, dtype, window, has_sinks, has_mask", [
    (SCHEDULES[0], "no_change", 64, torch.bfloat16, (-1, -1), True, True),
    (SCHEDULES[1], "relative_bias", 128, torch.float16, (-1, 0), False, False),
    (SCHEDULES[2], "documents_and_slopes", 64, torch.bfloat16, (-1, -1), False, False),
    (SCHEDULES[1], "rows_times_keys", 104, torch.bfloat16, (70, 20), True, False),
    (SCHEDULES[2], "numbers", 40, torch.float16, (-1, 0), False, False),
    (SCHEDULES[0], "growing", 128, torch.bfloat16, (-1, 5), False, True)])
def test_both_passes(schedule, name, head_dim, dtype, window, has_sinks, has_mask, emulator, tmp_path):
    f = FUNCTIONS[name]()
    captured = [x for x in read(f)[2]]
    q, k, v, dout = (randn(B, heads, length, head_dim, seed=seed, dtype=dtype) for seed, (heads, length) in enumerate(
        ((H, SQ), (HK, SK), (HK, SK), (H, SQ))))
    sinks = randn(H, seed=5) if has_sinks else None
    mask = create_block_mask(lambda b, h, q, k: (q // 40 + k // 50) % 3 > 0, None, None, SQ, SK) if has_mask else None
    out, lse, dq, dk, dv, *gradients = run(emulator, tmp_path, f, head_dim, dtype, schedule, (q, k, v, dout), sinks,
                                           window, mask)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wants = [x for x in captured if x.requires_grad]
    want_out, want_lse = flash_attention(*leaves, score_mod=f, backend="reference", return_lse=True, window_size=window,
                                         sinks=None if sinks is None else sinks.double(), block_mask=mask)
    want = torch.autograd.grad(want_out, [*leaves, *wants], dout.double())
    tolerance = dict(rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 4e-3)
    assert_close(out.double(), want_out, **tolerance)
    assert_close(lse.double(), want_lse.double(), rtol=1e-3, atol=2e-3)
    for x, y in zip((dq, dk, dv), want):
        assert_close(x.double(), y, rtol=2e-2, atol=2e-2 * y.abs().max().item())
    for x, y in zip([g for g, x in zip(gradients, captured) if x.requires_grad], want[3:]):
        assert_close(x.double(), y.double(), rtol=3e-2, atol=1e-2 * y.abs().max().item())


def test_printed_functions(tmp_path):
    """Functions that people share, and their derivatives by the score, as CUDA and by torch."""
    scores, rows, keys = torch.linspace(-3, 3, 7), range(7), range(9)
    text, calls, wanted = '#include <cstdio>\n#include "mods/score_function.cuh"\n', "", []
    for name, make in SHARED.items():
        values = captured_of(name)
        f = make(**values)
        graph, root, captured = read(f)
        data = ""
        for i, x in enumerate(captured):
            x = (x if x.ndim else x[None]).detach()
            numbers = ", ".join(map(str, x.flatten().tolist()))
            dtype = {torch.float64: "double", torch.int64: "int64_t", torch.int32: "int"}[x.dtype]
            data += f"    const {dtype} data{i}[] = {{{numbers}}};\n    captured[{i}] = {{data{i}, nullptr, " \
                    f"{{{', '.join(map(str, x.shape))}}}}};\n"
        text += f"namespace {name}_ {{\n{struct(graph, root, [x.dtype for x in captured])}}}\n"
        calls += f"""{{
    Captured captured[4] = {{}};
{data}    for (int row = 0; row < 7; row++)
        for (int key = 0; key < 9; key++)
            for (int s = -3; s <= 3; s++) {{
                const ScorePlace at{{1, 2, Index(row - 3) + 3, Index(key + 2) - 2}};
                std::printf("%.9g %.9g\\n", {name}_::ScoreMod::changed(s, at, captured),
                            {name}_::ScoreMod::derivative(s, at, captured));
            }}
}}
"""
        score = scores.double().requires_grad_()
        for row in rows:
            for key in keys:
                changed = f(score, *map(torch.tensor, (1, 2, row, key))).double().expand(7)
                gradient = (torch.autograd.grad(changed.sum(), score, allow_unused=True)[0]
                            if changed.requires_grad else None)
                wanted += zip(changed.tolist(), [0.0] * 7 if gradient is None else gradient.tolist())
    (tmp_path / "main.cpp").write_text(f"{text}int main() {{\n{calls}}}\n")
    done = subprocess.run([CXX, *FLAGS, *CUDA, "-I", EMULATOR, "-I", CSRC, tmp_path / "main.cpp", "-o",
                           tmp_path / "main"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True, timeout=60)
    got = torch.tensor([list(map(float, line.split())) for line in done.stdout.splitlines()], dtype=torch.float64)
    assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=2e-5, atol=2e-5, equal_nan=True)
