"""A cluster that does not exist, and the jobs on it, in simulated time: torch-free, driving the planners of the core.

`hardware` is what a step takes, richer than any planner's model of it; `workload` what a step is worth; `engine` lets a
planner see what the runtime would have measured, and does what the planner says. Nothing here decides anything.
"""
