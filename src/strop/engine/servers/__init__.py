"""Engines that are programs of their own, started by strop or given by address."""
