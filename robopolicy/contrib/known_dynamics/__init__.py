"""Algorithms that train policies through known, differentiable dynamics or plans with linear dynamics."""
