"""Optimizers as specs that can be rebuilt wherever the update happens; their state as data.

Names are imported when first used: strategies, which are settings too, load without torch.
"""

from typing import TYPE_CHECKING

from orchestra.settings.notation import lazy_package

if TYPE_CHECKING:
    from orchestra.optimizers.state import capture, common_of, require_alike, restore

    __all__ = ["capture", "common_of", "require_alike", "restore"]
else:
    __getattr__ = lazy_package(
        __name__, "state", names=("capture", "common_of", "require_alike", "restore")
    )
