"""Settings under which a backward waits for its first reduce-scatter."""

from __future__ import annotations

import dataclasses

from tests.support.fsdp_ext.twins import CONFIG

WAITING = dataclasses.replace(CONFIG, defer=False)
