"""Block masks: masks of all kinds, against what their functions give for all rows and keys at once; the layout bit
by bit, against a plain loop; torch's BlockMask; copies and errors. Then attention with them, against test_lengths.py's
loop over samples in fp64."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from torch.nn.attention import flex_attention
from torch.testing import assert_close

from cases import compiler_for, slow_unless
from conftest import HAS_GPU, captured
from minimal_attn import block_mask, flash_attention, reference_attention
from minimal_attn.block_mask import BlockMask, create_block_mask, with_tensors
from minimal_attn.options import BLOCK_MASK, Options
from test_lengths import DTYPES, IMPLS, KERNELS, TOLERANCE, check_batch, close, op_of
from test_scores import Scored, randn

DEVICE = "cuda" if HAS_GPU else "cpu"
B, H, SQ, SK = 2, 3, 333, 401
TENSORS = "units", "row_words", "key_words", "bits"


def tensor(values):
    return torch.tensor(values, device=DEVICE)


def draw(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


POSITIONS = torch.arange(SK, device=DEVICE)
DOCUMENTS = (POSITIONS[:, None] >= tensor([50, 51, 128, 300])).sum(1)
PAGE_TABLE = draw(2**20, 51).argsort()  # of pages of 8 keys
PLACES = PAGE_TABLE.argsort()[POSITIONS // 8] * 8 + POSITIONS % 8  # in its sequence, of each key in the pages
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 5]  # of a draft's tokens, after which the cached keys end
TREE = torch.eye(len(PARENTS), dtype=torch.bool)
for token, parent in enumerate(PARENTS[1:], 1):
    TREE[token] |= TREE[parent]
TREE = TREE.to(DEVICE)
CACHED = SK - len(PARENTS)
PREFIXES, LENGTHS_Q, LENGTHS_K, WINDOWS = tensor([70, 128]), tensor([333, 64]), tensor([129, 390]), tensor([1, 65, 999])
CHOSEN = draw(2, H, 6, 7) > 0
RANDOM = draw(2, B, H, SQ, SK) > 0
WIDTH, HEIGHT = 20, 21  # of images by rows of pixels
CLEAN = 200  # tokens before their noisy copies, in block diffusion


def distance(q, k):
    return (q - k).abs()


def in_neighbourhood(place, key_place, size, radius):
    """Along one side of an image. Near its ends, the neighbourhood moves inwards and stays as large."""
    return distance(place.clamp(radius, size - 1 - radius), key_place) <= radius


def block_diffusion(b, h, q, k):
    block, key_block = q % CLEAN // 16, k % CLEAN // 16
    return torch.where(k < CLEAN, torch.where(q < CLEAN, block >= key_block, block > key_block),
                       (q >= CLEAN) & (block == key_block))


MASKS = {
    "everything": lambda b, h, q, k: k >= 0,
    "nothing": lambda b, h, q, k: k < 0,
    "constant": lambda b, h, q, k: b.new_ones((), dtype=torch.bool),
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: distance(q, k) <= 70,
    "causal_window": lambda b, h, q, k: (q >= k) & (q - k < 130),
    "per_head_window": lambda b, h, q, k: distance(q, k) < WINDOWS[h],
    "dilated": lambda b, h, q, k: (q >= k) & (q - k < 200) & ((q - k) % 3 == 0),
    "prefix_lm_per_sample": lambda b, h, q, k: (q >= k) | (k < PREFIXES[b]),
    "documents": lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k],
    "causal_documents": lambda b, h, q, k: (q >= k) & (DOCUMENTS[q] == DOCUMENTS[k]),
    "longformer": lambda b, h, q, k: (distance(q, k) < 64) | (q < 5) | (k < 5),
    "random_blocks": lambda b, h, q, k: CHOSEN[h, q // 64, k // 64],
    "random": lambda b, h, q, k: RANDOM[b, h, q, k],
    "lengths": lambda b, h, q, k: (q < LENGTHS_Q[b]) & (k < LENGTHS_K[b]),
    "pages": lambda b, h, q, k: q >= PLACES[k],
    "draft_tree": lambda b, h, q, k: (k < CACHED) | TREE[q % len(PARENTS), (k - CACHED).clamp(min=0)],
    "neighbourhood": lambda b, h, q, k: in_neighbourhood(q // WIDTH, k // WIDTH, HEIGHT, 3)
    & in_neighbourhood(q % WIDTH, k % WIDTH, WIDTH, 4),
    "block_diffusion": block_diffusion,
}
each_mask = pytest.mark.parametrize("mask_mod", MASKS.values(), ids=MASKS)


def dense(mask_mod, shape=(B, H, SQ, SK)):
    """By broadcasting, without vmap."""
    sizes = [torch.arange(n, device=DEVICE).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(shape)]
    return mask_mod(*sizes).expand(shape)


def build(name="causal", **options):
    return create_block_mask(MASKS[name], B, H, SQ, SK, DEVICE, **options)


def check_same(mask, other):
    for name in TENSORS:
        assert torch.equal(getattr(mask, name), getattr(other, name)), name


def word_bit(words, i):
    return words[i // 32] >> i % 32 & 1


def check_layout(mask, want):
    """The states and the numbers of units, and the words."""
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in map(mask.__getattribute__, TENSORS))
    want, numbers = want.cpu(), []
    units, row_words, key_words = mask.units.tolist(), mask.row_words.tolist(), mask.key_words.tolist()
    assert mask.units.shape == (*want.shape[:2], 6, 7)
    assert mask.row_words.shape == (*want.shape[:2], 6, 1) and mask.key_words.shape == (*want.shape[:2], 7, 1)
    assert mask.bits.shape == (int((mask.units >= 0).sum()), 2, 128)
    for b, h, m, n in torch.cartesian_prod(*map(torch.arange, mask.units.shape)).tolist():
        seen = want[b, h, m * 64:m * 64 + 64, n * 64:n * 64 + 64]
        unit = units[b][h][m][n]
        assert unit == -1 if seen.all() else unit >= 0 if seen.any() else unit == -2
        assert word_bit(row_words[b][h][m], n) == word_bit(key_words[b][h][n], m) == (unit != -2)
        numbers += [unit] * (unit >= 0)
    assert numbers == list(range(len(numbers)))


@each_mask
def test_mask(mask_mod):
    mask, want = create_block_mask(mask_mod, B, H, SQ, SK, DEVICE), dense(mask_mod)
    assert torch.equal(mask.to_dense(), want)
    assert mask.shape == want.shape and mask.mask_mod is mask_mod and mask.device.type == DEVICE
    check_layout(mask, want)
    check_same(BlockMask.from_dense(want), mask)


@pytest.mark.parametrize("name", ["causal_documents", "per_head_window", "random"])
def test_bits(name):
    """One by one. Beyond the ends they are 0."""
    mask, want = build(name), torch.zeros(B, H, 384, 448, dtype=torch.bool)
    want[:, :, :SQ, :SK] = dense(MASKS[name])
    bits = mask.bits.tolist()
    for b, h, m, n in (mask.units >= 0).nonzero()[::5].tolist():
        number = mask.units[b, h, m, n]
        seen = want[b, h, m * 64:m * 64 + 64, n * 64:n * 64 + 64].tolist()
        for i in range(64):
            for j in range(64):
                thread, bit = 32 * (i // 16) + i % 8 * 4 + j % 8 // 2, i // 8 % 2 * 16 + j // 8 * 2 + j % 2
                assert [words[thread] >> bit & 1 for words in bits[number]] == [seen[i][j], seen[j][i]]


def test_words_of_many_units():
    """More than 32, whose highest bit is a sign."""
    mask = create_block_mask(MASKS["causal"], None, None, 64 * 33, 64 * 64, DEVICE)
    assert mask.shape == (1, 1, 64 * 33, 64 * 64)
    assert mask.row_words[0, 0].tolist() == [*([2**(m + 1) - 1, 0] for m in range(31)), [-1, 0], [-1, 1]]
    assert mask.key_words[0, 0].tolist() == [*([-2**n, 1] for n in range(32)), [0, 1], *[[0, 0]] * 31]


def test_parts(monkeypatch):
    """A mask that is evaluated in many parts, of which the last one is smaller."""
    whole = build("random")
    monkeypatch.setattr(block_mask, "PART", 50 * 64 * 64)
    check_same(build("random"), whole)


@pytest.mark.parametrize("shape", [(7, 9), (H, 7, 9), (B, 1, 70, 9), (1, H, 7, 70), (1, 1, 64, 128), (1, 1, 1, 1)])
def test_from_dense(shape):
    want = draw(2, *shape) > 0
    for x in (want, want.mT.contiguous().mT):
        mask = BlockMask.from_dense(x)
        assert mask.mask_mod is None and torch.equal(mask.to_dense(), want.view(mask.shape))


@pytest.mark.parametrize("size", [64, 192, (64, 128), (1 << 30, 64)], ids=str)
def test_from_blocks(size):
    rows, keys = size if isinstance(size, tuple) else (size, size)
    blocks = (draw(2, H, B, -(-SQ // rows), -(-SK // keys)) > 0).transpose(0, 1)
    mask = BlockMask.from_blocks(blocks, SQ, SK, size)
    want = dense(lambda b, h, q, k: blocks[b, h, q // rows, k // keys])
    assert torch.equal(mask.to_dense(), want) and mask.mask_mod is None
    check_layout(mask, want)


@pytest.mark.parametrize("size", [64, 128, (192, 64)], ids=str)
@pytest.mark.parametrize("name", ["causal_documents", "per_head_window", "lengths", "everything", "nothing"])
def test_from_torch(name, size):
    """Lists of partial and of full blocks, or one list of both, with garbage behind the counts."""
    theirs = flex_attention.create_block_mask(MASKS[name], B, H, SQ, SK, DEVICE, size)
    blocks = theirs.to_dense()
    one_list = flex_attention.BlockMask.from_kv_blocks(
        blocks.sum(-1).int(), blocks.argsort(dim=-1, descending=True).int(), BLOCK_SIZE=theirs.BLOCK_SIZE,
        mask_mod=MASKS[name], seq_lengths=(SQ, SK))
    for x in (theirs, one_list):
        for count, indices in ((x.kv_num_blocks, x.kv_indices), (x.full_kv_num_blocks, x.full_kv_indices)):
            if count is not None:
                indices[torch.arange(indices.shape[-1], device=DEVICE) >= count[..., None]] = 10**6
        check_same(BlockMask.from_torch(x), build(name))


def test_from_torch_evaluates_partial_blocks_alone():
    """A mask_mod that is defined for 128 rows, of which one block of keys is listed."""
    visible = draw(2, 128) > 0
    theirs = flex_attention.BlockMask.from_kv_blocks(tensor([[[1, 0, 0]]]), tensor([[3 * [[2, 0, 1, 3]]]]),
                                                     mask_mod=lambda b, h, q, k: visible[q], seq_lengths=(300, 400))
    want = torch.zeros(1, 1, 300, 400, dtype=torch.bool, device=DEVICE)
    want[:, :, :128, 256:384] = visible[:, None]
    assert torch.equal(BlockMask.from_torch(theirs).to_dense(), want)


def test_copies():
    """Copies share no memory with the mask, and have no mask_mod."""
    mask = build("documents")
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        check_same(other, mask)
        assert other.mask_mod is None and other.shape == mask.shape and repr(other) == repr(mask)
        other.bits.zero_()
        assert mask.bits.any()
    moved = mask.to("meta")
    assert moved.device.type == "meta" and moved.bits.is_meta and moved.mask_mod is MASKS["documents"]
    check_same(mask.to(DEVICE), mask)


def test_copy_():
    """In place, with room for more partial units than there are at first."""
    few, many = build("causal"), build("window")
    assert len(few.bits) < len(many.bits)
    target = build("causal", num_bits=len(many.bits) + 3)
    addresses = [getattr(target, name).data_ptr() for name in TENSORS]
    for other in (many, few, build("nothing")):
        assert target.copy_(other) is target and target.mask_mod is other.mask_mod
        assert torch.equal(target.to_dense(), other.to_dense()) and len(target.bits) == len(many.bits) + 3
        assert torch.equal(target.row_words, other.row_words) and torch.equal(target.key_words, other.key_words)
    assert addresses == [getattr(target, name).data_ptr() for name in TENSORS]
    blocks = torch.ones(B, H, 6, 7, dtype=torch.bool, device=DEVICE)
    assert torch.equal(BlockMask.from_blocks(blocks, SQ, SK, 64, num_bits=len(many.bits)).copy_(many).to_dense(),
                       many.to_dense())
    for wrong in (many, create_block_mask(MASKS["nothing"], B, H, SQ - 1, SK, DEVICE)):
        with pytest.raises(ValueError, match=r"copy_ needs .* got BlockMask\(.*\) for BlockMask\("):
            few.copy_(wrong)
    check_same(few, build("causal"))


def test_num_bits():
    """Room for as many bits as asked for."""
    want = build("random")
    room = len(want.bits)
    check_same(build("random", num_bits=room), want)
    spare = build("random", num_bits=room + 5)
    assert spare.bits.shape == (room + 5, 2, 128)
    assert torch.equal(spare.units, want.units) and torch.equal(spare.bits[:room], want.bits)
    with pytest.raises(ValueError, match=f"num_bits must be at least {room}, the number of partial units, got 7"):
        create_block_mask(lambda b, h, q, k: RANDOM.cpu()[b, h, q, k], B, H, SQ, SK, "cpu", num_bits=7)


def test_text():
    mask = create_block_mask(MASKS["causal"], None, None, 192, 320, DEVICE)
    assert mask.sparsity() == 60
    assert str(mask) == ("BlockMask(shape=(1, 1, 192, 320), sparsity=60.00%)\n░····\n█░···\n██░··\n"
                         "First sample and head: █ full, ░ partial, · empty")
    assert repr(mask) == f"BlockMask(shape=(1, 1, 192, 320), num_bits=3, device='{mask.device}')"
    blocks = torch.ones(2, 1, 41, 121, dtype=torch.bool, device=DEVICE).tril(64)
    lines = str(BlockMask.from_blocks(blocks, 41 * 64, 121 * 64, 64)).splitlines()[1:-1]
    assert len(lines) == 14 and {len(line) for line in lines} == {41}  # of 3 x 3 units
    assert lines[0] == "█" * 21 + "░" * 2 + "·" * 18


@pytest.mark.slow
def test_compiled(monkeypatch):
    """Each pass is one graph. The second mask of a kind has other sizes, and no new graph."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(block_mask, "_compiled", lambda function: torch.compile(function, backend=backend,
                                                                                fullgraph=True, dynamic=True))
    for size, lengths in ((2, tensor([40, 90])), (3, tensor([9, 120, 200]))):
        arguments = (lambda b, h, q, k: (q >= k) & (k < lengths[b]), size, 2, 100 * size, 150 * size, DEVICE)
        check_same(create_block_mask(*arguments, compile=True), create_block_mask(*arguments))
        assert len(graphs) == 2


def test_compiler_that_fails(monkeypatch):
    """One warning, and the mask without it."""
    monkeypatch.setattr(block_mask, "_can_compile", True)
    monkeypatch.setattr(block_mask, "_compiled", {}.__getitem__)
    with pytest.warns(UserWarning, match="torch.compile fails, so block masks are built without it: KeyError") as got:
        masks = [build(compile=True) for _ in range(2)]
    assert len(got) == 1 and got[0].filename == __file__
    for mask in masks:
        check_same(mask, build())


def call(mask_mod=MASKS["causal"], sizes=(B, H, SQ, SK), device=DEVICE, **options):
    return lambda: create_block_mask(mask_mod, *sizes, device, **options)


def of_blocks(blocks, *sizes):
    return lambda: BlockMask.from_blocks(blocks, *sizes)


def of_torch(**changes):
    theirs = flex_attention.create_block_mask(MASKS["causal"], 1, 1, 128, 128, DEVICE)
    for name, x in changes.items():
        setattr(theirs, name, x)
    return lambda: BlockMask.from_torch(theirs)


ONES = torch.ones(1, 1, 3, 4, dtype=torch.bool, device=DEVICE)


@pytest.mark.parametrize("wrong, error, text", [
    (call(sizes=(B, H, 0, SK)), ValueError, "Q_LEN must be at least 1, got 0"),
    (call(sizes=(B, H, SQ, 4.0)), TypeError, "KV_LEN must be an int, got 4.0"),
    (call(sizes=(0, H, SQ, SK)), ValueError, "B must be at least 1, got 0"),
    (call(num_bits=-1), ValueError, "num_bits must be at least 0, got -1"),
    (call(device="meta"), ValueError, "must be a CPU or a GPU, got 'meta'"),
    (call("causal"), TypeError, "mask_mod must be a function of b, h, q_idx and kv_idx, got 'causal'"),
    (call(lambda b, h, q, k: q >= 0 if q > k else k > 0), TypeError, "(?s)mask_mod must .* no `if` on .* control flow"),
    (call(lambda b, h, q, k: True), TypeError, "mask_mod must return a tensor.* got type <class 'bool'>"),
    (call(lambda b, h, q, k: q - k), TypeError, "mask_mod must return a tensor of bool, got torch.int64"),
    (call(lambda b, h, q, k: (q > k).expand(2, 3)), ValueError, r"mask_mod must .* got a .* of shape \(2, 3\)"),
    (lambda: dataclasses.replace(build(), units=ONES.int()), ValueError,
     r"units must be int32 of shape .*\(Bm, Hm, 6, 7\).*, got a torch.int32 tensor of shape \(1, 1, 3, 4\)"),
    (lambda: dataclasses.replace(build(), bits=ONES.int()), ValueError, r"bits must be int32 of shape \(P, 2, 128\)"),
    (lambda: BlockMask.from_dense(ONES.int()), TypeError, "mask must be bool of .* got a torch.int32"),
    (lambda: BlockMask.from_dense(ONES[0, 0, 0]), ValueError, r"mask must be .*\(B, H, Sq, Sk\).* got .*\(4,\)"),
    (lambda: BlockMask.from_dense(ONES[:, :0]), ValueError, r"mask must be .* with elements, .*\(1, 0, 3, 4\)"),
    (of_blocks(ONES.float(), 192, 256, 64), TypeError, "blocks must be bool of .* got a torch.float32"),
    (of_blocks(ONES[0], 192, 256, 64), ValueError, r"blocks must be bool of shape \(B or 1, H or 1, rows, columns\)"),
    (of_blocks(ONES, 193, 256, 64), ValueError, r"blocks must be .* H or 1, 4, 4\), got .*\(1, 1, 3, 4\)"),
    (of_blocks(ONES, 192, 256, 96), ValueError, "BLOCK_SIZE must be a multiple of 64, or a pair of them, got 96"),
    (lambda: BlockMask.from_torch(build()), TypeError, "block_mask must .* of torch alone, got <class 'minimal_attn"),
    (of_torch(BLOCK_SIZE=(128, 32)), ValueError, r"BLOCK_SIZE must be .*, got \(128, 32\)"),
    (of_torch(seq_lengths=(300, 128)), ValueError, "the lists of block_mask must be of .*, 3, 1"),
])
def test_errors(wrong, error, text):
    with pytest.raises(error, match=text):
        wrong()


# Attention with them.

MASKED = list(IMPLS)
# In its interpreter, Triton needs half a minute for such masks. .ci/run leaves to it what no other backend can show.
each_impl, each_kernel = (pytest.mark.parametrize("impl", [
    pytest.param(impl, marks=slow_unless(HAS_GPU or impl != "triton", impls is KERNELS)) for impl in impls])
    for impls in (MASKED, KERNELS))
ANY = (None, None)  # samples and heads of a mask that depends on neither
# The name of a mask, its samples and heads, and what changes in the batch.
CASES = {
    "causal": ("documents", ANY, dict(causal=True)),
    "window": ("per_head_window", (None, H), dict(window=(120, 40), sm_scale=-0.3, layout="bshd")),
    "lengths": ("prefix_lm_per_sample", (B, None), dict(seqused_q=(333, 70), seqused_k=(401, 129), layout="slice")),
    "sinks": ("block_diffusion", ANY, dict(has_sinks=True, head_dim_v=16)),
    "rows_without_keys": ("lengths", (B, None), dict(has_sinks=True, causal=True, head_dim_v=64, D=64)),
    "softcap": ("longformer", ANY, dict(softcap=2.0)),
    "alibi": ("draft_tree", ANY, dict(slopes="samples", D=32)),
    "bias": ("random", (B, H), dict(bias=(0, 1, 0, 1))),
    "bool_bias": ("random_blocks", (None, H), dict(bias=(1, 0, 0, 1), bias_dtype="bool")),
    "dropout": ("neighbourhood", ANY, dict(dropout_p=0.3, seqused_k=(401, 260))),
    "chunks_max": ("random", (B, H), dict(chunk=100, has_max=True)),
    "all": ("random", (B, H), dict(softcap=2.0, slopes="heads", bias=(1, 1, 1, 1), causal=True, window=(300, -1),
                                   dropout_p=0.3, has_sinks=True, seqused_k=(401, 129), has_max=True)),
}
NOT_OF_SM90 = "softcap", "alibi", "bias", "bool_bias", "dropout", "chunks_max", "all"


def qkv(impl, samples=B, **options):
    device, dtype = IMPLS[impl][1], DTYPES[impl]
    return [randn(samples, heads, n, 16, seed=n + heads, device=device, dtype=dtype, **options).requires_grad_()
            for heads, n in ((H, SQ), (1, SK), (1, SK))]


def check_masked(impl, name, sizes=(B, H), changes=(), **options):
    batch = Scored(name, **dict(rows=(SQ,) * B, keys=(SK,) * B, H=H, Hk=1, D=8, is_packed=False) | dict(changes))
    device = IMPLS[impl][1]
    mask = create_block_mask(MASKS[name], *sizes, SQ, SK, DEVICE).to(device)
    check_batch(impl, batch, DTYPES[impl], seen=dense(MASKS[name]).to(device), block_mask=mask, **options)


@pytest.mark.parametrize("D", [64, 128, 256] if HAS_GPU else [8])
@pytest.mark.parametrize("impl, name", [
    pytest.param(impl, name, marks=slow_unless(HAS_GPU or name == "random", impl != "triton"))
    for impl in MASKED for name in MASKS])
def test_attention(impl, name, D, poisoned_outputs):
    check_masked(impl, name, changes=dict(D=D))


@pytest.mark.parametrize("impl, case", [
    pytest.param(impl, case, marks=slow_unless(HAS_GPU or impl == "cuda:host" and case in ("window", "all"),
                                               impl != "triton" or case == "window"))
    for impl in MASKED for case in CASES if impl != "cuda:sm90" or case not in NOT_OF_SM90])
def test_attention_with_other_options(impl, case, poisoned_outputs):
    check_masked(impl, *CASES[case], deterministic=True)


@pytest.mark.parametrize("impl", [pytest.param("triton", marks=slow_unless(HAS_GPU))])
def test_tiles_of_several_units(impl):
    """Empty tiles are not read: NaN there changes no bit, and gradients there are 0."""
    backend, device = IMPLS[impl]
    rows, keys = slice(128, 256), slice(0, 128)
    states = draw(4, 6, 7).repeat_interleave(64, 0).repeat_interleave(64, 1)[:SQ, :SK]
    sees = (states == 3) | (states == 2) & RANDOM[0, 0]
    sees[rows], sees[:, keys] = False, False
    mask, results = BlockMask.from_dense(sees).to(device), []
    for junk, attend in ((0, reference_attention), (0, flash_attention), (math.nan, flash_attention)):
        q, k, v, dout = (randn(B, heads, n, 64, seed=n + heads, device=device, dtype=torch.float16)
                         for heads, n in ((H, SQ), (1, SK), (1, SK), (H, SQ)))
        q[:, :, rows], dout[:, :, rows], k[:, :, keys], v[:, :, keys] = [junk] * 4
        options = dict(backend=backend, deterministic=True) if attend is flash_attention else {}
        leaves = [(x if options else x.double()).requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, block_mask=mask, **options)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))))
    for want, got, with_nan in zip(*results):
        close(got, want, TOLERANCE[torch.float16])
        assert got.equal(with_nan)
    assert all((x[:, :, part] == 0).all() for x, part in zip(results[2], (rows, rows, keys, keys)))


@each_impl
def test_3d_input(impl):
    backend, device = IMPLS[impl]
    q = qkv(impl)[0].detach()
    mask = build("random").to(device)
    flat = BlockMask.from_dense(mask.to_dense().view(B * H, 1, SQ, SK))
    k, v = (randn(B, H, SK, 16, seed=seed, device=device, dtype=q.dtype) for seed in (1, 2))
    want = flash_attention(q, k, v, block_mask=mask, backend=backend)
    got = flash_attention(*(x.flatten(0, 1) for x in (q, k, v)), block_mask=flat, backend=backend)
    close(got, want.flatten(0, 1).double(), TOLERANCE[q.dtype])


@each_impl
def test_no_samples(impl):
    q, k, v = qkv(impl, samples=0)
    mask = create_block_mask(MASKS["per_head_window"], None, H, SQ, SK, DEVICE).to(q.device)
    out = flash_attention(q, k, v, block_mask=mask, backend=IMPLS[impl][0])
    assert out.shape == q.shape and torch.autograd.grad(out.sum(), q)[0].shape == q.shape


@pytest.mark.parametrize("impl, is_captured", [
    pytest.param(impl, is_captured, marks=slow_unless(impl == "cuda:host" and not is_captured,
                                                      HAS_GPU or impl != "triton"))
    for impl in MASKED for is_captured in (False, True)])
def test_compile_fullgraph(impl, is_captured):
    backend, device = IMPLS[impl]
    leaves, mask = qkv(impl), build("documents").to(device)

    def attend(q, k, v, given=None):
        out, lse = flash_attention(2 * q, k, v, block_mask=mask if is_captured else given, return_lse=True,
                                   backend=backend)
        return out + 1, lse

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=compiler_for(impl))
    for mask in (mask,) if is_captured else (mask, build("per_head_window").to(device)):
        got, want = (call(*leaves, *[mask] * (not is_captured)) for call in (compiled, attend))
        gradients = [torch.autograd.grad(x[0].sum(), leaves) for x in (got, want)]
        for x, y in zip((*got, *gradients[0]), (*want, *gradients[1])):
            close(x, y.double(), TOLERANCE[DTYPES[impl]])


@pytest.mark.parametrize("impl", [
    pytest.param(impl, marks=slow_unless(HAS_GPU or impl != "triton", False)) for impl in KERNELS])
def test_opcheck(impl):
    q, k, v = (x.detach() for x in qkv(impl))
    mask = build("random").to(q.device)
    options = with_tensors(Options.of(0.2, mask_units=mask), q, k).of_op()
    forward, backward = op_of(impl)
    torch.library.opcheck(forward.default, (q, k, v, *options))
    out, lse, _ = forward(q, k, v, *options)
    torch.library.opcheck(backward.default, (torch.ones_like(out), None, q, k, v, out, lse, *options, impl != "triton"))


@each_kernel
def test_op_clamps_numbers(impl):
    """Numbers of bits that are out of range read nothing outside. The facade refuses them, but on the CPU alone."""
    q, k, v = (x.detach() for x in qkv(impl))
    mask = build("random").to(q.device)
    forward, _ = op_of(impl)
    last, units = len(mask.bits) - 1, mask.units
    results = []
    for low, high in ((-2**31, 2**31 - 1), (-2, last)):
        changed = torch.where(units % 3 == 0, low, torch.where(units % 3 == 1, high, units))
        mask = dataclasses.replace(mask, units=changed)
        given = Options.of(0.2)._replace(**dict(zip(Options._fields[BLOCK_MASK], mask._tensors.values())))
        results.append(forward(q, k, v, *given.of_op())[0])
    assert results[0].equal(results[1]) and results[0].abs().max() > 0


@each_impl
def test_mask_of_torch(impl):
    """It is converted once."""
    q, k, v = qkv(impl)
    calls = []

    def mask_mod(b, h, q, k):
        calls.append(b)
        return (q >= k) & (q - k < 130)

    theirs = flex_attention.create_block_mask(mask_mod, None, None, SQ, SK, q.device)
    attend = lambda mask: flash_attention(q, k, v, block_mask=mask, backend=IMPLS[impl][0])  # noqa: E731
    before, out = len(calls), attend(theirs)
    after = len(calls)
    assert after > before and attend(theirs).equal(out) and len(calls) == after
    assert out.equal(attend(build("causal_window").to(q.device)))


def test_compiled_functions_tell_masks_of_torch_apart():
    q, k, v = qkv("torch")
    attend = lambda mask: flash_attention(q, k, v, block_mask=mask, backend="torch")  # noqa: E731
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for name in ("causal", "causal_window"):
        mask = flex_attention.create_block_mask(MASKS[name], None, None, SQ, SK, q.device)
        assert attend(mask).equal(compiled(mask))


@each_impl
def test_copy_between_calls(impl):
    """On a GPU, between replays of a CUDA graph."""
    backend, device = IMPLS[impl]
    q, k, v = (x.detach() for x in qkv(impl))
    masks = [build(name).to(device) for name in ("window", "documents", "nothing")]
    target = build("causal", num_bits=max(len(mask.bits) for mask in masks + [build("causal")])).to(device)
    call = lambda mask=target: flash_attention(q, k, v, block_mask=mask, backend=backend)  # noqa: E731
    graph, out = captured(call) if device == "cuda" else (None, None)
    for mask in masks:
        target.copy_(mask)
        if graph is None:
            out = call()
        else:
            graph.replay()
        assert_close(out, call(mask))


MASK = create_block_mask(MASKS["causal"], None, None, 70, 90, "cpu")


@pytest.mark.parametrize("wrong, error, text", [
    (create_block_mask(MASKS["causal"], None, None, 70, 91, "cpu"), ValueError,
     r"block_mask must .* broadcasts to \(2, 4, 70, 90\), \(batch size, .* got BlockMask\(shape=\(1, 1, 70, 91\)"),
    (create_block_mask(MASKS["causal"], 3, None, 70, 90, "cpu"), ValueError, r"got BlockMask\(shape=\(3, 1, 70, 90\)"),
    (MASK.to("meta"), ValueError, "block_mask must be on cpu, as q is, got .* device='meta'"),
    (torch.ones(70, 90, dtype=torch.bool), TypeError, "block_mask must be a BlockMask of .*, got .*torch.Tensor"),
    (dataclasses.replace(MASK, units=MASK.units - 1), ValueError,
     "each unit of block_mask must be in -2..1, got -3"),
    (dataclasses.replace(MASK, units=MASK.units + 2), ValueError, "must be in -2..1, got 3"),
])
def test_bad_masks(wrong, error, text):
    q = torch.randn(2, 4, 70, 8)
    k = torch.randn(2, 2, 90, 8)
    for call in (flash_attention, reference_attention):
        with pytest.raises(error, match=text):
            call(q, k, k, block_mask=wrong)


def test_packed_batches_have_no_mask():
    q, bounds = torch.randn(1, 2, 70, 8), torch.tensor([0, 30, 70], dtype=torch.int32)
    for call in (flash_attention, reference_attention):
        with pytest.raises(ValueError, match="block_mask cannot be given with cu_seqlens"):
            call(q, q, q, cu_seqlens_q=bounds, cu_seqlens_k=bounds, block_mask=MASK)
