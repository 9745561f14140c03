"""The command minimal-attn: its results and exit codes, how it is interrupted, and that its check can fail."""

import contextlib
import dataclasses
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

from conftest import HAS_GPU
from minimal_attn import __version__, _build, attention as interface, available_backends, cli
from minimal_attn.backends import auto as choice
from minimal_attn.bench import measure
from minimal_attn.bench.impls import IMPLS
from minimal_attn.bench.options import OPS
from minimal_attn.command import crosscheck
from minimal_attn.reference.definition import reference_forward
from test_build import python

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if HAS_GPU else "cpu"


def test_info(capsys, monkeypatch):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    lines = {line[:20].strip(): line[20:].strip() for line in printed.splitlines()}
    assert [name for name in interface.BACKENDS if lines[name] == "ready"] == available_backends()
    assert (torch.cuda.get_device_name() in printed) if HAS_GPU else lines["float32"].split() == ["torch"] * 4
    assert "minimal_attn_C" in lines["csrc"] or "_C." in lines["csrc"]


def test_backend_that_is_missing_is_named(capsys, monkeypatch):
    monkeypatch.setattr(_build, "why_not", lambda on_gpu=False: "no compiler today")
    monkeypatch.setattr(crosscheck, "CHECKS", crosscheck.CHECKS[:1])
    choice._choose_first_available.cache_clear()
    codes = [cli.main([command]) for command in ("info", "check")]
    choice._choose_first_available.cache_clear()
    assert codes == [0, 0] and capsys.readouterr().out.count("no compiler today") == 2


def test_info_without_rich(tmp_path):
    """info runs for a user without the extra. check and bench say which extra they lack."""
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError(\"No module named 'rich'\", name='rich')")
    run = ("import sys; from minimal_attn import cli\n"
           "codes = [cli.main([command]) for command in ('info', 'check', 'bench')]; print(codes)")
    said = python(run, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert said.endswith("[0, 2, 2]\n")


def test_check(capsys, monkeypatch):
    backends = {name: backend for name, backend in interface.BACKENDS.items()  # Triton takes two minutes
                if name in ("cuda", "torch") and backend.why_not(torch.device(DEVICE)) is None}
    monkeypatch.setattr(crosscheck, "BACKENDS", backends)
    assert cli.main(["check"]) == 0
    printed = capsys.readouterr().out
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


def test_check_fails(capsys, monkeypatch):
    failures = {no_scale: "max error ", shifted_lse: "lse is wrong", all_rows_see: "lse is wrong",
                raises: "RuntimeError: "}
    right = interface.BACKENDS["torch"]
    backends = {"torch": right} | {f.__name__: dataclasses.replace(right, forward=f) for f in failures}
    monkeypatch.setattr(interface, "BACKENDS", backends)
    monkeypatch.setattr(crosscheck, "BACKENDS", backends)
    empty_rows = crosscheck.CHECKS[-1]
    monkeypatch.setattr(crosscheck, "CHECKS", [empty_rows])
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["check"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 12 and "3 of 15 are right" in printed
    for f, failure in failures.items():
        assert printed.count(f"{f.__name__}, {empty_rows.name}, float16: {failure}") == 1


def test_check_fails_if_the_build_does(capsys, monkeypatch):
    """Other backends are judged all the same."""
    cuda = dataclasses.replace(interface.BACKENDS["cuda"], why_not=lambda device: None)
    monkeypatch.setattr(crosscheck, "BACKENDS", {"cuda": cuda, "torch": interface.BACKENDS["torch"]})
    monkeypatch.setattr(crosscheck, "CHECKS", crosscheck.CHECKS[:1])
    monkeypatch.setattr(crosscheck, "load", raises)
    assert cli.main(["check"]) == 1 and "3 of 6 are right" in capsys.readouterr().out


@pytest.mark.parametrize("argv, code, said", [
    (["bench", "--help"], 0, "usage: minimal-attn bench "), (["--version"], 0, f"minimal_attn {__version__}\n"),
    (["dance"], 2, "'dance'"), (["info", "--fast"], 2, "--fast")])
def test_options(argv, code, said, capsys):
    with pytest.raises(SystemExit, match=str(code)):
        cli.main(argv)
    assert said in "".join(capsys.readouterr())


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
    """In `minimal-attn info | head -1` the reader may be gone before anything is written."""
    process = start([sys.executable, "-m", "minimal_attn", "info"], TRITON_INTERPRET="0")
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 1


@pytest.mark.parametrize("command", [["-m", "minimal_attn"], ["bench.py"]])
def test_sigint_while_torch_is_imported(command, tmp_path, start):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    process = start([sys.executable, *command], PYTHONPATH=str(tmp_path))
    assert (*process.communicate(timeout=PATIENCE), process.returncode) == ("", "", 130)


def test_sigint_bench_writes_rows(tmp_path, start):
    rows = tmp_path / "rows.json"
    process = start([sys.executable, "bench.py", "--shape", "2,4,64,64", "--seqlens", "", "--impls",
                     "manual,torch:math", "--rounds", "1000", "--json", rows])
    deadline = time.monotonic() + PATIENCE
    while not (rows.exists() and len(json.loads(rows.read_text())["rows"]) == 2):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and err == "" and out.endswith(f"wrote {rows}\n")
    assert re.fullmatch(r"\d+ of 2000 timings", json.loads(rows.read_text())["meta"]["interrupted"])


def test_error_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(crosscheck, "run", raises)
    monkeypatch.delenv("MINIMAL_ATTN_TRACEBACK", raising=False)
    assert cli.main(["check"]) == 1
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith("minimal-attn: no kernel for this")
    monkeypatch.setenv("MINIMAL_ATTN_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        cli.main(["check"])


# demo.

def test_demo(capsys, monkeypatch):
    """It checks and times what is here, and goes on where a backend is not."""
    monkeypatch.setitem(measure.SECONDS_PER_TIMING, "cpu", 1e-3)
    monkeypatch.setitem(OPS["attention"].impls, "triton", IMPLS["triton"]._replace(forward=raises))
    is_off = dataclasses.replace(measure.BACKENDS["triton"], why_not=lambda _: ValueError("set TRITON_INTERPRET=1"))
    monkeypatch.setitem(measure.BACKENDS, "triton", is_off)
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    assert out.count("triton: RuntimeError: no kernel for this\n") == 1
    ours = "cuda:simt" if HAS_GPU else "cuda:host"
    errors = re.findall(rf"\n{ours}: max error (\S+) against fp64, allowed (\S+)", out)
    assert len(errors) == 2 and all(0 < float(max_err) < float(allowed) for max_err, allowed in errors)
    assert len(re.findall(rf"\n{ours} +[\d.,]+ ", out)) == 2
    wrong = IMPLS["torch:math"]._replace(forward=lambda q, k, v, call: q)
    monkeypatch.setitem(OPS["attention"].impls, "torch:math", wrong)
    assert cli.main(["demo"]) == 1
    assert "\ntorch:math: WrongResult: max error" in capsys.readouterr().out
