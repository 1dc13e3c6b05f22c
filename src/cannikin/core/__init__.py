"""The torch-free heart: performance model, exact split, online fit, noise scale, goodput, planners.

Only numpy and the standard library: no torch, clock, environment, files or global randomness, so that the runtime and
the simulator drive the very same code and a test can drive it with made-up times.
"""
