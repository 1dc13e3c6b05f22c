"""Measurements that print what they measured beside its target: `python -m benchmarks [name ...]`; never tests."""
