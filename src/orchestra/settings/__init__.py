"""Settings: frozen dataclasses that check themselves, and their one notation."""

from orchestra.settings.base import MAX_RANKS as MAX_RANKS
from orchestra.settings.base import MAX_SEED as MAX_SEED
from orchestra.settings.base import MAX_STEPS as MAX_STEPS
from orchestra.settings.base import REQUIRED as REQUIRED
from orchestra.settings.base import Described as Described
from orchestra.settings.base import Settings as Settings
from orchestra.settings.base import describe as describe
from orchestra.settings.base import setting as setting
from orchestra.settings.notation import Call as Call
from orchestra.settings.notation import Registry as Registry
from orchestra.settings.notation import parse as parse
from orchestra.settings.notation import read as read
from orchestra.settings.notation import write as write
