"""Python's syntax tree of a text, within the bounds of what is read."""

from __future__ import annotations

import ast
import warnings

MOST_CHARACTERS = 400_000
MOST_NESTED = 40
MOST_DIGITS = 100
"""Of a whole number. Also of what YAML says."""


def expression(text: str) -> ast.expr:
    """The tree of one expression.

    Raises:
        ValueError: it is none, or too long, too deep, or has a number with too many digits.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the syntax: an unknown escape stays as it is
            tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(error.msg) from None
    except (RecursionError, MemoryError):
        raise ValueError(f"it is nested more than {MOST_NESTED} deep") from None
    _check(tree)
    return tree


def _check(tree: ast.expr) -> None:
    level: list[ast.AST] = [tree]
    for _ in range(MOST_NESTED):
        for node in level:
            number = node.value if isinstance(node, ast.Constant) else None
            if isinstance(number, int) and abs(number) >= 10**MOST_DIGITS:
                raise ValueError(f"a number of more than {MOST_DIGITS} digits is beyond any use")
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ValueError(f"it is nested more than {MOST_NESTED} deep")
