"""The command minimal-attn: what it says of this machine, that its check can fail, and the options of its benchmark."""

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console

from conftest import HAS_GPU
from minimal_attn import __version__, _build, available_backends, choice, cli, crosscheck, info, interface
from minimal_attn.bench import demo
from minimal_attn.bench.attention import IMPLS
from minimal_attn.progress import watched
from minimal_attn.reference import reference_forward
from test_build import python

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if HAS_GPU else "cpu"


def test_info(capsys, monkeypatch):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    lines = {line[:20].strip(): line[20:].strip() for line in printed.splitlines()}
    assert lines["minimal_attn:"].startswith(f"{__version__}, in ")
    assert f"torch {torch.__version__}, Triton " in lines["Versions:"]
    ready = [name for name in interface.BACKENDS if lines[name].strip() == "ready"]
    assert ready == available_backends()
    assert lines["GPU:" if not HAS_GPU else "GPU 0:"].strip() == (torch.cuda.get_device_name() if HAS_GPU else "none")
    assert HAS_GPU or lines["float32"].split() == lines["bfloat16"].split() == ["torch"] * 4
    assert "minimal_attn_C" in lines["csrc"] or "_C." in lines["csrc"]


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(_build, "why_not", lambda on_gpu=False: "no compiler today")
    choice._choose_first_available.cache_clear()
    yield
    choice._choose_first_available.cache_clear()


def test_backend_that_is_missing_is_named(capsys, no_compiler, monkeypatch):
    monkeypatch.setattr(crosscheck, "CHECKS", crosscheck.CHECKS[:1])
    info.print_info()
    assert cli.main(["check"]) == 0
    printed = capsys.readouterr().out
    assert "  cuda               no compiler today\n" in printed and "cuda is left out: no compiler today" in printed


@pytest.mark.gpu
def test_info_kernels(capsys):
    _build.load()
    cli.main(["info"])
    lines = {line[:20].strip(): line[20:].split() for line in capsys.readouterr().out.splitlines()}
    for dtype in interface.KERNEL_DTYPES:
        qkv = [torch.empty(3, 2, 4, 128, head_dim, device="cuda", dtype=dtype) for head_dim in (64, 128, 256, 100)]
        assert lines[str(dtype).removeprefix("torch.")] == [f"cuda:{interface.which_kernel(*x)}" for x in qkv]


def test_info_without_rich(tmp_path):
    """As a user without the extra runs it; there check and bench say which extra they lack."""
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError(\"No module named 'rich'\", name='rich')")
    run = ("import sys; from minimal_attn import cli\n"
           "codes = [cli.main([command]) for command in ('info', 'check', 'bench')]; print(codes)")
    said = python(run, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert f"{__version__}, in " in said and said.endswith("[0, 2, 2]\n")


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
    return reference_forward(q, k, v, options._replace(softmax_scale=1.0))


def shifted_lse(q, k, v, options):
    out, lse = reference_forward(q, k, v, options)
    return out, lse + 1e-3


def all_rows_see(q, k, v, options):
    out, lse = reference_forward(q, k, v, options)
    return out, lse.clamp(min=-50)


def raises(*args, **kwargs):
    raise RuntimeError("no kernel for this\nand hints")


@pytest.mark.parametrize("broken, failure", [
    (no_scale, "max error "), (shifted_lse, "lse is wrong"), (all_rows_see, "lse is wrong"), (raises, "RuntimeError: ")])
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


def test_check_fails_if_the_build_does(capsys, monkeypatch):
    """And the other backends are judged."""
    cuda = dataclasses.replace(interface.BACKENDS["cuda"], why_not=lambda device: None)
    monkeypatch.setattr(crosscheck, "BACKENDS", {"cuda": cuda, "torch": interface.BACKENDS["torch"]})
    monkeypatch.setattr(crosscheck, "CHECKS", crosscheck.CHECKS[:1])
    monkeypatch.setattr(crosscheck, "load", raises)
    assert cli.main(["check"]) == 1 and "3 of 6 are right" in capsys.readouterr().out


@pytest.mark.parametrize("argv, code, said", [
    (["bench", "--help"], 0, "usage: minimal-attn bench "), (["bench", "--impls", "nobody"], 2, "argument --impls"),
    (["dance"], 2, "'dance'"), (["info", "--fast"], 2, "--fast"), (["--version"], 0, f"minimal_attn {__version__}\n")])
def test_options(argv, code, said, capsys):
    with pytest.raises(SystemExit, match=str(code)):
        cli.main(argv)
    assert said in "".join(capsys.readouterr())


def test_no_command_prints_help(capsys):
    assert cli.main([]) == 0 and capsys.readouterr().out.startswith("usage: minimal-attn ")


# How commands end: in processes of their own.

PATIENCE = 60  # seconds for a process to start or to end, beside 16 workers of the tests on a slow host


@pytest.fixture
def start():
    """(command, **env) -> its process, which is gone after the test."""
    with contextlib.ExitStack() as processes:
        def started(command, **env):
            # Where a parent ignores SIGINT, as a shell does for what runs in its background, a child ignores it too.
            process = subprocess.Popen(command, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True,
                                       preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
            processes.enter_context(process)  # at the end: closes the pipes, and waits
            processes.callback(process.kill)  # before that
            return process

        yield started


def test_closed_pipe_exits_silently(start):
    """As in `minimal-attn info | head -1`, whose reader is gone before anything is written."""
    process = start([sys.executable, "-m", "minimal_attn", "info"], TRITON_INTERPRET="0")
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 1


@pytest.mark.parametrize("command", [["-m", "minimal_attn"], ["-m", "minimal_attn", "check"], ["bench.py"]])
def test_sigint_while_torch_is_imported(command, tmp_path, start):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    process = start([sys.executable, *command], PYTHONPATH=str(tmp_path))
    assert (*process.communicate(timeout=PATIENCE), process.returncode) == ("", "", 130)


def test_sigint_bench_writes_files(tmp_path, start):
    rows, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    process = start([sys.executable, "bench.py", "--shape", "2,4,64,64", "--seqlens", "", "--impls",
                     "manual,torch:math", "--rounds", "1000", "--json", rows, "--plot", plot])
    deadline = time.monotonic() + PATIENCE
    while not (rows.exists() and len(json.loads(rows.read_text())["rows"]) == 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and err == ""
    # 2000 times 0.3 s on a GPU; on a CPU 0.2 s and two calls more for each
    assert 6 <= int(re.search(r"\ntiming takes (?:about|at least) (\d+) min, ", out)[1]) <= 60
    timings = json.loads(rows.read_text())["meta"]["interrupted"]
    assert re.fullmatch(r"\d+ of 2000 timings", timings) and f"interrupted after {timings}; " in out
    assert out.endswith(f"wrote {rows}, {plot}\n") and plot.stat().st_size > 100


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def wait_for(self, is_enough):
        """Until is_enough(what was written), for 20 s at most."""
        deadline = time.monotonic() + PATIENCE
        while not is_enough(self.getvalue()) and time.monotonic() < deadline:
            time.sleep(0.1)


def test_progress_line_on_terminal_only():
    """And a file does not."""
    for file in (Terminal(), io.StringIO()):
        jobs = watched([3, 4], lambda job: f"counting to {job}", Console(file=file, width=100))
        assert list(jobs) == [3, 4]
        assert ("counting to 4" in file.getvalue()) == ("2/2" in file.getvalue()) == file.isatty()


def test_build_progress_line(monkeypatch):
    """It moves, and is gone in the end. What is too long for the terminal is said once in full."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "20")
    text = f"waiting for {'/long' * 20}/lock"
    with _build._saying(lambda: text):
        sys.stderr.wait_for(lambda text: len(set(re.findall(r"\d s", text))) > 1)
    whole, *lines, cleared = sys.stderr.getvalue().split("\r\033[K")
    assert whole == f"minimal_attn: {text}\n" and len(set(lines)) > 1 and cleared == ""
    assert all(len(line) < 40 and re.fullmatch(r"minimal_attn: waiting for /.* \d s", line) for line in lines)


def test_build_progress_in_a_log(monkeypatch):
    """A line for each change, and none that moves."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    done = iter([0, 0, 1, 2])
    told = threading.Event()

    def progress():
        files = next(done, None)
        if files is None:
            told.set()
        return f"{2 if files is None else files} of 2 files"

    with _build._saying(progress):
        assert told.wait(PATIENCE)
    assert sys.stderr.getvalue().splitlines() == [f"minimal_attn: {i} of 2 files" for i in range(3)]


@pytest.mark.parametrize("error, code, said", [
    (KeyboardInterrupt(), 130, "interrupted"), (RuntimeError("\nno compiler\nand hints"), 1, "no compiler"),
    (OSError(), 1, "OSError")])
def test_error_is_one_line(error, code, said, capsys, monkeypatch):
    def fails():
        raise error

    monkeypatch.setattr(cli, "check", fails)
    monkeypatch.delenv("MINIMAL_ATTN_TRACEBACK", raising=False)
    assert cli.main(["check"]) == code
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith(f"minimal-attn: {said}")
    if code == 1:
        monkeypatch.setenv("MINIMAL_ATTN_TRACEBACK", "1")
        with pytest.raises(type(error)):
            cli.main(["check"])


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


def test_demo_wrong_result(capsys, monkeypatch):
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


MS = {"bfloat16": {"manual": 2.1, "cuda:sm90": 0.2, "triton": 0.22, "torch:cudnn": 0.222, "torch:flash": 0.4},
      "float32": {"manual": 4.1, "cuda:dmma": 2.5, "triton": 14.4, "torch:efficient": 2.4}}
ON_A_GPU = [timed(dtype, impl, ms) for dtype in MS for impl, ms in MS[dtype].items()]
NO_KERNEL = "RuntimeError: No available kernel."


@pytest.fixture
def screen(capsys):
    """The lines that show() prints of results."""
    def lines_of(results):
        demo.show(results, "cuda")
        return capsys.readouterr().out.splitlines()

    return lines_of


def test_demo_table_on_gpu(screen):
    lines = screen([*ON_A_GPU, demo.Result("float32", "torch:cudnn", 8e-7, excuse=NO_KERNEL)])
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    rows = [line.split() for line in lines if " bfloat16 " in line and "Next" not in line]
    assert [row[0] for row in rows] == sorted(MS["bfloat16"], key=MS["bfloat16"].get)
    assert rows[0] == "cuda:sm90 bfloat16 1.9e-03 7.5e-03 0.2 687 1.11".split()
    assert any("torch:cudnn in float32" in line and NO_KERNEL in line for line in lines)
    assert any("7 of 7 results agree" in line for line in lines)
    assert any("bfloat16: cuda:sm90 is 1.11 times as fast as torch:cudnn" in line for line in lines)
    assert any("float32: ours is slower, cuda:dmma reaches 0.96 " in line for line in lines)


def test_demo_table_with_failure(screen, monkeypatch):
    """A result that is not finite is shown as such: measured() leaves it out."""
    failed = demo.Result("bfloat16", "cuda:sm90", 7.5e-3, failure="WrongResult: max error 1.00e+00, allowed 7.50e-03")
    case = types.SimpleNamespace(device="cuda", dtype="bfloat16", tolerance=7.5e-3)
    monkeypatch.setattr(demo, "measured", lambda case, impl: {"ms": 1.0, "tflops": 137.4})
    lines = screen([failed, timed("bfloat16", "torch:cudnn", 0.222), demo.result_of(case, "manual")])
    assert any(line.split() == "cuda:sm90 bfloat16 FAILED 7.5e-03 – – –".split() for line in lines)
    assert any("cuda:sm90 in bfloat16: WrongResult: max error 1.00e+00" in line for line in lines)
    assert any("1 of 2 results agree" in line for line in lines)
    assert any(line.split()[:4] == "manual bfloat16 nan –".split() for line in lines)


def test_demo_keeps_reason_of_peer(monkeypatch):
    case = types.SimpleNamespace(device="cpu", dtype="bfloat16", tolerance=7.5e-3)
    monkeypatch.setattr(demo, "judge", raises)
    assert demo.result_of(case, "torch:flash").excuse == "RuntimeError: no kernel for this"


@pytest.mark.gpu
def test_demo_on_a_gpu(capsys):
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\nbfloat16: .* the fastest peer\.\n", out) and "FAILED" not in out
