"""Action-conditioned video world models and success detectors."""
