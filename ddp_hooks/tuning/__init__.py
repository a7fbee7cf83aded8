"""Search for the fusion size and the number of lanes of a hook, beside training."""

from ddp_hooks.tuning.candidates import Groups, Setting
from ddp_hooks.tuning.config import BucketTuner
from ddp_hooks.tuning.profile import Job, Trial, job_of
from ddp_hooks.tuning.tuning import Tunable, Tuning, begin

__all__ = ["BucketTuner", "Groups", "Job", "Setting", "Trial", "Tunable", "Tuning", "begin", "job_of"]
