"""Reads a settings file without running it: ``args.key = value`` lines, or ``config = TrainConfig(key=value, ...)``.

Both are Python, so editors and linters understand them, but a settings file that could run code could also delete a
folder, or do something else on every process of a run. What the reader does not know is refused with its line number.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyvae.config.expressions import BINARY_OPERATORS, SET_MAKERS, Expressions, NotASettingError, dotted
from tinyvae.config.old_files import OLD_KEYS
from tinyvae.errors import UserError

SETTINGS_NAME = "args"


@dataclass(frozen=True, kw_only=True)
class FileSettings:
    """What a settings file says."""

    values: dict[str, Any]
    """Key -> value as written, in the order of the file."""
    lines: dict[str, int] = field(default_factory=dict)
    """Key -> the line that set it last."""
    derived_from: str | None = None
    """The preset that the file changes, where it does."""
    used_time: bool = False
    """Whether the file asks for the current time."""
    docstring: str = ""


def read_settings(text: str, *, file: Path, base: Path) -> FileSettings:
    """The settings in the text of a file. ``base``: the folder that relative paths start from.

    Raises:
        UserError: with every line that is not a setting.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:  # the last two: brackets without end
        line = f", line {fault.lineno}" if isinstance(fault, SyntaxError) else ""
        raise UserError(f"{file}{line} is not valid Python ({str(fault) or 'too deep'}); mend it.") from None
    reading = _Reading(Expressions(file, base))
    mistakes = [f"line {line}: {reason}" for line, reason in reading.statements(tree.body)]
    if mistakes:
        listed = mistakes[0] if len(mistakes) == 1 else "".join(f"\n  - {mistake}" for mistake in mistakes)
        raise UserError(
            f"{file} must hold settings only (`args.key = value`, or `config = TrainConfig(key=value)`): {listed}"
        )
    return FileSettings(
        values=reading.values,
        lines=reading.lines,
        derived_from=reading.derived_from,
        used_time=reading.expressions.used_time,
        docstring=ast.get_docstring(tree) or "",
    )


class _Reading:
    """The state of reading one file from top to bottom."""

    def __init__(self, expressions: Expressions) -> None:
        self.expressions = expressions
        self.values: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        self.derived_from: str | None = None
        self._settings_names = {SETTINGS_NAME}
        expressions.names[SETTINGS_NAME] = self.values

    def statements(self, body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
        """Read every statement; yields (line, reason) for those that are no setting."""
        for statement in body:
            try:
                self._statement(statement)
            except NotASettingError as fault:
                yield statement.lineno, str(fault)

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Pass):
            return
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return  # a docstring, or text used as a comment
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._refuse_imported_settings(statement)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                self._assign(target, statement.value)
        elif isinstance(statement, ast.AnnAssign):
            if statement.value is not None:
                self._assign(statement.target, statement.value)
        elif isinstance(statement, ast.AugAssign):
            self._change(statement)
        else:
            first_line = ast.unparse(statement).splitlines()[0]
            raise NotASettingError(f"`{first_line}` is not a setting")

    def _refuse_imported_settings(self, statement: ast.Import | ast.ImportFrom) -> None:
        """Settings that come from another module would be lost without a word, since nothing is run."""
        names = {alias.asname or alias.name for alias in statement.names}
        if names & (self._settings_names | {"*", "config"}):
            raise NotASettingError(
                f"`{ast.unparse(statement)}` takes settings from another file; write them here, or start from a preset "
                'with `config = replace(load_preset("NAME"), key=value)`'
            )

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._assign_name(target.id, value)
            return
        key = self._key_of(target)
        if key is None:
            raise NotASettingError(f"`{ast.unparse(target)}` is neither a setting nor a variable")
        self._set(key, self._value_of(key, value), target.lineno)

    def _value_of(self, key: str, value: ast.expr) -> Any:
        """The value of a setting; None for a key that another part decides now, where it would have to be run."""
        try:
            return self.expressions.value(value)
        except NotASettingError:
            if key in OLD_KEYS:
                return None
            raise

    def _assign_name(self, name: str, value: ast.expr) -> None:
        call = dotted(value.func) if isinstance(value, ast.Call) else None
        if isinstance(value, ast.Call) and call in ("TrainConfig", "replace", "dataclasses.replace"):
            self._whole_config(value, call)
        elif name in self._settings_names or _is_empty_set(value):
            self._new_settings(name, value)
        else:
            self.expressions.names[name] = self.expressions.value(value)

    def _new_settings(self, name: str, value: ast.expr) -> None:
        """``args = EasyDict()``, with or without settings inside."""
        start = self.expressions.value(value)
        if not isinstance(start, dict):
            raise NotASettingError(f"`{name} = {ast.unparse(value)}` is not a set of settings")
        self._settings_names.add(name)
        self.values.clear()
        self.lines.clear()
        self.expressions.names[name] = self.values
        for key, item in start.items():
            self._set(str(key), item, value.lineno)

    def _whole_config(self, call: ast.Call, name: str) -> None:
        """``TrainConfig(key=value)`` or ``replace(load_preset("h100"), key=value)``."""
        if name == "TrainConfig":
            if call.args:
                raise NotASettingError("TrainConfig takes key=value only")
        else:
            self.derived_from = self._preset_of(call)
        for keyword in call.keywords:
            if keyword.arg is None:
                raise NotASettingError("`**` is not supported; write the settings out")
            self._set(keyword.arg, self.expressions.value(keyword.value), keyword.value.lineno)

    def _preset_of(self, call: ast.Call) -> str:
        inner = call.args[0] if len(call.args) == 1 else None
        if isinstance(inner, ast.Call) and (dotted(inner.func) or "").split(".")[-1] == "load_preset" and inner.args:
            name = self.expressions.value(inner.args[0])
            if isinstance(name, str):
                return name
        raise NotASettingError('`replace` must start from a preset: replace(load_preset("NAME"), key=value)')

    def _change(self, statement: ast.AugAssign) -> None:
        """``args.learning_rate *= 2``."""
        key = self._key_of(statement.target)
        if key is None or key not in self.values or type(statement.op) not in BINARY_OPERATORS:
            raise NotASettingError(f"`{ast.unparse(statement)}` changes something that is not set earlier in the file")
        changed = ast.BinOp(ast.Constant(self.values[key]), statement.op, statement.value)
        self._set(key, self.expressions.value(ast.fix_missing_locations(changed)), statement.lineno)

    def _key_of(self, target: ast.expr) -> str | None:
        """The key that ``args.key`` or ``args["key"]`` names; None for anything else."""
        owner = target.value if isinstance(target, ast.Attribute | ast.Subscript) else None
        if not isinstance(owner, ast.Name) or owner.id not in self._settings_names:
            return None
        if isinstance(target, ast.Attribute):
            return target.attr
        assert isinstance(target, ast.Subscript)
        key = self.expressions.value(target.slice)
        return key if isinstance(key, str) else None

    def _set(self, key: str, value: Any, line: int) -> None:
        self.values[key] = value
        self.lines[key] = line


def _is_empty_set(value: ast.expr) -> bool:
    """Whether this is ``EasyDict()`` or its like: the start of a list of settings, under whatever name."""
    return isinstance(value, ast.Call) and not value.args and not value.keywords and dotted(value.func) in SET_MAKERS
