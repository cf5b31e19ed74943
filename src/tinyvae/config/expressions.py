"""The values that a settings file may write, evaluated from its syntax tree: nothing in the file is run.

Literals, arithmetic, text and paths put together, earlier settings and variables, environment variables, and the
current time as a pattern (``datetime.now().strftime("%Y-%m-%d")`` stays ``%Y-%m-%d``: the process that makes the run
folder fills it in, so that all processes of a run agree).
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TIME_DIRECTIVES = "YmdHMS"
LARGEST_EXPONENT = 64
SET_MAKERS = (
    "EasyDict",
    "easydict.EasyDict",
    "edict",
    "SimpleNamespace",
    "types.SimpleNamespace",
    "argparse.Namespace",
)
"""Calls that make an object with attributes; read as dictionaries."""

DTYPES: Mapping[str, str] = {
    "torch.float32": "float32",
    "torch.float": "float32",
    "torch.float16": "float16",
    "torch.half": "float16",
    "torch.bfloat16": "bfloat16",
}
"""A precision as torch's own object -> its name as a setting."""


class NotASettingError(Exception):
    """An expression that is more than a setting may be; the message says what."""


class Now:
    """The moment the run starts, known only as a pattern."""

    def strftime(self, pattern: str) -> str:
        others = sorted(set(re.findall("%(.)", pattern)) - set(TIME_DIRECTIVES))
        if others:
            known = " ".join(f"%{letter}" for letter in TIME_DIRECTIVES)
            raise NotASettingError(f"the time pattern {pattern!r} may only use {known}")
        return pattern


BINARY_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
PATH_PARTS = ("parent", "name", "stem", "suffix", "parents")
PATH_METHODS = ("resolve", "absolute", "expanduser", "joinpath", "with_name", "with_suffix", "as_posix")


class Expressions:
    """Evaluates expressions of one file. ``names`` grows as the file is read; ``base`` is what paths start from."""

    def __init__(self, file: Path, base: Path) -> None:
        self.names: dict[str, Any] = {"__file__": str(file)}
        self.used_time = False
        self._base = base
        self._functions: dict[str, Callable[..., Any]] = {
            "int": int,
            "float": float,
            "str": str,
            "bool": bool,
            "abs": abs,
            "min": min,
            "max": max,
            "round": round,
            "list": list,
            "tuple": tuple,
            "dict": dict,
            **dict.fromkeys(SET_MAKERS, dict),
            "Path": Path,
            "pathlib.Path": Path,
            "os.getenv": os.environ.get,
            "os.environ.get": os.environ.get,
            "time.strftime": self._time_pattern,
            "strftime": self._time_pattern,
        }
        for module in ("os.path", "osp", "path"):  # as `import os.path as osp` and `from os import path` name it
            for name in ("join", "expanduser", "expandvars", "dirname", "basename", "normpath"):
                self._functions[f"{module}.{name}"] = getattr(os.path, name)
            for name in ("abspath", "realpath"):
                self._functions[f"{module}.{name}"] = self._absolute

    def value(self, node: ast.expr) -> Any:
        """The value of an expression; `NotASettingError` where it is more than this reader knows."""
        handler = getattr(self, f"_{type(node).__name__.lower()}", None)
        if handler is None:
            raise NotASettingError(f"`{ast.unparse(node)}` is not a plain value")
        try:
            return handler(node)
        except (TypeError, ValueError, KeyError, IndexError, ArithmeticError, AttributeError) as fault:
            raise NotASettingError(f"`{ast.unparse(node)}` has no value ({fault})") from None

    def _absolute(self, path: str) -> str:
        # The shell's folder would make the run depend on where it is started; the file's project does not.
        return os.path.normpath(os.path.join(self._base, path))

    def _time_pattern(self, pattern: str, *_moment: Any) -> str:
        self.used_time = True
        return Now().strftime(pattern)

    def _constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bytes | complex) or node.value is Ellipsis:
            raise NotASettingError(f"`{ast.unparse(node)}` is not a plain value")
        return node.value

    def _name(self, node: ast.Name) -> Any:
        if node.id not in self.names:
            raise NotASettingError(f"`{node.id}` is not set earlier in the file")
        return self.names[node.id]

    def _tuple(self, node: ast.Tuple) -> tuple[Any, ...]:
        return tuple(self.value(item) for item in node.elts)

    def _list(self, node: ast.List) -> list[Any]:
        return [self.value(item) for item in node.elts]

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        if any(key is None for key in node.keys):
            raise NotASettingError("`**` inside a dictionary is not supported")
        return {
            self.value(key): self.value(item)
            for key, item in zip(node.keys, node.values, strict=True)
            if key is not None
        }

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            return not value
        if isinstance(node.op, ast.USub):
            return -value
        return +value

    def _binop(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        both_numbers = isinstance(left, int | float) and isinstance(right, int | float)
        joins_text = isinstance(node.op, ast.Add) and isinstance(left, str | list | tuple)
        joins_path = isinstance(node.op, ast.Div) and isinstance(left, Path)
        if not (both_numbers or joins_text or joins_path) or type(node.op) not in BINARY_OPERATORS:
            raise NotASettingError(f"`{ast.unparse(node)}` is not a plain value")
        if isinstance(node.op, ast.Pow) and abs(right) > LARGEST_EXPONENT:
            raise NotASettingError(f"`{ast.unparse(node)}` is too large")
        return BINARY_OPERATORS[type(node.op)](left, right)

    def _attribute(self, node: ast.Attribute) -> Any:
        if dotted(node) in DTYPES:
            return DTYPES[dotted(node) or ""]
        owner = self.value(node.value)
        if isinstance(owner, dict):
            if node.attr not in owner:
                raise NotASettingError(f"`{ast.unparse(node)}` is not set earlier in the file")
            return owner[node.attr]
        if isinstance(owner, Path) and node.attr in PATH_PARTS:
            return getattr(owner, node.attr)
        raise NotASettingError(f"`{ast.unparse(node)}` is not a plain value")

    def _subscript(self, node: ast.Subscript) -> Any:
        if dotted(node.value) == "os.environ":
            return os.environ[self.value(node.slice)]
        owner = self.value(node.value)
        # A Path's `parents` is a sequence of its own kind.
        if not isinstance(owner, dict | list | tuple) and not hasattr(owner, "__getitem__"):
            raise NotASettingError(f"`{ast.unparse(node)}` is not a plain value")
        return owner[self.value(node.slice)]

    def _joinedstr(self, node: ast.JoinedStr) -> str:
        return "".join(str(self.value(part)) for part in node.values)

    def _formattedvalue(self, node: ast.FormattedValue) -> str:
        value = self.value(node.value)
        pattern = "" if node.format_spec is None else str(self.value(node.format_spec))
        if isinstance(value, Now):
            return value.strftime(pattern)
        return format(value, pattern)

    def _call(self, node: ast.Call) -> Any:
        name = dotted(node.func)
        parts = (name or "").split(".")
        if parts[-1] in ("now", "today", "utcnow") and "datetime" in parts:
            self.used_time = True
            return Now()  # its time zone is not looked at: the machine that starts the run has one clock
        arguments = [self.value(argument) for argument in node.args]
        named = {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        if len(named) != len(node.keywords):
            raise NotASettingError(f"`{ast.unparse(node)}` is not a plain value")
        if name in self._functions:
            return self._functions[name](*arguments, **named)
        if isinstance(node.func, ast.Attribute):
            return self._method(node, node.func, arguments)
        raise NotASettingError(f"`{ast.unparse(node)}` would have to be run, and settings files are only read")

    def _method(self, node: ast.Call, function: ast.Attribute, arguments: list[Any]) -> Any:
        owner_name = dotted(function.value)
        known = owner_name is None or owner_name.split(".")[0] in self.names
        owner = self.value(function.value) if known else None
        if isinstance(owner, Now) and function.attr == "strftime":
            return owner.strftime(*arguments)
        if isinstance(owner, Path) and function.attr in PATH_METHODS:
            if function.attr in ("resolve", "absolute"):
                return Path(self._absolute(str(owner)))
            return getattr(owner, function.attr)(*arguments)
        raise NotASettingError(f"`{ast.unparse(node)}` would have to be run, and settings files are only read")


def dotted(node: ast.expr) -> str | None:
    """``a.b.c`` of an expression that is just names and dots; None for any other."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None
