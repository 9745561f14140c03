"""CI has no GPU: what one proved is in gpu_record.json, and counts only for the sources that it ran."""

import json
import types
import warnings
from pathlib import Path

import pytest

from conftest import add_up, count_by_file, longest_first, pytest_configure
from minimal_attn._build import source_digest
from test_sanitizers import SANITIZER_RUNS

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


def test_record_has_no_failure(record):
    assert KEYS <= record.keys()
    assert record["failed"] == 0 and record["passed"] > 0
    assert not record.get("missing"), "the record lacks a part"
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


def part(files, **kw):
    """A record of one run before its sums, as conftest.py makes it."""
    keys = dict.fromkeys(KEYS - {"passed", "failed", "skipped"}, "same")
    files = {name: dict(zip(("passed", "failed", "skipped"), counts)) for name, counts in files.items()}
    return {**keys, "parts": 1, "duration_s": 1.5, "evidence": dict.fromkeys(files, "seen"), "files": files, **kw}


def test_record_parts_add_up():
    whole = ["test_a.py", "test_b.py", "test_c.py"]
    first = add_up(part({"test_a.py": (5, 0, 1), "test_b.py": (7, 2, 0)}), {}, whole)
    assert [first[x] for x in ("parts", "passed", "failed", "skipped", "missing")] == [1, 12, 2, 1, ["test_c.py"]]
    # What ran again is not counted twice.
    second = add_up(part({"test_b.py": (9, 0, 0), "test_c.py": (1, 0, 0)}), first, whole)
    assert [second[x] for x in ("parts", "passed", "failed", "skipped", "missing")] == [2, 15, 0, 1, []]
    assert second["duration_s"] == 3 and second["evidence"] == dict.fromkeys(whole, "seen")
    assert list(second["files"]) == whole and KEYS <= second.keys()


@pytest.mark.parametrize("other", ["device", "driver", "torch", "triton", "cuda", "source_digest"])
def test_record_parts_of_other_sources_or_machines_are_dropped(other):
    earlier = add_up(part({"test_a.py": (5, 0, 1)}, **{other: "another"}), {}, ["test_a.py", "test_b.py"])
    record = add_up(part({"test_b.py": (1, 0, 0)}), earlier, ["test_a.py", "test_b.py"])
    assert (record["parts"], record["passed"], record["missing"]) == (1, 1, ["test_a.py"])


def test_count_by_file_counts_an_error_as_a_failure():
    report = [types.SimpleNamespace(nodeid="tests/test_a.py::test_b[c::d]", duration=0.5)]
    stats = {"passed": report * 3, "error": report, "failed": report, "": report * 6, "warnings": report}
    assert count_by_file(stats) == {"test_a.py": {"passed": 3, "failed": 2, "skipped": 0, "seconds": 5.5}}


class Item:
    """As much of pytest's as longest_first looks at."""

    def __init__(self, *markers, file="test_a.py", fixtures=()):
        self.get_closest_marker, self.path, self.fixturenames = markers.count, Path(file), fixtures


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
        values["--gpu-record-part"] = True
        with pytest.raises(pytest.UsageError, match="whole test files"):
            pytest_configure(config)
    config.args, values = ["tests/test_facade.py::test_backends"], {"--gpu-record-part": True}
    with pytest.raises(pytest.UsageError, match="whole test files"):
        pytest_configure(config)
