"""The gradient noise scale: estimated from one step (`estimate`), tracked over many (`tracker`)."""
