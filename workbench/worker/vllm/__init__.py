"""vLLM offline: settings, the engine in this process, what really runs, forced scoring and generation."""
