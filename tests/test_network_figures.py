"""What is drawn of a simulated network: a step's messages on the cluster, the busiest links."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import vl_convert
from tests.drawn import Drawn, drawn_alone, keep, record

from orchestra.cluster import Cluster, load_cluster
from orchestra.cluster.file import cluster_text
from orchestra.records.exports import read_trace, write_trace
from orchestra.records.record import Link, Links, run_folder, write_links
from orchestra.records.report import Message, RankReport, Slice, Timeline
from orchestra.report.figures.bars import links
from orchestra.report.figures.frame import for_image
from orchestra.report.figures.messages import WIDTH, MessageLayout, messages
from orchestra.report.figures.timeline import Arrow, exchanges


def cluster(text: str) -> Cluster:
    return load_cluster(text, where="test", folder=Path())


class Sent(NamedTuple):
    """A message in a timeline; times in seconds."""

    step: int
    source: int
    target: int
    bytes: int
    at: float
    there: float


def traced(ranks: int, sent: Sequence[Sent], servers: Sequence[int] = ()) -> list[RankReport]:
    """What ranks report whose steps have a second each, and who sent each other that."""
    steps = sorted({message.step for message in sent})
    slices: list[list[Slice]] = [[] for _ in range(ranks)]
    for rank in range(ranks):
        for step in () if rank in servers else steps:
            slices[rank].append(Slice(0, "step", f"step {step}", step, step + 1, {"step": step}))
    for number, message in enumerate(sent):
        which = Message(message.source, message.target, 1, number)
        for rank, category, at, extra in (
            (message.source, "send", message.at, {"bytes_sent": message.bytes}),
            (message.target, "receive", message.there, {}),
        ):
            args = extra if rank in servers else {**extra, "step": message.step}
            slices[rank].append(Slice(1, category, category, at, at + 0.01, args, which))
    return [
        RankReport(
            rank=rank, role="server" if rank in servers else "worker", steps=0, samples=1,
            setup={}, train_seconds=1.0, seconds={}, bytes_sent=0, bytes_estimated=False,
            staleness={}, peak_buffer_bytes=0, switched_at_step=None, stopped=False, threads=1,
            timeline=Timeline("clock", 0.0, ("steps", "main"), slices[rank]),
        )
        for rank in range(ranks)
    ]  # fmt: skip


def simulated_run(
    folder: Path, ranks: int, sent: Sequence[Sent], servers: Sequence[int] = (),
    on: str = "lan_1gbit(nodes=4)", label: str = "ring",
) -> Path:  # fmt: skip
    """The folder of a run that left these messages on the cluster `on`."""
    keep(folder, [record(label, ranks, engine="simulation")], trace=False)
    inner = run_folder(folder, label, ranks, 0)
    write_trace(inner, traced(ranks, sent, servers))
    (inner / "cluster.yaml").write_text(cluster_text(cluster(on)))
    return inner


def round_the_ring(ranks: int, steps: int = 3) -> list[Sent]:
    return [
        Sent(step, rank, (rank + 1) % ranks, 1000, step + 0.1, step + 0.2)
        for step in range(1, steps + 1)
        for rank in range(ranks)
    ]


def push_and_pull(workers: int) -> list[Sent]:
    """Each worker pushes to the last rank at a time of its own; answers come together."""
    server = workers
    return [
        message
        for step in (1, 2, 3)
        for rank in range(workers)
        for message in (
            Sent(step, rank, server, 5000, step + 0.1 * (rank + 1), step + 0.5),
            Sent(step, server, rank, 3000, step + 0.6, step + 0.9),
        )
    ]


def heads(found: Drawn, name: str) -> dict[str, tuple[int, int]]:
    """By "source → target", messages and bytes of an arrow."""
    return {v["what"]: (v["messages"], v["bytes"]) for v in found.values(name, "what")}


def texts(found: Drawn, name: str) -> list[str]:
    """What stands in the figure, the ground behind words aside."""
    values = found.values(name, "text")
    return [text for text, _, _ in sorted({(v["text"], v["x"], v["y"]) for v in values})]


# Which messages


def test_pushes_and_answers_with_their_order(tmp_path: Path) -> None:
    write_trace(tmp_path, traced(4, push_and_pull(3), servers=[3]))
    (exchange,) = exchanges(read_trace(tmp_path / "trace.json.gz"))
    assert (exchange.step, [*exchange.servers]) == (2, [3])
    assert exchange.seconds == pytest.approx(0.81)
    shown = [(a.source, a.target, a.count, a.bytes, a.place) for a in exchange.arrows]
    assert shown == [
        (0, 3, 1, 5000, 1), (1, 3, 1, 5000, 2), (2, 3, 1, 5000, 3),
        (3, 0, 1, 3000, 4), (3, 1, 1, 3000, 4), (3, 2, 1, 3000, 4),
    ]  # fmt: skip
    assert exchange.arrows[-1].first == pytest.approx(0.5)


def test_a_step_between_two_exchanges_is_not_chosen(tmp_path: Path) -> None:
    few = [Sent(step, 0, 1, 20, step + 0.1, step + 0.2) for step in range(1, 8)]
    many = [Sent(step, 1, 0, 9000, step + 0.3, step + 0.4) for step in (2, 6)]
    write_trace(tmp_path, traced(2, [*few, *many]))
    (exchange,) = exchanges(read_trace(tmp_path / "trace.json.gz"))
    assert exchange.step == 2  # as near to the middle as 6, and earlier


def test_each_part_of_a_switch_has_its_own(tmp_path: Path) -> None:
    parts = [message for message in round_the_ring(3, 8) if message.step not in (4, 5)]
    write_trace(tmp_path, traced(3, parts))
    assert [found.step for found in exchanges(read_trace(tmp_path / "trace.json.gz"))] == [2, 7]


def test_messages_of_a_rank_to_itself_are_none(tmp_path: Path) -> None:
    write_trace(tmp_path, traced(2, [Sent(1, 0, 0, 100, 1.1, 1.2)]))
    assert exchanges(read_trace(tmp_path / "trace.json.gz")) == []


# The figure


def test_arrows_and_links_hold_the_bytes(tmp_path: Path) -> None:
    simulated_run(tmp_path, 4, push_and_pull(3), servers=[3])
    found, name = drawn_alone(tmp_path, messages), "messages-ring"
    assert heads(found, name) == {
        **{f"{rank} → 3": (1, 5000) for rank in range(3)},
        **{f"3 → {rank}": (1, 3000) for rank in range(3)},
    }
    words = texts(found, name)
    thin = "\u202f"
    assert words.count(f"↑ 5.00{thin}kB ↓ 3.00{thin}kB") == 3
    assert words.count(f"↑ 9.00{thin}kB ↓ 15.0{thin}kB") == 1
    assert f"1: 1, 5.00{thin}kB" in words
    shapes = {v["text"]: v["shape"] for v in found.values(name, "shape", "text")}
    assert shapes == {"0": "circle", "1": "circle", "2": "circle", "3": "square"}
    figure = found.figures[name]
    assert figure.title == "ring: messages of step 2"
    assert f"(seed 0), where they are in the cluster: 6 messages, 24.0{thin}kB." in figure.caption
    assert "A square is a rank that serves." in figure.caption


def test_arrows_that_are_alike_have_numbers_only(tmp_path: Path) -> None:
    simulated_run(tmp_path, 4, round_the_ring(4))
    found = drawn_alone(tmp_path, messages)
    assert "Each is 1 message, 1.00" in found.figures["messages-ring"].caption
    assert "colour tells" not in found.figures["messages-ring"].caption  # all begin together
    assert texts(found, "messages-ring").count("1") == 5  # of four arrows, and a rank


def test_no_two_words_touch(tmp_path: Path) -> None:
    simulated_run(tmp_path, 8, push_and_pull(7), servers=[7], on="two_sites(nodes=8)")
    boxes = []
    values = drawn_alone(tmp_path, messages).values("messages-ring", "align")
    for text, x, y, align in {(v["text"], v["x"], v["y"], v["align"]) for v in values}:
        length = 5 * len(text)
        boxes.append((x - length * (align == "right"), x + length * (align == "left"), y))
        assert 0 <= boxes[-1][0] <= boxes[-1][1] <= WIDTH
    for index, (left, right, y) in enumerate(boxes):
        for other_left, other_right, other in boxes[index + 1 :]:
            assert abs(y - other) >= 9 or right < other_left or left > other_right


def test_many_arrows_are_thin_and_have_no_words(tmp_path: Path) -> None:
    ranks = range(10)
    everyone = [
        Sent(step, a, b, 100 + a, step + 0.1, step + 0.2)
        for step in (1, 2, 3) for a in ranks for b in ranks if a != b
    ]  # fmt: skip
    simulated_run(tmp_path, 10, everyone, on="lan_1gbit(nodes=10)")
    found = drawn_alone(tmp_path, messages)
    assert len(heads(found, "messages-ring")) == 90
    assert "too many for words" in found.figures["messages-ring"].caption
    assert max(v["thick"] for v in found.values("messages-ring", "thick")) <= 1.2
    assert not [text for text in texts(found, "messages-ring") if ":" in text]


def test_of_a_strategy_the_most_ranks_that_can_be_drawn_are(tmp_path: Path) -> None:
    runs = [record("ring", ranks, engine="simulation") for ranks in (4, 16, 32, 64)]
    keep(tmp_path, runs, trace=False)
    for ranks in (4, 16, 32, 64):
        inner = run_folder(tmp_path, "ring", ranks, 0)
        (inner / "cluster.yaml").write_text(cluster_text(cluster(f"lan_1gbit(nodes={ranks})")))
        sent = [] if ranks == 32 else round_the_ring(ranks)  # too many for the timeline
        write_trace(inner, traced(ranks, sent or [Sent(1, 0, 0, 1, 1.1, 1.2)]))
    names = [*drawn_alone(tmp_path, messages).figures]
    assert names == ["messages-ring-16-ranks"]


def test_real_processes_have_no_cluster_to_draw_on(tmp_path: Path) -> None:
    inner = simulated_run(tmp_path, 4, round_the_ring(4))
    (inner / "cluster.yaml").unlink()
    assert not drawn_alone(tmp_path, messages).figures


@pytest.mark.parametrize(
    ("on", "dark"),
    [("lan_1gbit(nodes=2)", False), ("one_host", True), ("two_sites(nodes=8)", True)],
)
def test_it_compiles_without_a_warning(
    on: str, dark: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    simulated_run(tmp_path, 8, push_and_pull(7), servers=[7], on=on)
    figure = drawn_alone(tmp_path, messages).figures["messages-ring"]
    vl_convert.vegalite_to_vega(dict(figure.spec), show_warnings=True)
    vl_convert.vegalite_to_svg(for_image(figure, 290, dark), show_warnings=True)
    assert capfd.readouterr().err == ""


def test_arrows_that_begin_together_are_drawn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    simulated_run(tmp_path, 4, round_the_ring(4))
    figure = drawn_alone(tmp_path, messages).figures["messages-ring"]
    assert "colour tells" not in figure.caption
    drawing = vl_convert.vegalite_to_svg(for_image(figure), show_warnings=True)
    assert len(re.findall('stroke="#0072B2"', drawing)) == 4
    assert capfd.readouterr().err == ""


# Places


def test_ranks_of_a_node_lie_together_and_arcs_go_round_their_side() -> None:
    stage = MessageLayout(cluster("lan_1gbit(nodes=2)"), 4, 5, {})
    assert stage.rows == [0, 2, 1, 3]
    down, up = stage.arcs([Arrow(0, 3, 1, 1, 0.0, 1), Arrow(1, 2, 1, 1, 0.0, 1)])
    assert (down.down, up.down) == (True, False)
    assert all(x > stage.x for x, _ in down.points)
    assert all(x < stage.x for x, _ in up.points)
    assert down.points[0][1] == stage.y[0]
    assert down.points[-1][1] == stage.y[3]
    assert down.apex[0] > up.apex[0]


def test_longer_arcs_reach_further_and_ends_are_spread() -> None:
    stage = MessageLayout(cluster("lan_1gbit(nodes=5)"), 5, 5, {})
    arcs = stage.arcs([Arrow(rank, 4, 1, 1, 0.0, 1) for rank in range(4)])
    reaches = [arc.apex[0] for arc in arcs]
    assert reaches == sorted(reaches, reverse=True)
    ends = [arc.points[-1][1] for arc in arcs]
    assert len(set(ends)) == 4
    assert ends == sorted(ends, reverse=True)  # the nearest arrives first, so that none cross
    assert max(x for arc in arcs for x, _ in arc.points) <= WIDTH


# Links


def with_links(folder: Path, label: str, shares: Sequence[float], **changes: Any) -> None:
    inner = run_folder(folder, label, 4, 0)
    busiest = [
        Link(f"worker-{place} up", 125e6, round(share * 1e6), share)
        for place, share in enumerate(shares)
    ]
    whole: dict[str, Any] = {"seconds": 2.0, "count": 9, "unused": 2, "tenths": [9] + [0] * 9}
    write_links(inner, Links(**{**whole, **changes}, busiest=busiest))


def test_the_busiest_links_of_each_strategy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    labels = ("one process", "ring", "server")
    keep(tmp_path, [record(label, engine="simulation") for label in labels], trace=False)
    with_links(tmp_path, "one process", [], count=0, unused=0)
    with_links(tmp_path, "ring", [0.5] * 8)
    with_links(tmp_path, "server", [0.9, 0.001], count=2, unused=0)
    found = drawn_alone(tmp_path, links)
    bars = found.values("link-utilisation", "percent")
    assert [(v["strategy"], v["link"]) for v in bars if "bytes" in v][: 6 + 2] == [
        *(("ring", f"worker-{place} up") for place in range(6)),
        ("server", "worker-0 up"), ("server", "worker-1 up"),
    ]  # fmt: skip
    thin = "\u202f"
    told = {v["text"] for v in found.values("link-utilisation", "text")}
    assert told == {
        f"50{thin}% · 500{thin}kB", f"90{thin}% · 900{thin}kB", f"0.10{thin}% · 1.00{thin}kB",
        "and 3 more links, 2 of them unused", "",
    }  # fmt: skip
    headings = [v["strategy"] for v in found.values("link-utilisation", "lane")
                if v["lane"].endswith("\u2063")]  # fmt: skip
    assert [*dict.fromkeys(headings)] == ["ring", "server"]
    spec = for_image(found.figures["link-utilisation"], 290)
    vl_convert.vegalite_to_svg(spec, show_warnings=True)
    assert capfd.readouterr().err == ""


def test_real_links_are_not_drawn(tmp_path: Path) -> None:
    assert not drawn_alone(keep(tmp_path, [record("ring")], trace=False), links).figures
