"""A cluster that does not exist, and jobs on it, in simulated time: torch-free, it drives the planners of the core.

`hardware` knows what a step takes, better than any planner's model; `workload` what a step is worth; `simulation` shows
a planner what the runtime would have measured, and carries out its plans. Nothing here decides anything.
"""
