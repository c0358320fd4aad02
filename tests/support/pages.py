"""A report read back from its page, as a browser would."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

BLOCKS = {"td", "th", "tr", "li", "dt", "dd", "p", "h3", "summary", "pre"}
MINUS, THIN = "\u2212", "\u202f"


@dataclass
class Shown:
    """A cell of the table: its attributes, its figure, and the lines below it."""

    attributes: dict[str, str]
    text: str = ""
    details: list[str] = field(default_factory=list)

    def numbers(self, text: str | None = None) -> list[float]:
        """The numbers in its figure, or in `text`."""
        plain = (self.text if text is None else text).replace(MINUS, "-").replace(THIN, "")
        for mark in "±[],":
            plain = plain.replace(mark, " ")
        return [float(word) for word in plain.split()]


class Page(HTMLParser):
    """The table by row and key, the embedded data, and all the text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.table: dict[str, dict[str, Shown]] = {}
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.scripts: dict[str, str] = {}
        self.text = ""
        self._row: dict[str, Shown] | None = None
        self._cell: Shown | None = None
        self._script: str | None = None
        self._small = False
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    @property
    def data(self) -> Any:
        return json.loads(self.scripts["orchestra-data"])

    def of(self, tag: str, name: str) -> list[str]:
        """The attribute `name` of every `tag` that has it."""
        return [attributes[name] for found, attributes in self.tags
                if found == tag and name in attributes]  # fmt: skip

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append((tag, attributes))
        if tag == "tr":
            self._row = None
            if "data-row" in attributes:
                self._row = self.table.setdefault(attributes["data-row"], {})
        elif tag == "td" and self._row is not None:
            self._cell = self._row[attributes["data-key"]] = Shown(attributes)
        elif tag == "small" and self._cell is not None:
            self._small = True
            self._cell.details.append("")
        elif tag in ("script", "style"):
            self._script = attributes.get("id", tag)

    def handle_endtag(self, tag: str) -> None:
        self.text += " " * (tag in BLOCKS)
        if tag == "td":
            self._cell = None
        elif tag == "small":
            self._small = False
        elif tag in ("script", "style"):
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
            return
        self.text += data
        if self._cell is not None and self._small:
            self._cell.details[-1] += data
        elif self._cell is not None:
            self._cell.text += data
