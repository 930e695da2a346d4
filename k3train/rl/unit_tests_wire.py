"""Calls and values between a program and its tests, over a pair of pipes. Runs inside the sandbox (`unit_tests.py`)."""

from __future__ import annotations

import builtins
import importlib
import json
import os
import types
from collections.abc import Callable
from typing import Any

SEQUENCES: dict[str, type] = {"l": list, "t": tuple, "s": set, "z": frozenset}
CHANGED = (list, dict, set, bytearray)  # arguments that a call may change
NUMBERS = {"fractions": "Fraction", "decimal": "Decimal"}
# Modules of the library that a test may name because the program imports them; the test's side imports its own.
MODULES = frozenset(
    {"array", "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq"}
    | {"itertools", "json", "math", "operator", "random", "re", "statistics", "string", "struct", "time", "typing"}
)


class GoneError(BaseException):
    """The other side has ended, or said what nobody may say: the test has failed, though a bare `except` catch this."""

    happened = False

    def __init__(self, text: str) -> None:
        super().__init__(text)
        GoneError.happened = True


# Made of texts.
SIMPLE: dict[str, Callable[..., Any]] = {
    "i": lambda text: int(text, 16),
    "f": float.fromhex,
    "c": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "b": bytes.fromhex,
    "y": bytearray.fromhex,
    "r": lambda *ends: range(*(int(text, 16) for text in ends)),
}


class Peer:
    """One end of the pipes. Either side may ask while it is asked: tests give the program functions to call.

    Args:
        read, write: descriptors.
        stand_in: class of what stands for an object of the other side, made of this peer and the object's number.
        serve: does what is asked besides calls; None on the side of the tests, which does nothing else.
    """

    def __init__(
        self, read: int, write: int, stand_in: type, serve: Callable[[dict[str, Any]], Any] | None = None
    ) -> None:
        self._read, self._write, self._rest = read, write, b""
        self._stand_in, self._serve = stand_in, serve
        self._own: dict[int, Any] = {}  # objects that the other side knows by number
        self._others: dict[int, Any] = {}  # those of the other side
        self.errors: dict[int, type[Exception]] = {}  # exception classes of the other side

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._write, data) :]

    def receive(self) -> dict[str, Any]:
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            more = os.read(self._read, 1 << 16)
            if not more:
                raise GoneError("the other side has ended")
            parts.append(more)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        found = json.loads(line)
        if type(found) is not dict:
            raise GoneError("no message")
        return found

    def request(self, message: dict[str, Any]) -> Any:
        """Ask, and answer what the other side asks meanwhile. Raises what the other side raised.

        Raises:
            GoneError: it has ended, or its answer is none.
        """
        error = value = None
        try:
            self.send(message)
            while "do" in (reply := self.receive()):
                self.answer(reply)
            if "error" in reply:
                error = self._error(*reply["error"])
            else:
                value, self._after = self.decode(reply["value"]), reply.get("after") or ()
        except Exception as problem:
            raise GoneError(str(problem)) from None
        if error is not None:
            raise error
        return value

    def ask(self, name: str, *operands: Any) -> Any:
        return self.request({"do": name, "of": [self.encode(operand) for operand in operands]})

    def call(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function of the other side. What it does to lists, dicts and sets that it is given is done to ours."""
        found = self.request(
            {
                "do": "call",
                "of": self.encode(function),
                "args": [self.encode(arg) for arg in args],
                "kwargs": {name: self.encode(arg) for name, arg in kwargs.items()},
            }
        )
        try:
            for ours, theirs in zip(args, self._after):
                if type(ours) in CHANGED:
                    update(ours, self.decode(theirs))
        except Exception as problem:
            raise GoneError(str(problem)) from None
        return found

    def answer(self, message: dict[str, Any]) -> None:
        """Do what is asked; whatever goes wrong is the answer."""
        after = None
        try:
            if message["do"] == "call":
                args = [self.decode(arg) for arg in message["args"]]
                kwargs = {name: self.decode(arg) for name, arg in message["kwargs"].items()}
                found = self.decode(message["of"])(*args, **kwargs)
                after = [self.encode(arg) if type(arg) in CHANGED else None for arg in args]
            elif self._serve is None:
                raise GoneError("the program asked for more than a call")
            else:
                found = self._serve(message)
            reply = {"value": self.encode(found), "after": after}
        except Exception as problem:
            _, *kind = self._exception(type(problem))
            reply = {"error": [*kind, [self.encode(arg) for arg in problem.args]]}
        self.send(reply)

    def _error(self, number: int, name: str, bases: list[str], args: list[Any]) -> BaseException:
        kind = self._error_class(number, name, bases)
        values = [self.decode(arg) for arg in args]
        try:
            return kind(*values)
        except Exception:
            return kind.__new__(kind)

    def _error_class(self, number: int, name: str, bases: list[str]) -> type[Exception]:
        base = getattr(builtins, bases[0], None) if bases else None
        if not (isinstance(base, type) and issubclass(base, Exception)):
            raise GoneError(f"the program ended with {name}")
        if name == bases[0]:
            return base
        return self.errors.setdefault(number, type(str(name), (base,), {}))

    def _exception(self, kind: type) -> list[Any]:
        bases = [c.__name__ for c in kind.__mro__ if getattr(builtins, c.__name__, None) is c]
        return ["e", self._number(kind), kind.__name__, bases]

    def _number(self, value: Any) -> int:
        self._own[id(value)] = value
        return id(value)

    def encode(self, value: Any) -> Any:
        """A value as JSON has it; what is not plain as the number of an object."""
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return ["i", hex(value)]
        if kind is float:
            return ["f", value.hex()]
        if kind is complex:
            return ["c", value.real.hex(), value.imag.hex()]
        if kind in (bytes, bytearray):
            return ["b" if kind is bytes else "y", value.hex()]
        for tag, sequence in SEQUENCES.items():
            if kind is sequence:
                return [tag, [self.encode(item) for item in value]]
        if kind is dict:
            return ["d", [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if kind is range:
            return ["r", hex(value.start), hex(value.stop), hex(value.step)]
        if NUMBERS.get(kind.__module__) == kind.__name__:
            return ["q", kind.__module__, str(value)]
        if kind is types.ModuleType and value.__name__ in MODULES:
            return ["m", value.__name__]
        if kind is self._stand_in:
            return ["own", value._k3_number]
        if isinstance(value, type) and issubclass(value, Exception):
            return self._exception(value)
        return ["o", self._number(value)]

    def decode(self, given: Any) -> Any:
        if given is None or type(given) in (bool, str):
            return given
        tag, *rest = given
        if tag in SEQUENCES:
            return SEQUENCES[tag](self.decode(item) for item in rest[0])
        if tag == "d":
            return {self.decode(key): self.decode(item) for key, item in rest[0]}
        if tag == "q":
            name = NUMBERS[rest[0]]  # before the import: the program chooses none
            return getattr(importlib.import_module(rest[0]), name)(rest[1])
        if tag == "m" and rest[0] in MODULES:
            return importlib.import_module(rest[0])
        if tag == "own":
            return self._own[rest[0]]
        if tag == "e" and self._serve is None:
            return self._error_class(*rest)
        if tag in ("o", "e"):
            number = int(rest[0])
            if number not in self._others:
                self._others[number] = self._stand_in(self, number)
            return self._others[number]
        return SIMPLE[tag](*rest)


def update(ours: Any, theirs: Any) -> None:
    """Make a list, dict, set or bytearray equal to what became of it, where something did."""
    if type(ours) is not type(theirs) or ours == theirs:
        return
    if isinstance(ours, list | bytearray):
        ours[:] = theirs
    else:
        ours.clear()
        ours.update(theirs)
