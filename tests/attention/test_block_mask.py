"""Block masks: masks that people share, against what their functions give for all rows and keys at once; the layout bit
by bit, against a plain loop; torch's BlockMask; copies and errors."""

import copy
import pickle

import pytest
import torch
from torch.nn.attention import flex_attention

from conftest import HAS_GPU
from minimal_attn import block_mask
from minimal_attn.block_mask import BlockMask, create_block_mask

DEVICE = "cuda" if HAS_GPU else "cpu"
B, H, SQ, SK = 2, 3, 333, 401
TENSORS = "units", "row_words", "key_words", "bits"


def tensor(values):
    return torch.tensor(values, device=DEVICE)


def draw(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


POSITIONS = torch.arange(SK, device=DEVICE)
DOCUMENTS = (POSITIONS[:, None] >= tensor([50, 51, 128, 300])).sum(1)
DOCUMENT_STARTS = tensor([0, 50, 51, 128, 300])[DOCUMENTS]
IMAGES = torch.where((POSITIONS % 130 > 40) & (POSITIONS % 130 < 120), POSITIONS // 130, -1)  # -1: text
PAGE_TABLE = draw(2**20, 51).argsort()  # of pages of 8 keys
PLACES = PAGE_TABLE.argsort()[POSITIONS // 8] * 8 + POSITIONS % 8  # in its sequence, of each key in the pages
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 5]  # of a draft's tokens, after which the cached keys end
TREE = torch.eye(len(PARENTS), dtype=torch.bool)
for token, parent in enumerate(PARENTS[1:], 1):
    TREE[token] |= TREE[parent]
TREE = TREE.to(DEVICE)
CACHED = SK - len(PARENTS)
PREFIXES, LENGTHS_Q, LENGTHS_K, WINDOWS = tensor([70, 128]), tensor([333, 64]), tensor([129, 390]), tensor([1, 65, 999])
SLOPES, CHOSEN, BLOCKS = tensor([0.5, 0.125, 0.02]), draw(2, H, 6, 7) > 0, draw(3, 11, 13) == 0
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
    "bottom_right_causal": lambda b, h, q, k: q + SK - SQ >= k,
    "anti_causal": lambda b, h, q, k: q <= k,
    "diagonal": lambda b, h, q, k: q == k,
    "window": lambda b, h, q, k: distance(q, k) <= 70,
    "causal_window": lambda b, h, q, k: (q >= k) & (q - k < 130),
    "sink_and_window": lambda b, h, q, k: (q >= k) & ((q - k < 100) | (k < 4)),
    "per_head_window": lambda b, h, q, k: distance(q, k) < WINDOWS[h],
    "dilated": lambda b, h, q, k: (q >= k) & (q - k < 200) & ((q - k) % 3 == 0),
    "strided": lambda b, h, q, k: (q >= k) & ((q - k < 32) | ((q - k) % 32 == 0)),
    "fixed": lambda b, h, q, k: (q >= k) & ((q // 32 == k // 32) | (k % 32 >= 28)),
    "chunks": lambda b, h, q, k: (q >= k) & (q // 96 == k // 96),
    "prefix_lm": lambda b, h, q, k: (q >= k) | (k < 100),
    "prefix_lm_per_sample": lambda b, h, q, k: (q >= k) | (k < PREFIXES[b]),
    "documents": lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k],
    "causal_documents": lambda b, h, q, k: (q >= k) & (DOCUMENTS[q] == DOCUMENTS[k]),
    "documents_with_prefixes": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (
        (q >= k) | (k - DOCUMENT_STARTS[k] < 20)),
    "transfusion": lambda b, h, q, k: (q >= k) | (IMAGES[q] >= 0) & (IMAGES[q] == IMAGES[k]),
    "global_tokens": lambda b, h, q, k: (q < 5) | (k < 5),
    "longformer": lambda b, h, q, k: (distance(q, k) < 64) | (q < 5) | (k < 5),
    "bigbird": lambda b, h, q, k: (distance(q // 32, k // 32) < 2) | (q < 32) | (k < 32) | BLOCKS[q // 32, k // 32],
    "random_blocks": lambda b, h, q, k: CHOSEN[h, q // 64, k // 64],
    "random": lambda b, h, q, k: RANDOM[b, h, q, k],
    "lengths": lambda b, h, q, k: (q < LENGTHS_Q[b]) & (k < LENGTHS_K[b]),
    "left_padding": lambda b, h, q, k: (q >= k) & (k >= PREFIXES[b]),
    "alibi_cutoff": lambda b, h, q, k: SLOPES[h] * distance(q, k) < 8,
    "pages": lambda b, h, q, k: q >= PLACES[k],
    "draft_tree": lambda b, h, q, k: (k < CACHED) | TREE[q % len(PARENTS), (k - CACHED).clamp(min=0)],
    "frames": lambda b, h, q, k: q // 48 >= k // 48,
    "neighbourhood": lambda b, h, q, k: in_neighbourhood(q // WIDTH, k // WIDTH, HEIGHT, 3)
    & in_neighbourhood(q % WIDTH, k % WIDTH, WIDTH, 4),
    "swin": lambda b, h, q, k: (q // WIDTH // 7 == k // WIDTH // 7) & (q % WIDTH // 5 == k % WIDTH // 5),
    "shifted_swin": lambda b, h, q, k: ((q // WIDTH + 3) // 7 == (k // WIDTH + 3) // 7)
    & ((q % WIDTH + 2) // 5 == (k % WIDTH + 2) // 5),
    "sliding_tiles": lambda b, h, q, k: (distance(q // WIDTH // 4, k // WIDTH // 4) <= 1)
    & (distance(q % WIDTH // 5, k % WIDTH // 5) <= 1),
    "checkerboard": lambda b, h, q, k: (q + k) % 2 == 0,
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


def test_argument_of_compiled_function():
    def use(x, mask):
        return x + mask.units.sum() + mask.bits.shape[0] + mask.shape[2] + mask.Q_LEN

    compiled = torch.compile(use, backend="eager", fullgraph=True)
    for mask in (build(), build("window")):
        assert torch.equal(compiled(tensor(1), mask), use(tensor(1), mask))


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
    (call(sizes=(B, True, SQ, SK)), TypeError, "H must be an int, got True"),
    (call(num_bits=-1), ValueError, "num_bits must be at least 0, got -1"),
    (call(num_bits="8"), TypeError, "num_bits must be an int, got '8'"),
    (call(device="meta"), ValueError, "must be on a CPU or a GPU, got meta"),
    (call("causal"), TypeError, "mask_mod must be a function of b, h, q_idx and kv_idx, got 'causal'"),
    (call(lambda b, h, q, k: q >= 0 if q > k else k > 0), TypeError, "(?s)mask_mod must .* no `if` on .* control flow"),
    (call(lambda b, h, q, k: True), TypeError, "mask_mod must return a tensor.* got type <class 'bool'>"),
    (call(lambda b, h, q, k: q - k), TypeError, "mask_mod must return a tensor of bool, got torch.int64"),
    (call(lambda b, h, q, k: (q > k).expand(2, 3)), ValueError, r"mask_mod must .* got one of shape \(2, 3\)"),
    (lambda: BlockMask.from_dense(ONES.int()), TypeError, "mask must be a tensor of bool, got a torch.int32"),
    (lambda: BlockMask.from_dense([[True]]), TypeError, "mask must be a torch.Tensor, got list"),
    (lambda: BlockMask.from_dense(ONES[0, 0, 0]), ValueError, r"mask must have 2 or 3 or 4 dim.* of shape \(4,\)"),
    (lambda: BlockMask.from_dense(ONES[:, :0]), ValueError, r"mask must have .* none of size 0, .*\(1, 0, 3, 4\)"),
    (lambda: BlockMask.from_dense(ONES.to("meta")), ValueError, "must be on a CPU or a GPU, got meta"),
    (of_blocks(ONES.float(), 192, 256, 64), TypeError, "blocks must be a tensor of bool, got a torch.float32"),
    (of_blocks(ONES[0], 192, 256, 64), ValueError, "blocks must have 4 dimensions"),
    (of_blocks(ONES, 193, 256, 64), ValueError, r"blocks must be .* H or 1, 4, 4\), got \(1, 1, 3, 4\)"),
    (of_blocks(ONES, 192, 256, 96), ValueError, "BLOCK_SIZE must be a multiple of 64, or a pair of them, got 96"),
    (of_blocks(ONES, 192, 256, (64, 0)), ValueError, r"BLOCK_SIZE must be .*, got \(64, 0\)"),
    (of_blocks(ONES, 192, -1, 64), ValueError, "KV_LEN must be at least 1, got -1"),
    (lambda: BlockMask.from_torch(build()), TypeError, "block_mask must be a BlockMask of torch.*, got BlockMask"),
    (of_torch(BLOCK_SIZE=(128, 32)), ValueError, r"BLOCK_SIZE must be .*, got \(128, 32\)"),
    (of_torch(seq_lengths=(300, 128)), ValueError, "the lists of block_mask must be of .*, 3, 1"),
    (of_torch(mask_mod=lambda b, h, q, k: q), TypeError, "mask_mod must return a tensor of bool"),
])
def test_errors(wrong, error, text):
    with pytest.raises(error, match=text):
        wrong()
