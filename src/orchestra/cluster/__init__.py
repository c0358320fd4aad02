"""The description of a cluster: nodes, links, ranks and faults. Pure data.

Files of clusters, and PyYAML with them, are imported when first used, so that `orchestra list`
answers at once.
"""

from typing import TYPE_CHECKING, Any

from orchestra.cluster.cluster import *  # noqa: F403
from orchestra.cluster.faults import *  # noqa: F403
from orchestra.cluster.nodes import *  # noqa: F403
from orchestra.cluster.presets import *  # noqa: F403

if TYPE_CHECKING:
    from orchestra.cluster.file import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        if name not in ("cluster_text", "load_cluster", "read_cluster"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from orchestra.cluster import file

        return getattr(file, name)
