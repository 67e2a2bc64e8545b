"""Scripts that show a failure with torch and the engine alone."""
