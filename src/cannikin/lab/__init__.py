"""A real heterogeneous cluster on one machine: slow ranks, slow links, GPU shares (`cannikin lab`).

cluster . lab_file        what the cluster is like, in words or in TOML
device . throttle         how long a rank of some speed takes, and the hooks that make it so
portable . hosts . mps    the mechanisms, behind `mechanism.Mechanism`
launch . processes        starts torchrun on it, passes output and exit status on, leaves nothing behind
agent . rank              what runs in the processes started: torchrun itself, and the shim around the script
"""
