"""The record of what a GPU proved, saved while the tests run. A run that is stopped loses the last seconds, and the
next one goes on with the tests that are left.

conftest.py starts it for --gpu-record. A test counts for the sources, the tests and the machine that it ran with. A test
file counts when all of its tests have ended. If it has not ended and none of its tests has failed, those that have ended
are kept too.
"""

import datetime
import json
import time
from pathlib import Path

import pytest

SAVE_EVERY = 5  # seconds, for a file of about 1 MB
OUTCOMES = "passed", "failed", "skipped"


def start(config, make_recorder):
    """Record a run of pytest. Under pytest-xdist, the process that hands out the tests has the Recorder, and tells its
    workers what is recorded: all of them have to collect the same tests."""
    if hasattr(config, "workerinput"):
        recorded = config.workerinput["recorded"]
    else:
        recorder = make_recorder()
        config.pluginmanager.register(recorder)
        recorded = recorder.recorded
    config.pluginmanager.register(Rest(recorded))


class Rest:
    """Leaves the tests to run that are not recorded."""

    def __init__(self, recorded):
        self.recorded = recorded

    def pytest_collection_modifyitems(self, config, items):
        left = still_to_run([item.nodeid for item in items], *self.recorded)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in left])
        items[:] = [item for item in items if item.nodeid in left]


class Recorder:
    """Counts what the tests report, and saves it.

    Args:
        path: of the record.
        machine: {name: value}: what all parts of a record have in common.
        all_files: the names of the test files that make it whole.
        goes_on: keep what path says, if it is of this machine. Otherwise it is made anew.
    """

    def __init__(self, path, machine, all_files, goes_on):
        self.path, self.machine, self.all_files = path, machine, all_files
        self.start = self.saved = time.monotonic()
        earlier = json.loads(path.read_text()) if goes_on and path.exists() else {}
        if any(earlier.get(name) != value for name, value in machine.items()):
            earlier = {}
        self.parts, self.seconds = earlier.get("parts", 0), earlier.get("duration_s", 0)
        # {file: counts} of those whose tests have all ended; of others {file: {test: [outcome, seconds]}}. A file with
        # a failure runs again.
        self.files = {file: counts for file, counts in earlier.get("files", {}).items() if not counts["failed"]}
        self.tests = {file: tests for file, tests in earlier.get("tests", {}).items()
                      if all(outcome != "failed" for outcome, _ in tests.values())}
        self.recorded = [*self.files], {file: [*tests] for file, tests in self.tests.items()}
        # {name: value} that tests handed over, and {name: the file of the test}
        kept = {**self.files, **self.tests}
        self.evidence_of = {name: file for name, file in earlier.get("evidence_of", {}).items() if file in kept}
        self.evidence = {name: earlier["evidence"][name] for name in self.evidence_of}
        self.collected = {}  # {file: the tests that this run has of it}
        self.running = {}  # {test: [outcome, seconds] until now}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["recorded"] = self.recorded

    def pytest_collection_finish(self, session):
        self.collect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.collect(ids)

    def collect(self, nodeids):
        if self.collected:  # by another worker
            return
        self.collected = by_file(nodeids)
        for file, tests in self.collected.items():
            if not tests.isdisjoint(self.tests.get(file, ())):  # all of it runs again
                del self.tests[file]

    def pytest_collectreport(self, report):
        if report.skipped:  # a whole file
            self.files[file_of(report.nodeid)] = {"passed": 0, "failed": 0, "skipped": 1, "seconds": 0}

    def pytest_runtest_logreport(self, report):
        outcome, seconds = self.running.pop(report.nodeid, ("passed", 0))
        if outcome != "failed" and report.outcome != "passed":
            outcome = report.outcome
        result = [outcome, round(seconds + report.duration, 3)]
        if report.when == "call" and report.passed:  # what the test handed over by record_property
            self.evidence.update(report.user_properties)
            self.evidence_of.update((name, file_of(report.nodeid)) for name, _ in report.user_properties)
        if report.when in ("setup", "call"):
            self.running[report.nodeid] = result
        else:  # its teardown, or its worker has crashed
            self.end(report.nodeid, result)

    def end(self, nodeid, result):
        file = file_of(nodeid)
        tests = self.tests.setdefault(file, {})
        tests[nodeid] = result
        if self.collected[file] <= tests.keys():
            self.files[file] = counts_of(self.tests.pop(file).values())
        if time.monotonic() >= self.saved + SAVE_EVERY:
            self.save()

    def save(self):
        """Whole or not at all: this may be stopped at any time."""
        self.saved = time.monotonic()
        record = {
            **self.machine,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "parts": self.parts + 1,
            "duration_s": round(self.seconds + self.saved - self.start, 1),
            "evidence": dict(sorted(self.evidence.items())),
            "evidence_of": dict(sorted(self.evidence_of.items())),
            "files": dict(sorted(self.files.items())),
            **{x: sum(counts[x] for counts in self.files.values()) for x in OUTCOMES},
            "missing": self.missing(),
        }
        if self.tests:
            record["tests"] = self.tests
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps(record, indent=2) + "\n")
        new.replace(self.path)

    def missing(self):
        return sorted(set(self.all_files) - set(self.files))

    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.files:  # none was left
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter):
        if self.collected:
            self.save()
        terminalreporter.write_line(f"GPU record: {self.path}; still to run: {' '.join(self.missing()) or 'none'}")


def still_to_run(nodeids, files, tests):
    """Those of the collected tests that are in none of the recorded files and not among the recorded tests {file: its
    tests}. If one of these is gone, or no other test is left, the file has changed, and all of it runs again."""
    left = set()
    for file, collected in by_file(nodeids).items():
        if file not in files:
            ended = set(tests.get(file, ()))
            left |= collected - ended if ended < collected else collected
    return left


def counts_of(results):
    """{outcome: how many tests, "seconds": of all workers together}."""
    outcomes, seconds = zip(*results)
    return {**{x: outcomes.count(x) for x in OUTCOMES}, "seconds": round(sum(seconds), 3)}


def by_file(nodeids):
    files = {}
    for nodeid in nodeids:
        files.setdefault(file_of(nodeid), set()).add(nodeid)
    return files


def file_of(nodeid):
    return Path(nodeid.partition("::")[0]).name
