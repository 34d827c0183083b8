# SPDX-License-Identifier: Apache-2.0
"""Programs on disk: what the code reads is compared by all that it holds, and is found wherever a name leads to it."""

import functools
import sys
import types
import warnings

import jax.numpy as jnp
import pytest

import graftax
from graftax._export.value_token import value_token

pytestmark = pytest.mark.usefixtures("cache_of_jax_is_off")

HEAD = "import abc, enum, functools, operator\nimport jax, graftax\n"
CALL = "\n@graftax.jit\ndef f(x):\n    return x * "
DECORATOR = "def around(g):\n    {}def inner(*args): return g(*args)\n    return inner\n"

# What of a module another version of it has in another way, as "@@": the source, and what f multiplies by.
READS = {
    "a default": ("def helper(k=@@): return k", "helper()"),
    "a default of a default": ("def one(k=@@): return k\ndef helper(one=one): return one()", "helper()"),
    "an enum member": ("class Mode(enum.Enum):\n    FAST = @@", "Mode.FAST.value"),
    "an enum member of parts": ("class Mode(enum.Enum):\n    FAST = 'x', @@", "Mode.FAST.value[1]"),
    "an itemgetter": ("get = operator.itemgetter(int(@@) - 1)\ndef helper(): return get([1.0, 2.0])", "helper()"),
    "a partial": ("helper = functools.partial(lambda a, b: a * b, @@)", "helper(1.0)"),
    "a closure in a closure": (
        "def make(k):\n    def a(): return k\n    def b(): return a()\n    return b\nhelper = make(@@)",
        "helper()",
    ),
    "a bound method": (
        "class Of:\n    def __init__(self, k): self.k = k\n    def out(self): return self.k\nhelper = Of(@@).out",
        "helper()",
    ),
    "a schedule": ("import optax\nhelper = optax.constant_schedule(@@)", "helper(0)"),
    "an optimizer": ("import optax\nopt = optax.sgd(@@)", "opt.update(x, opt.init(x))[0]"),
    "a property": ("class Of:\n    @property\n    def k(self): return @@\nof = Of()", "of.k"),
    "a method of a base": ("class Base:\n    def k(self): return @@\nclass Of(Base): pass\nof = Of()", "of.k()"),
    "a descriptor": (
        "class D:\n    def __init__(self, k): self.k = k\n    def __get__(self, o, t=None): return self.k\n"
        "class Of:\n    d = D(@@)\nof = Of()",
        "of.d",
    ),
    "a dataclass's default": ("import dataclasses\n@dataclasses.dataclass\nclass Of:\n    k: float = @@", "Of().k"),
    "a pytree": (
        "class Of:\n    def __init__(self, k): self.k = k\n"
        "jax.tree_util.register_pytree_node(Of, lambda a: ((a.k / @@,), None), lambda _, c: Of(c[0] * @@))\n"
        "of = Of(jax.numpy.ones(()) * @@)",
        "of.k",
    ),
    "a static method": ("class Of:\n    @staticmethod\n    def k(): return @@", "Of.k()"),
    "a class method": ("class Of:\n    @classmethod\n    def k(cls): return @@", "Of.k()"),
    "a decorated helper": (
        DECORATOR.format("@functools.wraps(g)\n    ") + "@around\ndef helper(): return @@",
        "helper()",
    ),
    "one without a name of its own": (DECORATOR.format("") + "@around\n@around\ndef helper(): return @@", "helper()"),
    "a cached helper": ("@functools.cache\ndef helper(): return @@", "helper()"),
    "a custom rule": (
        "@jax.custom_jvp\ndef helper(x): return x * @@\n@helper.defjvp\ndef rule(p, t): return helper(*p), t[0] * @@",
        "helper(1.0)",
    ),
    "subclasses": (
        "class Base: pass\nclass A(Base): k = 1.0\nif @@ == 2:\n    class B(Base): k = 1.0",
        "sum(c.k for c in Base.__subclasses__())",
    ),
    "the name of a helper": ("def helper(): pass\nhelper.__name__ = 'n' * int(@@)", "len(helper.__name__)"),
    "the name of a class": ("class Of: pass\nOf.__name__ = 'n' * int(@@)", "len(Of.__name__)"),
    "a jitted helper": ("@jax.jit\ndef helper(x): return x * @@", "helper(1.0)"),
    "a global of a jitted helper that JAX has traced": (
        "k = @@\n@jax.jit\ndef helper(x): return x * k\nhelper(1.0)",
        "helper(1.0)",
    ),
    "a global behind two jitted helpers that JAX has traced": (
        "k = [@@]\ndef inner(x): return x * k[0]\n@jax.jit\ndef one(x): return inner(x)\n"
        "@jax.jit\ndef two(x): return one(x)\ntwo(1.0)",
        "two(1.0)",
    ),
}


@pytest.fixture
def module(tmp_path):
    """Makes a module of a source; one of the same name takes the place of the last one."""

    def make(source, name="shipped_reads"):
        made = types.ModuleType(name)
        made.__file__ = str(tmp_path / f"{name}.py")
        sys.modules[name] = made
        exec(compile(source, made.__file__, "exec"), vars(made))
        return made

    yield make
    for name in ("shipped_reads", "shipped_settings"):
        sys.modules.pop(name, None)


def saved_and_loaded(first, then, path, way="file", x=1.0):
    """What a function gives after it has loaded the programs of another version, and how often it was traced."""
    cache = graftax.cache(path, min_seconds=0) if way == "disk" else None
    try:
        f = first().f
        f(jnp.asarray(x))
        cache.flush() if cache else f.save_compiled(path)
        g = then().f
        loaded = 0 if cache else g.load_compiled(path)
        found = float(g(jnp.asarray(x)))
        loaded += g.cache_info().disk
        return loaded, found, float(g.__wrapped__(jnp.asarray(x))), g.cache_info().traces
    finally:
        graftax.cache(None)


@pytest.mark.quick(4)
@pytest.mark.parametrize("way", ["file", "disk"])
@pytest.mark.parametrize(("source", "call"), READS.values(), ids=READS)
def test_a_program_is_used_while_all_that_its_code_reads_is_the_same(source, call, way, module, tmp_path):
    version = lambda k: lambda: module(HEAD + source.replace("@@", k) + CALL + call)
    loaded, found, _, traces = saved_and_loaded(version("1.0"), version("1.0"), tmp_path / "same", way)
    assert (loaded, found, traces) == (1, 1 if found > 0 else -1, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graftax.RecompileWarning)  # what has state is compared on each call
        _, found, plain, traces = saved_and_loaded(version("1.0"), version("2.0"), tmp_path / "other", way)
    assert (found, traces) == (plain, 1) and abs(found) == 2


@pytest.mark.parametrize("how", ["import shipped_settings\n    return shipped_settings.K",
                                 "from shipped_settings import K\n    return K"], ids=["module", "name"])  # fmt: skip
def test_what_a_helper_imports_is_compared(how, module, tmp_path):
    def version(k):
        def make():
            module(f"K = {k}", "shipped_settings")
            return module(f"{HEAD}def helper():\n    {how}{CALL}helper()")

        return make

    assert saved_and_loaded(version(1.0), version(1.0), tmp_path / "same")[0] == 1
    with pytest.warns(graftax.RecompileWarning, match="are not used"):
        assert saved_and_loaded(version(1.0), version(2.0), tmp_path / "other")[:2] == (0, 2.0)


@pytest.mark.parametrize(("source", "call", "what"), [
    ("@functools.singledispatch\ndef k(v): return 0.5\n@k.register\ndef _(v: int): return 1", "k(1)", "registry"),
    ("import dataclasses as d\n@d.dataclass\nclass Of:\n    k: float = d.field(default=1.0, metadata={'k': 2})",
     "d.fields(Of)[0].metadata['k']", "__dataclass_fields__"),
], ids=["singledispatch", "metadata"])  # fmt: skip
def test_what_the_standard_library_keeps_has_no_name_elsewhere(source, call, what, module, tmp_path):
    f = module(HEAD + source + CALL + call).f
    f(jnp.ones(()))
    with pytest.raises(graftax.GraftaxError, match=f"{what}.*pass it as an argument"):
        f.save_compiled(tmp_path / "x")


def test_classes_registered_with_an_abstract_one_are_compared(module, tmp_path):
    source = (
        HEAD
        + "class Base(abc.ABC): pass\nclass One: pass\n{}one = One()"
        + CALL
        + "(2 if isinstance(one, Base) else 3)"
    )
    plain, registered = (functools.partial(module, source.format(text)) for text in ("", "Base.register(One)\n"))
    with pytest.warns(graftax.RecompileWarning, match="Base is different, or has other classes registered"):
        assert saved_and_loaded(plain, registered, tmp_path / "x")[:3] == (0, 2, 2)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("def __bool__(self): return False", "(2 if one else 3)"),
        ("def __eq__(self, other): return True", "(2 if one == 3 else 3)"),
        (
            "def __getattribute__(self, name): return {'k': 5.0}.get(name) or object.__getattribute__(self, name)",
            "one.k",
        ),
    ],
    ids=["bool", "eq", "getattribute"],
)
def test_a_special_method_that_a_class_gets_is_compared(method, call, module, tmp_path):
    source = HEAD + "class One:\n    k = 2.0\n    {}\none = One()" + CALL + call
    before, after = (functools.partial(module, source.format(text)) for text in ("", method))
    assert saved_and_loaded(before, before, tmp_path / "same")[3] == 0
    with pytest.warns(graftax.RecompileWarning, match="class attribute One.__dict__ is different"):
        loaded, found, plain, _ = saved_and_loaded(before, after, tmp_path / "other")
    assert loaded == 0 and found == plain


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("before", "after", "call"),
    [
        ("Of(Base)", "Of(Rated)", "getattr(Of, 'k', 2.0)"),
        ("Of", "Of(metaclass=Meta)", "(5 if Of == 3 else 2)"),
    ],
    ids=["base", "metaclass"],
)
def test_what_a_class_is_made_of_is_compared(before, after, call, module, tmp_path):
    source = (
        "class Meta(type):\n    def __eq__(self, other): return True\n    __hash__ = type.__hash__\n"
        "class Base: pass\nclass Rated: k = 5.0\nclass {}: pass"
    )
    versions = (functools.partial(module, HEAD + source.format(text) + CALL + call) for text in (before, after))
    with pytest.warns(graftax.RecompileWarning, match="are not used"):
        assert saved_and_loaded(*versions, tmp_path / "x")[:3] == (0, 5, 5)


@pytest.mark.parametrize(
    ("one", "other"),
    [({"a": 1}, {"a": 2}), ((1, [2]), (1, [3])), (1, True), (jnp.ones(2), jnp.zeros(2)), (slice(1), slice(2))],
)
def test_values_are_told_by_what_they_hold(one, other):
    assert value_token(one) != value_token(other) and value_token(one) == value_token(one)


def test_the_order_of_a_set_counts():
    numbers = [frozenset([1, 1 + 8 * 1024]), frozenset([1 + 8 * 1024, 1])]
    assert (value_token(numbers[0]) == value_token(numbers[1])) == (list(numbers[0]) == list(numbers[1]))
