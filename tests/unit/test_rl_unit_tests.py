"""Unit tests as a reward: what tests may ask of a program, and programs that try to pass without doing it."""

from __future__ import annotations

import pytest
from test_rl_environments import says, task

from k3train.rl.rewards import REWARDS
from k3train.rl.sandbox import Limits, Sandbox
from k3train.rl.unit_tests import passes
from k3train.rl.unit_tests_wire import Peer

WIRE = "k3train.rl.unit_tests_wire"
LIMITS = Limits(seconds=60)  # a busy machine; what hangs has less
RIGHT = """
import math, collections, fractions
class Point:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __mul__(self, factor): return Point(self.x * factor, self.y * factor)
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __str__(self): return f"({self.x}, {self.y})"
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise Empty("nothing", 0)
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __enter__(self): return self
    def __exit__(self, *_): self.items.clear()
class Empty(LookupError): pass
def root(x):
    if x < 0: raise ValueError("negative")
    return math.sqrt(x)
def countdown(n):
    while n: yield n; n -= 1
def turn(items): items.reverse()
def index(words, table):
    for i, word in enumerate(words): table[word] = i
def each(function, items): return [function(item) for item in items]
def counts(text): return collections.Counter(text)
def nested(): return {"a": [1, (2.5, None)], "b": {3}, "c": b"x", "d": 10 ** 30, "e": 2 - 1j, "f": range(3)}
def third(): return fractions.Fraction(1, 3)
def first(items): return max(items)
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert root(9) == 3; assert abs(root(2) - 1.41421) < 1e-4; assert math.isclose(root(2), 2 ** 0.5)",
        "assert list(countdown(3)) == [3, 2, 1]; assert sum(countdown(4)) == 10; assert 2 in countdown(3)",
        "x = [1, 2, 3]; turn(x); assert x == [3, 2, 1]; d = {'z': 9}; index(['p'], d); assert d == {'z': 9, 'p': 0}",
        "assert each(lambda x: x + 1, (1, 2)) == [2, 3]; assert each(root, [4.0]) == [2.0]",
        "assert counts('aab') == {'a': 2, 'b': 1}; assert counts('aab')['a'] == 2; assert not counts('')",
        "assert nested() == {'a': [1, (2.5, None)], 'b': {3}, 'c': b'x', 'd': 10**30, 'e': 2-1j, 'f': range(3)}",
        "from fractions import Fraction; assert third() == Fraction(1, 3); assert first([Fraction(1), 2]) == 2",
        "assert Point(1, 2) + Point(2, 3) == Point(3, 5); assert str(Point(1, 2) * 3) == '(3, 6)'",
        "assert (Point(1, 2) * 2).y == 4; p = Point(1, 2); p.x = 5; assert p == Point(5, 2); assert p != Point(5, 1)",
        "s = Stack(); s.push([1]); s.push(2); assert len(s) == 2; assert s.pop() == 2; assert s.pop() == [1]",
        "with Stack() as s: s.push(1)\nassert len(s) == 0; assert isinstance(s, Stack) and not isinstance(s, Point)",
        "try: root(-1)\nexcept ValueError as e: assert str(e) == 'negative'\nelse: assert False",
        "try: Stack().pop()\nexcept Empty as e: assert e.args == ('nothing', 0)\nelse: assert False",
        "try: Stack().pop()\nexcept LookupError: pass\nelse: assert False",
        "assert [y for x in (1, 4) for y in [root(x)]] == [1, 2]; f = lambda x: root(x); assert f(4) == 2",
    ],
)
def test_what_tests_may_ask(test: str) -> None:
    assert passes(RIGHT, test, LIMITS)


def test_what_does_not_hold() -> None:
    for test in (
        "assert root(9) == 4",
        "assert counts('aab') == {'a': 1}",
        "assert Point(1, 2) == Point(2, 1)",
        "missing(1)",
        "root(-1)",
        "import sys; sys.exit(0)",
    ):
        assert not passes(RIGHT, test, LIMITS), test


OBJECT = """
class X:
    def __init__(self, *a): pass
    def same(self, *a): return True
    def zero(self, *a): return 0
    def me(self, *a): return self
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __contains__ = same
    __sub__ = __rsub__ = __abs__ = __round__ = __float__ = __int__ = __index__ = zero
    __hash__ = zero
def double(x): return X()
"""
# Tells what the test's side asks for, and answers whatever suits.
LIAR = """
import gc, sys
class V(float):
    def __new__(cls, *a): return super().__new__(cls, 0)
    def __eq__(self, other): return True
    __lt__ = __le__ = __gt__ = __ge__ = __ne__ = __eq__
    def __sub__(self, other): return V()
    __rsub__ = __abs__ = __round__ = lambda self, *a: V()
    __hash__ = float.__hash__
def double(x): return V()
"""
WRITES = """
import os
for fd in range(3, 64):
    for said in (b'passed', b'{"value": 4}\\n', b'{"ready": true}\\n{"value": ["i", "0x4"]}\\n'):
        try: os.write(fd, said)
        except OSError: pass
def double(x): os._exit(0)
"""
CHEATS = {
    "the last printed word": (
        "import os, re, __main__\nprint(re.findall('[0-9a-f]{64}', getattr(__main__, 'code', ''))[-1:])\nos._exit(0)"
    ),
    "exit at once": "import os\nprint('passed')\nos._exit(0)",
    "exit when called": "import sys\ndef double(x): sys.exit(0)",
    "exit of the interpreter when called": "import os\ndef double(x): os._exit(0)",
    "an object that equals all": OBJECT,
    "a number that equals all": LIAR,
    "exceptions as values": "def double(x): raise SystemExit(0)",
    "an exception": "def double(x): raise AssertionError('passed')",
    "own builtins": (
        "import builtins\ndef yes(*a): return True\n"
        "abs = isinstance = all = any = yes\nlen = lambda *a: 0\nbuiltins.abs = builtins.isinstance = yes\n"
        "def double(x): return 3"
    ),
    "an own math": (
        "import sys, types\nmath = types.ModuleType('math')\nmath.isclose = lambda *a, **k: True\n"
        "sys.modules['math'] = math\ndef double(x): return 3"
    ),
    "writing to every descriptor": WRITES,
    "frames and names": (
        "import sys, __main__\nf = sys._getframe()\nwhile f:\n    for d in (f.f_globals, f.f_locals):\n"
        "        for k in list(d):\n            if k in ('TEST', 'word', 'code', 'run', 'serve', 'VERDICT'):\n"
        "                d[k] = lambda *a: True\n    f = f.f_back\n"
        "__main__.refused = (); __main__.inside = lambda *a: True\ndef double(x): return 5"
    ),
    "the other's class": (
        "import sys\nchild = sys.modules['k3train.rl.unit_tests_child']\n"
        f"wire = sys.modules[{WIRE!r}]\nwire.Peer.encode = lambda self, value: ['own', 0]\n"
        "child.builtin_of = lambda *a: (4,)\n"
        "def double(x): return object()"
    ),
    "garbage": (
        f"import sys\nwire = sys.modules[{WIRE!r}]\n"
        "wire.Peer.encode = lambda self, value: ['i', '0xzz']\ndef double(x): return 1"
    ),
    "a module to import": (
        f"import sys\nwire = sys.modules[{WIRE!r}]\n"
        "wire.Peer.encode = lambda self, value: ['m', 'unittest.__main__']\ndef double(x): return 1"
    ),
    "callbacks": (
        f"import sys\nwire = sys.modules[{WIRE!r}]\n"
        "def serve(self, m): self.send({'do': 'name', 'of': 'double'})\n"
        "wire.Peer.answer = serve\ndef double(x): return 4"
    ),
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): return 5",
    "nothing": "",
}
TESTS = (
    "assert double(2) == 4",
    "assert abs(double(2) - 4) < 1e-6",
    "assert math.isclose(double(2), 4)",
    "assert isinstance(double(2), int) and double(2) in (4,) and not double(2) - 4",
    "assert {4: 1}[double(2)] == 1 and round(double(2)) == 4 and len(str(double(2))) == 1 and [4] == [double(2)]",
)


FALSE_VALUES = ("an object that equals all", "a number that equals all", "own builtins", "an own math")


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_pass_nothing(name: str) -> None:
    """Those that return something clever meet every form of test, each on its own."""
    for test in TESTS if name in FALSE_VALUES else TESTS[:1]:
        assert not passes(CHEATS[name], f"import math\n{test}", LIMITS), test


def test_an_end_is_not_the_exception_that_a_test_waits_for() -> None:
    test = "try: double(-1)\nexcept: pass\nelse: assert False"
    for end in ("os._exit(0)", "sys.exit(1)", "os.closerange(3, 64)"):
        assert not passes(f"import os, sys\ndef double(x): {end}", test, LIMITS), end
    assert passes("def double(x): raise ValueError(x)", test, LIMITS)


def test_the_tests_that_cheats_do_not_pass_can_be_passed() -> None:
    assert passes("import math\ndef double(x): return x * 2", "\n".join(TESTS), LIMITS)


@pytest.mark.parametrize("name", ["writing to every descriptor", "frames and names", "an object that equals all"])
def test_cheats_pass_nothing_without_namespaces_either(name: str) -> None:
    assert not passes(CHEATS[name], TESTS[0], LIMITS, walls=False)
    assert passes("def double(x): return x * 2", TESTS[0], LIMITS, walls=False)


def test_a_program_that_hangs_fails_and_leaves_nothing() -> None:
    for program in ("while True: pass", "import time\ndef double(x): time.sleep(60)"):
        assert not passes(program, TESTS[0], Limits(seconds=2)), program
    assert not passes("def double(x): return double(x)", TESTS[0], LIMITS)


def test_the_time_of_a_test_begins_when_the_program_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a right answer on a busy machine is a wrong one: two interpreters start, and only one is looked at."""
    boxes: list[Sandbox] = []
    started: list[bool] = []
    enter, status = Sandbox.__enter__, Sandbox._status
    monkeypatch.setattr(Sandbox, "__enter__", lambda self: boxes.append(self) or enter(self))

    def clock(self: Sandbox) -> str:
        started.extend(box._said.count(b"\n") == 2 for box in boxes)
        return status(self)

    monkeypatch.setattr(Sandbox, "_status", clock)
    assert passes("def double(x): return x * 2", TESTS[0], LIMITS)
    assert started == [True, True]


def test_a_program_chooses_no_module_to_import() -> None:
    with pytest.raises(KeyError, match="k3_none"):
        Peer(0, 1, object).decode(["q", "k3_none", "1"])


def test_the_share_of_tests() -> None:
    """Two of three lines hold, whatever surrounds the program in the response."""
    lines = "assert double(2) == 4\nassert double(0) == 0\nassert double('a') == 1"
    program = "Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
    assert REWARDS["unit_tests"](task(lines), [says(program)], 0) == pytest.approx(2 / 3)
    assert REWARDS["unit_tests"](task("\n"), [says(program)], 0) == 0.0
