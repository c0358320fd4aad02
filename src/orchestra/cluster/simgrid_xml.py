"""The XML of SimGrid's platform files: elements with their lines, and quantities with units."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import NoReturn
from xml.parsers import expat

from orchestra.errors import InputError
from orchestra.settings.base import MAX_NESTED

MAX_BYTES = 32_000_000

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)}
_WORDS = {"kilo": 1e3, "mega": 1e6, "giga": 1e9, "tera": 1e12, "peta": 1e15, "exa": 1e18}
SPEEDS = {f"{prefix}f": value for prefix, value in _PREFIXES.items()}
SPEEDS |= {f"{word}flops": value for word, value in _WORDS.items()} | {"flops": 1.0, "": 1.0}
BANDWIDTHS = {f"{p}Bps": value for p, value in (_PREFIXES | _BINARY).items()}
BANDWIDTHS |= {f"{p}bps": value / 8 for p, value in (_PREFIXES | _BINARY).items()} | {"": 1.0}
NUMBERS = {"": 1.0}
TIMES = {"w": 604800.0, "d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
TIMES |= {"ns": 1e-9, "ps": 1e-12, "": 1.0}
_QUANTITY = re.compile(
    r"\s*(\d{1,400}(?:\.\d{0,400})?(?:[eE][-+]?\d{1,3})?|\.\d{1,400})\s*([A-Za-z]*)\s*"
)


@dataclass
class Element:
    """A tag with its attributes, what is inside, and where it stands ("platform.xml:7")."""

    tag: str
    attributes: dict[str, str]
    where: str
    inside: list[Element] = field(default_factory=list)

    def of(self, *tags: str) -> list[Element]:
        """Those inside with one of these tags."""
        return [each for each in self.inside if each.tag in tags]

    def walk(self) -> Iterator[Element]:
        """Itself, and all that is inside, however deep."""
        yield self
        for each in self.inside:
            yield from each.walk()

    @property
    def id(self) -> str:
        """Its name."""
        return self.attributes.get("id", "")

    def bandwidth(self, key: str) -> float:
        """An attribute in bytes/s."""
        return self.quantity(key, self.attributes.get(key, ""), BANDWIDTHS)

    def latency(self, key: str) -> float:
        """An attribute in seconds; 0 where it is not there."""
        return self.quantity(key, self.attributes.get(key, "0"), TIMES)

    def quantity(self, key: str, text: str, units: Mapping[str, float]) -> float:
        """The number in `text`, in terms of what its unit stands for."""
        match = _QUANTITY.fullmatch(text)
        if match is None or match[2] not in units:
            self.refuse(f"has a {key} {text!r}, which is no number with a known unit")
        try:
            return float(Fraction(match[1]) * Fraction(repr(units[match[2]])))
        except OverflowError:
            self.refuse(f"has a {key} {text!r}, which is beyond any machine")

    def refuse(self, reason: str) -> NoReturn:
        """Raise the error that this element does not fit."""
        name = f" {self.id}" if self.id else ""
        raise InputError(f"{self.where}: <{self.tag}>{name} {reason}") from None


def parse(path: Path) -> Element:
    """The root of a platform file; nothing else is fetched, and no entity is expanded.

    Raises:
        InputError: it cannot be read, is no XML, or no platform of version 4.
    """
    parser = expat.ParserCreate()
    stack = [Element("", {}, str(path))]

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, attributes, f"{path}:{parser.CurrentLineNumber}")
        stack[-1].inside.append(element)
        stack.append(element)
        if len(stack) > MAX_NESTED:
            element.refuse(f"is nested more than {MAX_NESTED} deep")

    def entity(name: str, *_: object) -> None:
        line = parser.CurrentLineNumber
        raise InputError(f"{path}:{line}: declares an entity ({name}); write it out")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: stack.pop()
    parser.EntityDeclHandler = entity
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise InputError(f"{path}: has more than {MAX_BYTES:,} bytes")
        parser.Parse(content, True)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except expat.ExpatError as error:
        text = expat.errors.messages[error.code]
        raise InputError(f"{path}:{error.lineno}: not XML: {text}") from None
    (root,) = stack[0].inside
    if root.tag != "platform" or not root.attributes.get("version", "").startswith("4"):
        root.refuse("is no platform of version 4 or 4.1; simgrid_update_xml converts older ones")
    return root
