"""The parsers of `orchestra watch`, `studio`, `list`, `schema` and `completion`."""

from __future__ import annotations

from pathlib import Path

from orchestra.cli.parser import Parser

WATCH = """\
Show a run, or a comparison, in the terminal while it goes on: progress, loss, stragglers, and the
switch of strategies when it happens. Each rank has a row: its steps, samples/s, loss, and the
shares of its time that go into compute, communication, waiting and input. The row also has its
staleness, batch, bytes sent, and the rank that it waits for.

DIR is the folder of `orchestra train` or `orchestra compare` (on any engine); it may be watched
from another terminal, or another machine that shares the folder, at no cost for the run. A run
that has ended is shown once. Ctrl-C ends the watching, never the run.

Where output is no terminal, and with --once, what is known now is printed once. Exit status: 0, and
1 if the run failed or was cut off.
"""

WATCH_EPILOG = """\
examples:
  orchestra watch
      the newest folder in runs/

  orchestra watch runs/quickstart-1
      a comparison: what is done, and the run under way

  orchestra watch runs/quickstart-1/runs/servers/4-ranks/seed-0 --once
      one of its runs, printed once

  while sleep 60; do orchestra watch runs/first >> progress.txt; done
      a table a minute, in a file

docs/how-to/watch.md explains each column.
"""


def watch() -> Parser:
    parser = Parser("watch", WATCH, WATCH_EPILOG)
    folder = "of a run or a comparison (default: the newest in runs/)"
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=folder)
    parser.flag("--once", "print what is known now, and end")
    return parser


STUDIO = """\
Open a page on which you choose the size of a model, the number of workers, the bandwidth and the
latency of their network, and how slow the slowest of them is. The time of a step, its timeline and
the scaling of every strategy are simulated as you move the controls, and the messages of a step
travel on the network. Nothing is trained, and nothing has to be measured first.

The page is served to this machine alone (127.0.0.1). Ctrl-C ends it.
"""
STUDIO_EPILOG = """\
examples:
  orchestra studio --open
      the page in your browser

  orchestra studio --port 8000
      at http://127.0.0.1:8000/, such as for ssh -L 8000:127.0.0.1:8000 from another machine
"""


def studio() -> Parser:
    parser = Parser("studio", STUDIO, STUDIO_EPILOG)
    parser.option("--port", "N", "port of the address (default: a free one)", type=int, default=0)
    parser.flag("--open", "open the page in the browser of this machine")
    return parser


LIST = """\
Show the names that an experiment may use, each with one line; or, for one NAME, what it does and
the meaning, values and default of each of its settings. NAME may be a heading, too: clusters,
tasks, optimizers.

A cluster with its settings, 'lan_1gbit(nodes=8)', or the file of one, is written out in full, as a
file that says the same; or drawn, with --draw.
"""

LIST_EPILOG = """\
examples:
  orchestra list ParameterServer
  orchestra list clusters
  orchestra list 'two_sites(nodes=6)' --draw sites.png --ranks 6
"""


def list_() -> Parser:
    parser = Parser("list", LIST, LIST_EPILOG)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a name, or package.module:Name")
    parser.option("--draw", "FILE", "draw a cluster: .png or .svg", type=Path)
    parser.option("--ranks", "N", "with --draw: show where they are", type=int)
    return parser


SCHEMA = """\
Print the JSON Schema of experiment files or of cluster files. An editor with a YAML language server
completes and checks keys by it. The command line checks more: names of strategies and tasks, and
which settings go together.
"""

SCHEMA_EPILOG = """\
examples:
  orchestra schema experiment > experiment.schema.json
      then, as the first line of a file: # yaml-language-server: $schema=experiment.schema.json
"""

KINDS = ("experiment", "cluster")


def schema() -> Parser:
    parser = Parser("schema", SCHEMA, SCHEMA_EPILOG)
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    return parser


COMPLETION = """\
Print the script that makes your shell complete the commands and options of orchestra.
"""

COMPLETION_EPILOG = """\
examples:
  orchestra completion bash > ~/.local/share/bash-completion/completions/orchestra

  orchestra completion zsh > ~/.zsh/completions/_orchestra
      with ~/.zsh/completions in fpath
"""

SHELLS = ("bash", "zsh", "tcsh")


def completion() -> Parser:
    parser = Parser("completion", COMPLETION, COMPLETION_EPILOG)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    return parser
