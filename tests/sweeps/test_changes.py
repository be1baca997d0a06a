"""Changes of a function between two runs on one store: none is silent, and no other is told.

Each row is the text of a module in which «before|after» stands for what changes.
"""

from __future__ import annotations

import json
import os
import re
import sys
import types
import warnings
from pathlib import Path

import pytest

from meanfield.results import Variable
from meanfield.results.store import description_at, open_store
from meanfield.sweeps import Task
from meanfield.sweeps.plan import make_plan

F = "\ndef f(x): return {'y': %s}\n"
DATACLASS = "from dataclasses import dataclass, field\nfrom typing import ClassVar\n"
ARRAYS = "import numpy as np\n"
TORCH = "import torch\n"
ATTENTION = (
    "import torch\nfrom meanfield import AttentionParameters, SelfAttention\n"
    "from meanfield.attention import kernels, normalizations\n"
    "from meanfield.layers import Chain, MLP\n"
    "def params(a): return AttentionParameters.from_bilinear([[a]], [[1.0]])\n"
    "def f(x, s): return {'y': x}\n"
)
WITH_SETTING = "\ndef f(x, s): return {'y': x}\n"
NET = (
    TORCH + "class Config:\n    def __init__(self, k): self.k = k\n"
    "    def to_dict(self): return {'k': self.k, 'transformers_version': id(self)}\n"
    "class Net(torch.nn.Module):\n    def __init__(self, k):\n"
    "        super().__init__()\n        self.k = k\n"
    "class Buffered(torch.nn.Module):\n    def __init__(self, k):\n"
    "        super().__init__()\n"
    "        self.register_buffer('k', torch.tensor(k), persistent=False)\n"
    "torch.manual_seed(0)\n" + WITH_SETTING
)
MAKE = "def make(k):\n    def inner(x): return k * x\n    return inner\n" + WITH_SETTING
AGAIN = MAKE.replace("k * x", "inner(x - 1) if x else k")
MUTUAL = (
    "def make(k):\n    def even(n): return odd(n - 1)\n    def odd(n): return k or even(n - 1)\n"
    "    return even" + WITH_SETTING
)
CHAIN = (  # of two functions the second calls the first or itself
    "def inner_of(it):\n    def inner(x): return it\n    return inner\n"
    "def make(k):\n    first, second = inner_of(0), inner_of(0)\n"
    "    first.__closure__[0].cell_contents = second\n"
    "    second.__closure__[0].cell_contents = (first, second)[k]\n    return first" + WITH_SETTING
)
LOCAL = (
    "from dataclasses import dataclass\nfrom functools import cached_property\n"
    "def make(k):\n    class A:\n        identified_by = ()\n        {}\n    return A"
    + WITH_SETTING
).replace("{'y': x}", "{{'y': x}}") + "FIXED = {{'s': make(«2|3»){}}}"

TURN = "import os, argparse\nTURN = os.stat(__file__).st_mtime\n"  # another in each run

# What the warning names; what comes with it by what is reached is not listed.
WARNED = [
    ("f", F % "«2|3» * x"),
    ("K", "K = «2|3»" + F % "K * x"),
    ("K", "K: int = «2|3»" + F % "K * x"),
    ("K", "K = 1\nK += «2|3»" + F % "K * x"),
    ("K", "K, L = «2|3», 1" + F % "K * x"),
    ("K", "if «True|False»:\n    K = 1\nelse:\n    K = 2" + F % "K * x"),
    ("K", "for K in («2|3»,):\n    pass" + F % "K * x"),
    ("K", "try:\n    K = «2|3»\nfinally:\n    pass" + F % "K * x"),
    ("K", "K = {'a': 1}\nK['a'] = «2|3»" + F % "K['a'] * x"),
    ("TURN", TURN + F % "TURN * x"),
    ("K", TURN + "for K in (TURN,):\n    pass" + F % "K * x"),
    ("K", TURN + "K = {'a': [TURN]}" + F % "K['a'][0] * x"),
    ("K", TURN + "K = argparse.Namespace(a=TURN)" + F % "K.a * x"),
    ("K", TURN + ARRAYS + "K = np.full(3, TURN)" + F % "K[0] * x"),
    ("net", TURN + TORCH + "torch.manual_seed(int(TURN))\nnet = torch.nn.Linear(1, 1)"
            + F % "float(net(torch.tensor([x])))"),
    ("K", TURN + "K = [TURN]\ndef other():\n    K = []\n    K.append(1)" + F % "K[0] * x"),
    ("K", TURN + "K = {1: TURN}\ndef other(K):\n    K[1] = 2" + F % "K[1] * x"),
    ("np", "import numpy as np\nnp.mine = «2|3»" + F % "np.mine * x"),
    ("K", "(K := «2|3»)" + F % "K * x"),
    ("K", "K = {'a': lambda x: «2|3» * x}" + F % "K['a'](x)"),
    ("K", "K = lambda x: «2|3» * x" + F % "K(x)"),
    ("L", "L = «2|3»\nK = L" + F % "K * x"),
    ("g", "def g(x): return «2|3» * x" + F % "g(x)"),
    ("h", "def h(x): return «2|3» * x\ndef g(x): return h(x)" + F % "g(x)"),
    ("g", "def g(x): return «2|3» * x\nK = {'a': g}" + F % "K['a'](x)"),
    ("g", "def g(x): return «2|3» * x\nK = (g,)" + F % "K[0](x)"),
    ("g", "def g(x, k=«2|3»): return k * x" + F % "g(x)"),
    ("g", "from functools import lru_cache\n@lru_cache\ndef g(x): return «2|3» * x" + F % "g(x)"),
    ("h", "from functools import partial\ndef h(k, x): return «2|3» * x\ng = partial(h, 1)"
          + F % "g(x)"),
    ("g", "from functools import partial\ndef h(k, x): return k * x\ng = partial(h, «2|3»)"
          + F % "g(x)"),
    ("ACT", "import torch\nACT = torch.«exp|sin»" + F % "float(ACT(torch.tensor(x)))"),
    ("g", "from math import «sin|cos» as g" + F % "g(x)"),
    ("np", "import «numpy|math» as np" + F % "np.sin(x)"),
    ("sin", "from «math|cmath» import *" + F % "sin(x)"),
    ("g", "try:\n    from math import «sin|cos» as g\nexcept ImportError:\n    g = abs"
          + F % "g(x)"),
    ("net", "import torch\nnet = torch.nn.Linear(1, 1, bias=«True|False»)"
            + F % "float(net(torch.tensor([x])))"),
    ("C", "class C:\n    scale = «2|3»" + F % "C.scale * x"),
    ("C", "class C:\n    def g(self, x): return «2|3» * x" + F % "C().g(x)"),
    ("C", "class C:\n    __call__ = lambda self, x: «2|3» * x" + F % "C()(x)"),
    ("B", "class B:\n    k = «2|3»\nclass C(B): pass" + F % "C.k * x"),
    ("C", "class A:\n    k = 2\nclass B:\n    k = 3\nclass C(«A|B»): pass" + F % "C.k * x"),
    ("C", "class C: pass\nC.k = «2|3»" + F % "C.k * x"),
    ("M", "class M(type):\n    k = «2|3»\nclass C(metaclass=M): pass" + F % "C.k * x"),
    ("S", DATACLASS + "@dataclass\nclass S:\n    scale: float = «2.0|3.0»" + F % "S().scale * x"),
    ("S", DATACLASS + "@dataclass\nclass S:\n    k: int = field(default_factory=lambda: «2|3»)"
          + F % "S().k * x"),
    ("E", "from enum import Enum\nclass E(Enum):\n    a = «2|3»" + F % "E.a.value * x"),
    ("P", "from typing import NamedTuple\nclass P(NamedTuple):\n    k: int = «2|3»" + F % "P().k"),
    ("Net", TORCH + "class Net(torch.nn.Module):\n    def forward(self, x): return «2|3» * x"
            + F % "Net()(x)"),
    ("Alias", "class C:\n    k = 2\nclass D:\n    k = 3\nAlias = «C|D»" + F % "Alias.k * x"),
    ("deco", "from functools import wraps\ndef deco(fn):\n    @wraps(fn)\n"
             "    def wrapper(x): return {'y': «2|3» * fn(x)['y']}\n    return wrapper\n@deco"
             + F % "x"),
    ("f", "from functools import wraps\ndef deco(k):\n    def deco(fn):\n        @wraps(fn)\n"
          "        def wrapper(x): return {'y': k * fn(x)['y']}\n        return wrapper\n"
          "    return deco\n@deco(«2|3»)" + F % "x"),
    ("f", "def a(fn): return fn\ndef b(fn): return lambda x: fn(2 * x)\n@«a|b»"
          + F % "x" + "TASK = f"),
    ("inner", "def g(fn):\n    def inner(x): return {'y': «2|3» * fn(x)['y']}\n    return inner"
          + F % "x" + "TASK = g(f)"),
    ("f", "def g(fn):\n    def inner(x): return fn(x)\n    return inner"
          + F % "«2|3» * x" + "TASK = g(f)"),
    ("<lambda>", "TASK = lambda x: {'y': «2|3» * x}"),
    ("K", "K = «2|3»\nTASK = lambda x: {'y': K * x}"),
    ("f", "from functools import partial\ndef f(k, x): return {'y': «2|3» * x}\n"
          "TASK = partial(f, 1)"),
    ("closure table", "def make(table): return lambda x: {'y': table['k'] * x}\n"
                      "TASK = make({'k': «2|3»})"),
    ("A", DATACLASS + "@dataclass\nclass A:\n    k: int\n    def g(self): return «2|3»\n"
          "    def f(self, x): return {'y': self.g()}\nTASK = A(1).f"),
    ("A", DATACLASS + "@dataclass(frozen=True)\nclass A:\n    k: int\n    C: ClassVar[int] = «2|3»"
          "\n    def f(self, x): return {'y': self.C}\nTASK = A(1).f"),
    ("B", DATACLASS + "class B:\n    def g(self): return «2|3»\n@dataclass\nclass A(B):\n"
          "    k: int\n    def f(self, x): return {'y': self.g()}\nTASK = A(1).f"),
    ("A", "class A:\n    K = «2|3»\n    @classmethod\n    def f(cls, x): return {'y': cls.K}\n"
          "TASK = A.f"),
    ("A", "class A:\n    K = «2|3»\n    @staticmethod\n    def f(x): return {'y': A.K}\n"
          "TASK = A.f"),
    ("S", DATACLASS + "@dataclass\nclass S:\n    k: int\n    def g(self): return «2|3»"
          + WITH_SETTING + "FIXED = {'s': S(1)}"),
    ("S", DATACLASS + "@dataclass\nclass S:\n    k: int\n    C: ClassVar[int] = «2|3»"
          + WITH_SETTING + "FIXED = {'s': S(1)}"),
    ("g", "def g(x): return «2|3» * x" + WITH_SETTING + "FIXED = {'s': g}"),
    ("g", "def g(x): return «2|3» * x" + WITH_SETTING + "FIXED = {'s': {'act': [g]}}"),
    ("C", "class C:\n    def g(self): return «2|3»" + WITH_SETTING + "FIXED = {'s': C()}"),
    ("E", "from enum import Enum\nclass E(Enum):\n    a = «2|3»" + WITH_SETTING
          + "FIXED = {'s': E.a}"),
    ("<lambda>", WITH_SETTING + "FIXED = {'s': [\n    lambda x: x,\n    lambda x: «2|3» * x,\n]}"),
    ("Net", TORCH + "class Net(torch.nn.Module):\n    def forward(self, x): return «2|3» * x"
            + WITH_SETTING + "FIXED = {'s': torch.nn.Sequential(Net())}"),
    ("Top", "class Top:\n    k = «2|3»\ndef make():\n    class A(Top): pass\n    return A"
            + WITH_SETTING + "FIXED = {'s': make()}"),
    ("h", TURN + "def a(x): return 2 * x\ndef b(x): return 3 * x\nh = (a, b)[int(TURN)]"
          + F % "h(x)"),
    ("h", TURN + "import math\nh = (math.sin, math.cos)[int(TURN)]" + F % "h(x)"),
    ("h", TURN + "import importlib\nh = importlib.import_module(('math', 'cmath')[int(TURN)])"
          + F % "h.sin(x)"),
    ("h", TURN + "def make(k):\n    def h(x): return k * x\n    return h\nh = make(TURN)"
          + F % "h(x)"),
    ("h", TURN + "def make(k):\n    def h(x): return k(x)\n    return h\n"
          "h = make((abs, min)[int(TURN)])" + F % "h(x)"),
    ("h", TURN + "def h(x, k=TURN): return k * x" + F % "h(x)"),
    ("h", TURN + "def h(x, *, k=TURN): return k * x" + F % "h(x)"),
    ("h", TURN + "h = lambda x, k=TURN: k * x" + F % "h(x)"),
    ("h", TURN + "h = (lambda x: 2 * x) if TURN else (lambda x: 3 * x)" + F % "h(x)"),
    ("C", TURN + "class C:\n    k = TURN" + F % "C.k * x"),
    ("C", TURN + "class C:\n    k: float = TURN" + F % "C.k * x"),
    ("<lambda>", TURN + WITH_SETTING
     + "FIXED = {'s': (lambda x: 2 * x) if TURN else (lambda x: 3 * x)}"),
    ("<lambda>", ATTENTION + "row = normalizations.RowWise(lambda s: s.softmax(«-1|-2»))\n"
     "FIXED = {'s': SelfAttention(params(1.0), normalization=row)}"),
]  # fmt: skip

REFUSED = [
    ("default k", "def f(x, k=«2|3»): return {'y': k * x}"),
    ("default act", "import math\ndef f(x, act=math.«exp|sin»): return {'y': act(x)}"),
    ("default k", "def f(x, k=«None|0»): return {'y': k}"),
    ("argument 0", "from functools import partial\ndef h(k, x): return {'y': k * x}\n"
                   "TASK = partial(h, «2|3»)"),
    ("argument act", "from functools import partial\ndef a(x): return x\ndef b(x): return -x\n"
                     "def h(x, act): return {'y': act(x)}\nTASK = partial(h, act=«a|b»)"),
    ("argument 1", "from functools import partial\ndef h(k, l=2, x=1): return {'y': l}\n"
                   "TASK = partial(h, 1«|, 3»)"),
    ("closure k", "def make(k): return lambda x: {'y': k * x}\nTASK = make(«2|3»)"),
    ("closure k", ARRAYS + "def make(k): return lambda x: {'y': k[0]}\n"
                  "TASK = make(np.full(99, «2.0|3.0»))"),
    ("closure k", TORCH + "def make(k): return lambda x: {'y': (k, x)[1]}\n"
                  "torch.manual_seed(«0|1»)\nTASK = make(torch.nn.Linear(2, 2))"),
    ("default k", "def make(k):\n    def inner(x, k=k): return {'y': k * x}\n    return inner\n"
                  "TASK = make(«2|3»)"),
    ("self", DATACLASS + "@dataclass\nclass A:\n    k: int\n"
             "    def f(self, x): return {'y': self.k}\nTASK = A(«2|3»).f"),
    ("self", "class A:\n    identified_by = ('k',)\n    def __init__(self, k): self.k = k\n"
             "    def __call__(self, x): return {'y': self.k}\nTASK = A(«2|3»)"),
    ("self", "class A:\n    @classmethod\n    def f(cls, x): return {'y': x}\nclass B(A): pass\n"
             "TASK = «A|B».f"),
    *(("fixed.s", f"from {module} import *\n{WITH_SETTING}FIXED = {{'s': {values}}}")
      for module, values in [
          ("math", "«2|3»"), ("math", "«1|True»"), ("math", "«'1'|1»"),
          ("math", "«None|0»"), ("math", "«2**60 + 1|2**60 + 2»"), ("math", "«1.0|1.0000001»"),
          ("math", "«[1, 2]|[2, 1]»"), ("math", "{'a': {'b': «2|3»}}"),
          ("math", "«{1: 5}|{'1': 5}»"), ("math", "{«1|2»: 5}"), ("math", "{1, «2|3»}"),
          ("math", "1 + «2|3»j"), ("math", "b'«a|b»'"), ("math", "range(«2|3»)"),
          ("math", "«sin|cos»"), ("math", "[sin, «exp|cos»]"),
          ("pathlib", "Path('«a|b»')"), ("fractions", "Fraction(1, «2|3»)"),
          ("functools", "partial(pow, «2|3»)"),
          ("collections", "defaultdict(«int|float»)"),
          ("enum", "Enum('E', 'a b').«a|b»"),
          ("numpy", "arange(3) * «2|3»"), ("numpy", "zeros((«2, 3|3, 2»))"),
          ("numpy", "zeros(3, «float|int»)"), ("numpy", "dtype('«f4|f8»')"),
          ("numpy", "ma.array([1.0, 2.0], mask=[0, «0|1»])"),
          ("numpy", "«float32|float64»"),
          ("torch", "eye(2) * «2|3»"), ("torch", "eye(2).«half|bfloat16»()"),
          ("torch", "tensor(«2|3»).bfloat16()"), ("torch", "«float32|float64»"),
          ("torch.nn", "ReLU().«train|eval»()"),
          ("torch.nn", "Linear(«1|2», 1)"),
          ("math", "{1: «2|3»}.get"), ("fractions", "Fraction(1, «2|3»).limit_denominator"),
      ]),
    *(("fixed.s", NET + f"FIXED = {{'s': {net}}}") for net in [
        "Net(«2|3»)", "Net(torch.«relu|tanh»)", "Net(Config(«2|3»))",
        "torch.nn.Sequential(Net(«2|3»))", "Buffered(«2.0|3.0»)",
        "torch.nn.TransformerEncoderLayer(2, «1|2», 2, dropout=0.0)",
    ]),
    ("fixed.s", NET + "net = torch.nn.Sequential(torch.nn.Dropout()).eval()\n"
                "net[0].train(«False|True»)\nFIXED = {'s': net}"),
    ("fixed.s", "class A:\n    @classmethod\n    def f(cls): pass\n    @classmethod\n"
                "    def g(cls): pass" + WITH_SETTING + "FIXED = {'s': A.«f|g»}"),
    ("fixed.s", DATACLASS + "@dataclass\nclass A:\n    k: int\n    def f(self): pass"
                + WITH_SETTING + "FIXED = {'s': A(«2|3»).f}"),
    ("s: 2: closure k", MAKE + "FIXED = {'s': [make(1), make(«2|3»)]}"),
    ("s: 2: closure k", MAKE + "FIXED = {'s': {'a': make(1), 'b': make(«2|3»)}}"),
    ("inner, in turn", MAKE + "a, b = make(1), make(2)\nFIXED = {'s': [a, b, «a|b»]}"),
    ("inner, in turn", MAKE + "a, b = make(1), make(2)\nFIXED = {'s': [a, «b, a|a, b»]}"),
    ("s: closure k", AGAIN + "FIXED = {'s': make(«2|3»)}"),
    ("s: closure odd: closure k", MUTUAL + "FIXED = {'s': make(«2|3»)}"),
    ("closure it: inner_of.<locals>.inner, in turn", CHAIN + "FIXED = {'s': make(«0|1»)}"),
    ("s: closure k", "def make(k):\n    def inner(x):\n        def g():\n            k = 1\n"
                     "            return lambda: k\n        return k * x\n    return inner"
                     + WITH_SETTING + "FIXED = {'s': make(«2|3»)}"),
    *(("s: g: closure k", LOCAL.format(f"{wrap}\n        def g(self): return k", now))
      for now in ("", "()") for wrap in ("", "@property", "@staticmethod", "@cached_property")),
    ("s: g: default k", LOCAL.format("def g(self, k=k): return k", "")),
    ("s: attribute a", LOCAL.format("a = k", "")),
    ("s: attribute a", LOCAL.format("a = k", "()").replace("class A", "@dataclass\n    class A")),
    ("s: 2: default k", WITH_SETTING + "FIXED = {'s': [lambda k=1: k, lambda k=«2|3»: k]}"),
    ("argument s: 2: closure k", MAKE + "from functools import partial\n"
                                 "TASK = partial(f, s=[make(1), make(«2|3»)])"),
    *(("fixed.s", f"{ATTENTION}FIXED = {{'s': {value}}}") for value in [
        "SelfAttention(params(«1.0|2.0»))", "SelfAttention(params(1.0), causal=«False|True»)",
        "SelfAttention(params(1.0), kernel=kernels.«dot_product|l2»)",
        "SelfAttention(params(1.0), kernel=kernels.soft_cap(«2.0|3.0»))",
        "SelfAttention(params(1.0), normalization=normalizations.«softmax|sigmoid»)",
        "Chain([SelfAttention(params(1.0)), SelfAttention(params(«1.0|2.0»))])",
    ]),
    ("fixed.s", TORCH + "from meanfield.pretrained.transformer import Transformer\n"
                "torch.manual_seed(«0|1»)\nmodel = torch.nn.Linear(2, 2)" + WITH_SETTING
                + "from types import SimpleNamespace as N\n"
                "like = N(model_type='m', blocks=lambda model: [], sizes=lambda model: (1, 1))\n"
                "FIXED = {'s': Transformer('a', like, False, model, None)}"),
    ("fixed.s", TORCH + "from meanfield import pretrained" + WITH_SETTING
                + "torch.manual_seed(0)\n"
                "layer = torch.nn.TransformerEncoderLayer(4, «1|2», 4).double()\n"
                "FIXED = {'s': pretrained.read(layer)}"),
    ("fixed.s", TORCH + "from meanfield import pretrained" + WITH_SETTING
                + "torch.manual_seed(0)\nlayer = torch.nn.TransformerEncoderLayer(4, 1, 4)\n"
                "with torch.no_grad():\n    for p in layer.parameters(): p.fill_(0.5)\n"
                "FIXED = {'s': pretrained.read(layer.«float|double»())}"),
    ("fixed.s", DATACLASS + "@dataclass\nclass S:\n    k: int\n@dataclass\nclass T:\n    k: int"
                + WITH_SETTING + "FIXED = {'s': «S|T»(1)}"),
    ("fixed.s.k", DATACLASS + "@dataclass\nclass S:\n    k: int" + WITH_SETTING
                  + "FIXED = {'s': S(«2|3»)}"),
    ("fixed.k", "def f(x, k=5): return {'y': k}\nFIXED = {«|'k': None»}"),
]  # fmt: skip

UNCHANGED = [
    "def f(x, k=None): return {'y': x}",
    "K = None" + F % "(K, x)[1]",
    "import threading\ndef f(x, lock=threading.Lock()): return {'y': x}",
    "def f(x):\n    «|# in words»\n    return {'y': x}",
    "def f(x):\n    «|'''In words.'''»\n    return {'y': x}",
    "class C:\n    «'In words.'|'In others.'»\n    k = 2" + F % "C.k",
    "class C:\n    «'In words.'|'In others.'»" + F % "(C, x)[1]",
    "def f( x ):\n    return {«'y'|\"y\"»: (x)}",
    "«def a(): pass\ndef b(): pass|def b(): pass\ndef a(): pass»" + F % "(a, b, x)[2]",
    "«|def other(): return 1»" + F % "x",
    "x = «2|3»" + F % "2 * x",
    "import numpy as np\nK = «2|3»" + F % "np.K if x < 0 else x",
    F % "x" + "if __name__ == '__main__':\n    ds = «2|3»",
    TORCH + "torch.manual_seed(0)\nnet = torch.nn.Linear(2, 2)"
    + F % "float(net(torch.ones(2) * x).sum())",
    TORCH + "net = torch.nn.ReLU()\nstep = torch.optim.SGD([torch.ones(1)])" + F % "(net, step)",
    "K = frozenset(['a', 'b', 'c', 'd'])" + F % "x if 'a' in K else 0",
    "def f(x): return {'y': x in {'a', 'b', 'c', 'd'}}",
    "from functools import lru_cache\n@lru_cache\ndef g(x): return x" + F % "g(x)",
    TURN + "def g():\n    global TURN\n    TURN += 1" + F % "(g(), x)[1]",
    TURN + "K = TURN" + F % "x",
    "C = {}\ndef f(x):\n    C[x] = x\n    return {'y': x}\n«|f(1.0)»",
    "C = {}\ndef f(x): return {'y': C.setdefault(x, x)}\n«|f(1.0)»",
    "def memo(g):\n    kept = {}\n    def h(x):\n        kept[x] = g(x)\n"
    "        return kept[x]\n    return h\n@memo\ndef g(x): return x" + F % "g(x)" + "«|g(1.0)»",
    "def counted(g):\n    n = 0\n    def h(x):\n        nonlocal n\n        n += 1\n"
    "        return g(x)\n    return h\n@counted\ndef g(x): return x" + F % "g(x)" + "«|g(1.0)»",
    "import threading\nclass C:\n    lock = threading.Lock()" + F % "(C, x)[1]",
    "def h(x, memo=dict()): return memo.setdefault(x, x)" + F % "h(x)" + "«|h(1.0)»",
    "N = 1\ndef h(x, k=N * 2, memo={}): return memo.setdefault(x, x)" + F % "h(x)" + "«|h(1.0)»",
    "h = lambda x, memo={}: memo.setdefault(x, x)" + F % "h(x)" + "«|h(1.0)»",
    "class C:\n    cache = dict()\n    def h(self, x): return self.cache.setdefault(x, x)"
    + F % "C().h(x)" + "«|C().h(1.0)»",
    "from types import SimpleNamespace\ndef counted(g, on=SimpleNamespace(n=0)):\n"
    "    box = SimpleNamespace(n=0)\n    def h(x):\n        box.n += 1\n        return g(x)\n"
    "    return h\n@counted\ndef g(x): return x" + F % "g(x)" + "«|g(1.0)»",
    "import threading\ndef locked(g):\n    lock = threading.Lock()\n    def inner(*a):\n"
    "        with lock: return g(*a)\n    return inner\ndef sq(x): return x\n"
    "class C:\n    k = locked(sq)\ndef h(x, g=locked(sq)): return g(x)" + F % "(h(x), C)[0]",
    TORCH + "def h(x, k=torch.ones(2, device='meta')): return x" + F % "h(x)",
    "class N: n = 0\ndef f(x):\n    N.n += 1\n    return {'y': x}\n«|f(1.0)»",
    "CACHE = {}\nCACHE[object()] = id(CACHE)" + F % "CACHE.setdefault(x, x)",
    "n = 0\ndef f(x):\n    global n\n    n += 1\n    return {'y': x}\nf(1)\n«|f(1)»",
    "import threading\nLOCK = threading.Lock()" + F % "(LOCK, x)[1]",
    "import xarray as xr\nD = xr.Dataset({'a': 1})" + F % "float(D.a) * x",
    "import random\nR = random.Random()" + F % "(R, x)[1]",
    "from functools import singledispatch\n@singledispatch\ndef g(x): return x" + F % "g(x)",
    "import logging\nlog = logging.getLogger('a')" + F % "(log, x)[1]",
    *(f"from {module} import *\n{WITH_SETTING}FIXED = {{'s': {value}}}" for module, value in [
        ("math", "{'a', 'b', 'c', 'd'}"), ("math", "«(1, 2)|[1, 2]»"), ("math", "«1|1.0»"),
        ("math", "«2**60|2.0**60»"), ("math", "{«'a': 1, 'b': 2|'b': 2, 'a': 1»}"),
        ("math", "{'f': frozenset(['a', 'b', 'c'])}"), ("math", "None"),
        ("torch", "ones(3)"), ("torch.nn", "ReLU()"), ("torch", "ones(3).bfloat16()"),
        ("numpy", "«arange(6.0)[::2]|array([0.0, 2.0, 4.0])»"),
    ]),
    DATACLASS + "from functools import cached_property\n@dataclass\nclass A:\n    k: int\n"
    "    @cached_property\n    def g(self): return 1\n    def f(self, x): return {'y': self.g}\n"
    "a = A(1)\nTASK = a.f\n«|a.g»",
    ATTENTION + "FIXED = {'s': SelfAttention(params(1.0))}",
    AGAIN + "FIXED = {'s': [make(2), make(2)]}",
    AGAIN.replace("inner(x - 1)", "again(x - 1)").replace("return inner", "again = partial(inner)"
        "\n    return again") + "from functools import partial\nFIXED = {'s': make(2)}",
    "def make():\n    def inner(x): return x\n    inner.__defaults__ = (inner,)\n    return inner"
    + WITH_SETTING + "FIXED = {'s': make()}",
    "import threading\ndef make(table): return lambda x: {'y': table}\n"
    "TASK = make([threading.Lock()])",
    LOCAL.format("a: object = object()\n        def g(self): return A", "()").replace("«2|3»", "2")
    .replace("class A", "@dataclass\n    class A"),
    LOCAL.format("", "").replace("«2|3»", "2").replace("class A:", "class A:\n        «'a'|'b'»"),
    NET + "FIXED = {'s': Net(Config(2))}",
    NET + "net = Net(object())\nnet.k = [net, net.forward]\nFIXED = {'s': net}",
    TORCH + "torch.manual_seed(0)" + WITH_SETTING
    + "FIXED = {'s': torch.nn.LSTM(1, 1).bfloat16()}",
    MAKE + "FIXED = {'s': {«'a': make(1), 'b': make(2)|'b': make(2), 'a': make(1)»}}",
]  # fmt: skip


def text_of(row: str, side: int) -> str:
    return re.sub("«([^|]*?)\\|(.*?)»", lambda found: found[side + 1], row, flags=re.DOTALL)


def planned(row: str, side: int, folder: Path):
    """The plan of the sweep of a module's function, the module imported anew."""
    file = folder / "changing.py"
    file.write_text(text_of(row, side))
    os.utime(file, (side, side))
    module = sys.modules["changing"] = types.ModuleType("changing")
    module.__file__ = str(file)
    exec(compile(file.read_text(), file, "exec"), vars(module))
    fn, fixed = vars(module).get("TASK"), vars(module).get("FIXED")
    task = Task(fn or module.f, [Variable("y", "y")], name="changing" if fn else None)
    return make_plan(task, {"x": [1.0]}, fixed, 0)


def outcome(row: str, folder: Path, monkeypatch) -> list[str]:
    """What is said when a store that was begun before is opened after."""
    monkeypatch.setitem(sys.modules, "changing", types.ModuleType("changing"))
    before = planned(row, 0, folder)
    open_store(folder / "s", before.description | {"provenance": "{}"}, None)
    after = planned(row, 1, folder)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        open_store(folder / "s", after.description, description_at(folder / "s"))
    return [str(each.message) for each in said]


@pytest.mark.parametrize(("name", "row"), WARNED)
def test_changed_code_is_a_warning_that_names_what_changed(tmp_path, monkeypatch, name, row):
    (said,) = outcome(row, tmp_path, monkeypatch)
    names = re.search("has changed since in (.*); finished", said)[1].split(", ")
    assert {name} <= {one.rpartition(".")[2].rpartition(": ")[2] for one in names}


@pytest.mark.parametrize(("name", "row"), REFUSED)
def test_a_changed_value_is_refused_and_named(tmp_path, monkeypatch, name, row):
    with pytest.raises(ValueError, match=rf"configuration \(.*{re.escape(name)}.*: stored"):
        outcome(row, tmp_path, monkeypatch)


@pytest.mark.parametrize("row", UNCHANGED)
def test_what_has_not_changed_is_neither_refused_nor_warned_of(tmp_path, monkeypatch, row):
    assert outcome(row, tmp_path, monkeypatch) == []


def identities(folder: str) -> str:
    """Of every row the identity in this process."""
    found = []
    for row in [*UNCHANGED, *(row for _, row in [*WARNED, *REFUSED] if "pretrained" not in row)]:
        described = planned(row, 0, Path(folder)).description
        names = ("configuration", "carried", "source")
        found.append([row, {name: described[name] for name in names}])
    return json.dumps(found)


def test_every_identity_is_the_same_in_another_process(tmp_path, monkeypatch, script):
    monkeypatch.setitem(sys.modules, "changing", types.ModuleType("changing"))
    code = "from tests.sweeps.test_changes import *\nprint(identities('.'))"
    done = script("run.py", code)
    here = json.loads(identities(str(tmp_path)))
    assert len(here) > 150
    for one, other in zip(here, json.loads(done.out), strict=True):
        assert one == other
