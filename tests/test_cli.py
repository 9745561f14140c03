"""The command minimal-attn: what it says of this machine, that its check can fail, and the options of its benchmark."""

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from conftest import HAS_GPU
from minimal_attn import (__version__, _build, available_backends, choice, cli, crosscheck, info, interface,
                          reference_attention)
from test_build import python

ROOT = Path(__file__).parents[1]
DEVICE = "cuda" if HAS_GPU else "cpu"


def test_the_script_of_the_package():
    module, function = re.search('\nminimal-attn = "(.*):(.*)"\n', (ROOT / "pyproject.toml").read_text()).groups()
    assert getattr(importlib.import_module(module), function) is cli.main


def test_info(capsys, monkeypatch):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    lines = {line[:20].strip(): line[20:].strip() for line in printed.splitlines()}
    assert lines["minimal_attn:"].startswith(f"{__version__}, in ")
    assert f"torch {torch.__version__}, Triton " in lines["Versions:"]
    ready = [name for name in interface.BACKENDS if lines[name].strip() == "ready"]
    assert ready == available_backends()
    assert lines["GPU:" if not HAS_GPU else "GPU 0:"].strip() == (torch.cuda.get_device_name() if HAS_GPU else "none")
    if not HAS_GPU:
        assert lines["float32"].split() == lines["bfloat16"].split() == ["torch"] * 4
    assert "minimal_attn_C" in lines["csrc"] or "_C." in lines["csrc"]


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(_build, "why_not", lambda on_gpu=False: "no compiler today")
    choice._choose_first_available.cache_clear()
    yield
    choice._choose_first_available.cache_clear()


def test_info_says_why_a_backend_is_not_there(capsys, no_compiler):
    info.print_info()
    assert "  cuda               no compiler today\n" in capsys.readouterr().out


@pytest.mark.gpu
def test_info_names_the_kernels(capsys):
    _build.load()
    cli.main(["info"])
    lines = {line[:20].strip(): line[20:].split() for line in capsys.readouterr().out.splitlines()}
    for dtype in interface.KERNEL_DTYPES:
        qkv = [torch.empty(3, 2, 4, 128, head_dim, device="cuda", dtype=dtype) for head_dim in (64, 128, 256, 100)]
        assert lines[str(dtype).removeprefix("torch.")] == [f"cuda:{interface.which_kernel(*x)}" for x in qkv]


def test_info_as_a_module_needs_no_rich(tmp_path):
    """As a user without the extra runs it; there check and bench say which extra they lack."""
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError(\"No module named 'rich'\", name='rich')")
    run = ("import sys; from minimal_attn import cli\n"
           "codes = [cli.main([command]) for command in ('info', 'check', 'bench')]; print(codes)")
    said = python(run, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert f"{__version__}, in " in said and said.endswith("[0, 2, 2]\n")


def test_what_the_extra_is(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "minimal_attn.crosscheck")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err == ("minimal-attn check needs rich, of the extra \"bench\": pip install "
                                       "'minimal_attn[bench]'\n")


def test_another_package_that_is_missing_is_not_taken_for_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "minimal_attn.crosscheck")
    monkeypatch.setitem(sys.modules, "minimal_attn.validation", None)
    with pytest.raises(ModuleNotFoundError, match="minimal_attn.validation"):
        cli.main(["check"])


def test_check(capsys, monkeypatch):
    if not HAS_GPU:  # test_forward.py has many more
        monkeypatch.setattr(crosscheck, "CHECKS", crosscheck.CHECKS[1::2])
    assert cli.main(["check"]) == 0
    printed = capsys.readouterr().out
    backends = [name for name in interface.BACKENDS if name != "reference"
                and interface.BACKENDS[name].why_not(torch.device(DEVICE)) is None]
    count = len(crosscheck.CHECKS) * 3 * len(backends)
    assert f"{count} of {count} are right" in printed and "FAILED" not in printed
    rows = [line.split() for line in printed.splitlines() if "float" in line and "Largest" not in line]
    errors = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
    assert len(rows) == len(crosscheck.CHECKS) * 3
    for row in rows:
        dtype, cells = row[-len(backends) - 1], row[-len(backends):]
        assert all(0 < float(cell) < errors[dtype] for cell in cells)


def no_scale(q, k, v, options):
    return reference_attention(q, k, v, options.causal, 1.0, options.seq_lens, return_lse=True)


def shifted_lse(q, k, v, options):
    out, lse = reference_attention(q, k, v, options.causal, options.softmax_scale, options.seq_lens,
                                   return_lse=True)
    return out, lse + 1e-3


def all_rows_see(q, k, v, options):
    out, lse = reference_attention(q, k, v, options.causal, options.softmax_scale, options.seq_lens,
                                   return_lse=True)
    return out, lse.clamp(min=-50)


def raises(*args, **kwargs):
    raise RuntimeError("no kernel for this\nand hints")


@pytest.mark.parametrize("broken, failure", [
    (no_scale, "max error "), (shifted_lse, "lse is wrong"), (all_rows_see, "lse is wrong"),
    (raises, "RuntimeError: no kernel for this\n")])
def test_check_fails(broken, failure, capsys, monkeypatch):
    wrong = dataclasses.replace(interface.BACKENDS["torch"], forward=broken)
    backends = {"torch": interface.BACKENDS["torch"], "wrong": wrong}
    monkeypatch.setattr(interface, "BACKENDS", backends)
    monkeypatch.setattr(crosscheck, "BACKENDS", backends)
    empty_rows = crosscheck.CHECKS[-1]
    monkeypatch.setattr(crosscheck, "CHECKS", [empty_rows])
    assert cli.main(["check"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 3 and "3 of 6 are right" in printed
    assert printed.count(f"wrong, {empty_rows.name}, float16: {failure}") == 1


def test_a_backend_that_is_not_there_is_left_out(capsys, no_compiler, monkeypatch):
    monkeypatch.setattr(crosscheck, "CHECKS", crosscheck.CHECKS[:1])
    assert cli.main(["check"]) == 0
    assert "cuda is left out: no compiler today" in capsys.readouterr().out


def test_bench_gets_its_options(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "--help"])
    assert "usage: minimal-attn bench " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "--impls", "nobody"])
    assert "minimal-attn bench: error: argument --impls: 'nobody' is none of" in capsys.readouterr().err


@pytest.mark.parametrize("argv, said", [
    ([], "required: command"), (["dance"], "invalid choice: 'dance'"),
    (["info", "--fast"], "unrecognized arguments: --fast")])
def test_bad_commands(argv, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)
    assert said in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"minimal_attn {__version__}\n"
