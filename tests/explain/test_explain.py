# SPDX-License-Identifier: Apache-2.0
"""`graftax.explain`: every kind of cause is named, alone and beside another one, before the call and after it."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import io
import json
import operator
import os
import re
import subprocess
import sys
import warnings
from collections import OrderedDict, deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from graftax.__main__ import main

f32 = jnp.float32


class Mode(enum.Enum):
    TRAIN = 1
    TEST = 2


@dataclasses.dataclass
class Config:
    width: int = 3
    name: str = "small"


class Model:
    def __init__(self, **fields):
        self.__dict__.update(fields)


class Other(Model):
    pass


class Left:
    pass


class Right:
    pass


def scaled(k):
    return lambda x: x * k


def shifted(k):
    return lambda x: x + k


def two(shared):
    one = [jnp.ones(2)]
    return {"a": one, "b": one if shared else [jnp.ones(2)]}


def used(v):
    """JAX compiles nothing anew for an array that nobody reads."""
    return v.reshape(1, -1) if isinstance(v, jax.Array) else None


def committed(x):
    return jax.device_put(x, jax.devices()[0])


def on_mesh(x):
    mesh = jax.make_mesh((1,), ("data",))
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))


# name: (what f is given first, then, the kinds of causes, what the text says)
CAUSES = {
    "int": (lambda: 1, lambda: 2, "number", "v was 1, is 2"),
    "float": (lambda: 0.1, lambda: 0.2, "number", "v was 0.1, is 0.2"),
    "complex": (lambda: 1j, lambda: 2j, "number", "v was 1j, is 2j"),
    "bool": (lambda: True, lambda: False, "bool", "v was True, is False"),
    "text": (lambda: "train", lambda: "test", "text", "v was 'train', is 'test'"),
    "bytes": (lambda: b"a", lambda: b"b", "text", "v was b'a', is b'b'"),
    "enum": (lambda: Mode.TRAIN, lambda: Mode.TEST, "value identity", "Mode.TEST"),
    "int to float": (lambda: 1, lambda: 1.0, "number type", "v was 1 (int), is 1.0 (float)"),
    "int to bool": (lambda: 1, lambda: True, "number type", "v was 1 (int), is True (bool)"),
    "minus zero": (lambda: 0.0, lambda: -0.0, "number", "v was 0.0, is -0.0"),
    "None to text": (lambda: None, lambda: "x", "type", "v was None (NoneType), is 'x' (str)"),
    "None to array": (lambda: None, lambda: jnp.ones(2), "array", "v was None, is an array"),
    "number to array": (lambda: 3, lambda: jnp.asarray(3), "array", "v was 3, is an array"),
    "range": (lambda: range(3), lambda: range(4), "value", "v was range(0, 3), is range(0, 4)"),
    "dtype object": (lambda: np.dtype("f4"), lambda: np.dtype("i4"), "value", "int32"),
    "class": (lambda: Left, lambda: Right, "identity", "Right"),
    "sentinel": (object, object, "identity", "v was <object object>, is another <object object>"),
    "C function": (lambda: operator.add, lambda: operator.mul, "value identity", "built-in function mul"),
    "attribute": (lambda: Config(3), lambda: Config(4), "number", "v.width was 3, is 4"),
    "new attribute": (lambda: Model(a=1), lambda: Model(a=1, b=2), "added", "v.b was nothing, is 2"),
    "attribute gone": (lambda: Model(a=1, b=2), lambda: Model(a=1), "removed", "v.b was 2, is nothing"),
    "list grows": (lambda: [1], lambda: [1, jnp.ones(2)], "added", "v[1] was nothing, is an array"),
    "list shrinks": (lambda: [1, 2], lambda: [1], "removed", "v[1] was 2, is nothing"),
    "dict key": (lambda: {"a": 1}, lambda: {"a": 1, "b": 2}, "added", "v['b'] was nothing, is 2"),
    "dict order": (lambda: {"a": 1, "b": 2}, lambda: {"b": 2, "a": 1}, "order", "v was the order 'a', 'b'"),
    "container": (lambda: [1, 2], lambda: (1, 2), "type", "v was list, is tuple"),
    "dict class": (lambda: {"a": 1}, lambda: OrderedDict(a=1), "type", "v was dict, is OrderedDict"),
    "object class": (lambda: Model(a=1), lambda: Other(a=1), "type", "v was Model, is Other"),
    "set": (lambda: {1, 2}, lambda: {1, 3}, "content", "v was a set with 2, is a set with 3"),
    "maxlen": (lambda: deque([1], 3), lambda: deque([1], 4), "content", "v was maxlen=3, is maxlen=4"),
    "NumPy texts": (lambda: np.array(["a"]), lambda: np.array(["bb"]), "content", "<U2"),
    "sharing": (lambda: two(False), lambda: two(True), "sharing", "were two objects, are now one object"),
    "no sharing": (lambda: two(True), lambda: two(False), "sharing", "were one object, are now two objects"),
    "function": (lambda: scaled(1), lambda: shifted(1), "code", "is function shifted.<locals>.<lambda>"),
    "closure": (lambda: scaled(1), lambda: scaled(2), "number", "v.__closure__['k'] was 1, is 2"),
    "partial": (
        lambda: functools.partial(max, 1),
        lambda: functools.partial(max, 2),
        "number",
        "v.args[0] was 1, is 2",
    ),
    "shape": (lambda: jnp.ones(2), lambda: jnp.ones(3), "shape", "v was shape (2,), is shape (3,)"),
    "dtype": (lambda: jnp.ones(2), lambda: jnp.ones(2, int), "dtype", "v was dtype float32, is dtype int32"),
    "weak type": (lambda: jnp.asarray(1.0), lambda: jnp.asarray(1.0, f32), "weak type", "was weakly typed float32"),
    "committed": (lambda: jnp.ones(2), lambda: committed(jnp.ones(2)), "committed", "is put on its device"),
    "sharding": (lambda: committed(jnp.ones(2)), lambda: on_mesh(jnp.ones(2)), "sharding", "on a mesh {'data': 1}"),
    "packed": (lambda: graftax.pack({"n": 1}), lambda: graftax.pack({"n": 2}), "packed number", "['n'] was 1, is 2"),
    "NumPy shape": (lambda: np.ones(2), lambda: np.ones((2, 1)), "shape", "v was shape (2,), is shape (2, 1)"),
    "random key": (lambda: jax.random.key(0), lambda: jax.random.key(0, impl="rbg"), "dtype", "key<rbg>"),
}


def warned(call, times=8):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(times):
            call(i)
    return [str(w.message) for w in caught if w.category is graftax.RecompileWarning]


def causes_of(f, *args):
    """Calls f; the causes of what this compiled, which `explain` has to know beforehand."""
    before = graftax.explain(f, *args)
    assert not before.hit
    f(*args)
    after = graftax.explain(f).variants[-1]
    assert list(map(str, before.causes)) == list(map(str, after.causes))
    assert before.number == after.nearest == 1
    assert graftax.explain(f, *args).hit
    return after.causes


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named(name):
    first, then, kinds, text = CAUSES[name]
    f = graftax.jit(lambda v: used(v), numbers="static")
    f(first())
    value = then()
    (cause,) = causes_of(f, value)
    assert cause.kind in kinds.split() or cause.kind == kinds
    assert text in str(cause)
    assert cause.path.startswith("v") and cause.remedy
    assert "0x" not in str(graftax.explain(f))


@pytest.mark.parametrize(("one", "other"), list(zip(CAUSES, [*list(CAUSES)[7:], *list(CAUSES)[:7]], strict=True)))
def test_two_causes_at_once_are_both_named(one, other):
    f = graftax.jit(lambda v, w: (used(v), used(w)))
    f(CAUSES[one][0](), CAUSES[other][0]())
    found = causes_of(f, CAUSES[one][1](), CAUSES[other][1]())
    text = "\n".join(map(str, found))
    assert CAUSES[one][3] in text
    assert CAUSES[other][3].replace("v", "w", 1) in text.replace("v", "w") or CAUSES[other][3] in text
    assert {cause.path[0] for cause in found} == {"v", "w"}


# ---- what surrounds a call

rate = 3


class Counter:
    limit = 5


def helper(x):
    return x * rate * Counter.limit


def other_helper(x):
    return x - 1


@pytest.fixture
def reading(monkeypatch):
    f = graftax.jit(lambda x: helper(x))
    f(jnp.ones(2))
    return f


def last_causes(f):
    return [(cause.kind, str(cause)) for cause in graftax.explain(f).variants[-1].causes]


def test_a_global_that_a_helper_reads_is_named(reading, monkeypatch):
    monkeypatch.setitem(globals(), "rate", 4)
    reading(jnp.ones(2))
    assert last_causes(reading) == [("read", f"global {__name__}.rate was 3, is 4")]


def with_defaults(x, by="a", *, plus="a"):
    return x * len(by) + len(plus)


def test_the_defaults_of_a_helper_are_named(monkeypatch):
    f, x = graftax.jit(lambda x: with_defaults(x)), jnp.ones(2)
    f(x)
    monkeypatch.setattr(with_defaults, "__defaults__", ("bb",))
    f(x)
    assert last_causes(f) == [("read", "by, a default of with_defaults was 'a', is 'bb'")]
    monkeypatch.setattr(with_defaults, "__kwdefaults__", {"plus": "ccc"})
    f(x)
    assert last_causes(f) == [("read", "plus, a default of with_defaults was 'a', is 'ccc'")]


def test_a_class_attribute_is_named(reading, monkeypatch):
    monkeypatch.setattr(Counter, "limit", 6)
    reading(jnp.ones(2))
    assert last_causes(reading) == [("read", "class attribute Counter.limit was 5, is 6")]


def test_code_that_was_replaced_is_named(reading, monkeypatch):
    monkeypatch.setattr(helper, "__code__", other_helper.__code__)
    reading(jnp.ones(2))
    ((kind, text),) = last_causes(reading)
    assert kind in ("code", "read") and "helper" in text and "is function" in text


def test_a_global_that_becomes_a_list_is_named(reading, monkeypatch):
    monkeypatch.setitem(globals(), "rate", jnp.ones(2))
    reading(jnp.ones(2))
    assert any(f"global {__name__}.rate" in text and kind == "read" for kind, text in last_causes(reading))


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (lambda: jax.enable_x64(True), "jax_enable_x64 was False, is True"),
        (lambda: jax.default_matmul_precision("highest"), "jax_default_matmul_precision was None, is 'highest'"),
        (lambda: jax.numpy_dtype_promotion("strict"), "jax_numpy_dtype_promotion"),
        (lambda: jax.default_prng_impl("rbg"), "jax_default_prng_impl was 'threefry2x32', is 'rbg'"),
        (lambda: jax.set_mesh(jax.make_mesh((1,), ("data",))), "mesh"),
    ],
)
def test_a_setting_is_named(setting, text):
    f = graftax.jit(lambda x: x * 2)
    x = jnp.ones(2)
    f(x)
    with setting():
        f(x)
    ((kind, said),) = last_causes(f)[:1]
    assert kind == "setting" and text in said


def test_a_number_that_is_symbolic_from_now_on_is_named_and_so_are_its_guards():
    class Trainer:
        def __init__(self):
            self.step, self.rate = 0, 0.5

    def train(trainer, x):
        if trainer.step % 10 == 0:
            return x
        return x[0] if x.shape[0] * 2 == trainer.step else x * trainer.rate

    f, trainer = graftax.jit(train), Trainer()
    for trainer.step in (1, 2, 3, 10, 20, 6):
        f(trainer, jnp.ones(3))
    said = [list(map(str, variant.causes)) for variant in graftax.explain(f).variants]
    assert said[:3] == [
        ["the first call"],
        ["trainer.step was 1, is 2: from now on, one program takes any value"],
        ["trainer.step % 10 == 0 was False, is True"],
    ]
    # The last one differs in one guard from the second and from the third.
    assert said[3] in (["trainer.step % 10 == 0 was True, is False"], ["trainer.step == 6 was False, is True"])
    for trainer.step, number in ((30, 3), (7, 2), (6, 4), (1, 1)):
        assert graftax.explain(f, trainer, jnp.ones(3)).number == number, trainer.step
        assert graftax.explain(f, trainer, jnp.ones(3)).hit
    trainer.rate = 0.25
    explanation = graftax.explain(f, trainer, jnp.ones(3))
    assert not explanation.hit
    assert "trainer.rate was 0.5, is 0.25: from now on, one program takes any value" in map(str, explanation.causes)
    assert f.cache_info().traces == 4  # to ask compiles nothing


def test_a_number_that_is_symbolic_at_the_same_value_is_still_what_it_was():
    class Run:
        def __init__(self):
            self.step, self.last = 0, []

    @graftax.jit
    def f(run, x):
        run.step += 1
        run.last = [*run.last[-2:], run.step]
        return x

    run = Run()
    for _ in range(4):
        f(run, 1.0)
    causes = [str(cause) for cause in graftax.explain(f).variants[-1].causes]
    # Python 3.11 does not tell that the list has shown what may change: there each number stays a value.
    if sys.version_info >= (3, 12):
        assert "run.last[0] is still 1: from now on, one program takes any value" in causes
    assert not any("was 1, is 1" in cause for cause in causes)


def test_a_value_that_is_asked_for_again_and_again_warns():
    f = graftax.jit(lambda v: f"{v}")
    messages = warned(lambda i: f(i), 12)
    assert any("needs its value" in message for message in messages)  # as a symbol
    assert any("graftax.Dynamic" in message for message in messages)  # and when it is static again


def test_eviction_is_named():
    f = graftax.jit(lambda x, n: x * n, cache_size=1, numbers="static")
    for n in (1, 2, 1):
        f(jnp.ones(2), n)
    ((kind, text),) = last_causes(f)
    assert kind == "evicted" and "cache_size=1" in text


def test_an_object_that_counted_by_identity_and_is_gone_has_that_remedy():
    f = graftax.jit(lambda g, x: g(x))
    for _ in range(2):
        f(graftax.jit(lambda x: x * 2), jnp.ones(2))
    first = graftax.explain(f).variants[-1].causes[0]
    assert (first.kind, first.path, first.before) == ("identity", "g", "a value that is gone")
    assert "create it once" in first.remedy


@pytest.mark.quick(0)
def test_cleared_caches_are_named():
    f = graftax.jit(lambda x: x * 2)
    f(jnp.ones(2))
    jax.clear_caches()
    f(jnp.ones(2))
    assert [kind for kind, _ in last_causes(f)] == ["cleared"]
    f.clear_cache()
    f(jnp.ones(2))
    assert "clear_cache() was called" in last_causes(f)[0][1]


def test_the_first_call_says_so():
    f = graftax.jit(lambda x: x)
    assert str(graftax.explain(f)) == "<lambda>: nothing was compiled"
    assert str(graftax.explain(f, jnp.ones(2)).causes[0]) == "the first call"
    f(jnp.ones(2))
    assert last_causes(f) == [("first", "the first call")]


# ---- the nearest variant, the record, the text


def test_a_call_is_compared_with_the_variant_that_is_most_like_it():
    f = graftax.jit(lambda x, mode, n: x)
    f(jnp.ones(2), "a", 1)
    f(jnp.ones(3), "b", 2)
    f(jnp.ones(2), "a", 2)
    variant = graftax.explain(f).variants[-1]
    assert variant.nearest == 1 and list(map(str, variant.causes)) == [
        "n was 1, is 2: from now on, one program takes any value"
    ]


def test_a_variant_knows_when_where_and_how_long():
    f = graftax.jit(lambda x: jnp.tanh(x) @ x)
    f(jnp.ones((2, 2)))
    (variant,) = graftax.explain(f).variants
    assert variant.number == 1 and variant.where[0] == __file__
    assert set(variant.seconds) == {"traced", "lowered", "compiled"} and variant.all_seconds > 0


def test_hits_write_nothing():
    f = graftax.jit(lambda x: x * 2)
    for _ in range(5):
        f(jnp.ones(2))
    assert len(graftax.explain(f).variants) == 1


def test_a_function_in_the_trace_of_another_is_a_part_of_it():
    inner = graftax.filter_jit(lambda x: x * 2)
    outer = jax.jit(lambda x: inner(x) + 1)
    outer(jnp.ones(2))
    assert len(graftax.explain(inner).variants) == 1
    assert "a part of another program" in str(graftax.explain(inner))


def test_an_explanation_is_data_too():
    f = graftax.jit(lambda x, mode: x)
    f(jnp.ones(2), "a"), f(jnp.ones(3), "b")
    data = json.loads(graftax.explain(f).to_json())
    assert data["function"] == "<lambda>" and data["programs"] == 2
    causes = data["variants"][1]["causes"]
    assert [(c["kind"], c["path"], c["before"], c["now"]) for c in causes] == [
        ("text", "mode", "'a'", "'b'"),
        ("shape", "x", "(2,)", "(3,)"),
    ]
    asked = json.loads(graftax.explain(f, jnp.ones(3), "c").to_json())
    assert asked["hit"] is False and asked["nearest"] == 2


def test_asking_runs_nothing_and_changes_nothing():
    ran = []

    @graftax.jit
    def f(state, x):
        ran.append(1)
        state["n"] = x

    state = {"n": jnp.ones(2)}
    graftax.explain(f, state, jnp.ones(3))
    assert ran == [] and f.cache_info().traces == 0 and state["n"].shape == (2,)


def test_only_jitted_functions_are_explained():
    with pytest.raises(TypeError, match=r"graftax\.explain takes"):
        graftax.explain(len)


# ---- as it happens


def test_compilations_are_told_as_they_happen(tmp_path):
    said, path = io.StringIO(), tmp_path / "trace.jsonl"
    f = graftax.jit(lambda x, mode: x)
    with graftax.log_recompiles(said), graftax.log_recompiles(path):
        for mode in ("a", "b", "b"):
            f(jnp.ones(2), mode)
    f(jnp.ones(2), "c")
    assert said.getvalue().count("graftax: ") == 2 and "mode was 'a', is 'b'" in said.getvalue()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["number"] for line in lines] == [1, 2] and lines[1]["causes"][0]["kind"] == "text"


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        graftax.log_recompiles(tmp_path / "missing" / "trace.jsonl")
    graftax.jit(lambda x: x + 1)(jnp.ones(2))  # nothing logs it


def test_a_log_becomes_one_page(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    f = graftax.jit(lambda x, mode: x)
    with graftax.log_recompiles(path):
        for mode in ("a", "<b>", "c"):
            f(jnp.ones(2), mode)
    other = json.loads(path.read_text().splitlines()[0]) | {"process": -1, "function": "of another process"}
    path.write_text(path.read_text() + json.dumps(other) + "\n")
    assert main(["explain", str(path)]) == 0
    text = (tmp_path / "trace.html").read_text()
    assert capsys.readouterr().out.strip() == str(tmp_path / "trace.html")
    assert "4 programs compiled in" in text and "2 functions by 2 processes" in text
    assert "mode was &#x27;a&#x27;, is &#x27;&lt;b&gt;&#x27;" in text and "{{" not in text
    assert not re.search(r"(src|href)=", text)


def test_nothing_in_a_log_is_markup_of_its_page(tmp_path):
    path = tmp_path / "trace.jsonl"
    with graftax.log_recompiles(path):
        graftax.jit(lambda x: x)(jnp.ones(2))
    line = json.loads(path.read_text())
    bad = "<script>alert(1)</script>"
    texts = {name: bad for name in ("function", "file", "line", "number", "nearest", "process")}
    cause = {"kind": bad, "text": bad, "remedy": bad}
    path.write_text(
        json.dumps(line | texts | {"seconds": {bad: 1.0}, "causes": [cause]}) + "\n" + json.dumps(line) + "\n"
    )
    assert main(["explain", str(path)]) == 0
    text = (tmp_path / "trace.html").read_text()
    assert bad not in text and text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 9


def test_what_is_no_log_is_refused(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text("[1]\n")
    assert main(["explain", str(path)]) == 2 and "is not a log" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "none")]) == 2


@pytest.mark.quick(0)
def test_the_environment_asks_for_a_log(tmp_path):
    code = "import graftax, jax.numpy as jnp; graftax.jit(lambda x: x)(jnp.ones(2))"
    for value, said in (("1", "the first call"), (str(tmp_path / "t.jsonl"), "")):
        env = os.environ | {"GRAFTAX_EXPLAIN": value}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert said in done.stderr and (said or "graftax: " not in done.stderr)
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 1


# ---- warnings


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        (lambda i: jnp.ones(i), "pad to a few"),
        (lambda i: jnp.ones(1, ["f4", "i4", "i2", "i1", "u1", "u2", "u4", "bool"][i]), "Convert it once"),
        (lambda i: "abcdefgh"[i], "cannot be traced"),
        (lambda i: i, "dynamic='v'"),
        (lambda i: scaled(i), "dynamic="),
    ],
)
def test_the_third_compilation_for_one_cause_warns_once_with_the_remedy(values, remedy):
    f = graftax.jit(lambda v: None, numbers="static")
    assert warned(lambda i: f(values(i)), 3) == []
    (message,) = warned(lambda i: f(values(7 - i)), 5)
    assert remedy in message and "v" in message


def test_calls_in_between_do_not_matter_where_one_value_changes():
    f = graftax.jit(lambda v: None)
    (message,) = warned(lambda i: f(jnp.ones(i // 3)), 24)
    assert "v keeps changing (last values: (1,), (2,), (3,))" in message


@pytest.mark.quick(0)
def test_what_is_dropped_again_and_again_is_told_as_that():
    f = graftax.jit(lambda x: x * 2)
    with pytest.warns(graftax.RecompileWarning, match=r"4 times: it was compiled before, and JAX has dropped it since"):
        for _ in range(4):
            f(jnp.ones(2))
            jax.clear_caches()


def test_each_cause_is_warned_of_once():
    f = graftax.jit(lambda v, w: None)
    first = warned(lambda i: f(jnp.ones(i), "a"))
    second = warned(lambda i: f(jnp.ones(0), "abcdefgh"[i]))
    assert len(first) == len(second) == 1 and "w keeps changing" in second[0]
    assert warned(lambda i: f(copy.copy(jnp.ones(9 + i)), "z")) == []
