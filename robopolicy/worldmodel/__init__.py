"""Action-conditioned video world models, and judges of what they show."""
