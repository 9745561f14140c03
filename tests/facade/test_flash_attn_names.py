"""flash-attn's names: flash_attn_interface, bert_padding, and `import flash_attn` after install_as_flash_attn.

What changes the imports of a process is tested in processes of its own, or undone by a fixture.
"""

import importlib
import importlib.metadata
import importlib.util
import sys

import pytest
import torch

import minimal_attn
from cases import in_a_new_process
from minimal_attn.flash_attn import bert_padding, flash_attn_interface, install as as_flash_attn
from test_transformers import check_llama, padding_mask

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
cpu = pytest.mark.cpu


@pytest.fixture
def installed():
    minimal_attn.install_as_flash_attn()
    yield
    minimal_attn.uninstall_as_flash_attn()
    assert "flash_attn" not in sys.modules and importlib.util.find_spec("flash_attn") is None


# The names.

@cpu
def test_interface_has_the_functions_of_minimal_attn():
    for name in flash_attn_interface.__all__:
        if name != "flash_attn_with_kvcache":  # whose order of arguments is that of flash-attn 2
            assert getattr(flash_attn_interface, name) is getattr(minimal_attn, name)
    assert {name for name in minimal_attn.__all__ if name.startswith("flash_attn_")} < set(flash_attn_interface.__all__)


@cpu
def test_with_kvcache_takes_the_arguments_of_flash_attn_2():
    """Each of them by its position, so that none goes to another one's place."""
    generator = torch.Generator().manual_seed(0)
    q, slopes = torch.randn(2, 1, 2, 8, generator=generator), torch.tensor([0.5, 0.25])
    pages = torch.randn(4, 5, 2, 8, generator=generator)
    seqlens, pads, table = (torch.tensor(x, dtype=torch.int32) for x in ([9, 7], [2, 0], [[3, 1], [0, 2]]))
    got = flash_attn_interface.flash_attn_with_kvcache(q, pages, pages, None, None, None, None, seqlens, None, pads,
                                                       table, 0.7, True, (4, 0), 1.5, False, slopes, 3, True)
    heads_first = pages.transpose(1, 2)
    want = minimal_attn.attention_with_kvcache(
        q.transpose(1, 2), heads_first, heads_first, seqlens, leftpad_k=pads, page_table=table, sm_scale=0.7,
        causal=True, window_size=(4, 0), softcap=1.5, alibi_slopes=slopes, num_splits=3, return_lse=True)
    assert got[0].equal(want[0].transpose(1, 2)) and got[1].equal(want[1])
    with pytest.raises(ValueError, match="^block_table must be int32 .*2, max_pages"):
        flash_attn_interface.flash_attn_with_kvcache(q, pages, pages, block_table=table[:1])


@cpu
def test_bert_padding():
    x = torch.randn(3, 11, 2, 4, dtype=torch.float64, requires_grad=True)
    mask = padding_mask("left", "cpu")
    packed, indices, cu_seqlens, longest, seqused = bert_padding.unpad_input(x, mask)
    assert packed.equal(x[mask.bool()]) and (cu_seqlens.tolist(), longest) == ([0, 11, 15, 22], 11)
    assert seqused.tolist() == [11, 4, 7]
    assert bert_padding.index_first_axis(x.flatten(0, 1), indices).equal(packed)
    padded = bert_padding.index_put_first_axis(packed, indices, 33).unflatten(0, (3, 11))
    assert padded.equal(bert_padding.pad_input(packed, indices, 3, 11)) and padded.equal(x * mask[..., None, None])
    gradient, = torch.autograd.grad(padded.sum(), x)
    assert gradient.equal(mask[..., None, None].expand_as(x).double())


@cpu
def test_unpad_input_with_an_unused_mask():
    x, used = torch.arange(8.0).reshape(2, 4), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 1]])
    packed, indices, cu_seqlens, longest, seqused = bert_padding.unpad_input(x, used, unused)
    assert packed.tolist() == indices.tolist() == [0, 1, 2, 4, 7]
    assert (cu_seqlens.tolist(), longest, seqused.tolist()) == ([0, 3, 5], 3, [2, 1])
    with pytest.raises(ValueError, match="unused_mask must be .* of shape"):
        bert_padding.unpad_input(x, used, unused[:1])


# install_as_flash_attn.

@cpu
def test_import_flash_attn(installed):
    import flash_attn
    from flash_attn import flash_attn_func, flash_attn_with_kvcache
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    assert flash_attn_func is minimal_attn.flash_attn_func and pad_input is minimal_attn.pad_input
    assert flash_attn_varlen_func is minimal_attn.flash_attn_varlen_func
    assert (unpad_input, index_first_axis) == (bert_padding.unpad_input, bert_padding.index_first_axis)
    assert flash_attn_with_kvcache is flash_attn_interface.flash_attn_with_kvcache
    assert flash_attn.__version__ == as_flash_attn.VERSION and "flash_attn_func" in flash_attn.__all__
    assert flash_attn.bert_padding.pad_input is pad_input
    for name in ("flash_attn.cute", "flash_attn.layers", "flash_attn.no_such_module"):
        assert importlib.util.find_spec(name) is None
    with pytest.raises(ModuleNotFoundError):
        import flash_attn.layers.rotary  # noqa: F401
    with pytest.raises(ImportError):
        from flash_attn.flash_attn_interface import _no_such_function  # noqa: F401


@cpu
@pytest.mark.parametrize("name", flash_attn_interface.PRIVATE)
def test_private_functions_can_be_imported_but_not_called(name, installed):
    """diffusers imports two of them where it finds flash-attn."""
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward, _wrapped_flash_attn_forward  # noqa: F401
    function = getattr(importlib.import_module("flash_attn.flash_attn_interface"), name)
    with pytest.raises(NotImplementedError, match=f"^{name} is a private function"):
        function(torch.zeros(1), causal=True)


@cpu
def test_metadata(installed):
    for name in ("flash_attn", "flash-attn", "Flash.Attn"):
        assert importlib.metadata.version(name) == as_flash_attn.VERSION
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    found = importlib.metadata.distribution("flash-attn")
    assert found.metadata["Name"] == "flash-attn" and not found.files and not found.requires
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn-3")


@cpu
def test_install_twice_and_undo():
    minimal_attn.uninstall_as_flash_attn()  # nothing to undo
    before = list(sys.meta_path)
    for _ in range(2):
        minimal_attn.install_as_flash_attn()
        assert sys.meta_path == [*before, as_flash_attn._FINDER]
    from flash_attn import flash_attn_func
    minimal_attn.uninstall_as_flash_attn()
    assert sys.meta_path == before and not any(name.startswith("flash_attn") for name in sys.modules)
    with pytest.raises(ModuleNotFoundError):
        import flash_attn  # noqa: F401
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
    assert flash_attn_func is minimal_attn.flash_attn_func
    minimal_attn.install_as_flash_attn()
    assert importlib.import_module("flash_attn").flash_attn_func is flash_attn_func
    minimal_attn.uninstall_as_flash_attn()
    assert sys.meta_path == before


@cpu
def test_another_flash_attn_is_left_alone(tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = 'another'")
    said = in_a_new_process("""
import minimal_attn
try:
    minimal_attn.install_as_flash_attn()
except RuntimeError as error:
    print(error)
minimal_attn.uninstall_as_flash_attn()
import flash_attn
print(flash_attn.__version__)
""", PYTHONPATH=str(tmp_path)).stdout
    assert said.startswith(f"flash_attn is found at {tmp_path}/flash_attn/__init__.py; install_as_flash_attn does not")
    assert said.endswith("another\n")


# transformers, which asks for the package, its version and its distribution.

@pytest.fixture
def availability(monkeypatch):
    """transformers' questions, on a machine that seems to have a GPU, and what it has loaded afterwards."""
    pytest.importorskip("transformers")
    from transformers import modeling_flash_attention_utils as utils
    from transformers.utils import import_utils

    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    yield import_utils
    monkeypatch.undo()
    as_flash_attn._forget_what_transformers_saw()


def test_transformers_finds_it_also_if_imported_before(availability):
    assert not availability.is_flash_attn_2_available()
    minimal_attn.install_as_flash_attn()
    assert availability.is_flash_attn_2_available() and availability.is_flash_attn_greater_or_equal("2.3.3")
    assert not availability.is_flash_attn_3_available() and not availability.is_flash_attn_4_available()
    minimal_attn.uninstall_as_flash_attn()
    assert not availability.is_flash_attn_2_available()


@cpu
def test_transformers_that_lists_packages_when_it_is_imported(monkeypatch):
    """transformers 5.17 does so."""
    import_utils = pytest.importorskip("transformers.utils.import_utils")
    packages = {"torch": ["torch"]}
    monkeypatch.setattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING", packages, raising=False)
    minimal_attn.install_as_flash_attn()
    assert "flash-attn" in [name.replace("_", "-") for name in packages["flash_attn"]]
    minimal_attn.uninstall_as_flash_attn()
    assert "torch" in packages and "flash_attn" not in packages


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_model_with_flash_attention_2(side, availability, installed):
    """A model that asks for flash-attn by its name."""
    check_llama("flash_attention_2", side)
