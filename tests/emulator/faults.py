"""The statements of csrc's kernels that synchronize, for tests that leave out one at a time.

They are found by the names of the primitives. Such a call is a statement of its own at the start of a line, or after an
`if (...)` or `for (...)` there. If the emulator cannot observe that one is missing, its line says so:
`// unobserved by the emulator: why`. A named barrier that one side leaves out is a deadlock. That shows nothing of what
the barrier protects.
"""
import re
from pathlib import Path
from typing import NamedTuple

CSRC = Path(__file__).parents[2] / "csrc"
# Sources that define the primitives and call none of them.
NO_KERNELS = (*(f"ptx/{name}.cuh" for name in ("sm80", "sm90", "memory", "cluster", "dmma")), "common/launch.h",
              "host/cuda.h")

PRIMITIVES = (
    "__syncthreads", "__syncwarp", "barrier_sync", r"cluster_sync\w*", "cluster_wait",  # threads with threads
    "producer_acquire", "consumer_wait", r"consumer_release\w*", "mbarrier_wait",  # the ends of a ring of buffers
    "cp_async_wait", "__pipeline_wait_prior", r"tma_store_\w*wait\w*",  # threads with copies
    "fence_mbarrier_init", "fence_proxy_async",  # what other units see
    "warpgroup_arrive", "warpgroup_wait",  # threads with products
    "wait_for_previous_kernel",  # kernels with kernels
)
CALL = re.compile(rf"(?:[\w\].]+(?:\[[^;()]*?\])?\.)?\b({'|'.join(PRIMITIVES)})(?:<[^;()]*?>)?\(")
BEFORE = re.compile(r" *(?:(?:if|for) \(.*\) )?")  # what may stand before it on its line


class Statement(NamedTuple):
    file: str
    name: str
    line: int
    begin: int  # of the call in the file's text
    is_observed: bool  # by the emulator

    def __str__(self):
        return f"{self.file}:{self.line}-{self.name}"


def code_only(text):
    """The text with blanks for comments and preprocessor lines, so that places stay what they are."""
    return re.sub(r"//.*|^ *#(?:.*\\\n)*.*", lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.MULTILINE)


def closing(text, at):
    """The place after the parenthesis that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError("a parenthesis is not closed")


def calls(file, text):
    """(Statement, is_alone) of every call of a primitive in a file's text; is_alone: it is a statement of its own."""
    code = code_only(text)
    for match in CALL.finditer(code):
        begin_of_line = code.rfind("\n", 0, match.start()) + 1
        before, end = code[begin_of_line:match.start()], closing(code, match.end() - 1)
        if "__device__" in before:  # its definition
            continue
        is_alone = bool(BEFORE.fullmatch(before)) and code[end:end + 1] == ";"
        line = text.count("\n", 0, match.start()) + 1
        is_observed = "// unobserved by the emulator: " not in text[end:text.find("\n", end)]
        yield Statement(file, match[1], line, match.start(), is_observed), is_alone


def kernel_files(csrc=CSRC):
    return [file for file in sorted(csrc.rglob("*"))
            if file.suffix in (".cu", ".cuh", ".h") and name_of(file, csrc) not in NO_KERNELS]


def name_of(file, csrc):
    """The file's path in csrc, by which the others include it."""
    return file.relative_to(csrc).as_posix()


def statements(csrc=CSRC):
    """Statements of all files of csrc."""
    return [call for path in kernel_files(csrc) for call, is_alone in calls(name_of(path, csrc), path.read_text())
            if is_alone]


def make_switchable(csrc):
    """Lets emulator::is_left_out(n) decide of each statement in a copy of csrc, the n-th of statements()."""
    found = statements(csrc)
    for path in kernel_files(csrc):
        text = path.read_text()
        for n, statement in reversed(list(enumerate(found))):
            if statement.file == name_of(path, csrc):
                text = f"{text[:statement.begin]}if (emulator::is_left_out({n})) {{}} else {text[statement.begin:]}"
        path.write_text(text)
