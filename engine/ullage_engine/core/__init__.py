"""Requests, scheduling, sampling and the step loop of the worker process."""
