"""What each compressor takes to encode and to decode, its bytes, and what a step of it leaves out.

A memory pass over the same elements (own += 0.5 other, the "mix" of calibrations) takes turns with
them: the multiples of it are what a simulation charges.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.options import (
    PrintedTable,
    bench_parser,
    print_remarks,
    read_options,
    write_figures,
)
from orchestra.cli.main import guarded
from orchestra.compression.base import Compressor, Context, Encoder
from orchestra.settings import parse
from orchestra.strategies.registry import STRATEGIES

SHAPE = (1024, 4096)
COMPRESSORS = (
    "FP16()", "BF16()", "PowerSGD(1)", "PowerSGD(4)", "RandomK(0.01)", "QSGD(7)",
    "QSGD(1, norm='max')", "SignSGD()", "TopK(0.01)", "TopK(0.001)", "Threshold(0.01)",
    "DGC(0.001)",
)  # fmt: skip
DESCRIPTION = f"""\
Encode and decode a gradient of {SHAPE[0]} x {SHAPE[1]} float32 elements with each compressor, in
one thread, as one worker does with its own payload. Decoding those of N workers takes N times as
long where payloads do not add. Of all rounds the shortest counts, since whatever else the machine
does makes them longer. The error is |C(g) - g| / |g| of one step; with error feedback it
is made up for in later ones.
"""


@dataclass(frozen=True)
class CompressionRow:
    """Milliseconds, multiples of a memory pass, the part of the bytes, and the relative error."""

    compressor: str
    encode_ms: float
    decode_ms: float
    encode_passes: float
    decode_passes: float
    bytes_part: float
    error: float


def gradient(seed: int) -> Tensor:
    """Normal values whose scale differs from row to row: shape [elements]."""
    random = torch.Generator().manual_seed(seed)
    scale = torch.randn(SHAPE[0], 1, generator=random).exp()
    return (torch.randn(SHAPE, generator=random) * scale).view(-1)


def bench_compression(
    compressors: Sequence[str] = COMPRESSORS, rounds: int = 30
) -> list[CompressionRow]:
    """Measure each of `compressors`."""
    return [_row(text, rounds) for text in compressors]


def _row(text: str, rounds: int) -> CompressionRow:
    compressor: Compressor = parse(text, STRATEGIES, where="benchmark")
    exact, values = gradient(0), gradient(0)
    context = Context(SHAPE, 0, 0, 0, 1, compressor.memory(values.view(SHAPE), 0))
    residuals = [torch.zeros_like(values)] if compressor.error_feedback else []
    other = gradient(1)
    passes, encodes, decodes = [], [], []
    sent = 0
    for number in range(rounds + 1):
        values.copy_(exact)
        for memory in context.memory if compressor.brings_momentum else ():
            memory.zero_()
        started = time.perf_counter()
        other.add_(exact, alpha=0.5)
        passed = time.perf_counter()
        steps = _steps(compressor, values, residuals, context)
        sent = next(steps)
        encoded = time.perf_counter()
        sent += sum(steps)
        decoded = time.perf_counter()
        if number:
            passes.append(passed - started)
            encodes.append(encoded - passed)
            decodes.append(decoded - encoded)
    error = float((values - exact).norm() / exact.norm())
    return CompressionRow(
        text,
        1e3 * min(encodes),
        1e3 * min(decodes),
        min(encodes) / min(passes),
        min(decodes) / min(passes),
        sent / exact.nbytes,
        error,
    )


def _steps(
    compressor: Compressor, values: Tensor, residuals: Sequence[Tensor], context: Context
) -> Iterator[int]:
    """Encode, and give the bytes of the payload; then decode, and give those of further ones."""
    if isinstance(compressor, Encoder):
        for residual in residuals:
            values.add_(residual.zero_())
        payload = compressor.encode_all([values], residuals, [context])[0]
        yield payload.nbytes
        compressor.combine([payload], values, context)
        return
    yield from (each.nbytes for each in compressor.rounds([values], residuals, [context]))


def table_of(rows: Sequence[CompressionRow]) -> PrintedTable:
    """Return the table with a line for each compressor."""
    headings = ("", "encode", "decode", "encode, passes", "decode, passes", "bytes", "error")
    lines = [
        (
            row.compressor, f"{row.encode_ms:.1f} ms", f"{row.decode_ms:.1f} ms",
            f"{row.encode_passes:.2f}", f"{row.decode_passes:.2f}", f"{row.bytes_part:.2%}",
            f"{row.error:.3f}",
        )
        for row in rows
    ]  # fmt: skip
    return PrintedTable(f"a gradient of {SHAPE[0]} x {SHAPE[1]}", headings, lines)


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write the figures if a file is given."""
    options = read_options(
        bench_parser("python -m benchmarks.compression", DESCRIPTION, rounds=30), arguments
    )
    torch.set_num_threads(1)
    rows = bench_compression(rounds=options.rounds)
    table = table_of(rows)
    table.show()
    print_remarks(
        "Passes: multiples of own += 0.5 other over the same elements. Bytes: of float32."
    )
    write_figures(options.json, "compression", rows, [table], options.command)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
