"""docs/reference/commands.md, from the parsers.

python -m tests.support.commands_page > docs/reference/commands.md
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator

from orchestra.cli.commands import ORCHESTRA, Command, CommandGroup
from orchestra.cli.parser import Parser

HEAD = """\
# Commands

What `orchestra COMMAND --help` says, on one page. Completion of commands and options in your shell:
`orchestra completion --help`.
"""


def page() -> str:
    """Return the page, in Markdown."""
    return "\n".join([HEAD, *_group(ORCHESTRA)])


def _group(group: CommandGroup) -> Iterator[str]:
    for name, each in group.commands.items():
        if isinstance(each, CommandGroup):
            yield f"## {each.program}\n\n{_words(each.introduction)}\n"
            yield from _group(each)
        else:
            yield from _command(f"{group.program} {name}", each)


def _command(program: str, command: Command) -> Iterator[str]:
    parser = command.parser()
    yield f"## {program}\n\n{_words(parser.description or '')}\n"
    rows = [*_rows(parser)]
    if rows:
        yield "| argument | meaning |\n| --- | --- |"
        yield from rows
        yield ""
    if parser.epilog:
        yield f"```text\n{parser.epilog.strip()}\n```\n"


def _rows(parser: Parser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        names = ", ".join(action.option_strings)
        value = "" if action.nargs == 0 else str(action.metavar or action.dest)
        text = f"{names} {value}".strip()
        yield f"| `{text}` | {_cell(action.help or '')} |"


def _words(text: str) -> str:
    """Return paragraphs as they are, and indented ones as blocks of text."""
    parts = text.strip("\n").rstrip().split("\n\n")
    return "\n\n".join(
        f"```text\n{textwrap.dedent(part)}\n```"
        if part.startswith("    ")
        else part.replace("<", "&lt;")  # Markdown has no use for angle brackets
        for part in parts
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%")


if __name__ == "__main__":
    print(page(), end="")
