"""Both sides of a unit test, each in a sandbox of its own, where `unit_tests.py` runs this.

On the side of the test a name that Python does not know stands for the program's. What comes back from there is a plain
value, rebuilt from built-in types, or a `Ref` to an object that stays there. So nothing of the program runs where the
test runs: it can answer, and nothing else.

A program must not see what is expected before it has answered. So what compares or computes with a plain value of the
test happens on the side of the test: an object is asked for its plain value first, has none later once it had none,
and neither has what comes of computing with it. Only two objects of the program are compared by the program.
"""

from __future__ import annotations

import builtins
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any

from k3train.rl.unit_tests_wire import GoneError, Peer

PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
UNARY = ("neg", "pos", "abs", "invert")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, f"__{name}__") for name in (*BINARY, *UNARY, *COMPARISONS)},
    **{name: getattr(builtins, name) for name in ("len", "iter", "next", "bool", "str", "repr", "isinstance")},
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem")},
    **{name: getattr(builtins, name) for name in ("getattr", "setattr")},
}


class Ref:
    """On the side of the test: an object of the program."""

    __slots__ = ("_k3_derived", "_k3_number", "_k3_peer", "_k3_plain")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_k3_peer", peer)
        object.__setattr__(self, "_k3_number", number)
        object.__setattr__(self, "_k3_plain", True)  # whether it may have a plain value
        object.__setattr__(self, "_k3_derived", False)  # whether it was computed with a value of the test

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._k3_peer.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._k3_peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._k3_peer.ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._k3_peer.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._k3_peer.ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._k3_peer.ask("delitem", self, key)

    def __len__(self) -> int:
        return self._k3_peer.ask("len", self)

    def __iter__(self) -> Iterator[Any]:
        return self._k3_peer.ask("iter", self)

    def __next__(self) -> Any:
        return self._k3_peer.ask("next", self)

    def __contains__(self, item: Any) -> bool:
        return any(item is own or item == own for own in self)

    def __instancecheck__(self, other: Any) -> bool:
        return isinstance(other, Ref) and self._k3_peer.ask("isinstance", other, self) is True

    def __enter__(self) -> Any:
        return self._k3_peer.ask("getattr", self, "__enter__")()

    def __exit__(self, *_: Any) -> None:
        self._k3_peer.ask("getattr", self, "__exit__")(None, None, None)

    def __bool__(self) -> bool:
        known, value = plain_of(self)
        if not known and self._k3_derived:
            raise TypeError("what the program computed with a value of the test has no truth value here")
        return bool(value) if known else self._k3_peer.ask("bool", self) is True

    def __float__(self) -> float:
        return float(plain(self))

    def __int__(self) -> int:
        return int(plain(self))

    def __index__(self) -> int:
        return operator.index(plain(self))

    def __complex__(self) -> complex:
        return complex(plain(self))

    def __round__(self, *digits: Any) -> Any:
        return round(plain(self), *digits)

    def __str__(self) -> str:
        return self._k3_peer.ask("str", self)

    def __repr__(self) -> str:
        return self._k3_peer.ask("repr", self)

    def __hash__(self) -> int:
        return hash(self._k3_number)


def plain_of(ref: Ref) -> tuple[bool, Any]:
    """Whether an object of the program stands for a plain value, such as a dict's subclass, and the value."""
    if not ref._k3_plain:
        return False, None
    found = ref._k3_peer.ask("plain", ref)
    if found is None:
        object.__setattr__(ref, "_k3_plain", False)
        return False, None
    if type(found) is not tuple or len(found) != 1 or isinstance(found[0], Ref):
        raise GoneError("no plain value")
    return True, found[0]


def plain(value: Any) -> Any:
    if not isinstance(value, Ref):
        return value
    known, found = plain_of(value)
    if not known:
        raise TypeError("an object of the program has no plain value that could be computed with")
    return found


def calculating(name: str, turned: bool = False) -> Callable[..., Any]:
    """An operator between an object of the program and something else, or of it alone."""

    def method(self: Ref, *others: Any) -> Any:
        if not any(isinstance(other, Ref) for other in others):
            known, value = plain_of(self)
            if known:
                return OPERATORS[name](*others, value) if turned else OPERATORS[name](value, *others)
        found = self._k3_peer.ask(name, *((*others, self) if turned else (self, *others)))
        if not isinstance(found, Ref):
            if all(isinstance(other, Ref) for other in others) and others:
                return found
            raise TypeError(f"{name} between an object of the program and a value of the test gave a plain value")
        object.__setattr__(found, "_k3_derived", True)
        object.__setattr__(found, "_k3_plain", False)
        return found

    return method


def comparing(name: str) -> Callable[..., Any]:
    def method(self: Ref, other: Any) -> Any:
        if isinstance(other, Ref):
            return self._k3_peer.ask(name, self, other) is True
        known, value = plain_of(self)
        if known:
            return OPERATORS[name](value, other)
        return {"eq": False, "ne": True}.get(name, NotImplemented)

    return method


for _name in BINARY:
    setattr(Ref, f"__{_name}__", calculating(_name))
    setattr(Ref, f"__r{_name}__", calculating(_name, turned=True))
for _name in UNARY:
    setattr(Ref, f"__{_name}__", calculating(_name))
for _name in COMPARISONS:
    setattr(Ref, f"__{_name}__", comparing(_name))


class Callback:
    """On the side of the program: a function of the test."""

    def __init__(self, peer: Peer, number: int) -> None:
        self._k3_peer, self._k3_number = peer, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._k3_peer.call(self, args, kwargs)


def builtin_of(value: Any) -> tuple | None:
    """The plain value that an object is by its class, as (value,); None where it is none."""
    for kind in PLAIN:
        if isinstance(value, kind):
            return (kind(value),)
    return None


class Names(dict):
    """The globals of a test. What Python's builtins name is theirs: a program must not bring a `len` of its own."""

    def __init__(self, peer: Peer) -> None:
        super().__init__({"__name__": "tests"})
        self._peer = peer

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) or name.startswith("__"):
            raise KeyError(name)
        return self._peer.request({"do": "name", "of": name})


def serve(space: dict[str, Any], peer: list[Peer]) -> Callable[[dict[str, Any]], Any]:
    """What the side of the program does when it is asked for a name, a plain value, or an operator."""

    def answer(message: dict[str, Any]) -> Any:
        if message["do"] == "name":
            return space[message["of"]]
        operands = [peer[0].decode(operand) for operand in message["of"]]
        return builtin_of(*operands) if message["do"] == "plain" else OPERATORS[message["do"]](*operands)

    return answer


def run_program(given: dict[str, Any]) -> None:
    """Run the program, then answer for it until nobody asks any more."""
    space: dict[str, Any] = {"__name__": "__main__"}
    peers: list[Peer] = []
    peers.append(Peer(given["read"], given["write"], Callback, serve(space, peers)))
    exec(compile(given["source"], "<program>", "exec"), space)
    peers[0].send({"ready": True})
    while True:
        try:
            peers[0].answer(peers[0].receive())
        except GoneError:
            return


def run_test(given: dict[str, Any]) -> None:
    """Run one test once the program is there; only where its end is reached the verdict is written."""
    peer = Peer(given["read"], given["write"], Ref)
    try:
        peer.receive()
        exec(compile(given["source"], "<test>", "exec"), Names(peer))
    except BaseException as problem:
        print(f"{type(problem).__name__}: {problem}")
        os._exit(1)
    if not GoneError.happened:
        os.write(given["verdict"], b"passed")
