"""What cannikin needs of a machine and a launch environment, and what will limit a run there.

`probes` looks, for a limited time, and writes down facts. `checks` makes findings of them without looking again, so
that a machine nobody has at hand can be tried in a test.
"""
