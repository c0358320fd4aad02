"""The description of a cluster: nodes, links, ranks and faults. Pure data."""

from orchestra.cluster.cluster import *  # noqa: F403
from orchestra.cluster.faults import *  # noqa: F403
from orchestra.cluster.file import *  # noqa: F403
from orchestra.cluster.nodes import *  # noqa: F403
from orchestra.cluster.presets import *  # noqa: F403
