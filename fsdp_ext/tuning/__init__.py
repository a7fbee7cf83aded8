"""Settings of FSDP2 and its extension, found by short trials before training."""

from fsdp_ext.tuning.config import TuneConfig
from fsdp_ext.tuning.profile_cache import Tuned
from fsdp_ext.tuning.trials import tune

__all__ = ["TuneConfig", "Tuned", "tune"]
