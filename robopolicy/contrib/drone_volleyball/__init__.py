"""Volleyball drills for quadrotors, and agents that tune the gains of their controller."""
