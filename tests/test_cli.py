"""The command minimal-attn: what it says of this machine, that its check can fail, and the options of its benchmark."""

import dataclasses
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from conftest import HAS_GPU
from minimal_attn import (__version__, _build, available_backends, choice, cli, crosscheck, info, interface,
                          reference_attention)
from minimal_attn.bench import demo
from minimal_attn.bench.attention import IMPLS
from minimal_attn.progress import watched
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
    assert capsys.readouterr().err == ("minimal-attn: this needs rich, of the extra \"bench\": pip install "
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
        dtype, allowed, *cells = row[-len(backends) - 2:]
        assert all(0 < float(cell) < 2 * float(allowed) < 2 * errors[dtype] for cell in cells)


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
    (["dance"], "invalid choice: 'dance'"), (["info", "--fast"], "unrecognized arguments: --fast")])
def test_bad_commands(argv, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)
    assert said in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"minimal_attn {__version__}\n"


def test_no_command_prints_help(capsys):
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: minimal-attn ") and all(x in said for x in ("demo ", "info ", "check ", "bench "))


# How commands end: in processes of their own.

BENCH = [sys.executable, "bench.py", "--shape", "2,4,64,64", "--seqlens", ""]


def start(command, **env):
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


@pytest.mark.parametrize("command", [
    ["info"], ["check"], ["bench", "--shape", "2,4,64,64", "--seqlens", "", "--impls", "manual"]],
    ids=lambda command: command[0])
def test_a_closed_pipe_ends_a_command_without_a_word(command):
    """As in `minimal-attn bench | head -1`, whose reader is gone before anything is written."""
    process = start([sys.executable, "-m", "minimal_attn", *command], TRITON_INTERPRET="0")
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 1


def test_ctrl_c_writes_what_bench_has(tmp_path):
    files = [tmp_path / name for name in ("rows.json", "plot.png", "page.html")]
    process = start([*BENCH, "--impls", "manual,torch:math", "--rounds", "1000", "--json", files[0], "--plot", files[1],
                     "--report", files[2]])
    deadline = time.monotonic() + 60
    while not (files[0].exists() and len(json.loads(files[0].read_text())["rows"]) == 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == ""
    assert 6 <= int(re.search(r"\ntiming takes about (\d+) min, ", out)[1]) <= 60  # 2000 times 0.2 s, and two calls
    assert "interrupted: 1 of 1 settings were measured in full" in out
    assert out.endswith(f"wrote {', '.join(map(str, files))}\n") and all(file.stat().st_size > 100 for file in files)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_what_is_at_work():
    """And a file does not."""
    for file in (Terminal(), io.StringIO()):
        jobs = watched([3, 4], lambda job: f"counting to {job}", Console(file=file, width=100))
        assert list(jobs) == [3, 4]
        assert ("counting to 4" in file.getvalue()) == ("2/2" in file.getvalue()) == file.isatty()


def test_a_terminal_shows_that_a_build_goes_on(monkeypatch):
    """A line that moves, and is gone in the end."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with _build._saying("compiling..."):
        time.sleep(2.3)
    first, *_, last, cleared = sys.stderr.getvalue().split("\r\033[K")[1:]
    assert (first, last, cleared) == ("minimal_attn: compiling... 1 s", "minimal_attn: compiling... 2 s", "")


def test_ctrl_c_ends_a_command_in_one_line(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "check", interrupted)
    assert cli.main(["check"]) == 130
    assert capsys.readouterr().err == "minimal-attn: interrupted\n"


def test_without_a_gpu_an_option_for_one_is_refused():
    process = start([*BENCH, "--host-cost"], CUDA_VISIBLE_DEVICES="")
    _, err = process.communicate()
    assert process.returncode == 2 and err.endswith("error: argument --host-cost: needs a GPU\n")


def test_what_the_machine_lacks_is_said_in_one_line():
    """A folder that is a file, where csrc would be compiled."""
    process = start([sys.executable, "-m", "minimal_attn", "check"], TORCH_EXTENSIONS_DIR=__file__)
    out, err = process.communicate()
    assert process.returncode == 1 and re.fullmatch(r"minimal-attn: csrc cannot be built in .*\n", err), err


def test_a_forced_kernel_that_is_none_is_refused():
    process = start([sys.executable, "-m", "minimal_attn", "demo"], MINIMAL_ATTN_KERNEL="sm100")
    _, err = process.communicate()
    assert process.returncode == 1 and err.startswith("minimal-attn: MINIMAL_ATTN_KERNEL must be unset or one of ")


# demo.

def test_demo_on_a_cpu(capsys, monkeypatch):
    """It checks, times nothing, and says how to switch the interpreter on."""
    is_off = ValueError("set TRITON_INTERPRET=1")
    monkeypatch.setitem(demo.BACKENDS, "triton", dataclasses.replace(demo.BACKENDS["triton"], why_not=lambda _: is_off))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    assert "triton is left out: set TRITON_INTERPRET=1\n" in out and "gdb -ex 'break flash_fwd'" in out
    assert "TFLOP/s" not in out and " is slower" not in out and "Self CPU" not in out
    assert "\n7 of 7 results agree " in out and len(out.splitlines()) <= 30 and max(map(len, out.splitlines())) <= 100
    rows = [line.split() for line in out.splitlines() if line.startswith("cuda:host ")]
    assert [row[1] for row in rows] == ["bfloat16", "float32"]
    assert all(0 < float(max_err) < float(allowed) for _, _, max_err, allowed in rows)


def test_demo_profiles_if_asked(capsys, monkeypatch):
    monkeypatch.setattr(demo, "IMPLS", {name: IMPLS[name] for name in ("manual", "torch:math")})
    assert cli.main(["demo", "--profile"]) == 0
    out = capsys.readouterr().out
    assert out.index("=== profiling manual attention ===") < out.index("\nNext: ") and out.count("CPU time total: ") == 2


def test_demo_fails_with_a_wrong_result(capsys, monkeypatch):
    wrong = IMPLS["torch:math"]._replace(forward=lambda q, k, v, causal: q)
    monkeypatch.setattr(demo, "IMPLS", IMPLS | {"torch:math": wrong})
    monkeypatch.setattr(demo.Case, "impls", demo.IMPLS)
    monkeypatch.setattr(demo, "DTYPES", ("float32",))
    assert cli.main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "torch:math in float32: WrongResult: max error " in out and re.search(r"\ntorch:math +float32 +FAILED", out)


def timed(dtype, impl, ms):
    """As measured at the shape of the demo on a GPU."""
    return demo.Result(dtype, impl, None if impl == "manual" else 7.5e-3, 1.9e-3, {"ms": ms, "tflops": 137.4 / ms})


MS = {"bfloat16": {"manual": 2.1, "cuda:simt": 3.2, "cuda:sm80": 0.39, "cuda:sm90": 0.2, "triton": 0.22,
                   "torch:cudnn": 0.222, "torch:flash": 0.4, "torch:efficient": 0.62, "torch:math": 2.3},
      "float32": {"manual": 4.1, "cuda:simt": 3.3, "cuda:dmma": 2.5, "triton": 14.4, "torch:efficient": 2.4,
                  "torch:math": 4.4}}
ON_A_GPU = [timed(dtype, impl, ms) for dtype in MS for impl, ms in MS[dtype].items()]
ON_A_GPU += [demo.Result("float32", impl, 8e-7) for impl in ("torch:cudnn", "torch:flash")]


@pytest.fixture
def screen(capsys):
    """The lines that show() prints of results."""
    def lines_of(results):
        demo.show(results, "cuda")
        return capsys.readouterr().out.splitlines()

    return lines_of


def test_the_screen_of_a_gpu(screen):
    lines = screen(ON_A_GPU)
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    rows = [line.split() for line in lines if " bfloat16 " in line and "Next" not in line]
    assert [row[0] for row in rows] == sorted(MS["bfloat16"], key=MS["bfloat16"].get)
    assert rows[0] == "cuda:sm90 bfloat16 1.9e-03 7.5e-03 0.2 687 1.11".split()
    assert "does not serve: torch:cudnn in float32, torch:flash in float32" in lines
    assert "13 of 13 results agree with attention in fp64." in lines
    assert "bfloat16: cuda:sm90 is 1.11 times as fast as torch:cudnn, the fastest peer." in lines
    assert ("float32: ours is slower, cuda:dmma reaches 0.96 of the speed of torch:efficient, the fastest peer."
            ) in lines


def test_the_screen_of_a_gpu_where_ours_fails(screen):
    failed = demo.Result("bfloat16", "cuda:sm90", 7.5e-3, failure="WrongResult: max error 1.00e+00, allowed 7.50e-03")
    lines = screen([failed, timed("bfloat16", "torch:cudnn", 0.222)])
    assert any(line.split() == "cuda:sm90 bfloat16 FAILED 7.5e-03 – – –".split() for line in lines)
    assert "cuda:sm90 in bfloat16: WrongResult: max error 1.00e+00, allowed 7.50e-03" in lines
    assert "1 of 2 results agree with attention in fp64." in lines
    assert "bfloat16: none of ours was timed." in lines


@pytest.mark.gpu
def test_demo_on_a_gpu(capsys):
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\nbfloat16: .* the fastest peer\.\n", out) and "FAILED" not in out
