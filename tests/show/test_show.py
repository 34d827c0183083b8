# SPDX-License-Identifier: Apache-2.0
"""`graftax.show`: every class as what it is made of, each shared object once, sizes, and nothing read from a device."""

from __future__ import annotations

import datetime
import functools
import io
import json
import math
import re
import textwrap
import time
import xml.etree.ElementTree
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import zoo
from sizes import sized
from watchdog import python


class Layer:
    def __init__(self, n=2):
        self.w = jnp.ones((n, n))
        self.act = jax.nn.relu
        self.name = "dense"


class Ring:
    def __init__(self):
        self.me = self
        self.w = jnp.ones(3)

    def turn(self):
        return self

    __call__ = turn


class Loud:
    def __init__(self):
        self.w = jnp.ones(3)

    def __repr__(self):
        raise AssertionError("no repr of a user's is called")

    __len__ = __bool__ = __eq__ = __hash__ = __repr__


def text(obj, **options):
    return graftax.show(obj, **options).text(width=60)


def test_plain_classes_are_shown_as_what_they_are_made_of():
    assert text({"layer": Layer(), "rate": 0.1}).splitlines() == [
        "dict of 2",
        "├─ 'layer': Layer",
        "│  ├─ w: float32[2, 2]",
        "│  ╰─ act: custom_jvp relu, name: 'dense'",
        "╰─ 'rate': 0.1",
    ]


def test_a_shared_object_stands_once_and_is_referred_to_by_number_and_path():
    layer = Layer()
    lines = text([layer, layer]).splitlines()
    assert "├─ [0]: Layer  #1" in lines
    assert "╰─ [1]: Layer  → #1 [0]" in lines


def test_a_tied_array_is_referred_to_and_counted_once():
    layer = Layer(10)
    shown = graftax.show({"a": layer, "b": {"tied": layer.w, "other": jnp.zeros(5)}})
    assert "'tied': float32[10, 10]  → #1 ['a'].w" in shown.text(width=60)
    sizes = {shown.picture.path(i): shown.picture.sizes[i] for i in range(len(shown.picture))}
    assert sizes["the root"] == (105, 420)
    assert sizes["['b']"] == (105, 420)
    assert sizes["['a']"] == (100, 400)


def test_cycles_end():
    assert text(Ring()).splitlines() == ["Ring  #1", "├─ me: Ring  → #1 the root", "╰─ w: float32[3]"]


def test_what_a_function_captures_is_shown():
    layer = Layer()

    def loss(x, scale=jnp.ones(2)):
        return layer.w @ x * scale

    lines = text({"loss": loss})
    assert "'loss': function loss" in lines
    assert "closure layer: Layer" in lines
    assert "__kwdefaults__" not in lines


def test_no_code_of_the_users_runs():
    shown = graftax.show({"loud": Loud(), "set": {1, 2}})
    assert "Loud" in shown.text()
    assert "Loud" in shown.html()


def test_no_array_is_read_unless_asked():
    with jax.transfer_guard_device_to_host("disallow"):
        shown = graftax.show({"w": jnp.arange(3.0), "key": jax.random.key(0)})
        shown.text()
        shown.html()
    assert "= [0.0, 1.0, 2.0]" in text({"w": jnp.arange(3.0)}, values=True)
    assert "= 0.5 ± " in text({"w": jnp.linspace(0.0, 1.0, 99)}, values=True)
    deleted = jnp.ones(3)
    deleted.delete()
    assert "w': float32[3] deleted" in text({"w": deleted}, values=True)


def test_where_arrays_are_is_told():
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices[:1]), ("x",))
    placed = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    assert "float32[4]" in text([placed, np.ones(2)])
    assert "NumPy float64[2]" in text([placed, np.ones(2)])


@pytest.mark.quick(0)
def test_arrays_on_several_devices_say_how_they_are_spread():
    code = """
        import jax, jax.numpy as jnp, graftax
        from jax.sharding import NamedSharding, PartitionSpec
        mesh = jax.make_mesh((2,), ("d",))
        split, whole = (jax.device_put(jnp.ones(4), NamedSharding(mesh, PartitionSpec(*axes))) for axes in (["d"], []))
        other = jax.device_put(jnp.ones(4), jax.devices()[1])
        print(graftax.show([split, whole, other]).text(width=80))
        """
    out = python(textwrap.dedent(code), XLA_FLAGS="--xla_force_host_platform_device_count=2")
    for line in ("float32[4] P('d',) on 2 devices", "float32[4] replicated on 2 devices", "float32[4] on cpu:1"):
        assert line in out, out


def test_values_are_written_and_functions_go_by_their_names():
    mesh = jax.make_mesh((1,), ("d",))
    values = {
        "enum": zoo.Color.RED,
        "shape": jax.ShapeDtypeStruct((2,), "float32"),
        "module": math,
        "class": Layer,
        "method": Ring().turn,
        "partial": functools.partial(jnp.sum, axis=0),
        "of an object": functools.partial(Ring()),
        "texts": np.array(["a"]),
        "scalar": np.float32(2),
        "spec": jax.sharding.PartitionSpec("d"),
        "mesh": mesh,
        "day": datetime.date(2020, 1, 2),
        "key": {(np.int8(3), frozenset()): 1, (1, range(2)): 2},
    }
    found = graftax.show(values).text(width=100)
    for part in (
        "'enum': Color.RED, 'shape': ShapeDtypeStruct float32[2]",
        "'module': module math",
        "'method': method Ring.turn",
        "'partial': partial of sum",
        "'of an object': partial of Ring",
        "'texts': NumPy <U1[1]",
        "'scalar': NumPy scalar float32[]",
        f"'spec': {jax.sharding.PartitionSpec('d')!r}",
        "'mesh': Mesh(",
        "'day': datetime.date(2020, 1, 2)",
        "(np.int8(3), frozenset())",
        "(1, range(0, 2))",
    ):
        assert part in found, found


def test_an_array_that_a_trace_holds_is_shown_as_traced():
    found = []
    jax.jit(lambda x: found.append(graftax.show({"x": x}).text()))(jnp.ones(2))
    assert "'x': traced float32[2]" in found[0]


@pytest.mark.parametrize("width", [24, 40, 63, 64, 80, 120, 200])
def test_no_line_is_wider_than_asked(width):
    shown = graftax.show({"a long name " * 3: Layer(100), "text": "x" * 500, "deep": [[[[[Ring()]]]]]})
    assert max(map(len, shown.text(width=width).splitlines())) <= width


def test_the_text_is_cut_where_it_would_be_long():
    model = {"layers": [{"w": jnp.ones(2), "n": i, "sub": [Layer(), Layer(3)]} for i in range(50)], "other": Layer()}
    short, whole = graftax.show(model), graftax.show(model, lines=None)
    assert len(short.text().splitlines()) <= 62
    assert "[1] … [49]  49 more, alike" in short.text()
    assert "'other': Layer" in short.text()
    assert len(whole.text().splitlines()) > 500
    assert "…" not in whole.text()
    assert "[0]" not in graftax.show(model, depth=1).text()


@pytest.mark.quick(0)
def test_depth_does_not_count():
    chain = None
    for i in range(5000):
        chain = {"next": chain, "i": i}
    assert len(graftax.show(chain).text().splitlines()) < 70
    assert len(graftax.show(chain, lines=None).text(width=100).splitlines()) >= 5000


def test_what_flax_keeps_for_itself_is_left_out():
    nnx = pytest.importorskip("flax.nnx")
    lines = text(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert "kernel: Param float32[2, 3]" in lines
    assert "_pytree__" not in lines
    assert "_pytree__" in text(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), lines=None)


def test_arrays_and_objects_are_shown_before_many_values():
    many = {f"value {i}": "x" * 20 for i in range(100)} | {"w": jnp.ones(2), "sub": [Layer()]}
    lines = text(many)
    assert "'w': float32[2]" in lines
    assert "'sub': list of 1" in lines
    assert "… " in lines


def test_a_jitted_function_without_arguments_is_shown_as_the_function():
    layer = Layer()
    lines = text(graftax.jit(lambda x: layer.w @ x))
    assert "graftax.jit of function <lambda>" in lines
    assert "closure layer: Layer" in lines


def test_marks_are_words_beside_places():
    mark = {"frozen": "a.**", "square": lambda x: getattr(x, "ndim", 0) == 2}
    shown = graftax.show({"a": Layer(), "b": Layer()}, mark=mark)
    lines = [line for line in shown.text().splitlines() if "w:" in line]
    assert "frozen  square" in lines[0]
    assert "square" in lines[1]
    assert "frozen" not in lines[1]


def test_it_is_plain_in_a_file_and_colored_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = graftax.show({"w": jnp.ones(2)})
    file, terminal = io.StringIO(), Terminal()
    shown.print(file)
    shown.print(terminal)
    assert file.getvalue() == f"{shown}\n" == shown.text() + "\n"
    assert "\x1b[" not in file.getvalue()
    if "\x1b[" in terminal.getvalue():  # rich is installed
        assert re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()) == file.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    shown.print(plain)
    assert plain.getvalue() == file.getvalue()


# ---- calls


def test_a_call_says_what_is_traced_captured_donated_forwarded_and_written_back():
    scale, state = jnp.ones(()), {"w": jnp.ones(3), "steps": 0, "table": jnp.ones(4), "old": 1}

    def step(state, x, rate):
        state["w"] = state["w"] + x * scale * rate
        state["steps"] += 1
        del state["old"]
        state["new"] = x.sum()
        return state, x, x[:2]

    jitted = graftax.jit(step, donate="x", dynamic="rate")
    shown = graftax.show(jitted, state, jnp.zeros(3), 0.5)
    lines = [re.sub(r"(?<=\S) {3,}.*", "", line) for line in shown.text(width=150).splitlines()]
    assert "5 arrays traced" in lines[0]
    assert "1 root captured" in lines[0]
    assert "1 array donated" in lines[0]
    assert "1 number symbolic" in lines[0]
    assert "1 object written back" in " ".join(shown.text(width=150).split())
    assert "├─ state: dict of 4  #1  written back  gets ['new']  loses ['old']" in lines
    assert "│  ├─ 'w': float32[3]  written back" in lines
    assert "│  ├─ 'steps': 0  symbolic  becomes 1" in lines
    assert "│  ├─ 'table': float32[4]" in lines
    assert "├─ x: float32[3]  donated" in lines
    assert "├─ rate: 0.5  traced number" in lines
    assert "├─ closure scale: float32[]  captured" in lines
    assert "   ├─ [0]: dict of 4  → #1 state" in lines
    assert "   ╰─ [2]: float32[2]" in lines
    assert state["steps"] == 0
    assert state.keys() == {"w", "steps", "table", "old"}


def test_a_call_says_what_is_forwarded():
    shown = graftax.show(graftax.jit(lambda x, y: (x, y * 2)), jnp.ones(3), jnp.ones(2))
    assert "x: float32[3]  #1  forwarded" in shown.text(width=60)
    assert "[0]: float32[3]  → #1 x" in shown.text(width=60)


def test_a_method_shows_its_object():
    class Model:
        def __init__(self):
            self.w = jnp.ones(2)

        @graftax.jit
        def step(self, x):
            self.w = self.w + x

    shown = graftax.show(Model().step, jnp.ones(2)).text(width=60)
    assert "self: Model  written back" in shown
    assert "w: float32[2]  written back" in shown


def test_arguments_without_a_jitted_function_are_refused():
    with pytest.raises(TypeError, match=r"further arguments.*list of 1"):
        graftax.show([1], 2)


# ---- differences


def test_differences_are_drawn_where_they_are():
    one = {"a": Layer(), "b": Layer(), "c": [1, 2, Ring()]}
    other = graftax.copy(one)
    other["a"].name = "other"
    other["c"][0] = 5
    one["d"], other["d"] = {"rate": 0.1, "n": 1}, {"rate": 0.2, "n": 1}
    lines = graftax.show.diff(one, other).text(width=100).splitlines()
    assert lines[0] == "3 differences between dict of 4 and dict of 4."
    assert any(line.startswith("│  ├─ name: 'dense'  ≠ str 'dense' → str 'other'") for line in lines)
    assert any("'rate': 0.1  ≠ float 0.1 → float 0.2" in line for line in lines)
    assert not any("'b'" in line for line in lines)
    assert graftax.show.diff(one, one).text().startswith("No difference")


# ---- pages and drawings


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_stands_alone_and_holds_every_place(tmp_path):
    layer = Layer()
    shown = graftax.show({"first": layer, "second": layer, "</script><b>": "</script>"})
    shown.html(tmp_path / "model.html")
    page = (tmp_path / "model.html").read_text(encoding="utf-8")
    assert page == shown.html()
    assert page.count("</script>") == 2
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", page)
    data = data_of(page)
    assert len(data["up"]) == len(data["label"]) == len(data["text"]) == 7
    assert list(data["first"]) == ["5"]
    assert "'</script>'" in data["texts"]
    assert "srcdoc=" in shown._repr_html_()


MARKUP = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "]]>&<b>",
    "half \ud800",
]


@pytest.mark.parametrize("text", MARKUP)
@pytest.mark.parametrize("place", ["value", "attribute", "key", "class", "mark"])
def test_no_name_or_text_is_markup_in_a_page_or_a_drawing(text, place, tmp_path):
    named = type(text if place == "class" and "half" not in text else "Named", (), {})()
    named.w = jnp.ones(1)
    setattr(named, text if place == "attribute" else "name", text)
    shown = graftax.show({text if place == "key" else "key": named}, mark={text if place == "mark" else "mark": "**"})
    page, plain = shown.html(tmp_path / "model.html"), graftax.show({"key": Layer()}, mark={"mark": "**"}).html()
    assert [page.count(tag) for tag in ("<script", "</script", "<!--", "<img", "<b>")] == [
        plain.count(tag) for tag in ("<script", "</script", "<!--", "<img", "<b>")
    ]
    assert any(text[:4] in held for held in [*data_of(page)["texts"], *data_of(page)["marks"].get("1", [])])
    drawing = xml.etree.ElementTree.fromstring(shown.svg(tmp_path / "model.svg"))
    assert {element.tag.rpartition("}")[2] for element in drawing.iter()} <= {
        "svg",
        "style",
        "rect",
        "path",
        "text",
        "tspan",
    }
    frame = shown._repr_html_()
    assert frame.startswith("<iframe") and frame.count("<") == 2 and frame.count('"') == 6


@pytest.mark.quick(1)
def test_a_hundred_thousand_nodes_are_shown():
    parts = sized(12_000, 1_500)
    model = [{"w": i, "parts": [object(), {"deep": [i, (i, None)]}]} for i in range(parts)]
    begin = time.perf_counter()
    shown = graftax.show(model)
    assert len(shown.picture) > 9 * parts
    assert len(shown.text().splitlines()) < 100
    assert len(data_of(shown.html())["up"]) > 5 * parts
    assert time.perf_counter() - begin < 60  # seconds, on a busy machine


def test_a_drawing_has_a_box_for_each_object_and_an_arrow_for_each_reference(tmp_path):
    layer, ring = Layer(), Ring()
    svg = graftax.show({"a": layer, "b": layer, "ring": ring}).svg(tmp_path / "m.svg")
    assert svg == (tmp_path / "m.svg").read_text(encoding="utf-8")
    assert svg.count('class="box"') == 3
    assert svg.count('class="edge') == 4
    assert svg.count('class="edge again"') == 2
    with pytest.raises(ValueError, match=r"html\(\)"):
        graftax.show([[Layer() for _ in range(12)] for _ in range(12)]).svg()


def test_text_page_and_drawing_have_the_same_marks():
    @graftax.jit(donate="state")
    def step(state, k, x, fixed):
        state["w"] = state["w"] * k + x * captured
        state["steps"] += 1
        return state, x

    captured, state = jnp.ones(()), {"w": jnp.ones(3), "steps": 0}
    for k in (1, 2):
        step(state, k, jnp.ones(3), "a")
    shown = graftax.show(step, state, 3, jnp.ones(3), "a")
    marks = ["donated", "written back", "symbolic", "becomes 3", "captured", "forwarded"]
    marked = graftax.show(state, mark={"frozen": "w"})
    for text in (shown.text(), shown.svg(), json.dumps(data_of(shown.html())["marks"])):
        assert [mark for mark in marks if mark not in text] == []
    assert '<tspan class="mark" xml:space="preserve">  frozen</tspan>' in marked.svg()


class Node:
    def __init__(self, name):
        self.name, self.next, self.w = name, None, jnp.ones(3)


def test_the_drawing_in_the_docs_is_what_its_code_makes():
    one, two, three = Node("one"), Node("two"), Node("three")
    one.next, two.next, three.next = two, three, one
    drawn = Path(__file__).parents[2] / "docs" / "pictures" / "ring.svg"
    assert graftax.show({"ring": one, "last": three}).svg() == drawn.read_text(encoding="utf-8")


def test_a_number_that_changes_is_shown_as_symbolic():
    @graftax.jit
    def step(state):
        following = [state["n"] + 1]  # in a list, so that nothing but the trace tells that it is a counter
        state["n"] = following[0]
        state["w"] = state["w"] * state["n"]

    state = {"n": 0, "w": jnp.ones(2), "rate": 0.1}
    step(state), step(state)
    for n in range(2, 4):
        text = " ".join(graftax.show(step, state).text().split())
        assert f"'n': {n} symbolic becomes {n + 1}" in text and "1 number symbolic" in text
        assert text.count("symbolic") == 2
        step(state)
