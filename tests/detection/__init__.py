"""The power of the suites, measured: planted faults are found, clean engines are not accused."""
