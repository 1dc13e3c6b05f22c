"""A real heterogeneous cluster on one machine: slow ranks, slow links, GPU shares (`cannikin lab`).

cluster . lab_file        what the cluster is like, in words or in TOML
mechanisms                the ways to make it: portable, hosts, mps, gpu
launch                    starts torchrun on it, passes output and exit status on, leaves nothing behind
run_folder                what launcher, agents and ranks tell one another
agent . rank . throttle   what runs in the processes started: torchrun itself, the shim around the script, its slowness
"""
