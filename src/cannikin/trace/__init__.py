"""Steps of a run log as a Chrome trace, which Perfetto opens; needs no torch."""
