"""What runs next. Host only: integers and queues, no jax."""

from jaxprefill.scheduler.limits import SchedulerLimits
from jaxprefill.scheduler.scheduler import Scheduler
from jaxprefill.scheduler.state import RequestState, Status

__all__ = ["RequestState", "Scheduler", "SchedulerLimits", "Status"]
