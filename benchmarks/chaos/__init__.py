"""Training under fault: real ranks that are killed, stopped, cut off and restarted, and what that costs.

`faults` draws what happens, `rank` is one rank of a training, `launch` starts ranks and strikes them, `judge` says what
came of it, and `run` is the command.
"""
