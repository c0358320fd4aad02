"""The parsers of `orchestra calibrate`, `doctor`, `import` and `emulation`."""

from __future__ import annotations

from pathlib import Path

from orchestra.cli.numbers import amount
from orchestra.cli.parser import Parser

CALIBRATE = """\
Measure the costs of this machine for simulations, in seconds. A gradient of a task is timed with 1,
2, 4 threads and so on up to all cores, with the moment at which each tensor's gradient is ready.
The optimizer's update, the rest of a step, copying and adding are timed, too. So are messages
between two processes, at both ends, and a core while all cores compute.

The figures go into a file that reads well. From then on `orchestra simulate`, on this machine,
goes by them for the tasks in the file, and says so in its records ("costs"). Calibrating another
task adds it; the rest is measured anew.

It ends within 120 s (--limit), or some seconds more where even starting and ending Python takes
them, and sooner on a quiet machine with a small model. Let the machine do nothing else meanwhile.
What other programs disturb is measured again while there is time. If they still took more than
10 % of the processor time from a measurement, or repeats differ by more than 30 %, nothing is kept.

Exit status: 0 kept, 1 not kept, 2 bad input.
"""

CALIBRATE_EPILOG = """\
examples:
  orchestra calibrate examples/quickstart.yaml
      the task, batch, optimizer and precision of an experiment

  orchestra calibrate --task 'digits(channels=8)' --optimizer 'Adam(lr=0.01)' --batch-size 8,64
      without a file

  orchestra calibrate experiment.yaml --out laptop.json
  orchestra simulate experiment.yaml --set calibration=laptop.json --cluster 'lan_1gbit(nodes=8)'
      a cluster of eight such laptops, simulated anywhere

  torchrun --nnodes 4 ... -m orchestra calibrate --links
      what a message takes between each two ranks, and the order of a ring over them
"""

TASK, OPTIMIZER = "digits()", "SGD(lr=0.1)"


def calibrate() -> Parser:
    parser = Parser("calibrate", CALIBRATE, CALIBRATE_EPILOG)
    parser.add_argument("experiment", nargs="?", type=Path, metavar="EXPERIMENT")
    parser.option("--task", "TASK", f"in place of the file's ({TASK})")
    parser.option("--optimizer", "CALL", f"in place of the file's ({OPTIMIZER})")
    parser.option("--batch-size", "N[,N...]", "of one worker; others around it are measured, too")
    each = "for each figure, where there is time (default: 0.5)"
    parser.option("--seconds", "S", each, type=amount("seconds", "0.5"), default=0.5)
    limit = "for everything; what it leaves no time for is left out, and said (default: 120)"
    parser.option("--limit", "SECONDS", limit, type=amount("seconds", "120"))
    parser.flag("--keep-anyway", "also figures that are not to be trusted")
    parser.option("--out", "FILE", "default: calibration.json in ~/.cache/orchestra", type=Path)
    links = "nothing but the links between ranks: those that a launcher started, or local ones"
    parser.flag("--links", links)
    parser.option("--ranks", "N", "local ranks, with --links (default: 4)", type=int, default=4)
    parser.option("--bytes", "N", "of a message, with --links", type=int, default=1_000_000)
    return parser


DOCTOR = """\
Show what this machine has, as far as it bears on a run: versions, cores and quotas, memory, GPUs,
addresses, compiled parts, limits; and warn, with a remedy, of what would go wrong.

With --hosts the same of several machines, by ssh, and whether `orchestra train --hosts` would run
there: ssh, versions, clocks, ports. If it would, the round trip and the bandwidth between each two
hosts are measured. In a cluster's file (--out) they serve `orchestra simulate` and `plan`.

Exit status: 0 nothing is in the way of a run on these hosts, 1 something is, 2 bad input.
"""

DOCTOR_EPILOG = """\
examples:
  orchestra doctor
  orchestra doctor --hosts a,b,c --out machines.yaml
  orchestra simulate experiment.yaml --cluster machines.yaml --ranks 3
"""


def doctor() -> Parser:
    parser = Parser("doctor", DOCTOR, DOCTOR_EPILOG)
    parser.option("--hosts", "HOST,...", "examine these machines, by ssh; localhost needs none")
    python = "of the hosts (default: the path of the one here)"
    parser.option("--remote-python", "PATH", python)
    links = "with --hosts: measure no bandwidths"
    parser.flag("--no-links", links, action="store_false", dest="links")
    parser.flag("--json", "print all of it as JSON")
    out = "write the hosts and their links as a cluster's file, a .yaml"
    parser.option("--out", "FILE", out, type=Path)
    return parser


IMPORT = """\
Write the file of a cluster of cloud instances, with their network and price. A SOURCE is one of
`orchestra list instances`. It takes a number and further figures, SOURCE,N,KEY=VALUE,...: speed or
flops, bandwidth, latency, gpu_link, gpu_latency, memory, price, watts, jitter, name.

The speed is that of a core, where the calibrated machine has 1; flops are those of a core or a GPU.
Bandwidth and latency are of the network, gpu_link and gpu_latency between GPUs. A figure that the
table lacks has to be given. Several sources are at one switch.
"""

IMPORT_EPILOG = """\
example:
  orchestra import 'aws:g5.xlarge,4,flops=15 TFLOP/s,latency=25 us' -o g5.yaml
      four instances; then: orchestra simulate experiment.yaml --cluster g5.yaml --ranks 4
"""


def import_() -> Parser:
    parser = Parser("import", IMPORT, IMPORT_EPILOG)
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="instances")
    out_help = "a .yaml (default: print it)"
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help=out_help)
    return parser


EMULATION = """\
The engine `emulation` runs the same processes as the engine `processes`. Each node of a cluster is
in a network namespace of its own, with shaped links and a part of this machine's cores.

    orchestra train --task digits --strategy AllReduce --engine emulation \\
        --cluster examples/clusters/mixed.yaml

It needs Linux, root, ip and tc. One line says what this machine cannot emulate.
"""

CHECK = """\
Measure the emulation of a cluster, and compare it with the file. Measured are the bandwidth of each
link in both directions, one after the other, and the latency from the first node to each other one,
as a message of a rank meets it. So is what each node computes while all others do, too.

Bandwidths are those of the wire: of each frame of 1,514 bytes a message has 1,448. Latencies are
what messages take more than they would without any.

Exit status: 0 all within 10 %, 1 something is not, 2 bad input.
"""

RUN = """\
Start a command once for each rank, inside its node, with the environment variables of torchrun:
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. OMP_NUM_THREADS is the
rank's share of its node's cores, unless it is set. GLOO_SOCKET_IFNAME names the shaped interface.
Each line of output begins with the rank and its node. When one command fails, all others are ended.

What the command sends by itself, such as the collectives of torch.distributed, has the bandwidths
of the cluster, and its latencies only where the kernel has netem (docs/how-to/emulate.md).

Exit status: 0 all ended well, 1 one did not, 2 bad input.
"""

RUN_EPILOG = """\
examples:
  orchestra emulation run examples/clusters/mixed.yaml -- python ddp.py --epochs 3
      any script for torchrun, on four unlike nodes

  orchestra emulation run 'lan_1gbit(nodes=2, cores=1)' -- python -m torch.distributed.run --help
"""

COMPOSE = """\
Print a compose file for Docker: a service for each node with a rank, with its part of the
processor, on one network. Each service shapes its link by tc, in both directions, and adds the
latencies where the host's kernel has netem. The command after -- runs with the variables of
torchrun; without one a short training does. The image is that of the repository's Dockerfile.

One rank a node, all nodes at one switch, no faults; otherwise: orchestra emulation run.
"""

COMPOSE_EPILOG = """\
examples:
  orchestra emulation compose examples/clusters/mixed.yaml > compose.yaml
  docker compose up --build --abort-on-container-failure

  orchestra emulation compose CLUSTER -- python ddp.py > compose.yaml
"""

CLEAN = """\
Remove control groups of runs whose processes are all gone, and end what still runs in them. Runs
under way are left alone. Namespaces, interfaces and bridges end by themselves, with the processes
that use them. The next emulated run cleans up, too.
"""


def emulation_check() -> Parser:
    return _on_cluster(Parser("emulation check", CHECK))


def emulation_run() -> Parser:
    return _with_ranks(Parser("emulation run", RUN, RUN_EPILOG, takes_command=True))


def emulation_compose() -> Parser:
    return _with_ranks(Parser("emulation compose", COMPOSE, COMPOSE_EPILOG, takes_command=True))


def emulation_clean() -> Parser:
    return Parser("emulation clean", CLEAN)


def _on_cluster(parser: Parser) -> Parser:
    parser.add_argument("cluster", metavar="CLUSTER", help="a preset or a file")
    return parser


def _with_ranks(parser: Parser) -> Parser:
    ranks = "default: one a node, or as many as the cluster names"
    _on_cluster(parser).option("--ranks", "N", ranks, type=int)
    return parser
