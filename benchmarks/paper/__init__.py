"""The paper's evaluation in simulation: every figure and table, beside the paper's own numbers.

Each section is a set of cells, pure functions of their arguments and a seed; `cells` runs them, `report` writes them
down, `evaluate` is the command. What is measured rather than simulated, the planner's own CPU time, is kept apart: it
differs from run to run.
"""
