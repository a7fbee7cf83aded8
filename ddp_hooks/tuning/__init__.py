"""Search for the fusion size of a hook, beside training."""

from ddp_hooks.tuning.candidates import Groups
from ddp_hooks.tuning.config import BucketTuner
from ddp_hooks.tuning.profile import Job, Trial, job_of
from ddp_hooks.tuning.tuning import Tunable, Tuning, begin

__all__ = ["BucketTuner", "Groups", "Job", "Trial", "Tunable", "Tuning", "begin", "job_of"]
