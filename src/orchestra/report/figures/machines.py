"""How well combinations of unlike machines were used, from one machine to all of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

import altair as alt

from orchestra.report.figures.frame import Figure, Look, Values, figure, layer, tips, value_axis
from orchestra.report.numbers import CONVERGENCE, HETEROGENEOUS, Measure
from orchestra.report.study import Study

CAPTIONS = {
    HETEROGENEOUS.key: (
        "Samples a second over the sum of what each node does alone, against the nodes that were "
        "used, the slowest combination first. 100 % would be a cluster that loses nothing."
    ),
    CONVERGENCE.key: (
        "(Time to target of one process on the fastest node / of the cluster) over (the sum of "
        "what its nodes do alone / what that one does). 100 % would be a time to target that falls "
        "in proportion to the speed that is added."
    ),
}


def combinations(study: Study) -> Iterator[Figure]:
    """The two efficiencies against the nodes that runs used, where there are several combinations
    of nodes, unlike ones among them."""
    for measure in study.of_machines:
        if measure in (HETEROGENEOUS, CONVERGENCE):
            yield from _against_machines(study, measure)


def _against_machines(study: Study, measure: Measure) -> Iterator[Figure]:
    values: Values = []
    for row in study.completed:
        found = row.mean(lambda record: getattr(record, measure.key))
        alone = row.record.alone
        if found is not None and row.record.cluster is not None and not row.single:
            values.append(
                {
                    "strategy": row.name,
                    "line": row.label,  # comparisons of several clusters make one line
                    "machines": combination(alone),
                    "alone": sum(alone.values()),
                    "value": 100 * found,
                }
            )
    values.sort(key=lambda value: value["alone"])
    order = list(dict.fromkeys(value["machines"] for value in values))
    if len(order) < 2:
        return
    x = alt.X("machines:N", title="nodes", sort=order, axis=alt.Axis(grid=False, labelAngle=0))
    y = value_axis(f"{measure.title}, %")
    styles = {value["line"]: study.styles[value["strategy"]] for value in reversed(values)}
    look = Look(styles, field="line")
    about = tips(
        ("line:N", "strategy"), "machines:N", ("alone:Q", "samples/s of all alone", ",.4~g"),
        ("value:Q", measure.title, ".3~g"),
    )  # fmt: skip
    layers = [
        layer(values, "line", x, y, look.colour, look.dash, strokeWidth=2),
        layer(
            values, "point", x, y, look.colour, look.shape, about, filled=True, size=70, opacity=1
        ),
    ]
    title = f"{measure.title.capitalize()} of combinations of machines"
    yield figure(f"{measure.key}-of-machines", title, CAPTIONS[measure.key], "scaling", layers)


def combination(nodes: Mapping[str, float]) -> str:
    """In words, those alike in name together: "fast + 3 slow"."""
    kinds = Counter(re.sub(r"-\d+$", "", name) for name in nodes)
    return " + ".join(f"{n} {kind}" if n > 1 else kind for kind, n in kinds.items())
