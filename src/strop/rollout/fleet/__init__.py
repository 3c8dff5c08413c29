"""The live runtime of the scheduler: engines that may come, go and fail, and the batches of rollouts played on them."""

from strop.rollout.fleet.dispatch import Dispatch
from strop.rollout.fleet.figures import BatchReport, EngineReport
from strop.rollout.fleet.fleet import Fleet, FleetObserver, Publish
from strop.rollout.fleet.replacements import OpenEngine
from strop.rollout.fleet.seat import Seat

__all__ = ["BatchReport", "Dispatch", "EngineReport", "Fleet", "FleetObserver", "OpenEngine", "Publish", "Seat"]
