"""Settings: frozen dataclasses that check themselves, and their one notation."""

from orchestra.settings.base import MOST_RANKS as MOST_RANKS
from orchestra.settings.base import MOST_SEED as MOST_SEED
from orchestra.settings.base import MOST_STEPS as MOST_STEPS
from orchestra.settings.base import REQUIRED as REQUIRED
from orchestra.settings.base import Described as Described
from orchestra.settings.base import Settings as Settings
from orchestra.settings.base import describe as describe
from orchestra.settings.base import setting as setting
from orchestra.settings.notation import Call as Call
from orchestra.settings.notation import parse as parse
from orchestra.settings.notation import read as read
from orchestra.settings.notation import replace_setting as replace_setting
from orchestra.settings.notation import write as write
from orchestra.settings.registry import Registry as Registry
