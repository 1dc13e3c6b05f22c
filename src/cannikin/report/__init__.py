"""What a run log shows: numbers, figures, one HTML page, a timeline and the live view; needs no torch."""
