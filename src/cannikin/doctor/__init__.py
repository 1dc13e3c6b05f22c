"""What a machine and a launch environment offer to a run, and what will limit it.

Probes look (`host`, `gpus`, `torch_facts`, `loopback`), each for a limited time, and `gather` writes down `Facts`.
`diagnose` makes findings of them without looking again (`on_software`, `on_gpus`, `on_host`, `on_network`,
`on_launch`), so that a machine nobody has at hand can be tried in a test.
"""
