"""Simulated engines under the scheduler that drives real ones: plan a cluster before there is one."""
