"""Visit orders (pick lists, inspection tours): exact for few points, by a network for many."""
