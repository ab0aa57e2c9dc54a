"""Orders of visits (pick lists, inspection tours): exact for few places, by a network for many."""
