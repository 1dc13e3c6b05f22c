"""From run logs to one HTML page: numbers, figures and sentences about one run or several; needs no torch."""
