"""Speed and sensitivity, measured side by side in one run: `make bench`. Nothing is asserted."""
