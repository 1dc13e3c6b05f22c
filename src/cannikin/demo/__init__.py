"""The demonstration: one small network trained for real on unlike ranks, under one policy after another."""
