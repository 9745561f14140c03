"""The command minimal-attn: what it says of this machine, that its check can fail, and the options of its benchmark."""

import contextlib
import dataclasses
import importlib
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
from minimal_attn import __version__, _build, available_backends, bench, choice, cli, crosscheck, info, interface
from minimal_attn.bench import attention, demo
from minimal_attn.bench.attention import IMPLS
from minimal_attn.bench.measure import MEASURED
from minimal_attn.progress import watched
from minimal_attn.reference import reference_forward
from test_build import python

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if HAS_GPU else "cpu"


def test_script_of_the_package():
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


def test_info_unavailable_backend(capsys, no_compiler):
    info.print_info()
    assert "  cuda               no compiler today\n" in capsys.readouterr().out


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


def test_missing_rich_names_the_extra(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "minimal_attn.crosscheck")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err == ("minimal-attn: this needs rich, of the extra \"bench\": pip install "
                                       "'minimal_attn[bench]'\n")


def test_missing_other_package_raises(monkeypatch):
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


def test_check_build_fails(capsys, monkeypatch):
    """cuda is told once, and the others are judged."""
    backends = {name: interface.BACKENDS[name] for name in ("cuda", "torch")}
    monkeypatch.setattr(crosscheck, "BACKENDS", backends)
    monkeypatch.setattr(crosscheck, "CHECKS", crosscheck.CHECKS[:1])
    monkeypatch.setattr(crosscheck, "load", raises)
    monkeypatch.setitem(backends, "cuda", dataclasses.replace(backends["cuda"], why_not=lambda device: None))
    assert cli.main(["check"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 3 and "3 of 6 are right" in printed
    assert printed.count("\ncuda: RuntimeError: no kernel for this\n") == 1


def test_check_unavailable_backend(capsys, no_compiler, monkeypatch):
    monkeypatch.setattr(crosscheck, "CHECKS", crosscheck.CHECKS[:1])
    assert cli.main(["check"]) == 0
    assert "cuda is left out: no compiler today" in capsys.readouterr().out


def test_bench_options(capsys):
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

PATIENCE = 60  # seconds for a process to start or to end, beside 16 workers of the tests on a slow host
BENCH = [sys.executable, "bench.py", "--shape", "2,4,64,64", "--seqlens", ""]


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


@pytest.mark.parametrize("command", [
    ["info"], ["check"], ["bench", "--shape", "2,4,64,64", "--seqlens", "", "--impls", "manual"]],
    ids=lambda command: command[0])
def test_closed_pipe_exits_silently(command, start):
    """As in `minimal-attn bench | head -1`, whose reader is gone before anything is written."""
    process = start([sys.executable, "-m", "minimal_attn", *command], TRITON_INTERPRET="0")
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 1


@pytest.mark.parametrize("command", [["-m", "minimal_attn"], ["-m", "minimal_attn", "check"], ["bench.py"]])
def test_sigint_while_torch_is_imported(command, tmp_path, start):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    process = start([sys.executable, *command], PYTHONPATH=str(tmp_path))
    assert (*process.communicate(timeout=PATIENCE), process.returncode) == ("", "", 130)


def test_sigint_in_import_of_the_package_reaches_the_program(tmp_path, start):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    process = start([sys.executable, "-c", "import minimal_attn"], PYTHONPATH=str(tmp_path))
    assert "KeyboardInterrupt" in process.communicate(timeout=PATIENCE)[1]


def test_sigint_bench_writes_files(tmp_path, start):
    files = [tmp_path / name for name in ("rows.json", "plot.png", "page.html")]
    process = start([*BENCH, "--impls", "manual,torch:math", "--rounds", "1000", "--json", files[0], "--plot", files[1],
                     "--report", files[2]])
    deadline = time.monotonic() + PATIENCE
    while not (files[0].exists() and len(json.loads(files[0].read_text())["rows"]) == 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and err == ""
    # 2000 times 0.3 s on a GPU; on a CPU 0.2 s and two calls more for each
    assert 6 <= int(re.search(r"\ntiming takes (?:about|at least) (\d+) min, ", out)[1]) <= 60
    timings = json.loads(files[0].read_text())["meta"]["interrupted"]
    assert re.fullmatch(r"\d+ of 2000 timings", timings)
    assert f"interrupted after {timings}; tables and pictures show the 1 settings that every" in out
    assert out.endswith(f"wrote {', '.join(map(str, files))}\n") and all(file.stat().st_size > 100 for file in files)


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
    """A line that moves, and is gone in the end."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    with _build._saying(lambda: "compiling..."):
        sys.stderr.wait_for(lambda text: len(set(re.findall(r"\d+ s", text))) > 1)
    *lines, cleared = sys.stderr.getvalue().split("\r\033[K")[1:]
    seconds = [int(re.fullmatch(r"minimal_attn: compiling\.\.\. (\d+) s", line)[1]) for line in lines]
    assert len(set(seconds)) > 1 and seconds == sorted(seconds) and cleared == ""


def test_build_progress_line_fits_terminal(monkeypatch):
    """What is too long for the line is said once in full."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "20")
    text = f"waiting for {'/long' * 20}/lock"
    with _build._saying(lambda: text):
        sys.stderr.wait_for(lambda text: text.count("\r") > 1)
    whole, *lines, cleared = sys.stderr.getvalue().split("\r\033[K")
    assert whole == f"minimal_attn: {text}\n" and lines and cleared == ""
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


def test_sigint_check_one_line(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "check", interrupted)
    assert cli.main(["check"]) == 130
    assert capsys.readouterr().err == "minimal-attn: interrupted\n"


@pytest.mark.parametrize("error, said", [
    (RuntimeError("\nno compiler\nand hints"), "no compiler"), (ValueError("sm100"), "sm100"), (OSError(), "OSError")])
def test_error_one_line(error, said, capsys, monkeypatch):
    def fails():
        raise error

    monkeypatch.setattr(cli, "check", fails)
    monkeypatch.delenv("MINIMAL_ATTN_TRACEBACK", raising=False)
    assert cli.main(["check"]) == 1
    assert capsys.readouterr().err == f"minimal-attn: {said} (MINIMAL_ATTN_TRACEBACK=1 shows the traceback)\n"
    monkeypatch.setenv("MINIMAL_ATTN_TRACEBACK", "1")
    with pytest.raises(type(error)):
        cli.main(["check"])


# What bench keeps of a run that an error ends.

def failing_at(seqlen):
    class Case(attention.Case):
        def __init__(self, setting, device):
            if setting.shape.seqlen_q == seqlen:
                raise RuntimeError("no memory for this")
            super().__init__(setting, device)

    return Case


BENCH_32 = ["bench", "--shape", "2,4,64,64", "--seqlens", "32", "--impls", "manual"]


def test_bench_error_keeps_tables(capsys, monkeypatch, tmp_path):
    """The pictures are of the shapes if no length of the sweep was measured."""
    files = [str(tmp_path / name) for name in ("rows.json", "plot.png", "page.html")]
    monkeypatch.setitem(attention.CASES, attention.Shape, failing_at(32))
    monkeypatch.setattr(bench, "measured", lambda case, impl: dict.fromkeys(MEASURED, 1.0))
    assert cli.main([*BENCH_32, "--json", files[0], "--plot", files[1], "--report", files[2]]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("minimal-attn: no memory for this") and "\n(2,4,64,64) float32 on " in out
    assert "interrupted after 1 of 2 timings; " in out and out.endswith(f"wrote {', '.join(files)}\n")
    assert json.loads(Path(files[0]).read_text())["meta"]["interrupted"] == "1 of 2 timings"


def test_bench_names_files_not_written(capsys, monkeypatch, tmp_path):
    page = tmp_path / "page.html"
    monkeypatch.setitem(attention.CASES, attention.Shape, failing_at(64))
    assert cli.main([*BENCH_32, "--report", str(page)]) == 1
    out = capsys.readouterr().out
    assert "interrupted: nothing was timed yet\n" in out and not page.exists()
    assert f"not written, as no setting has a row of every implementation: {page}\n" in out


def test_host_cost_without_gpu(start):
    process = start([*BENCH, "--host-cost"], CUDA_VISIBLE_DEVICES="")
    _, err = process.communicate()
    assert process.returncode == 2 and err.endswith("error: argument --host-cost: needs a GPU\n")


def test_demo_unwritable_folder_one_line(start):
    """A folder that is a file, where csrc would be compiled."""
    process = start([sys.executable, "-m", "minimal_attn", "demo"], TORCH_EXTENSIONS_DIR=__file__)
    out, err = process.communicate()
    assert process.returncode == 1 and re.fullmatch(r"minimal-attn: csrc cannot be built in .*\n", err), err


def test_demo_unknown_kernel(start):
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


def test_demo_profile(capsys, monkeypatch):
    monkeypatch.setattr(demo, "IMPLS", {name: IMPLS[name] for name in ("manual", "torch:math")})
    assert cli.main(["demo", "--profile"]) == 0
    out = capsys.readouterr().out
    assert out.index("=== profiling manual attention ===") < out.index("\nNext: ")
    assert out.count("CPU time total: ") == 2


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


MS = {"bfloat16": {"manual": 2.1, "cuda:simt": 3.2, "cuda:sm80": 0.39, "cuda:sm90": 0.2, "triton": 0.22,
                   "torch:cudnn": 0.222, "torch:flash": 0.4, "torch:efficient": 0.62, "torch:math": 2.3},
      "float32": {"manual": 4.1, "cuda:simt": 3.3, "cuda:dmma": 2.5, "triton": 14.4, "torch:efficient": 2.4,
                  "torch:math": 4.4}}
ON_A_GPU = [timed(dtype, impl, ms) for dtype in MS for impl, ms in MS[dtype].items()]
NO_KERNEL = "RuntimeError: No available kernel."
ON_A_GPU += [demo.Result("float32", impl, 8e-7, excuse=NO_KERNEL) for impl in ("torch:cudnn", "torch:flash")]


@pytest.fixture
def screen(capsys):
    """The lines that show() prints of results."""
    def lines_of(results):
        demo.show(results, "cuda")
        return capsys.readouterr().out.splitlines()

    return lines_of


def test_demo_table_on_gpu(screen):
    lines = screen(ON_A_GPU)
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    rows = [line.split() for line in lines if " bfloat16 " in line and "Next" not in line]
    assert [row[0] for row in rows] == sorted(MS["bfloat16"], key=MS["bfloat16"].get)
    assert rows[0] == "cuda:sm90 bfloat16 1.9e-03 7.5e-03 0.2 687 1.11".split()
    assert f"does not serve: torch:cudnn in float32, torch:flash in float32: {NO_KERNEL}" in lines
    assert "13 of 13 results agree with attention in fp64." in lines
    assert "bfloat16: cuda:sm90 is 1.11 times as fast as torch:cudnn, the fastest peer." in lines
    assert ("float32: ours is slower, cuda:dmma reaches 0.96 of the speed of torch:efficient, the fastest peer."
            ) in lines


def test_demo_table_on_gpu_with_failure(screen):
    failed = demo.Result("bfloat16", "cuda:sm90", 7.5e-3, failure="WrongResult: max error 1.00e+00, allowed 7.50e-03")
    lines = screen([failed, timed("bfloat16", "torch:cudnn", 0.222)])
    assert any(line.split() == "cuda:sm90 bfloat16 FAILED 7.5e-03 – – –".split() for line in lines)
    assert "cuda:sm90 in bfloat16: WrongResult: max error 1.00e+00, allowed 7.50e-03" in lines
    assert "1 of 2 results agree with attention in fp64." in lines
    assert "bfloat16: none of ours was timed." in lines


def test_demo_unjudged_nan(screen, monkeypatch):
    """measured() leaves out what is not finite."""
    case = types.SimpleNamespace(device="cuda", dtype="bfloat16", tolerance=7.5e-3)
    monkeypatch.setattr(demo, "measured", lambda case, impl: {"ms": 1.0, "tflops": 137.4})
    lines = screen([demo.result_of(case, "manual")])
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
