"""`orchestra completion`: what makes a shell complete commands and options."""

from __future__ import annotations

from argparse import Namespace

import shtab

from orchestra.cli.commands import ORCHESTRA


def main(options: Namespace) -> int:
    print(shtab.complete(ORCHESTRA.parser(), options.shell))
    return 0
