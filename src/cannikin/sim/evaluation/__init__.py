"""The paper's evaluation in simulation: every figure and table, its numbers beside the paper's own (`cannikin bench`).

Each section is a set of cells, pure functions of their arguments and a seed; `cells` runs them, `report` writes them
down. What is measured rather than simulated, the planner's own CPU time, is kept apart: it differs from run to run.
"""
