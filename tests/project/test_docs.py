# SPDX-License-Identifier: Apache-2.0
"""Every Python block of the documentation runs and gives what it shows; so does every example, and each docstring's.

Links lead somewhere.
"""

import ast
import builtins
import doctest
import importlib.util
import inspect
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

pytestmark = pytest.mark.usefixtures("cache_of_jax_is_off")

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "core/README.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
# Beside a line is what it prints, perhaps with a remark in parentheses, and beside the last line what it raises.
PRINTS = re.compile(r"^print\(.*\)  # (.*?)(?:  \(.*\))?$")
RAISES = re.compile(r"  # (\w+Error)(?:: \.\.\. (.*))?$")
LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def python_blocks(page):
    """(its line in the page, the code) of every Python block."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start(2)) + 1, textwrap.dedent(m[2])) for m in BLOCK.finditer(text)]


BLOCKS = [
    pytest.param(page, line, code, id=f"{name_of(page)}:{line}") for page in PAGES for line, code in python_blocks(page)
]


def printed(code, line):
    """What each line of a block is said to print, by its line in the page."""
    found = [(line + i, PRINTS.match(text)) for i, text in enumerate(code.splitlines())]
    return {place: m[1] for place, m in found if m}


@pytest.mark.parametrize(("page", "line", "code"), BLOCKS)
def test_a_block_of_the_docs_runs_and_gives_what_it_shows(page, line, code, monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    for library in ("flarejax", "brainstate", "haiku", "keras"):
        if f"import {library}" in code:
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    # A module of its own, where classes and functions find their globals; the page's own lines in a traceback.
    module = type(sys)(f"block_{line}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    compiled, shown = compile("\n" * (line - 1) + code, str(page), "exec"), printed(code, line)
    said = {}
    if shown:  # otherwise `print` is Python's own, of which graftax warns
        module.print = lambda *values: said.__setitem__(sys._getframe(1).f_lineno, " ".join(map(str, values)))
    raises = RAISES.search(code.splitlines()[-1])
    if raises is None:
        exec(compiled, module.__dict__)
    else:
        with pytest.raises(
            getattr(graftax, raises[1], None) or getattr(builtins, raises[1]), match=re.escape(raises[2] or "")
        ):
            exec(compiled, module.__dict__)
    for place, text in shown.items():  # `...` is any text, as in a doctest
        assert re.fullmatch(re.escape(text).replace(r"\.\.\.", ".*"), said.get(place, ""), re.DOTALL), said.get(place)
    for drawn in (tmp_path / "pictures").iterdir():
        kept = ROOT / "docs" / "pictures" / drawn.name
        assert drawn.read_text() == kept.read_text(), "draw it anew: python tools/pictures.py"


@pytest.mark.parametrize(("page", "line", "code"), BLOCKS)
def test_a_block_of_the_docs_shows_a_result(page, line, code):
    shown = printed(code, line) or RAISES.search(code.splitlines()[-1])
    assert shown or any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code)))


@pytest.mark.quick(len(BLOCKS))
@pytest.mark.parametrize(("page", "line", "code"), BLOCKS)
def test_a_block_of_the_docs_fits_beside_the_sidebars_of_the_site(page, line, code):
    assert max(map(len, code.splitlines())) <= 88


def fences(page):
    """The lines that open a block, whatever its language."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if re.match(r"\s*(```|~~~)", line)]
    return lines[::2]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_of_python_is_overlooked(page):
    of_python = [line for line in fences(page) if re.match(r"\s*(```|~~~)\s*\{?\.?py", line, re.IGNORECASE)]
    assert len(of_python) == len(python_blocks(page)), of_python


DOCUMENTED = {name: value for name, value in vars(graftax).items() if name[0] != "_" and ">>>" in (value.__doc__ or "")}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_example_in_a_docstring_gives_what_it_shows(name, tmp_path, monkeypatch):
    if name == "Checkpoints":
        pytest.importorskip("orbax.checkpoint")
    module = ModuleType(f"example_of_{name}")
    vars(module).update(graftax=graftax, jax=jax, jnp=jnp, np=np, folder=tmp_path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    test = doctest.DocTestParser().get_doctest(DOCUMENTED[name].__doc__, vars(module), name, None, None)
    # A recorded call names its code by the file of its module.
    module.__file__ = str(tmp_path / f"{module.__name__}.py")
    Path(module.__file__).write_text("".join(example.source for example in test.examples), encoding="utf-8")
    module.__spec__ = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    test.globs = vars(module)  # no copy, in which functions are not those of the module
    said = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    assert not said, "".join(said)


FUNCTIONS = [name for name in graftax.__all__ if not isinstance(getattr(graftax, name), ModuleType)]


@pytest.mark.quick(len(FUNCTIONS))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_names_each_argument_and_has_an_example(name):
    value = getattr(graftax, name)
    doc = inspect.getdoc(type(value) if name == "show" else value)  # an object that is called
    assert ">>>" in doc
    missing = [
        parameter for parameter in inspect.signature(value).parameters if not re.search(rf"\b{parameter}\b", doc)
    ]
    assert not missing


def test_the_readme_shows_what_is_new_in_two_blocks_that_fit_a_screen():
    jax_alone, ours = (code for _, code in python_blocks(ROOT / "README.md"))
    assert "graftax" not in jax_alone and "@graftax.jit" in ours
    for code, most in ((jax_alone, 12), (ours, 27)):
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= most and max(map(len, lines)) <= 72


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_the_three_answers_take_about_thirty_lines():
    answers = [code for _, code in python_blocks(ROOT / "docs" / "why.md")][:3]
    lines = [line for code in answers for line in code.splitlines() if line.strip() and "import" not in line]
    assert len(answers) == 3 and len(lines) <= 33


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
@pytest.mark.quick(0)  # the others take seconds; the pages' own code runs above
def test_an_example_runs_as_a_script(path):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it shows nothing"


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_an_example_does_nothing_when_it_is_imported(path, capsys):
    runpy.run_path(str(path), run_name="imported")
    assert capsys.readouterr().out == ""


@pytest.mark.quick(len(PAGES))
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_to_a_file_leads_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_links_lead_from_the_index_to_every_page_of_the_docs():
    index = ROOT / "docs" / "index.md"
    reached, ahead = set(), [index]
    while ahead:
        page = ahead.pop()
        if page not in reached and page.suffix == ".md" and page.is_file():
            reached.add(page)
            targets = LINK.findall(page.read_text(encoding="utf-8"))
            ahead += [(page.parent / target.partition("#")[0]).resolve() for target in targets if ":" not in target]
    assert {page.resolve() for page in index.parent.rglob("*.md")} <= reached


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_the_readme_names_its_two_commands(command):
    target = command.removeprefix("make ")
    assert re.search(rf"^{command}\b", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


# ---- what the README says of jax.jit and of the limits, and no block shows


def test_jax_jit_takes_no_string():
    with pytest.raises(TypeError, match="str"):
        jax.jit(lambda config, x: x)({"activation": "tanh"}, jnp.zeros(3))


def test_jax_jit_fails_on_a_cycle():
    ring = [jnp.ones(2)]
    ring.append(ring)
    # Where the stack ends is chance, and so is what JAX makes of it.
    with pytest.raises((RecursionError, SystemError, AttributeError)):
        jax.jit(lambda r: r[0])(ring)


def test_jax_jit_takes_no_plain_object_and_drops_changes():
    with pytest.raises(TypeError):
        jax.jit(lambda m: m)(type("Model", (), {})())
    params = {"w": jnp.ones(())}
    jax.jit(lambda p: p.update(w=p["w"] + 1))(params)
    assert params["w"] == 1


@pytest.mark.quick(0)
def test_a_number_that_keeps_changing_compiles_twice_and_anew_where_it_is_to_be_static():
    scaled = graftax.jit(lambda x, n: x * n)
    for n in range(12):
        assert scaled(jnp.ones(()), n) == n
    assert scaled.cache_info().traces == 2
    scaled = graftax.jit(lambda x, n: x * n, numbers="static")
    with pytest.warns(graftax.RecompileWarning, match=r"make it a jax\.Array"):
        for n in range(12):
            scaled(jnp.ones(()), n)
    assert scaled.cache_info().traces == 12


def test_a_number_as_an_array_compiles_once():
    scaled = graftax.jit(lambda x, n: x * n)
    for n in range(12):
        assert scaled(jnp.ones(()), jnp.asarray(n)) == n
    assert scaled.cache_info().traces == 1


def test_a_captured_array_is_no_constant():
    box = [jnp.ones(())]
    read = graftax.jit(lambda: box[0] * 2)
    assert read() == 2
    box[0] = jnp.asarray(5.0)
    assert read() == 10
