"""Simulated engines under the scheduler that drives real ones: plan a cluster without having it."""
