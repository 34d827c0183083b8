# SPDX-License-Identifier: Apache-2.0
"""Programs of every family that a read set has to see: plainly and compiled, on a hit, and after each change."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

# (source with a function f, steps: expressions of `call` and of the source's names; with "!" a change)
PROGRAMS = [
    (
        "def g(x): return x*K\nK=2.0\ndef f(x): return [g(v) for v in (x,x+1)]\n",
        ["call(jnp.ones(2))", "call(jnp.ones(2))", "!K=3.0", "call(jnp.ones(2))"],
    ),
    (
        "class B:\n  def go(self,x): return x\nclass C(B): pass\nc=C()\ndef f(x): return c.go(x)\n",
        [
            "call(1.0)",
            "!B.go=lambda s,x: x*2",
            "call(1.0)",
            "!C.go=lambda s,x: x*3",
            "call(1.0)",
            "!del C.go",
            "call(1.0)",
        ],
    ),
    (
        "import functools\ndef base(x,k=1): return x*k\nh=functools.partial(base,k=2)\ndef f(x): return h(x)\n",
        [
            "call(1.0)",
            "!h=functools.partial(base,k=5)",
            "call(1.0)",
            "!base.__code__=(lambda x,k=1: x+k).__code__",
            "call(1.0)",
        ],
    ),
    (
        "class Meta(type):\n"
        "  scale=2.0\n"
        "  @property\n"
        "  def s(cls): return cls.scale\n"
        "class C(metaclass=Meta): pass\n"
        "def f(x): return x*C.s\n",
        ["call(1.0)", "!Meta.scale=4.0", "call(1.0)", "!C.scale=9.0", "call(1.0)"],
    ),
    (
        "class D:\n  def __get__(self,o,c): return self.v\n  v=1.0\nclass C: d=D()\ndef f(x): return x*C.d+C().d\n",
        ["call(1.0)", "!D.v=2.0", "call(1.0)", "!C.d=7.0", "call(1.0)"],
    ),
    (
        "def deco(fn):\n"
        "  import functools\n"
        "  @functools.wraps(fn)\n"
        "  def w(*a): w.n+=1; return fn(*a)*w.n\n"
        "  w.n=0\n"
        "  return w\n"
        "@deco\n"
        "def h(x): return x*T\n"
        "T=2.0\n"
        "def f(x): return h(x)\n",
        ["call(1.0)", "call(1.0)", "h.n", "!T=3.0", "call(1.0)", "!h.n=10", "call(1.0)"],
    ),
    (
        "tbl={'a':lambda x:x,'b':lambda x:x*2}\nwhich='a'\ndef f(x): return tbl[which](x)\n",
        ["call(1.0)", "!which='b'", "call(1.0)", "!tbl['b']=lambda x:x*5", "call(1.0)"],
    ),
    (
        "import enum\n"
        "class E(enum.Enum):\n"
        "  A=1.0\n"
        "  B=2.0\n"
        "mode=E.A\n"
        "def f(x): return x*mode.value if mode is E.A else -x*mode.value\n",
        ["call(1.0)", "!mode=E.B", "call(1.0)"],
    ),
    (
        "class C:\n"
        "  __slots__=('w','n')\n"
        "  tot=0\n"
        "  def __init__(s): s.w=jnp.ones(2); s.n=0\n"
        "c=C()\n"
        "def f(c,x): c.n+=1; C.tot+=1; c.w=c.w*x; return c.w, c.n, C.tot\n",
        ["call(c,2.0)", "call(c,2.0)", "C.tot", "c.n", "c.w", "!C.tot=50", "call(c,2.0)"],
    ),
    (
        "def outer():\n"
        "  state={'k':1.0}\n"
        "  def get(): return state['k']\n"
        "  def setk(v): state['k']=v\n"
        "  return get,setk\n"
        "get,setk=outer()\n"
        "def f(x): return x*get()\n",
        ["call(1.0)", "!setk(3.0)", "call(1.0)", "!setk(jnp.ones(2))", "call(1.0)", "!setk(jnp.zeros(2))", "call(1.0)"],
    ),
    (
        "buf=[jnp.ones(2)]\ndef push(v): buf.append(v); return len(buf)\ndef f(x): return push(x)\n",
        ["call(1.0)", "call(2.0)", "buf", "!buf.clear()", "call(3.0)", "buf"],
    ),
    (
        "import collections\nq=collections.deque(maxlen=2)\ndef f(x):\n  q.append(x); return sum(q)\n",
        ["call(1.0)", "call(2.0)", "call(4.0)", "q", "!q.clear()", "call(1.0)"],
    ),
    (
        "class Acc:\n"
        "  def __init__(s): s.t=jnp.zeros(2); s.h={}\n"
        "acc=Acc()\n"
        "def add(k,v): acc.t=acc.t+v; acc.h.setdefault(k,[]).append(v)\n"
        "def f(k,x): add(k,x); return acc.t\n",
        ["call('a',1.0)", "call('a',2.0)", "call('b',2.0)", "acc.h", "!acc=Acc()", "call('a',1.0)", "acc.h"],
    ),
    (
        "cache={}\n"
        "def memo(n):\n"
        "  if n not in cache: cache[n]=jnp.arange(float(n))\n"
        "  return cache[n]\n"
        "def f(x,n): return memo(n).sum()+x\n",
        ["call(1.0,3)", "call(1.0,3)", "cache", "!cache[3]=jnp.ones(5)", "call(1.0,3)", "call(1.0,4)", "cache"],
    ),
    (
        "class Reg(dict): pass\nreg=Reg(); reg.hits=0\ndef f(x):\n  reg['x']=x; reg.hits+=1; return reg\n",
        ["call(1.0)", "call(2.0)", "reg", "reg.hits"],
    ),
    (
        "class S:\n"
        "  inst=None\n"
        "  def __new__(cls):\n"
        "    if cls.inst is None: cls.inst=super().__new__(cls); cls.inst.w=jnp.ones(2)\n"
        "    return cls.inst\n"
        "def f(x): s=S(); s.w=s.w+x; return s.w\n",
        ["call(1.0)", "call(1.0)", "S.inst.w", "!S.inst.w=jnp.zeros(2)", "call(1.0)"],
    ),
    (
        "n=0\n@graftax.jit\ndef inner(x):\n  global n\n  n+=1\n  return x*n\ndef f(x): return inner(x)+inner(x)\n",
        ["call(1.0)", "call(1.0)", "n", "!n=10", "call(1.0)"],
    ),
    (
        "class M:\n"
        "  def __init__(s): s.w=jnp.ones(2); s.k=0\n"
        "  @graftax.jit\n"
        "  def step(s,x): s.k+=1; s.w=s.w+x; return s.w\n"
        "m=M()\n"
        "def f(x): m.step(x); return m.step(x), m.k\n",
        ["call(1.0)", "call(1.0)", "m.k", "m.w"],
    ),
    (
        "s=[1.0]\ninner=graftax.jit(lambda x: x*s[0])\ndef f(x): return jax.vmap(inner)(x)\n",
        ["call(jnp.ones(3))", "!s[0]=2.0", "call(jnp.ones(3))", "!s[0]=jnp.asarray(3.0)", "call(jnp.ones(3))"],
    ),
    (
        "w={'a':jnp.ones(2)}\ndef loss(x): return (w['a']*x).sum()\ng=graftax.grad(loss)\ndef f(x): return g(x)\n",
        ["call(jnp.ones(2))", "!w['a']=jnp.full(2,3.0)", "call(jnp.ones(2))"],
    ),
    (
        "class L:\n  def __init__(s): s.w=jnp.ones(2)\nL.ID=L()\ndef f(l): return l is L.ID, l.w*2\n",
        ["call(L.ID)", "call(L())", "call(L.ID)", "!L.ID=L()", "call(L.ID)"],
    ),
    (
        "class L:\n"
        "  def __init__(s,w): s.w=w\n"
        "frozen=[]\n"
        "a,b=L(jnp.ones(2)),L(jnp.ones(2)); frozen.append(a)\n"
        "def f(ls): return [l.w if any(l is z for z in frozen) else l.w*2 for l in ls]\n",
        ["call([a,b])", "!frozen.append(b)", "call([a,b])", "!frozen[:]=[]", "call([a,b])"],
    ),
    (
        "state={}\ndef f(p,x):\n  k=id(p)\n  state[k]=state.get(k,0)+1\n  p['w']=p['w']*x\n  return state[k]\n",
        [
            "!p={'w':jnp.ones(2)}\nq={'w':jnp.ones(2)}",
            "call(p,2.0)",
            "call(q,2.0)",
            "call(p,2.0)",
            "sorted(state.values())",
            "p",
        ],
    ),
    (
        "class N:\n"
        "  def __init__(s,v): s.v=v; s.up=None; s.kids=[]\n"
        "r=N(jnp.ones(2)); k=N(jnp.ones(2)); k.up=r; r.kids.append(k)\n"
        "def f(n): n.kids.append(n.kids[0]); n.kids[0].v=n.v*3; return n.kids[-1] is n.kids[0], n.kids[0].up is n\n",
        ["call(r)", "r.kids[0] is r.kids[1]", "r.kids[0].v", "call(r)", "len(r.kids)"],
    ),
    (
        "tags={'b','a','c'}\ndef f(x): return [x*len(t) for t in tags], list(tags)\n",
        ["call(1.0)", "!tags.add('dddd')", "call(1.0)", "!tags.discard('a')", "call(1.0)"],
    ),
    (
        "import collections\n"
        "od=collections.OrderedDict(a=jnp.ones(2)); od.note=[1]\n"
        "def f(od,x): od.note.append(x); od.move_to_end('a'); od['z']=x; od.move_to_end('a'); return list(od)\n",
        ["call(od,1.0)", "od", "od.note", "call(od,2.0)", "od.note"],
    ),
    (
        "import dataclasses\n"
        "@dataclasses.dataclass\n"
        "class P:\n"
        "  w:object\n"
        "  log:list=dataclasses.field(default_factory=list)\n"
        "  n:int=0\n"
        "p=P(jnp.ones(2))\n"
        "def f(p,x): p.log.append(x); p.n+=len(p.log); p.w=dataclasses.replace(p).w*2; return p\n",
        ["call(p,1.0) is p", "p", "call(p,1.0) is p", "p"],
    ),
    (
        "class C:\n"
        "  def __init__(s): s.a=[jnp.ones(1),jnp.ones(1)]\n"
        "  def __setattr__(s,k,v): object.__setattr__(s,k,v); object.__setattr__(s,'last',k)\n"
        "c=C()\n"
        "def f(c): c.a.reverse(); c.b=c.a[0]+1; return c.last\n",
        ["call(c)", "c.b", "c.last", "call(c)"],
    ),
    (
        "class P:\n"
        "  def __init__(s): s._w=jnp.ones(2); s.reads=0\n"
        "  @property\n"
        "  def w(s): s.reads+=1; return s._w\n"
        "  @w.setter\n"
        "  def w(s,v): s._w=v; s.reads+=100\n"
        "p=P()\n"
        "def f(p): p.w=p.w*2; return p.reads\n",
        ["call(p)", "p.reads", "call(p)", "p._w"],
    ),
    (
        "d={'w':jnp.ones(2)}\n"
        "def f(d,x):\n"
        "  try:\n"
        "    d['q']=x/0 if isinstance(x,int) else x\n"
        "    raise KeyError('k')\n"
        "  except KeyError as e: d['err']=str(e)\n"
        "  finally: d['fin']=1\n"
        "  return d\n",
        ["call(d,2.0)", "d", "call(d,3.0)", "d"],
    ),
    (
        "import contextlib\n"
        "level=[0]\n"
        "@contextlib.contextmanager\n"
        "def up():\n"
        "  level[0]+=1\n"
        "  try: yield level[0]\n"
        "  finally: level[0]-=1\n"
        "def f(x):\n"
        "  with up() as a, up() as b: return x*a*b, level[0]\n",
        ["call(1.0)", "level", "!level[0]=5", "call(1.0)", "level"],
    ),
    (
        "def gen():\n"
        "  n=0\n"
        "  while True:\n"
        "    n+=1; yield n\n"
        "def f(x):\n"
        "  g=gen(); return [x*next(g) for _ in range(3)]\n",
        ["call(1.0)", "call(2.0)"],
    ),
    (
        "import functools\n@functools.lru_cache\ndef tab(n): return n*S\nS=2.0\ndef f(x,n): return x*tab(n)\n",
        ["call(1.0,3)", "call(1.0,4)", "!S=5.0", "call(1.0,3)", "call(1.0,7)"],
    ),
    (
        "class P:\n"
        "  @__import__('functools').cached_property\n"
        "  def big(s): return s.w*2\n"
        "  def __init__(s): s.w=jnp.ones(2)\n"
        "p=P()\n"
        "def f(p): return p.big\n",
        ["call(p)", "call(p)", "'big' in vars(p)", "!p.w=jnp.zeros(2)", "call(p)"],
    ),
    (
        "hooks=[]\n"
        "def reg(fn): hooks.append(fn); return fn\n"
        "@reg\n"
        "def h1(x): return x+1\n"
        "def f(x):\n"
        "  for h in hooks: x=h(x)\n"
        "  return x\n",
        ["call(1.0)", "!hooks.append(lambda x:x*10)", "call(1.0)", "!hooks.pop(0)", "call(1.0)"],
    ),
    (
        "class A:\n"
        "  def __init_subclass__(cls,**k): A.subs.append(cls)\n"
        "  subs=[]\n"
        "class B(A): k=2.0\n"
        "def f(x):\n"
        "  return [x*c.k for c in A.subs]\n",
        ["call(1.0)", "!B.k=3.0", "call(1.0)", "!\nclass C(A): k=7.0", "call(1.0)"],
    ),
    (
        "def f(x, *, opts={'k':[1]}):\n  opts['k'].append(1); return x*len(opts['k'])\n",
        ["call(1.0)", "call(1.0)", "f.__kwdefaults__['opts']['k']"],
    ),
    (
        "def h(x, acc=[]):\n  acc.append(x); return sum(acc)\ndef f(x): return h(x)\n",
        ["call(1.0)", "call(2.0)", "h.__defaults__[0]", "!h.__defaults__=([],)", "call(1.0)"],
    ),
    (
        "import types\n"
        "cfg=types.SimpleNamespace(lr=0.1,sched=[1.0,0.5])\n"
        "def lr(i): return cfg.lr*cfg.sched[i%2]\n"
        "def f(x,i): return x*lr(i)\n",
        [
            "call(1.0,0)",
            "call(1.0,1)",
            "call(1.0,2)",
            "call(1.0,3)",
            "!cfg.lr=1.0",
            "call(1.0,4)",
            "!cfg.sched[0]=jnp.ones(2)",
            "call(1.0,6)",
        ],
    ),
    (
        "class V:\n"
        "  def __init__(s,x): s.x=x\n"
        "  def __add__(s,o): return V(s.x+o.x*V.g)\n"
        "  g=1.0\n"
        "def f(a,b): return (a+b).x\n",
        [
            "call(V(1.0),V(2.0))",
            "!V.g=3.0",
            "call(V(1.0),V(2.0))",
            "!V.__add__=lambda s,o: V(s.x-o.x)",
            "call(V(1.0),V(2.0))",
        ],
    ),
    (
        "class W:\n  def __call__(s,x): s.n=getattr(s,'n',0)+1; return x*s.n\nw=W()\ndef f(x): return w(w(x))\n",
        ["call(1.0)", "call(1.0)", "w.n", "!w=W()", "call(1.0)"],
    ),
    (
        "def fact(n): return 1 if n<=1 else n*fact(n-1)\ndef f(x,n): return x*fact(n)\n",
        ["call(1.0,3)", "call(1.0,4)", "call(1.0,5)", "call(1.0,6)"],
    ),
    (
        "from string import Template\n"
        "name='a'\n"
        "params={'a':jnp.ones(2),'b':jnp.zeros(2)}\n"
        "def f(x): return params[f'{name}']+x\n",
        ["call(1.0)", "!name='b'", "call(1.0)", "!params['b']=jnp.full(2,4.0)", "call(1.0)"],
    ),
    (
        "def f(m): del m['a']; m['c']=m.pop('b'); return list(m)\n",
        [
            "!m={'a':jnp.ones(1),'b':jnp.zeros(1)}",
            "call(m)",
            "m",
            "!m={'b':jnp.ones(1),'a':jnp.zeros(1)}",
            "call(m)",
            "m",
        ],
    ),
    (
        "import copy\n"
        "class T: pass\n"
        "t=T(); t.w=jnp.ones(2); t.me=t\n"
        "def f(t): u=copy.deepcopy(t); u.w=u.w*2; return u.me is u, u.w, t.w\n",
        ["call(t)", "call(t)", "t.w"],
    ),
    (
        "def f(x):\n  class Loc:\n    k=x\n  return Loc.k*2\n",
        ["call(1.0)", "call(2.0)"],
    ),
    (
        "def f(xs): xs.sort(key=lambda p:p[0]); return [p[1]*i for i,p in enumerate(xs)]\n",
        ["!l=[(2,jnp.ones(1)),(1,jnp.zeros(1))]", "call(l)", "l", "call(l)"],
    ),
]


def shown(value):
    """What a value is, as far as a program can tell a compiled call from a plain one."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)) or type(value) in (int, float):
        return np.asarray(value, float).tolist()
    if isinstance(value, dict):
        return type(value).__name__, [(str(k), shown(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return type(value).__name__, [shown(v) for v in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    return type(value).__name__, [(k, shown(v)) for k, v in attributes.items() if v is not value]


def run(source, steps, wrap, name):
    scope = types.ModuleType(name)
    vars(scope).update(jnp=jnp, jax=jax, graftax=graftax)
    sys.modules[name] = scope
    try:
        exec(compile(source, f"<{name}>", "exec"), vars(scope))
        vars(scope)["call"] = wrap(vars(scope)["f"])
        found = []
        for step in steps:
            if step.startswith("!"):
                exec(step[1:], vars(scope))
            else:
                found.append(shown(eval(step, vars(scope))))
        return found
    finally:
        del sys.modules[name]


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
@pytest.mark.filterwarnings("ignore::graftax.RecompileWarning")
def test_a_program_does_the_same_compiled(number):
    source, steps = PROGRAMS[number]
    name = f"hostile_program_{number}"
    assert run(source, steps, graftax.jit, name) == run(source, steps, lambda f: f, name)
