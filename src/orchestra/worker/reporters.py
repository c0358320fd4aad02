"""Reporters that tell nobody, or pass everything on: the bases of those that do something else."""

from __future__ import annotations

from dataclasses import dataclass

from orchestra.worker.runtime import Reporter


class SilentReporter:
    """Nobody is told anything, and nobody wants to stop."""

    def progress(
        self,
        *,
        step: int,
        samples: int,
        loss: float | None = None,
        fraction: float | None = None,
    ) -> None: ...

    def phase(self, name: str) -> None: ...

    def expendable(self, yes: bool) -> None: ...

    def notice(self, text: str) -> None: ...

    def stop_requested(self) -> bool:
        return False


@dataclass
class PassingReporter:
    """Everything goes on to `inner`."""

    inner: Reporter

    def progress(
        self,
        *,
        step: int,
        samples: int,
        loss: float | None = None,
        fraction: float | None = None,
    ) -> None:
        self.inner.progress(step=step, samples=samples, loss=loss, fraction=fraction)

    def phase(self, name: str) -> None:
        self.inner.phase(name)

    def expendable(self, yes: bool) -> None:
        self.inner.expendable(yes)

    def notice(self, text: str) -> None:
        self.inner.notice(text)

    def stop_requested(self) -> bool:
        return self.inner.stop_requested()
