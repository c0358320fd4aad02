"""Every command: its line in the overview, its parser, and where it is carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestra.cli.parser import Parser
from orchestra.cli.parsers import comparing, looking, machines, planning, training
from orchestra.errors import InputError, nearest


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        summary: its line in the overview.
        parser: makes its parser.
        action: "module:function", imported once the arguments are read; called with them, it
            returns the exit status.
        trains: modules in the working folder may be imported: a task or strategy of the user's.
    """

    summary: str
    parser: Callable[[], Parser]
    action: str
    trains: bool = False


@dataclass(frozen=True)
class CommandGroup:
    """Commands that share their first words, such as `orchestra emulation`."""

    summary: str
    program: str
    kind: str  # of its commands, in messages
    introduction: str
    commands: Mapping[str, Command | CommandGroup]
    epilog: str = ""

    def overview(self) -> str:
        """Return the help of the group, with a line for each command."""
        width = max(map(len, self.commands))
        lines = [f"  {name:{width}} {each.summary}" for name, each in self.commands.items()]
        name = self.kind.upper()
        parts = [
            f"usage: {self.program} {name} [ARGUMENT ...]\n\n{self.introduction}\n{self.kind}s:",
            *lines,
            f"\n  {self.program} {name} --help says more about each.{self.epilog}",
        ]
        return "\n".join(parts).rstrip() + "\n"

    def find(self, name: str) -> Command | CommandGroup:
        """Return the command called `name`.

        Raises:
            InputError: no command has this name; the message offers the nearest name.
        """
        if name not in self.commands:
            kind = "option" if name.startswith("-") else self.kind
            place = "" if self is ORCHESTRA else f" of {self.program}"
            raise InputError(f"unknown {kind} {name!r}{place}; {nearest(name, self.commands)}")
        return self.commands[name]

    def parser(self) -> Parser:
        """Return a parser with one for each command inside, for completion and for the docs."""
        parser = Parser(self.program.removeprefix("orchestra").lstrip(), self.introduction)

        def made(prog: str) -> Parser:
            return self.commands[prog.split()[-1]].parser()

        # Called with the program's name, as the constructor of a parser would be
        maker: Any = made
        inside = parser.add_subparsers(metavar=self.kind.upper(), parser_class=maker)
        for name, each in self.commands.items():
            inside.add_parser(name, help=each.summary)
        return parser


EMULATION = CommandGroup(
    "check, use and clean up clusters that Linux emulates on this machine",
    "orchestra emulation",
    "action",
    machines.EMULATION,
    {
        "check": Command(
            "measure what the links, latencies and cores of a cluster's nodes really give",
            machines.emulation_check,
            "orchestra.cli.emulation:check",
        ),
        "run": Command(
            "start any command once for each rank inside its node, as torchrun would",
            machines.emulation_run,
            "orchestra.cli.emulation:run",
        ),
        "compose": Command(
            "write a compose file, and leave the nodes to Docker",
            machines.emulation_compose,
            "orchestra.cli.emulation:compose",
        ),
        "clean": Command(
            "remove what a run left behind that was killed together with its guard",
            machines.emulation_clean,
            "orchestra.cli.emulation:clean",
        ),
    },
)

ORCHESTRA = CommandGroup(
    "",
    "orchestra",
    "command",
    """\
Orchestra trains a PyTorch model on several processes under any distribution strategy, by
naming the strategy: a task says what to train, a strategy when the processes exchange what.
""",
    {
        "compare": Command(
            "train a task under every strategy of a file, and report on them side by side",
            comparing.compare,
            "orchestra.cli.compare:main",
            trains=True,
        ),
        "simulate": Command(
            "the same in virtual time, on a cluster that you describe",
            comparing.simulate,
            "orchestra.cli.compare:simulate",
            trains=True,
        ),
        "plan": Command(
            "which strategy for your model on your machines, and what it gains",
            planning.plan,
            "orchestra.cli.plan:main",
            trains=True,
        ),
        "map": Command(
            "which strategy is first where, as bandwidth, nodes or speeds vary: a figure",
            planning.map_,
            "orchestra.cli.plan:draw",
            trains=True,
        ),
        "train": Command(
            "train a task under one strategy, and write the record of the run",
            training.train,
            "orchestra.cli.train:main",
            trains=True,
        ),
        "join": Command(
            "join a run under way, as one rank more",
            training.join,
            "orchestra.cli.join:main",
            trains=True,
        ),
        "watch": Command(
            "show a run or a comparison in the terminal, while it goes on or afterwards",
            looking.watch,
            "orchestra.cli.watch:main",
        ),
        "report": Command(
            "make a report of any past runs",
            comparing.report,
            "orchestra.cli.compare:report",
        ),
        "replay": Command(
            "repeat a recorded run to the same bits, and stop where you like",
            training.replay,
            "orchestra.cli.train:replay",
            trains=True,
        ),
        "calibrate": Command(
            "measure what a simulation needs to know of this machine",
            machines.calibrate,
            "orchestra.cli.calibrate:main",
            trains=True,
        ),
        "doctor": Command(
            "show what this machine or others have, how they are linked, what would go wrong",
            machines.doctor,
            "orchestra.cli.doctor:main",
        ),
        "emulation": EMULATION,
        "import": Command(
            "write the file of a cluster of a cloud's instances",
            machines.import_,
            "orchestra.cli.import_cluster:main",
        ),
        "studio": Command(
            "a local web page: time, timeline and scaling of strategies as you move sliders",
            looking.studio,
            "orchestra.cli.studio:main",
        ),
        "list": Command(
            "show strategies, tasks and schedules, or the settings of one of them",
            looking.list_,
            "orchestra.cli.list:main",
        ),
        "schema": Command(
            "print the JSON Schema of a kind of file, for editors",
            looking.schema,
            "orchestra.cli.schema:main",
        ),
        "completion": Command(
            "print what makes a shell complete commands and options",
            looking.completion,
            "orchestra.cli.completion:main",
        ),
    },
    """ --version shows the version.

examples:
  orchestra compare examples/quickstart.yaml
      every strategy of the file on the same data, one after the other, and runs/quickstart-1/
      report.html with the answer: which was first, why, and did distributing pay

  orchestra train --task digits --strategy 'AllReduce("ring")'
      four processes, a small CNN on handwritten digits, gradients averaged round a ring

  orchestra train experiment.yaml --ranks 2 --set optimizer.lr=0.05 --out runs/first
      what the file says, with two changes; the same command again resumes it

  orchestra simulate examples/quickstart.yaml --cluster 'lan_1gbit(nodes=8)' --ranks 8
      the same comparison on eight machines that you do not have

  orchestra list ParameterServer
      what a parameter server is here, and each of its settings
""",
)
