"""CI has no GPU: what one proved is in gpu_record.json, and counts only for the sources that it ran."""

import json
import types
import warnings
from pathlib import Path

import pytest

from conftest import add_up, count_by_file, pytest_configure, readme_in_one_line
from minimal_attn._build import source_digest

RECORD = Path(__file__).parent / "gpu_record.json"
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


def test_the_gpu_run_was_clean(record):
    assert KEYS <= record.keys()
    assert record["failed"] == 0 and record["passed"] > 0
    assert not record.get("missing"), "the record lacks a part"
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        assert "SUMMARY: 0 " in record["evidence"][f"compute_sanitizer {tool}"]
    seconds = [x for name, x in record["evidence"].items() if name.startswith("seconds of the JIT build")]
    assert seconds and max(seconds) <= 75 and record["evidence"]["MB of the built library"] <= 12
    readme = readme_in_one_line()
    assert f"{record['passed']} passed, {record['skipped']} skipped" in readme
    took = " to ".join(dict.fromkeys(f"{x:.0f}" for x in (min(seconds), max(seconds))))
    assert f"takes {took} s to build from nothing beside 16 workers of the tests" in readme


def test_the_gpu_run_was_of_these_sources(record):
    check_sources(record)


def test_a_record_of_other_sources_fails_unless_it_says_why():
    with pytest.raises(AssertionError, match="other sources"):
        check_sources({"source_digest": "of others"})
    with pytest.raises(AssertionError, match="other sources"):  # the excuse is for some sources alone
        check_sources({"source_digest": "of others", "stale_because": "moved", "stale_for": "of others still"})
    with pytest.warns(UserWarning, match="no GPU could be reached: moved"):
        check_sources({"source_digest": "of others", "stale_because": "moved", "stale_for": source_digest()})


def part(files, **kw):
    """A record of one run before its sums, as conftest.py makes it."""
    keys = dict.fromkeys(KEYS - {"passed", "failed", "skipped"}, "same")
    files = {name: dict(zip(("passed", "failed", "skipped"), counts)) for name, counts in files.items()}
    return {**keys, "parts": 1, "duration_s": 1.5, "evidence": dict.fromkeys(files, "seen"), "files": files, **kw}


def test_a_record_in_parts_adds_up():
    whole = ["test_a.py", "test_b.py", "test_c.py"]
    first = add_up(part({"test_a.py": (5, 0, 1), "test_b.py": (7, 2, 0)}), {}, whole)
    assert [first[x] for x in ("parts", "passed", "failed", "skipped", "missing")] == [1, 12, 2, 1, ["test_c.py"]]
    # What ran again is not counted twice.
    second = add_up(part({"test_b.py": (9, 0, 0), "test_c.py": (1, 0, 0)}), first, whole)
    assert [second[x] for x in ("parts", "passed", "failed", "skipped", "missing")] == [2, 15, 0, 1, []]
    assert second["duration_s"] == 3 and second["evidence"] == dict.fromkeys(whole, "seen")
    assert list(second["files"]) == whole and KEYS <= second.keys()


@pytest.mark.parametrize("other", ["device", "driver", "torch", "triton", "cuda", "source_digest"])
def test_parts_of_other_sources_or_machines_do_not_add_up(other):
    earlier = add_up(part({"test_a.py": (5, 0, 1)}, **{other: "another"}), {}, ["test_a.py", "test_b.py"])
    record = add_up(part({"test_b.py": (1, 0, 0)}), earlier, ["test_a.py", "test_b.py"])
    assert (record["parts"], record["passed"], record["missing"]) == (1, 1, ["test_a.py"])


def test_an_error_counts_as_a_failure():
    report = [types.SimpleNamespace(nodeid="tests/test_a.py::test_b[c::d]")]
    stats = {"passed": report * 3, "error": report, "failed": report, "warnings": report}
    assert count_by_file(stats) == {"test_a.py": {"passed": 3, "failed": 2, "skipped": 0}}


def test_a_part_is_of_whole_files():
    config = types.SimpleNamespace(getoption=lambda name, default=None: values.get(name, default), args=["tests"])
    for values in ({"keyword": "causal"}, {"markexpr": "gpu"}):
        values["--gpu-record-part"] = True
        with pytest.raises(pytest.UsageError, match="whole test files"):
            pytest_configure(config)
    config.args, values = ["tests/test_facade.py::test_backends"], {"--gpu-record-part": True}
    with pytest.raises(pytest.UsageError, match="whole test files"):
        pytest_configure(config)
