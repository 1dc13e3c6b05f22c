"""The live view: what a run is doing, on a terminal, while it trains; needs no torch."""
