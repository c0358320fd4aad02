"""The names of clusters, and of the jitter of their nodes."""

from __future__ import annotations

from pathlib import Path

from orchestra.cluster.cluster import Cluster
from orchestra.errors import InputError
from orchestra.settings import Registry, parse

CLUSTERS = Registry(
    "cluster",
    {
        "ExponentialTail": "orchestra.cluster.jitter:ExponentialTail",
        "LogNormal": "orchestra.cluster.jitter:LogNormal",
        "Normal": "orchestra.cluster.jitter:Normal",
        "containers_10mbit": "orchestra.cluster.presets:Containers10Mbit",
        "infiniband": "orchestra.cluster.presets:Infiniband",
        "lan_10gbit": "orchestra.cluster.presets:Lan10Gbit",
        "lan_1gbit": "orchestra.cluster.presets:Lan1Gbit",
        "one_host": "orchestra.cluster.presets:OneHost",
        "stragglers": "orchestra.cluster.presets:Stragglers",
        "two_sites": "orchestra.cluster.presets:TwoSites",
        "wifi": "orchestra.cluster.presets:Wifi",
    },
    group="orchestra.clusters",
)


def load_cluster(text: str, *, where: str, folder: Path) -> Cluster:
    """The cluster that `text` names: `lan_1gbit(nodes=8)`, or the path of a YAML file.

    Args:
        where: opens the message of every error about `text` itself.
        folder: what a relative path is relative to.

    Raises:
        InputError: an unknown name or setting, or an error in the file, with its line.
    """
    if is_file(text):
        from orchestra.cluster.file import read_cluster

        path = folder / text
        if not path.is_file():
            raise InputError(f"{where}: there is no file {path}; give one, or a preset's name")
        return read_cluster(path)
    from orchestra.cluster.presets import Preset

    preset = parse(text, CLUSTERS, where=where)
    if not isinstance(preset, Preset):
        raise InputError(f"{where}: {text} is no cluster; one of them is lan_1gbit(nodes=8)")
    try:
        return preset.cluster()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def is_file(text: str) -> bool:
    """Whether `text` is the path of a cluster's file, not the name of a preset."""
    return isinstance(text, str) and text.endswith((".yaml", ".yml"))
