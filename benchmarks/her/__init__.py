"""Goals in hindsight on the goal tasks of Fetch."""
