"""benchmarks/models.py in its tiny size: its rows, what it calls wrong, and what it counts as attention."""

import itertools
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import models  # noqa: E402
from minimal_attn._build import source_digest  # noqa: E402
from minimal_attn.bench.measure import WrongResult  # noqa: E402
from minimal_attn.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.cpu

COLUMNS = ["op", "impl", "pass", "seqlen", "dtype", "ms", "attention_ms", "max_err"]
META = {"device", "driver", "torch", "triton", "cuda", "date", "source_digest", "command", "rounds", "model"}


@pytest.fixture(autouse=True)
def registers(monkeypatch):
    """Undoes all registrations with transformers after the test."""
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))


@pytest.mark.slow
def test_models_writes_rows(tmp_path, capsys):
    file = tmp_path / "x.json"
    argv = ["--device", "cpu", "--seqlens", "64", "--rounds", "1", "--json", str(file)]
    assert models.main(argv) is None
    content = json.loads(file.read_text(), parse_constant=lambda x: pytest.fail(f"{x} is not JSON"))
    meta, rows = content["meta"], content["rows"]
    assert set(content) == {"meta", "rows"} and set(meta) == META and meta["model"] == models.MODEL["cpu"]
    assert meta["rounds"] == 1 and meta["source_digest"] == source_digest()
    assert "python benchmarks/models.py" in meta["command"] and str(tmp_path) not in meta["command"]
    assert [(row["seqlen"], row["pass"], row["impl"]) for row in rows] == list(
        itertools.product([64], models.PASSES, ["sdpa", "minimal_attn"]))
    for row in rows:
        assert list(row) == COLUMNS and (row["op"], row["dtype"]) == ("models", "bfloat16")
        assert row["ms"] > 0 and row["attention_ms"] > 0 and row["max_err"] > 0
    out = capsys.readouterr().out
    assert out.count(" times as fast as sdpa\n") == 4 and out.endswith(f"wrote {file}\n")


@pytest.fixture(scope="module")
def model():
    return models.make_model("cpu")


@pytest.mark.parametrize("wrong, message", [
    ("nothing", None), ("logits", "wrong: the error of forward is .*, allowed is "),
    ("gradients", "wrong: the error of step is .*, allowed is "), ("NaN", "the error of forward is nan")])
def test_models_check_refuses_wrong_results(model, wrong, message):
    """An attention that is ours but for one fault."""
    def attend(module, query, key, value, *args, **options):
        out, _ = integration.attend(module, query, key, value, *args, **options)
        faulty = {"logits": lambda: 1.25 * out, "NaN": lambda: out * torch.nan,
                  "gradients": lambda: 2 * out - out.detach()}  # twice as large
        return faulty.get(wrong, lambda: out)(), None

    transformers.AttentionMaskInterface.register("wrong", integration.make_mask)
    transformers.AttentionInterface.register("wrong", attend)
    impls = {"wrong": ("wrong", models.nullcontext)}
    if message is None:
        errors = models.check(model, impls)
        assert errors["wrong"].keys() == {*models.PASSES} and min(errors["wrong"].values()) > 0
    else:
        with pytest.raises(WrongResult, match=message):
            models.check(model, impls)


@pytest.mark.parametrize("name, is_attention", [
    ("void sm90::flash_fwd<__nv_bfloat16, sm90::Shape<128> >(sm90::Params<sm90::Shape<128> >)", True),
    ("void pytorch_flash::flash_bwd_dot_do_o_kernel<true>(pytorch_flash::Flash_bwd_params)", True),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_128x128x128", True),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>(float*)", True),
    ("fmha_cutlassB_bf16_aligned_64x64_k128_sm80(PyTorchMemEffAttention)", True),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", False),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>(sm80::Params)", False),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::silu>(int)", False)])
def test_models_names_of_attention_kernels(name, is_attention):
    assert bool(models.KERNELS.match(name)) == is_attention


def test_models_counts_an_op_of_attention_once(monkeypatch):
    """And two of them that overlap, as long as either runs."""
    op, inner = "aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"
    spans = (inner, 1000, 3000), (op, 0, 4000), ("aten::mm", 4000, 9000), (op, 9000, 10000), (inner, 9500, 10500)
    events = [SimpleNamespace(name=name, device_type=DeviceType.CPU, time_range=SimpleNamespace(start=start, end=end))
              for name, start, end in spans]
    monkeypatch.setattr(models, "profile", lambda **_: nullcontext(SimpleNamespace(events=lambda: events)))
    assert models.attention_ms(print, "cpu") == 5.5


def test_models_no_attention_in_the_profile_is_an_error():
    with pytest.raises(RuntimeError, match="saw no attention"):
        models.attention_ms(lambda: torch.ones(2).exp(), "cpu")
