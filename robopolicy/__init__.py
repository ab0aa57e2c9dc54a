"""robopolicy: learning of robot policies from demonstrations, by reinforcement, and deployment on hardware."""

__version__ = "0.1.0"
