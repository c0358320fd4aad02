"""docs/reference/experiment.md, from the settings that an experiment file has.

python -m tests.support.experiment_page > docs/reference/experiment.md
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestra.cli.list import GROUPS
from orchestra.experiments.experiment import Experiment, Tune
from orchestra.experiments.file import TRAINING_KEYS
from orchestra.settings import Described, describe
from orchestra.trainer.settings import Target, Training

HEAD = """\
# Experiment files

An experiment file is YAML. `task` and `strategies` are required. `orchestra train` wants one
strategy, `orchestra compare` at least one. Every key can be changed on the command line:
`--set steps=100`, `--set optimizer.lr=0.05`. In Python, every key is a keyword argument of
`orchestra.train` and `orchestra.compare`.

```yaml
task: digits
ranks: 4
batch_size: 16        # per worker
epochs: 5
optimizer: SGD(lr=0.02, momentum=0.9)
schedule: Cosine
seeds: [0, 1, 2]
target: {metric: accuracy, at_least: 0.9}
strategies:
  ring: AllReduce("ring")
  servers: ParameterServer(servers=2, consistency="asynchronous", learning_rate="divided")
```

Values with parentheses are [notations](strategies.md#the-notation): the constructor call of a
strategy, task, optimizer, schedule or rule. `orchestra list NAME` explains each. Relative paths
start from the folder of the file.

## In an editor

`orchestra schema experiment` prints a JSON Schema of these keys, and `orchestra schema cluster` one
of [cluster files](clusters.md). Editors with a YAML language server complete and check keys by it.

```sh
orchestra schema experiment > experiment.schema.json
```

```yaml
# yaml-language-server: $schema=experiment.schema.json
task: digits
```

## Keys
"""


def page() -> str:
    """Return the page, in Markdown."""
    head = [row for row in describe(Experiment) if row.name != "training"]
    training = [row for row in describe(Training) if row.name in TRAINING_KEYS]
    name, *rest = head
    rows = [name._replace(default="the file's"), *rest, *training, GROUPS]
    parts = [HEAD, *_table(rows), "\n## target\n", *_table(describe(Target))]
    return "\n".join([*parts, "\n## tune\n", *_table(describe(Tune))]) + "\n"


def _table(rows: list[Described]) -> Iterator[str]:
    yield "| key | values | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for row in rows:
        values = f"{row.type}, {row.range}" if row.range else row.type
        yield f"| `{row.name}` | {_cell(values)} | {_cell(row.default)} | {_cell(row.meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
