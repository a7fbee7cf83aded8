"""How much should travel together? A search that runs beside training; hooks say what a setting means to them."""

from ddp_hooks.tuning.candidates import Groups, Setting
from ddp_hooks.tuning.config import BucketTuner
from ddp_hooks.tuning.profile import Job, Trial, job_of
from ddp_hooks.tuning.tuning import Knob, Tuning, begin

__all__ = ["BucketTuner", "Groups", "Job", "Knob", "Setting", "Trial", "Tuning", "begin", "job_of"]
