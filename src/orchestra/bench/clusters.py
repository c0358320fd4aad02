"""The clusters on which `orchestra bench fidelity --engine emulation` compares."""

from __future__ import annotations

from pathlib import Path

_NODES = """\
name: {name}
ranks: spread
all_nodes:
  cores: 1
  speed: 0.48
  loopback: {{bandwidth: 3 GB/s, latency: 15 us}}
"""
_LINK = "link: {bandwidth: 100 Mbit/s, latency: 250 us}"
TEXTS = {
    "equal": f"  {_LINK}\nnodes:\n  node: {{count: 4}}\n",
    "slow-node": f"  {_LINK}\nnodes:\n  fast: {{count: 3}}\n  slow: {{speed: 0.12}}\n",
    "slow-link": f"""\
  {_LINK}
nodes:
  near: {{count: 3}}
  far: {{link: {{bandwidth: 10 Mbit/s, latency: 250 us}}}}
""",
    "racks": f"""\
  {_LINK}
switches:
  top: {{}}
  rack-0: {{to: top, link: {{bandwidth: 40 Mbit/s, latency: 250 us}}}}
  rack-1: {{to: top, link: {{bandwidth: 40 Mbit/s, latency: 250 us}}}}
nodes:
  left: {{count: 2, switch: rack-0}}
  right: {{count: 2, switch: rack-1}}
""",
}
"""Of four nodes each, less than two cores together: equal ones; one four times slower; one behind a
link ten times thinner; two racks, with less between them than two of their nodes could use."""


def write_clusters(folder: Path) -> dict[str, Path]:
    """Write a file for each into `folder`; their paths, by name."""
    paths = {}
    for name, text in TEXTS.items():
        paths[name] = folder / f"{name}.yaml"
        paths[name].write_text(_NODES.format(name=name) + text)
    return paths
