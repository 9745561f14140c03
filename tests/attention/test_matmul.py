"""triton_matmul: every size, layout and dtype against fp64, what it refuses, and how it chooses its tiles."""

import math

import pytest
import torch

from cases import check_error, slow_unless
from conftest import HAS_GPU, needs_gib
from minimal_attn import checks, triton_matmul, validate_matmul

pytest.importorskip("triton", reason="triton is not installed")
from triton_ref import launching, matmul  # noqa: E402
from triton_ref.launching import properties  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Triton's interpreter is given fp32 in place of bfloat16.
each_dtype = pytest.mark.parametrize("dtype", [
    pytest.param(x, id=str(x), marks=slow_unless(HAS_GPU or x != torch.bfloat16, False)) for x in DTYPES])

SHAPES = [(1, 1, 1), (17, 33, 65), (70, 50, 300), (1, 70, 40), (70, 1, 40), (70, 40, 1), (130, 66, 5), (16, 24, 1000)]
EMPTY_SHAPES = [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)]
LARGE_SHAPES = [(1000, 1000, 1000), (1023, 513, 777), (16, 4096, 4096), (1, 4096, 4096), (4096, 16, 512),
                (300, 2056, 64), (128, 128, 20000), (2048, 2048, 2048)]


def in_nan(shape, dtype, device=DEVICE, rows_first=True, pad=8, offset=8):
    """Normal values in a buffer of NaN: pad elements follow each row, or each column unless rows_first."""
    rows, cols = shape if rows_first else shape[::-1]
    buffer = torch.full((offset + rows * (cols + pad) + pad,), math.nan, dtype=dtype, device=device)
    x = buffer.as_strided((rows, cols), (cols + pad, 1), offset)
    x.copy_(torch.randn(rows, cols))
    return x if rows_first else x.T


def check(a, b, *blocks, **options):
    c = triton_matmul(a, b, *blocks, **options)
    assert c.shape == (a.shape[0], b.shape[1]) and c.dtype == a.dtype and c.is_contiguous()
    # torch's own bfloat16 product reads a row's padding on some CPUs, so it gets copies.
    check_error(c, a.double() @ b.double(), a.clone() @ b.clone())
    return c


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@each_dtype
@pytest.mark.parametrize("shape", SHAPES + EMPTY_SHAPES + [
    pytest.param(shape, marks=pytest.mark.gpu) for shape in LARGE_SHAPES], ids=str)
def test_shapes(shape, dtype, poisoned_outputs):
    """Between NaN before and behind both operands, rows aligned as far as their length allows."""
    m, n, k = shape
    check(in_nan((m, k), dtype), in_nan((k, n), dtype))


@each_dtype
@pytest.mark.parametrize("pad, offset", [(8, 8), (3, 8), (8, 1)], ids=["aligned", "odd rows", "odd start"])
@pytest.mark.parametrize("b_rows_first", [True, False], ids=["b", "b.T"])
@pytest.mark.parametrize("a_rows_first", [True, False], ids=["a", "a.T"])
def test_layouts(a_rows_first, b_rows_first, pad, offset, dtype, poisoned_outputs):
    """Row-major and transposed, with rows that TMA can copy and with rows that it cannot."""
    m, n, k = (264, 136, 200) if HAS_GPU else (40, 24, 56)
    check(in_nan((m, k), dtype, DEVICE, a_rows_first, pad, offset),
          in_nan((k, n), dtype, DEVICE, b_rows_first, pad, offset))


@each_dtype
def test_strides(dtype):
    """Steps in both dimensions, broadcast rows and columns, and windows that overlap."""
    x, y = torch.randn(80, 96, device=DEVICE, dtype=dtype), torch.randn(96, 64, device=DEVICE, dtype=dtype)
    check(x[::2, ::3], y[::3, 1::2])
    check(x[:1].expand(48, 96), y)
    check(x, y[:, :1].expand(96, 40))
    check(x[:, :1].expand(80, 96), y)
    check(x, y[:1].expand(96, 64))
    check(x.flatten().as_strided((40, 48), (8, 1)), y.flatten().as_strided((48, 40), (1, 8)))
    assert triton_matmul(x, y).equal(triton_matmul(x.T.contiguous().T, y.T.contiguous().T))


def run(a, b, config, monkeypatch):
    """triton_matmul with a config of one's own."""
    monkeypatch.setattr(matmul, "_ranked", lambda *_: [config])
    monkeypatch.setattr(matmul, "_plans", {})
    return triton_matmul(a, b, use_autotune=False)


@pytest.mark.parametrize("splits", [2, 16])
@each_dtype
def test_splits(splits, dtype, monkeypatch, poisoned_outputs):
    """Also more of them than there is of K, and the same result in every run."""
    config = dict(kBlockM=16, kBlockN=16, kBlockK=16, kSplits=splits, num_warps=4, num_stages=2)
    for k in (8, 200):
        a, b = in_nan((17, k), dtype), in_nan((k, 16), dtype)
        c = run(a, b, config, monkeypatch)
        check_error(c, a.double() @ b.double(), a.clone() @ b.clone())
        assert c.equal(triton_matmul(a, b, use_autotune=False))


def test_fp32_is_exact():
    """Products of 12 bits by 12, which TF32 and float16 would round, and sums that float32 holds."""
    a, b = (torch.randint(-4095, 4096, shape, device=DEVICE).float() for shape in ((40, 1), (1, 50)))
    assert triton_matmul(a, b).double().equal(a.double() * b.double())
    a = torch.randint(-500, 500, (40, 64), device=DEVICE).float()
    assert triton_matmul(a, a.T).double().equal(a.double() @ a.double().T)


@each_dtype
def test_defaults(dtype):
    """Fewer than three blocks are as none, and a tile of one's own gives what the table's does to within rounding."""
    a, b = torch.randn(50, 70, device=DEVICE, dtype=dtype), torch.randn(70, 40, device=DEVICE, dtype=dtype)
    want = triton_matmul(a, b, use_autotune=False)
    for blocks in ((), (16,), (16, 16), (None, 16, 16)):
        assert triton_matmul(a, b, *blocks, use_autotune=False).equal(want)
    assert validate_matmul(triton_matmul, 70, 50, 300, dtype=dtype, device=DEVICE)[0]
    assert matmul.triton_matmul(a, b).equal(triton_matmul(a, b))


def tensor(*shape, dtype=torch.float16, device=DEVICE):
    return torch.zeros(shape, dtype=dtype, device=device)


SQUARE = tensor(99, 99)
WRONG = [
    (TypeError, "a is torch.float64", (tensor(3, 4, dtype=torch.float64), tensor(4, 5)), {}),
    (TypeError, "dtypes must match", (tensor(3, 4), tensor(4, 5, dtype=torch.bfloat16)), {}),
    (ValueError, "on the same device", (tensor(3, 4), tensor(4, 5, device="meta")), {}),
    (ValueError, "a and b must be 2D, .* b is \\(4,\\)", (tensor(3, 4), tensor(4)), {}),
    (ValueError, "a.shape\\[1\\] must be b.shape\\[0\\]", (tensor(3, 4), tensor(5, 4)), {}),
    (ValueError, "sizes go up to", (tensor(1, 1).expand(2**31, 1), tensor(1, 1)), {}),
    (ValueError, "block_m must be a power of two", (SQUARE, SQUARE), {"block_m": 48}),
    (ValueError, "block_n must be a power of two", (SQUARE, SQUARE), {"block_n": 8}),
    (ValueError, "block_m must be a power of two from 16 to 48", (tensor(33, 99), SQUARE), {"block_m": 64}),
    (ValueError, "block_k must be a power of two from 16 to 16", (tensor(99, 0), tensor(0, 5)), {"block_k": 32}),
    (ValueError, "block_m times block_n", (tensor(512, 64), tensor(64, 512)),
     dict(block_m=256, block_n=256, block_k=64)),
    (ValueError, "block_n times block_k .* 8192", (tensor(64, 256).float(), tensor(256, 64).float()),
     dict(block_m=16, block_n=64, block_k=256)),
]


@pytest.mark.parametrize("error, message, tensors, options", WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_errors(error, message, tensors, options):
    with pytest.raises(error, match=message):
        triton_matmul(*tensors, **options)


def test_no_derivative():
    a, b = torch.randn(4, 5, device=DEVICE, requires_grad=True), torch.randn(5, 6, device=DEVICE)
    for tensors in ((a, b), (b.T, a.T)):
        with pytest.raises(NotImplementedError, match="no backward pass"):
            triton_matmul(*tensors)
    with torch.no_grad():
        assert not check(a, b).requires_grad
    assert not check(torch.nn.Parameter(a, requires_grad=False), b).requires_grad
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a.detach(), torch.ones_like(a))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            triton_matmul(dual, b)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    compiled = torch.compile(triton_matmul, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m, n, k in ((20, 30, 40), (33, 18, 50)):
        a, b = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE).T
        assert compiled(a, b).equal(triton_matmul(a, b))


def test_op():
    a, b = torch.randn(20, 30, device=DEVICE), torch.randn(30, 40, device=DEVICE)
    for rest in ((None, None, None, True), (16, 16, 16, False)):
        torch.library.opcheck(torch.ops.minimal_attn.triton_matmul, (a, b, *rest))


def test_tile_config():
    """Known without a GPU; every config fits the GPU, and its tile is no larger than it must be."""
    for dtype in DTYPES:
        for m, n, k in SHAPES + LARGE_SHAPES + [(8192, 8192, 8192)]:
            for shared_memory in (99 << 10, 163 << 10, 227 << 10):
                config = matmul.tile_config(dtype, m, n, k, dtype != torch.float32, 132, shared_memory)
                tile = config["kBlockM"] + config["kBlockN"]
                assert 2 <= config["num_stages"] <= 5
                assert config["num_stages"] * tile * config["kBlockK"] * dtype.itemsize < shared_memory
                assert config["kBlockM"] * config["kBlockN"] <= checks.MAX_TILE
    assert matmul.tile_config(torch.float16, 16, 1024, 4096)["kSplits"] > 1  # few tiles
    assert matmul.tile_config(torch.float16, 8192, 8192, 8192)["kSplits"] == 1


def test_descriptors():
    """Descriptors tell TMA the layout of a matrix and of a transposed one, without keeping their memory alive."""
    x = torch.zeros(40, 64, device=DEVICE, dtype=torch.float16)
    for y, dim in ((x[:, :48], 1), (x[:, :48].T, 0)):
        assert matmul._contiguous_dim(y) == dim
        tile, block = matmul._tile(y, dim, 16, 32)
        described = launching._TileMap(tile, block).at(y.data_ptr())
        assert described.base.data_ptr() == x.data_ptr() and described.base.dtype == torch.float16
        assert tuple(described.shape) == (40, 48) and tuple(described.strides) == (64, 1)
        assert tuple(described.block_shape) == ((16, 32) if dim == 1 else (32, 16))
    windows = x.flatten().as_strided((16, 64), (8, 1))
    for y in (x[:, 1:], x[:, ::2], windows, x[:1].expand(40, 64), x[:, :1].expand(40, 64)):
        assert matmul._contiguous_dim(y) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # float16 has the tiles of bfloat16
@pytest.mark.parametrize("b_rows_first", [True, False], ids=["b", "b.T"])
@pytest.mark.parametrize("a_rows_first", [True, False], ids=["a", "a.T"])
def test_every_tile_of_the_table(a_rows_first, b_rows_first, dtype, monkeypatch, poisoned_outputs):
    """Whole tiles and cut ones, with and without splits."""
    shared_memory = properties(torch.device("cuda", torch.cuda.current_device())).max_shared_memory
    a, b = in_nan((304, 328), dtype, DEVICE, a_rows_first), in_nan((328, 520), dtype, DEVICE, b_rows_first)
    truth, base = a.double() @ b.double(), a @ b
    for *blocks, _ in matmul.TILES[dtype.itemsize]:
        for splits in (1, 4):
            config = matmul._config(dtype, *blocks, splits, True, shared_memory)
            check_error(run(a, b, config, monkeypatch), truth, base)


@pytest.mark.gpu
@needs_gib(30)
@pytest.mark.parametrize("pad", [0, 1], ids=["rows for TMA", "odd rows"])
def test_more_than_2_31_elements(pad, much_memory):
    """Offsets in a, b and c; the last rows and columns tell."""
    long, k = 2**25 + 136, 64
    a = torch.zeros(long, k + pad, device=DEVICE, dtype=torch.float16)[:, :k]
    a[-300:] = torch.randn(300, k, device=DEVICE)
    small = torch.randn(k, 72, device=DEVICE, dtype=torch.float16)
    assert long * k > 2**31
    c = triton_matmul(a, small, use_autotune=False)
    assert c.numel() > 2**31 and (c[:-300] == 0).all()
    check_error(c[-300:], a[-300:].double() @ small.double(), a[-300:] @ small)
    del c
    c = triton_matmul(small.T, a.T, use_autotune=False)
    check_error(c[:, -300:], small.T.double() @ a[-300:].T.double(), small.T @ a[-300:].T)
