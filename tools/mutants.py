# SPDX-License-Identifier: Apache-2.0
"""Does a test fail when the code is wrong? Mutants of the files that decide what a call means, and who survives.

All mutants of the files are compiled into one core, each behind a number: `mutated(17)` is true in the run of mutant 17
alone. One process imports everything once and forks for each mutant. So a mutant costs its tests, and no build.

Run it as `make mutants`. It works in build/mutants, and writes what it found to build/records/mutants.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mutant_runs import Mutant, Runs, in_turn

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "mutants"
RECORD = ROOT / "build" / "records" / "mutants.json"

EQUAL = ROOT / "tools" / "equal_mutants.toml"

# What decides what a call means.
FILES = (
    "core/graph/static_equality.cpp",
    "core/graph/commit.cpp",
    "core/call/trace.cpp",
    "core/call/trace_diff.cpp",
    "core/capture/watchers.cpp",
    "core/call/fast_dispatch.cpp",
    "python/graftax/_jax/fast_dispatch.py",
    "python/graftax/_jax/settings.py",
)
FIRST = FILES[0]  # it defines which mutant runs
# Where tests are looked for: those that reach a mutant are run.
TESTS = (
    "capture/test_assigned.py capture/test_numbers.py capture/test_numbers_in_place.py capture/test_numbers_limits.py "
    "capture/test_numbers_of_new_structures.py capture/test_outside.py capture/test_reads.py "
    "capture/test_reads_below_jax.py capture/test_reads_of_classes.py capture/test_reads_of_functions.py "
    "capture/test_watch.py explain/test_explain.py graph/test_commit.py graph/test_failure_points.py "
    "graph/test_flatten.py graph/test_functions.py graph/test_graphdef.py graph/test_kept.py graph/test_module.py "
    "graph/test_packed.py graph/test_partition.py graph/test_path.py graph/test_recording.py graph/test_registry.py "
    "graph/test_ties.py hazards jit/test_arguments.py jit/test_async.py jit/test_cache.py jit/test_direct.py "
    "jit/test_direct_leaves.py jit/test_direct_modules.py jit/test_errors.py jit/test_ignore.py jit/test_jax_ref.py "
    "jit/test_methods.py jit/test_mutation_modes.py jit/test_one_array.py jit/test_outcome.py "
    "jit/test_requested_donation.py jit/test_self_test.py jit/test_settings.py jit/test_tracebacks.py "
    "jit/test_untied.py jit/test_weakrefs.py jit/test_writeback.py sharding/test_placing.py "
    "sharding/test_shardings.py transforms/test_cond.py transforms/test_custom_state.py transforms/test_filtered.py "
    "transforms/test_replaced.py tree"
)

MOST = 10_000  # numbers of mutants
MOST_OF_FILE = 1000  # the numbers of a file stay, whatever is changed in another
HEADER = f"""
#pragma once
#define MOST {MOST}
#define SHOWN extern "C" __attribute__((visibility("default")))
SHOWN int graftax_mutant;
extern unsigned char* graftax_reached;
static inline bool mutated(int number) {{ return graftax_reached[number] = 1, graftax_mutant == number; }}
"""
# A process that a test starts has the mutant too, and tells in the same memory what it reaches.
DEFINITIONS = """
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstdlib>
static unsigned char nowhere[MOST];
unsigned char* graftax_reached = nowhere;
SHOWN void graftax_reach(const char* path) {
  int file = path ? open(path, O_RDWR) : -1;
  void* place = file < 0 ? MAP_FAILED : mmap(nullptr, MOST, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (place != MAP_FAILED) graftax_reached = static_cast<unsigned char*>(place);
  if (file >= 0) close(file);
}
int graftax_mutant =
    (graftax_reach(std::getenv("GRAFTAX_REACHED")), std::atoi(std::getenv("GRAFTAX_MUTANT") ?: "-1"));
"""
PYTHON_HEADER = """
import mmap as _mmap
import os as _os
_reached = {}
def _mutated(n):
    path = _os.environ.get("GRAFTAX_REACHED")
    if path and path not in _reached:
        with open(path, "r+b") as file:
            _reached[path] = _mmap.mmap(file.fileno(), 0)
    if path:
        _reached[path][n] = 1
    return _os.environ.get("GRAFTAX_MUTANT") == str(n)
"""


# ── C++ ──


def closing(text: str, at: int) -> int:
    """Where the parenthesis that opens at `at` closes; -1 where it does not on this line."""
    depth = 0
    for i in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return -1


def operators(condition: str) -> Iterator[tuple[int, str, str]]:
    """(where, operator, its opposite) outside of all parentheses."""
    swaps = {
        " && ": " || ",
        " || ": " && ",
        " == ": " != ",
        " != ": " == ",
        " < ": " <= ",
        " <= ": " < ",
        " > ": " >= ",
    }
    depth = 0
    for i, char in enumerate(condition):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(char, 0)
        for operator, swapped in swaps.items():
            if depth == 0 and condition.startswith(operator, i):
                yield i, operator, swapped


def alternatives(condition: str) -> Iterator[tuple[str, str]]:
    """(what was done, the condition after it)."""
    yield "negated", f"!({condition})"
    for at, operator, swapped in operators(condition):
        text = condition[:at] + swapped + condition[at + len(operator) :]
        yield f"{operator.strip()} to {swapped.strip()}", text


_CALL = re.compile(r"^(\s+)((?:[\w:]+(?:\.|->|\[\w+\]\.?))*[\w:]+\(.*\));$")
_ASSIGN = re.compile(r"^(\s+)((?:[\w:]+(?:\.|->|\[[\w.]+\]))*\w+ (?:[|+-]?=) .*);$")
_KEYWORDS = ("return", "throw", "delete", "if", "for", "while", "static_assert", "using", "case", "else")


class Cpp:
    """A C++ file with its mutants in it."""

    def __init__(self, name: str, source: str, first: int, without: set[int]) -> None:
        self.name, self.next, self.without = name, first, without
        self.mutants: list[Mutant] = []
        depth_of_enum = False
        lines: list[str] = []
        versions: list[bool | None] = []  # of the open #if: does this Python compile what follows?
        for number, line in enumerate(source.split("\n"), 1):
            if line.startswith("#if"):
                asked = re.match(r"#if PY_VERSION_HEX (>=|<) (0x[0-9A-F]+)$", line)
                versions.append((sys.hexversion >= int(asked[2], 16)) == (asked[1] == ">=") if asked else None)
            elif line.startswith("#else"):
                versions[-1] = versions[-1] is None or not versions[-1]
            elif line.startswith("#endif"):
                versions.pop()
            depth_of_enum = (depth_of_enum or line.lstrip().startswith(("enum ", "struct ", "constexpr "))) and line[
                :1
            ] != "}"
            skip = (
                number in without
                or depth_of_enum
                or False in versions
                or line.lstrip().startswith(("#", "//", "case "))
                or '"' in line
            )
            lines.append(line if skip else self._line(number, line))
            depth_of_enum = depth_of_enum and not line.startswith(("}", "  };")) and not line.endswith(";")
        include = '#include "mutant.h"\n'
        if name == FIRST:
            include += DEFINITIONS
        self.text = include + f'#line 1 "{name}"\n' + "\n".join(lines)

    def _new(self, line: int, what: str, text: str) -> str:
        self.mutants.append(Mutant(self.next, self.name, line, what, text.strip()))
        self.next += 1
        return f"mutated({self.next - 1})"

    def _line(self, number: int, line: str) -> str:
        head = re.match(r"^(\s*(?:\} )?(?:else )?(?:if|while) )\(", line)
        if head:
            end = closing(line, head.end() - 1)
            condition = line[head.end() : end]
            if end > 0 and ";" not in condition and not re.search(r"[^=!<>]=[^=]", condition):
                rest = line[end + 1 :]
                return f"{head[1]}({self._condition(number, condition, line)}){self._rest(number, rest)}"
            return line
        answer = re.match(r"^(\s+return )(.+);$", line)
        if answer and re.search(r"^!|&&|\|\|| == | != | < |^true$|^false$", answer[2]) and "?" not in answer[2]:
            return f"{answer[1]}({self._condition(number, answer[2], line)});"
        called = _CALL.match(line) or _ASSIGN.match(line)
        if called and called[2].split("(")[0].split(" ")[0] not in _KEYWORDS and line.count("(") == line.count(")"):
            return f"{called[1]}if (!{self._new(number, 'removed', line)}) {called[2]};"
        return line

    def _condition(self, number: int, condition: str, line: str) -> str:
        out = f"({condition})"
        for what, text in alternatives(condition):
            out = f"({self._new(number, what, line)} ? static_cast<bool>({text}) : static_cast<bool>({out}))"
        return out

    def _rest(self, number: int, rest: str) -> str:
        """What stands behind a condition on the same line."""
        answer = re.match(r"^( return )(true|false);$", rest)
        if answer:
            return f"{answer[1]}({answer[2]} != {self._new(number, 'other answer', rest)});"
        if re.match(r"^ (continue|break|return);$", rest) or _CALL.match(" " + rest):
            return f" {{ if (!{self._new(number, 'removed', rest)}) {rest.strip()} }}"
        return rest


# ── Python ──


class Py(ast.NodeTransformer):
    """Turns comparisons, `and`, `or`, `not` and answers of a module into ones with mutants."""

    def __init__(self, name: str, source: str, first: int) -> None:
        self.name, self.next, self.source = name, first, source.split("\n")
        self.mutants: list[Mutant] = []
        tree = ast.parse(source)
        after = next(i for i, n in enumerate(tree.body) if not isinstance(n, ast.ImportFrom) and i > 0)
        tree.body = [self.visit(n) if isinstance(n, ast.FunctionDef | ast.ClassDef) else n for n in tree.body]
        tree.body[after:after] = ast.parse(PYTHON_HEADER).body
        self.text = ast.unparse(ast.fix_missing_locations(tree))

    def _either(self, node: ast.expr, what: str, other: ast.expr) -> ast.expr:
        text = self.source[node.lineno - 1].strip()
        self.mutants.append(Mutant(self.next, self.name, node.lineno, what, text))
        test = ast.parse(f"_mutated({self.next})", mode="eval").body
        self.next += 1
        return ast.copy_location(ast.IfExp(test, other, node), node)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        return self._either(node, "negated", ast.UnaryOp(ast.Not(), node))

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self._either(node, "and to or, or or to and", ast.BoolOp(swapped, node.values))

    def visit_If(self, node: ast.If) -> ast.stmt:
        self.generic_visit(node)
        if not isinstance(node.test, (ast.Compare, ast.IfExp)):
            node.test = self._either(node.test, "negated", ast.UnaryOp(ast.Not(), node.test))
        return node

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        self.generic_visit(node)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            node.value = self._either(node.value, "other answer", ast.Constant(not node.value.value))
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        return node


# ── the build ──


def put(path: Path, text: bytes) -> None:
    """Writes a file where it has another content: what is as it was is not compiled again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != text:
        path.write_bytes(text)


def copy_sources(files: list[str]) -> None:
    for folder in ("python", "tests"):
        shutil.rmtree(PLACE / folder, ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / folder, PLACE / folder, ignore=ignored)
    for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        put(PLACE / name, (ROOT / name).read_bytes())
    core = {str(path.relative_to(ROOT)): path.read_bytes() for path in (ROOT / "core").rglob("*") if path.is_file()}
    for name in core.keys() - set(files):
        put(PLACE / name, core[name])
    for path in (PLACE / "core").rglob("*"):
        if path.is_file() and path.name != "mutant.h" and str(path.relative_to(PLACE)) not in core:
            path.unlink()


def build(files: list[str]) -> list[Mutant]:
    """A core with the mutants of some files; a line whose mutants do not compile goes without."""
    copy_sources([*files, FIRST])
    put(PLACE / "core" / "mutant.h", HEADER.encode())
    without: dict[str, set[int]] = {name: set() for name in files}
    while True:
        mutants: list[Mutant] = []
        for i, name in enumerate(files):
            source, first = (ROOT / name).read_text(encoding="utf-8"), i * MOST_OF_FILE
            made = Cpp(name, source, first, without[name]) if name[-4:] == ".cpp" else Py(name, source, first)
            put(PLACE / name, made.text.encode())
            mutants += made.mutants
        if FIRST not in files:
            text = (ROOT / FIRST).read_text(encoding="utf-8")
            put(PLACE / FIRST, Cpp(FIRST, text, 0, set(range(MOST))).text.encode())
        errors = compiled()
        if not errors:
            return numbered(mutants)
        for name, line in errors:
            if line in without.get(name, {line}):
                sys.exit(f"{name}:{line} does not compile without mutants either")
            without[name].add(line)


def numbered(mutants: list[Mutant]) -> list[Mutant]:
    """With the number of each among those that look the same."""
    seen: Counter[tuple[str, str, str]] = Counter()
    out: list[Mutant] = []
    for mutant in mutants:
        like = mutant.file, mutant.text, mutant.what
        out.append(mutant._replace(nth=seen[like]))
        seen[like] += 1
    return out


def compiled() -> set[tuple[str, int]]:
    folder = PLACE / "build"
    if not (folder / "build.ninja").exists():
        nanobind = subprocess.run(
            [sys.executable, "-m", "nanobind", "--cmake_dir"], text=True, capture_output=True
        ).stdout
        tools = [f"-D{k}={v}" for k, v in (("Python_EXECUTABLE", sys.executable), ("nanobind_DIR", nanobind.strip()))]
        ninja = Path(sys.executable).with_name("ninja")
        tools += [
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            "-DCMAKE_BUILD_TYPE=Release",
            "-DCMAKE_UNITY_BUILD=OFF",  # a mutant that does not compile takes no other file with it
            "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
        ]
        cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
        subprocess.run([cmake, "-S", PLACE, "-B", folder, "-G", "Ninja", *tools], check=True, stdout=subprocess.DEVNULL)
    cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
    done = subprocess.run([cmake, "--build", folder, "--", "-k", "0"], text=True, capture_output=True)
    if done.returncode == 0:
        for library in folder.glob("_core*.so"):
            shutil.copy(library, PLACE / "python" / "graftax")
        return set()
    found = re.findall(r"^\S*?(core/\w+\.cpp):(\d+):\d+: error", done.stdout, re.MULTILINE)
    if not found:
        sys.exit(done.stdout[-3000:])
    return {(name, int(line)) for name, line in found}


def key_of(files: list[str]) -> str:
    """What the numbers of mutants stand for."""
    return str(zlib.crc32(b"".join((PLACE / name).read_bytes() for name in files)))


def serve(mutants: list[Mutant], given: argparse.Namespace) -> None:
    """Runs mutants, spread over the files; each result is written at once."""
    os.chdir(PLACE)
    sys.path[:0] = [str(PLACE / "python"), str(PLACE / "tests" / "support"), str(PLACE / "tests"), str(PLACE)]
    os.environ.update(PYTHONPATH=os.pathsep.join(sys.path[:3]), JAX_PLATFORMS="cpu")
    first = PLACE / "at_import"
    first.write_bytes(bytes(MOST))
    os.environ["GRAFTAX_REACHED"] = str(first)
    import graftax

    del os.environ["GRAFTAX_REACHED"]
    assert str(PLACE) in str(graftax.__file__)
    known = json.loads(RECORD.read_text())["mutants"] if RECORD.exists() else []
    done = {r["name"] for r in known if r["result"] != "survived" or not given.again}
    equal = set(equal_mutants())
    turns = [m for m in in_turn(mutants) if m.name not in equal and re.search(given.like, m.name)]
    turns = turns[given.after : given.after + given.most]
    wanted = [m for m in turns if m.name not in done]
    places = [Path("tests") / test for test in given.tests.split()]
    tests = [path for place in places for path in (sorted(place.glob("test_*.py")) if place.is_dir() else [place])]
    key = f"{'kept' if given.reached else key_of(given.files)} {given.whole}"
    words = ["--quick"] * (not given.whole)
    runs = Runs(PLACE, RECORD, mutants, key, wanted, first.read_bytes(), given.budget, given.cases, words)
    runs.children.at_once = given.at_once
    runs.run(list(map(str, tests)))


def equal_mutants() -> dict[str, str]:
    """Mutants that change nothing which a program can see, by name, and why."""
    found = tomllib.loads(EQUAL.read_text(encoding="utf-8")) if EQUAL.exists() else {}
    return {name: reason for reason, names in found.items() for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=list(FILES), help="of those that FILES names")
    parser.add_argument("--most", type=int, default=10_000, help="mutants that are run")
    parser.add_argument("--after", type=int, default=0, help="mutants of the order that are left out before these")
    parser.add_argument("--like", default="", help="a pattern of their names: file | line | what was done | which")
    parser.add_argument("--reached", action="store_true", help="what tests reach is kept from a build to the next one")
    parser.add_argument("--again", action="store_true", help="those that survived run once more")
    parser.add_argument("--whole", action="store_true", help="all cases of the tests, not a sample of them")
    parser.add_argument("--tests", default=TESTS, help="files and folders of tests")
    parser.add_argument("--budget", type=float, default=30, help="seconds that the tests of one take without it")
    parser.add_argument("--cases", type=float, default=30, help="seconds for all cases of the tests, where none fails")
    parser.add_argument("--at-once", type=int, default=2, help="processes")
    given = parser.parse_args()
    serve(build(given.files), given)


if __name__ == "__main__":
    main()
