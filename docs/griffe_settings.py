"""For mkdocstrings: a setting shows its default, meaning and range in place of `setting(...)`."""

from __future__ import annotations

import ast
from typing import Any

import griffe

MAKERS = ("setting", "quantity")


class SettingsExtension(griffe.Extension):
    """Reads the fields of `Settings` classes."""

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **_: Any) -> None:
        """Replace the value of a field by its default, and document it with its meaning."""
        value = getattr(node, "value", None)
        if not (isinstance(value, ast.Call) and getattr(value.func, "id", "") in MAKERS):
            return
        default, meaning, *_more = value.args[value.func.id == "quantity" :]  # type: ignore[attr-defined]
        ranges = [
            f"{word} {ast.unparse(keyword.value)}"
            for keyword in value.keywords
            for name, word in (("low", "at least"), ("above", "above"), ("high", "at most"))
            if keyword.arg == name
        ]
        text = (
            ast.literal_eval(meaning) if isinstance(meaning, ast.Constant) else ast.unparse(meaning)
        )
        attr.docstring = griffe.Docstring(f"{text} ({', '.join(ranges)})" if ranges else text)
        attr.value = None if ast.unparse(default) == "REQUIRED" else ast.unparse(default)
