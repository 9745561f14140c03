"""integrations/kernels.py: the folder that it writes, loaded by the package `kernels` and through transformers."""

import inspect
import json
import re

import pytest

import minimal_attn
from minimal_attn.integrations import kernels as integration
from test_transformers import check_llama, loaded_kernel

cpu = pytest.mark.cpu


@cpu
def test_layout(tmp_path):
    """A build for each device, with metadata as the loader reads it. A second call writes the same."""
    for _ in range(2):
        assert integration.write(tmp_path) == f"minimal-attn/minimal-flash-attn3={tmp_path}"
        assert sorted(x.name for x in (tmp_path / "build").iterdir()) == ["torch-cpu", "torch-cuda"]
    ids = set()
    for device in ("cpu", "cuda"):
        build = tmp_path / "build" / f"torch-{device}"
        assert sorted(x.name for x in build.iterdir()) == ["__init__.py", "metadata.json"]
        metadata = json.loads((build / "metadata.json").read_text())
        assert metadata["backend"] == {"type": device} and metadata["python-depends"] == []
        assert metadata["version"] == 1  # transformers asks for it
        ids.add(metadata["id"])
    assert len(ids) == 2 and all(x.isidentifier() for x in ids)


@cpu
def test_functions(tmp_path):
    """transformers reads their signatures, and takes the kernel for one with paged caches."""
    kernel = loaded_kernel(tmp_path)
    assert all(getattr(kernel, name) is getattr(minimal_attn, name) for name in kernel.__all__)
    names = inspect.signature(kernel.flash_attn_varlen_func).parameters
    assert {"dropout_p", "window_size", "deterministic", "softcap", "s_aux", "max_seqlen_q"} <= set(names)
    names = inspect.signature(kernel.flash_attn_with_kvcache).parameters
    assert {"block_table", "cache_seqlens", "window_size", "softcap", "s_aux", "max_seqlen_q"} <= set(names)
    assert re.match(".*flash.*3", integration.NAME)


@cpu
def test_command(tmp_path, capsys):
    integration.main([str(tmp_path / "kernel")])
    assert capsys.readouterr().out == f"export LOCAL_KERNELS={integration.NAME}={tmp_path / 'kernel'}\n"
    with pytest.raises(ValueError, match="folder must not have a colon"):
        integration.write(tmp_path / "a:b")


@pytest.fixture
def local_kernel(tmp_path, monkeypatch):
    """The kernel in a folder, as the one place where the package looks."""
    pytest.importorskip("transformers")
    package = pytest.importorskip("kernels", reason="the package `kernels` is not installed")
    monkeypatch.setenv("LOCAL_KERNELS", integration.write(tmp_path))
    package.load._parse_local_kernel_overrides.cache_clear()
    yield package
    package.load._parse_local_kernel_overrides.cache_clear()


def test_kernels_loads_it(local_kernel):
    kernel = local_kernel.get_kernel(integration.NAME, version=1)
    assert kernel.flash_attn_func is minimal_attn.flash_attn_func


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_model_from_a_local_kernel(side, local_kernel, monkeypatch):
    """A model that asks for the kernel by its name. Nothing is downloaded."""
    from transformers import modeling_flash_attention_utils as utils
    from transformers.integrations import hub_kernels

    if not hub_kernels.is_kernels_available():  # transformers wants another version of the package
        monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
        monkeypatch.setattr(hub_kernels, "get_kernel_hub", local_kernel.get_kernel, raising=False)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    check_llama(integration.NAME, side)
    assert utils._flash_varlen_fn is minimal_attn.flash_attn_varlen_func
