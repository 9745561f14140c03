"""CI has no GPU: what one proved is in gpu_record.json, and counts only for the sources that it ran."""

import json
import os
import signal
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

from conftest import longest_first, pytest_collection_modifyitems, pytest_configure
from minimal_attn._build import source_digest
from recording import Recorder, still_to_run
from test_sanitizers import SANITIZER_RUNS

RECORD = Path(__file__).parents[1] / "gpu_record.json"
KEYS = {"device", "driver", "torch", "triton", "cuda", "passed", "failed", "skipped", "duration_s", "source_digest"}


@pytest.fixture
def record(request):
    if request.config.getoption("--gpu-record"):
        pytest.skip("this run writes the record anew")
    return json.loads(RECORD.read_text())


def check_sources(record):
    if record["source_digest"] == source_digest():
        return
    stale = f"{RECORD.name} was made from other sources of csrc/ and triton_ref/ than these"
    assert record.get("stale_because") and record.get("stale_for") == source_digest(), stale
    warnings.warn(f"{stale}, and no GPU could be reached: {record['stale_because']}")


def check_files(record):
    missing, reasons = set(record.get("missing", ())), record.get("missing_because", {})
    assert missing == reasons.keys() and all(reasons.values()), "the record lacks a part, and does not say why"
    for file, reason in reasons.items():
        warnings.warn(f"{RECORD.name} lacks {file}: {reason}")


def test_record_has_no_failure(record):
    assert KEYS <= record.keys()
    assert record["failed"] == 0 and record["passed"] > 0
    check_files(record)
    runs = {name.removeprefix("compute_sanitizer "): summary for name, summary in record["evidence"].items()
            if name.startswith("compute_sanitizer ")}
    assert all("SUMMARY: 0 " in summary for summary in runs.values())
    if record["source_digest"] == source_digest():
        assert runs.keys() == SANITIZER_RUNS.keys()
    else:  # in parts of its own
        assert {x.partition(",")[0] for x in runs} == {x.partition(",")[0] for x in SANITIZER_RUNS}
    seconds = [x for name, x in record["evidence"].items() if name.startswith("seconds of the JIT build")]
    assert seconds and max(seconds) <= 75 and record["evidence"]["MB of the built library"] <= 20


def test_record_took_20_minutes_at_most(record):
    """So that every change can have one, on a slow host too, with the tests that were run again. Otherwise the longest
    tests get shorter, or go to campaign.py."""
    assert record["duration_s"] <= 1200


def test_record_is_of_these_sources(record):
    check_sources(record)


def test_stale_record_fails_unless_it_says_why():
    with pytest.raises(AssertionError, match="other sources"):
        check_sources({"source_digest": "of others"})
    with pytest.raises(AssertionError, match="other sources"):  # the excuse is for some sources alone
        check_sources({"source_digest": "of others", "stale_because": "moved", "stale_for": "of others still"})
    with pytest.warns(UserWarning, match="no GPU could be reached: moved"):
        check_sources({"source_digest": "of others", "stale_because": "moved", "stale_for": source_digest()})


def test_record_without_a_file_fails_unless_it_says_why():
    check_files({})
    check_files({"missing": []})
    for reasons in {}, {"test_b.py": "its host was loaded"}, {"test_a.py": ""}:
        with pytest.raises(AssertionError, match="does not say why"):
            check_files({"missing": ["test_a.py"], "missing_because": reasons})
    with pytest.raises(AssertionError, match="does not say why"):  # the reason of a file that is there
        check_files({"missing_because": {"test_a.py": "its host was loaded"}})
    with pytest.warns(UserWarning, match="lacks test_a.py: its host was loaded"):
        check_files({"missing": ["test_a.py"], "missing_because": {"test_a.py": "its host was loaded"}})


MACHINE = {x: "same" for x in ("device", "driver", "torch", "triton", "cuda", "source_digest")}


@pytest.fixture
def recorder(tmp_path):
    """Makes a Recorder, as each run has one: of a.py, b.py and c.py, and of other sources or machines with `change`."""
    return lambda goes_on=True, **change: Recorder(tmp_path / "record.json", MACHINE | change,
                                                   ["a.py", "b.py", "c.py"], goes_on)


def report(recorder, nodeid, outcome="passed", when="call", **properties):
    """The reports of one test, of which the one of `when` has this outcome."""
    for phase in ("setup", "???") if when == "???" else ("setup", "call", "teardown"):
        its = outcome if phase == when else "passed"
        recorder.pytest_runtest_logreport(types.SimpleNamespace(
            nodeid=nodeid, when=phase, outcome=its, passed=its == "passed", duration=0.5,
            user_properties=list(properties.items())))


def saved(recorder):
    recorder.save()
    return json.loads(recorder.path.read_text())


def test_record_counts_a_file_when_all_of_its_tests_have_ended(recorder):
    run = recorder()
    for _ in range(2):  # as each worker collects
        run.collect(["tests/a.py::x[1]", "tests/a.py::x[2::3]", "tests/b.py::y", "tests/b.py::z"])
    report(run, "tests/b.py::y", bytes=7)
    report(run, "tests/a.py::x[1]", "skipped", "setup")
    record = saved(run)
    assert record["files"] == {} and record["missing"] == ["a.py", "b.py", "c.py"]
    assert record["evidence"] == {"bytes": 7}
    report(run, "tests/a.py::x[2::3]")
    record = saved(run)
    assert record["files"] == {"a.py": {"passed": 1, "failed": 0, "skipped": 1, "seconds": 3}}
    assert [record[x] for x in ("parts", "passed", "failed", "skipped", "missing")] == [1, 1, 0, 1, ["b.py", "c.py"]]
    assert record["tests"] == {"b.py": {"tests/b.py::y": ["passed", 1.5]}} and MACHINE.items() <= record.items()


def test_record_goes_on_with_what_is_left(recorder):
    tests = ["a.py::x", "b.py::y", "b.py::z", "c.py::w"]
    run = recorder()
    run.collect(tests)
    report(run, tests[1], bytes=7)
    report(run, tests[0])
    saved(run)
    run = recorder()
    assert still_to_run(tests, *run.recorded) == {"b.py::z", "c.py::w"}
    run.collect(["b.py::z", "c.py::w"])
    report(run, "b.py::z", time=3)
    report(run, "c.py::w")
    record = saved(run)
    assert [record[x] for x in ("parts", "passed", "failed", "skipped", "missing")] == [2, 4, 0, 0, []]
    assert list(record["files"]) == ["a.py", "b.py", "c.py"] and KEYS <= record.keys() and "tests" not in record
    assert record["files"]["b.py"]["passed"] == 2 and record["evidence"] == {"bytes": 7, "time": 3}
    assert still_to_run(tests, *recorder().recorded) == set()
    assert still_to_run(tests, *recorder(goes_on=False).recorded) == {*tests}


def test_record_counts_a_file_that_is_skipped_as_a_whole(recorder):
    run = recorder()
    run.pytest_collectreport(types.SimpleNamespace(nodeid="tests/a.py", skipped=True))
    run.pytest_collectreport(types.SimpleNamespace(nodeid="tests/b.py", skipped=False))
    assert list(saved(run)["files"]) == ["a.py"] and saved(run)["skipped"] == 1


def test_record_drops_the_evidence_of_a_file_that_runs_again(recorder):
    run = recorder()
    run.collect(["a.py::x", "a.py::y", "b.py::z"])
    report(run, "a.py::x", bytes=7)
    report(run, "a.py::y", "failed")
    report(run, "b.py::z", time=3)
    assert saved(run)["evidence"] == {"bytes": 7, "time": 3} and saved(recorder())["evidence"] == {"time": 3}


@pytest.mark.parametrize("when", ["setup", "call", "teardown", "???"])  # ???: pytest-xdist on a worker that crashed
def test_record_counts_an_error_as_a_failure_and_runs_the_file_again(recorder, when):
    tests = ["a.py::x", "a.py::y", "b.py::z", "b.py::w"]
    run = recorder()
    run.collect(tests)
    for nodeid in tests[1:3]:
        report(run, nodeid)
    report(run, "a.py::x", "failed", when)
    record = saved(run)
    assert (record["passed"], record["failed"]) == (1, 1) and list(record["files"]) == ["a.py"]
    assert still_to_run(tests, *recorder().recorded) == {"a.py::x", "a.py::y", "b.py::w"}
    report(run, "b.py::w", "failed", when)
    saved(run)
    run = recorder()
    assert still_to_run(tests, *run.recorded) == {*tests}
    run.collect(tests)
    for nodeid in tests:
        report(run, nodeid)
    assert [saved(run)[x] for x in ("passed", "failed")] == [4, 0]


def test_record_runs_a_file_with_a_failure_again_before_it_has_ended(recorder):
    run = recorder()
    run.collect(["a.py::x", "a.py::y", "a.py::z"])
    report(run, "a.py::x")
    report(run, "a.py::y", "failed")
    saved(run)
    assert recorder().recorded == ([], {})


def test_record_runs_a_file_again_that_has_changed():
    """Where a recorded test is no longer there, or no test is left that could end the file."""
    assert still_to_run(["a.py::x", "a.py::y"], [], {"a.py": ["a.py::x", "a.py::z"]}) == {"a.py::x", "a.py::y"}
    assert still_to_run(["a.py::x"], [], {"a.py": ["a.py::x"]}) == {"a.py::x"}


def test_record_counts_a_changed_file_anew(recorder):
    run = recorder()
    run.collect(["a.py::x", "a.py::y", "a.py::z"])
    report(run, "a.py::x")
    report(run, "a.py::z")
    saved(run)
    run = recorder()
    run.collect(["a.py::x", "a.py::y"])
    report(run, "a.py::y")
    assert saved(run)["files"] == {}
    report(run, "a.py::x")
    assert saved(run)["files"]["a.py"]["passed"] == 2


@pytest.mark.parametrize("other", MACHINE)
def test_record_parts_of_other_sources_or_machines_are_dropped(recorder, other):
    run = recorder(**{other: "another"})
    run.collect(["a.py::x", "b.py::y", "b.py::z"])
    report(run, "a.py::x")
    report(run, "b.py::y")
    assert saved(run)["parts"] == 1
    run = recorder()
    assert run.recorded == ([], {})
    run.collect(["b.py::y"])
    report(run, "b.py::y")
    record = saved(run)
    assert (record["parts"], record["passed"], record["missing"]) == (1, 1, ["a.py", "c.py"])


CONFTEST = """
import pathlib, recording

recording.SAVE_EVERY = 0

def pytest_configure(config):
    recording.start(config, lambda: recording.Recorder(
        pathlib.Path("record.json"), {"device": "none"}, ["test_a.py", "test_b.py"], goes_on=True))
"""
# In test_b.py something happens in the midst of its tests.
TESTS = {"test_a.py": "def test_a(): pass", "test_b.py": """
import os, pathlib, signal, time, pytest

def is_first():
    try:
        pathlib.Path("happened").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

@pytest.mark.parametrize("i", range(6))
def test_b(i):
    with open("begun", "a") as f:
        print(i, file=f)
    if i >= 3:
        HAPPENS
"""}
WORKERS = ["-n", "2", "--dist", "worksteal"]


def run_pytest(folder, *options):
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env.update(PYTHONPATH=str(Path(__file__).parents[1]), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    return subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "pytest_timeout",
                           "-p", "xdist.plugin", *options], cwd=folder, env=env, capture_output=True, text=True,
                          timeout=50)


@pytest.fixture
def suite(tmp_path):
    def make(happens):
        for name, text in {**TESTS, "conftest.py": CONFTEST}.items():
            (tmp_path / name).write_text(text.replace("HAPPENS", happens))
        return tmp_path
    return make


def begun(folder):
    return sorted((folder / "begun").read_text().split())


def recorded(folder):
    return json.loads((folder / "record.json").read_text())


def check_it_goes_on(folder, *options):
    """What is left runs, and no test that was recorded."""
    before = recorded(folder)["tests"]["test_b.py"]
    (folder / "begun").unlink()
    result = run_pytest(folder, *options)
    assert result.returncode == 0 and "still to run: none" in result.stdout, result.stdout
    ran = begun(folder)
    assert ran == [str(i) for i in range(6) if f"test_b.py::test_b[{i}]" not in before]
    record = recorded(folder)
    assert record["missing"] == [] and [record[x] for x in ("passed", "failed")] == [7, 0]
    result = run_pytest(folder, *options)  # nothing is left
    assert result.returncode == 0 and "still to run: none" in result.stdout, result.stdout
    assert recorded(folder) == record and begun(folder) == ran


@pytest.mark.cpu
def test_killed_run_goes_on(suite):
    folder = suite("is_first() and os.kill(os.getpid(), signal.SIGKILL)")
    assert run_pytest(folder).returncode == -signal.SIGKILL
    record = recorded(folder)
    assert [*record["files"]] == ["test_a.py"] and record["missing"] == ["test_b.py"]
    assert [*record["tests"]["test_b.py"]] == [f"test_b.py::test_b[{i}]" for i in range(3)]
    check_it_goes_on(folder)


@pytest.mark.cpu
def test_run_that_is_out_of_time_goes_on(suite):
    folder = suite("time.sleep(1.5)")
    # Each worker ends one of the three tests that sleep.
    result = run_pytest(folder, *WORKERS, "--session-timeout", "1")
    assert result.returncode and "session-timeout: 1" in result.stdout and "still to run: test_" in result.stdout
    ran = begun(folder)
    assert 0 < len(ran) < 6 and {*recorded(folder)["tests"]["test_b.py"]} == {f"test_b.py::test_b[{i}]" for i in ran}
    check_it_goes_on(folder, *WORKERS)


@pytest.mark.cpu
def test_file_of_a_crashed_worker_runs_again(suite):
    # It ends a while later: xdist fails if a worker ends while it is being given tests.
    folder = suite("is_first() and (time.sleep(0.5), os._exit(1))")
    result = run_pytest(folder, *WORKERS)
    assert result.returncode == 1 and recorded(folder)["files"]["test_b.py"]["failed"] == 1
    (folder / "begun").unlink()
    assert run_pytest(folder).returncode == 0 and len(begun(folder)) == 6
    assert recorded(folder)["missing"] == [] and recorded(folder)["failed"] == 0


class Item:
    """As much of pytest's as conftest.py looks at."""

    def __init__(self, *markers, file="test_a.py", fixtures=(), **params):
        self.get_closest_marker, self.path, self.fixturenames = markers.count, Path(file), fixtures
        self.callspec, self.is_skipped = types.SimpleNamespace(params=params), False

    def add_marker(self, marker):
        self.is_skipped |= marker.name == "skip"


@pytest.mark.parametrize("is_record", [False, True])
def test_record_leaves_the_campaign_and_what_has_no_gpu_to_others(monkeypatch, is_record):
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    items = [Item("slow", "campaign", backend="cuda"), Item("cpu"), Item(impl="cuda:host"),  # these three
             Item("slow", backend="triton"), Item(impl="triton"), Item()]
    pytest_collection_modifyitems(types.SimpleNamespace(getoption={"--gpu-record": is_record}.get), items)
    assert [item.is_skipped for item in items] == [is_record] * 3 + [False] * 3


def test_longest_first_gives_each_worker_its_share():
    short = [Item() for _ in range(20)]
    memory = [Item(fixtures=["much_memory"]) for _ in range(2)]
    sanitized = [Item("timeout", file="test_sanitizers.py") for _ in range(3)]
    long, skipped = [Item("timeout") for _ in range(3)], Item("timeout", "skip")
    given = [*short, skipped, *sanitized, *memory, *long]
    items = longest_first(given, 3)
    assert len(items) == 29 and set(items) == set(given)
    first, second, third = items[:9], items[9:19], items[19:]
    assert first[:2] == memory and not {*long, *sanitized} & {*first}
    assert third[:2] == [sanitized[0], long[1]] and second[:2] == [long[0], long[2]]
    assert [run.index(x) > 2 for run, x in ((third, sanitized[1]), (second, sanitized[2]))] == [True, True]
    for workers in (1, 2, 16):
        assert sorted(map(id, longest_first(given, workers))) == sorted(map(id, given))


def test_gpu_record_part_is_of_whole_files():
    config = types.SimpleNamespace(getoption=lambda name, default=None: values.get(name, default), args=["tests"])
    for values in ({"keyword": "causal"}, {"markexpr": "gpu"}):
        values["--gpu-record"] = "record.json"
        with pytest.raises(pytest.UsageError, match="whole test files"):
            pytest_configure(config)
    config.args, values = ["tests/test_facade.py::test_backends"], {"--gpu-record": "record.json"}
    with pytest.raises(pytest.UsageError, match="whole test files"):
        pytest_configure(config)
