"""JSON lines of a file that grows: what has been added since the last look."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

Line = dict[str, Any]

MOST_BYTES = 1 << 20
"""Read at a time. Of a file that has grown by more, lines at even distances stand for the rest."""
SAMPLES = 64


class Tail:
    """Reads the lines that are added to the file `path`, which need not be there yet.

    A last line without its end is kept until the rest is there. What is no JSON object is left out.

    Attributes:
        began_anew: the last `read` found a file that was written anew, and read it from its start.
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self.began_anew = False
        self._path = path
        self._most_bytes = most_bytes
        self._file: tuple[int, int] | None = None  # device and inode
        self._position = 0  # of what was read
        self._rest = b""

    def read(self) -> list[Line]:
        """The lines that have been completed since the last call, in their order.

        Raises:
            OSError: the file is there, but cannot be read.
        """
        self.began_anew = False
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())
            same, size = (status.st_dev, status.st_ino), status.st_size
            if self._file is not None and (same != self._file or size < self._position):
                self.began_anew = True
                self._position, self._rest = 0, b""
            self._file = same
            lines = []
            if size - self._position > self._most_bytes:
                start = size - self._most_bytes // 2
                lines = self._sampled(file, self._position, start)
                file.seek(start)
                file.readline()  # the rest of a line that began before
                self._rest = b""
            else:
                file.seek(self._position)
            text = self._rest + file.read()
            self._position = file.tell()
        whole, end, self._rest = text.rpartition(b"\n")
        return lines + _parsed((whole + end).splitlines())

    @staticmethod
    def _sampled(file: BinaryIO, begin: int, end: int) -> list[Line]:
        """Lines at even distances between two places of `file`."""
        found = []
        for k in range(SAMPLES):
            file.seek(begin + (end - begin) * k // SAMPLES)
            if k or begin:
                file.readline()
            if file.tell() < end:
                found.append(file.readline())
        return _parsed(found)


def _parsed(lines: list[bytes]) -> list[Line]:
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
