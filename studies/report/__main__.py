"""The report as PDF and HTML: draws its figures, and builds docs/report/report.typ.

    python -m studies.report [--out build/report]

All numbers are read from docs/report/data, which `python -m studies.questions` writes. It needs the
extra `report`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from studies.report.figures import draw

SOURCE = Path(__file__).parents[2] / "docs" / "report"
HTML_IS_NEW = "html export is under active development"  # a warning of every export to HTML


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m studies.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("build/report"))
    given = parser.parse_args()
    try:
        import typst  # noqa: F401 - only whether it is there
    except ModuleNotFoundError:
        print("typst is not installed: pip install -e '.[report]'", file=sys.stderr)
        return 2
    warnings = build(given.out)
    for warning in warnings:
        print(warning, file=sys.stderr)
    return 1 if warnings else 0


def build(out: Path, source: Path = SOURCE) -> list[str]:
    """Write report.pdf and report.html into `out`, and figures into the `source`; return the
    warnings of the compiler."""
    import typst

    draw(source / "data", source / "figures")
    out.mkdir(parents=True, exist_ok=True)
    os.environ["TYPST_FEATURES"] = "html"
    found = []
    for kind in ("pdf", "html"):
        _, warnings = typst.compile_with_warnings(
            source / "report.typ",
            out / f"report.{kind}",
            root=source,
            format=kind,
            ignore_system_fonts=True,
            sys_inputs={"kind": kind},
        )
        found += [f"{kind}: {warning}" for warning in warnings if HTML_IS_NEW not in str(warning)]
    return found


if __name__ == "__main__":
    sys.exit(main())
