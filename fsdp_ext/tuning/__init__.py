"""Settings of FSDP2 and its extension, found by short trials before training."""

from fsdp_ext.tuning.config import TuneConfig
from fsdp_ext.tuning.trials import tune
from fsdp_ext.tuning.tuned import Tuned

__all__ = ["TuneConfig", "Tuned", "tune"]
