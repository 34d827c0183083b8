# SPDX-License-Identifier: Apache-2.0
"""Does a test fail when the code is wrong? Mutants of the files that decide what a call means, and who survives.

All mutants of the files are compiled into one core, each behind a number: `mutated(17)` is true in the run of mutant 17
alone. One process imports everything once and forks for each mutant. So a mutant costs its tests, and no build.

Run it as `make mutants`. It works in build/mutants, and writes what it found to build/records/mutants.json.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "mutants"
RECORD = ROOT / "build" / "records" / "mutants.json"

# A file, and the tests that are about it: those that most likely fail come first.
FILES = {
    "core/static_key.cpp": "hazards/test_static_keys.py hazards/test_raising_keys.py test_graphdef.py "
    "hazards/test_hard_keys.py hazards/test_object_keys.py test_recording.py",
    "core/commit.cpp": "test_commit.py test_writeback.py hazards/test_mutation.py test_failure_points.py",
    "core/writeback.cpp": "test_outcome.py test_writeback.py hazards/test_mutation.py hazards/test_results.py "
    "test_mutation_modes.py",
    "core/watch.cpp": "test_reads.py hazards/test_programs_of_reads.py test_reads_of_classes.py "
    "test_reads_below_jax.py",
    "core/direct.cpp": "test_direct.py test_direct_modules.py test_donation.py test_async.py",
    "core/changes.cpp": "test_writeback.py test_outcome.py hazards/test_mutation.py hazards/test_results.py",
    "python/graftax/_direct.py": "test_direct.py test_direct_modules.py test_donation.py",
}
SECONDS = 150  # for the tests of one mutant: what runs longer hangs, and was noticed

HEADER = """
#pragma once
extern "C" int graftax_mutant;
static inline bool mutated(int number) { return graftax_mutant == number; }
"""
PYTHON_HEADER = "import os as _os\ndef _mutated(n): return _os.environ.get('GRAFTAX_MUTANT') == str(n)\n"


class Mutant(NamedTuple):
    number: int
    file: str
    line: int
    what: str
    text: str


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
        for number, line in enumerate(source.split("\n"), 1):
            depth_of_enum = (depth_of_enum or line.lstrip().startswith(("enum ", "struct ", "constexpr "))) and line[
                :1
            ] != "}"
            skip = number in without or depth_of_enum or line.lstrip().startswith(("#", "//", "case ")) or '"' in line
            lines.append(line if skip else self._line(number, line))
            depth_of_enum = depth_of_enum and not line.startswith(("}", "  };")) and not line.endswith(";")
        include = '#include "mutant.h"\n'
        if name == "core/static_key.cpp":
            include += 'extern "C" { __attribute__((visibility("default"))) int graftax_mutant; }\n'
            include += "#include <cstdlib>\n"  # a process that a test starts has the mutant too
            number = 'std::getenv("GRAFTAX_MUTANT")'
            include += f"int graftax_mutant = {number} ? std::atoi({number}) : -1;\n"
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
        tree.body = [self.visit(n) if isinstance(n, (ast.FunctionDef, ast.ClassDef)) else n for n in tree.body]
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


def copy_sources() -> None:
    for folder in ("core", "python", "tests"):
        shutil.rmtree(PLACE / folder, ignore_errors=True)
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / folder, PLACE / folder, ignore=ignored)
    for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, PLACE / name)


def build(files: list[str]) -> list[Mutant]:
    """A core with the mutants of some files; a line whose mutants do not compile goes without."""
    copy_sources()
    (PLACE / "core" / "mutant.h").write_text(HEADER)
    without: dict[str, set[int]] = {name: set() for name in files}
    while True:
        mutants: list[Mutant] = []
        for name in files:
            source = (ROOT / name).read_text(encoding="utf-8")
            made = (
                Cpp(name, source, len(mutants), without[name])
                if name[-4:] == ".cpp"
                else Py(name, source, len(mutants))
            )
            (PLACE / name).write_text(made.text, encoding="utf-8")
            mutants += made.mutants
        if "core/static_key.cpp" not in files:
            text = (ROOT / "core/static_key.cpp").read_text()
            (PLACE / "core/static_key.cpp").write_text(Cpp("core/static_key.cpp", text, 0, set(range(10_000))).text)
        errors = compiled()
        if not errors:
            return mutants
        for name, line in errors:
            if line in without.get(name, {line}):
                sys.exit(f"{name}:{line} does not compile without mutants either")
            without[name].add(line)


def compiled() -> set[tuple[str, int]]:
    folder = PLACE / "build"
    if not (folder / "build.ninja").exists():
        nanobind = subprocess.run(
            [sys.executable, "-m", "nanobind", "--cmake_dir"], text=True, capture_output=True
        ).stdout
        tools = [f"-D{k}={v}" for k, v in (("Python_EXECUTABLE", sys.executable), ("nanobind_DIR", nanobind.strip()))]
        ninja = Path(sys.executable).with_name("ninja")
        tools += [f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS=-O1"]
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


# ── the runs ──


def run(mutant: int, tests: list[str], quick: bool) -> str:
    """What became of a mutant: killed, survived, hung. The caller has imported everything and started no thread."""
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(PLACE / "last.log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ["GRAFTAX_MUTANT"] = str(mutant)
        ctypes.c_int.in_dll(ctypes.CDLL(sys.modules["graftax._core"].__file__), "graftax_mutant").value = mutant
        import pytest

        status = pytest.main(
            [
                "-x",
                "-q",
                "-p",
                "no:xdist",
                "-p",
                "no:cacheprovider",
                "-W",
                "ignore::pytest.PytestAssertRewriteWarning",
                *(["--quick"] * quick),
                *tests,
            ]
        )
        os._exit(int(status))
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "survived" if status == 0 else "killed"
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def serve(mutants: list[Mutant], wanted: int, seconds: float) -> None:
    """Runs mutants, spread over the files, until the time is up; each result is written at once."""
    os.chdir(PLACE)
    sys.path[:0] = [str(PLACE / "python"), str(PLACE / "tests"), str(PLACE)]
    os.environ.update(PYTHONPATH=os.pathsep.join(sys.path[:3]), JAX_PLATFORMS="cpu", PYTHONDONTWRITEBYTECODE="1")
    import graftax

    assert str(PLACE) in str(graftax.__file__)
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401

    RECORD.parent.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, object]] = json.loads(RECORD.read_text())["mutants"] if RECORD.exists() else []
    known = {(r["file"], r["line"], r["what"], r["text"]) for r in results}
    tests = {name: [f"tests/{test}" for test in FILES[name].split()] for name in FILES}
    for name in {m.file for m in mutants}:
        if run(-1, tests[name][:1], quick=True) != "survived":
            sys.exit(f"the tests of {name} fail without a mutant: {PLACE / 'last.log'}")
    turns = sorted(mutants, key=lambda m: zlib.crc32(repr((m.file, m.line, m.what)).encode()))
    start = time.monotonic()
    for mutant in turns:
        if len(results) >= wanted or time.monotonic() - start > seconds:
            break
        if (mutant.file, mutant.line, mutant.what, mutant.text) in known:
            continue
        result = "survived"
        for chosen in tests[mutant.file]:
            result = run(mutant.number, [chosen], quick=False)
            if result != "survived":
                break
        results.append({**mutant._asdict(), "result": result})
        RECORD.write_text(json.dumps({"made": len(mutants), "mutants": results}, indent=1))
        print(result, mutant.file, mutant.line, mutant.what, "|", mutant.text, flush=True)
    killed = sum(r["result"] != "survived" for r in results)
    print(f"{killed} of {len(results)} mutants killed; {len(mutants)} were made")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", default=list(FILES), help="of those that FILES names")
    parser.add_argument("--most", type=int, default=10_000, help="mutants that are run")
    parser.add_argument("--seconds", type=float, default=1e9)
    given = parser.parse_args()
    serve(build(given.files), given.most, given.seconds)


if __name__ == "__main__":
    main()
