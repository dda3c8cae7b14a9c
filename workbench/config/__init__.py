"""What to run: configurations, the axes they differ in, presets, settings and themes."""
