"""robopolicy: learning of robot policies from demonstrations, by reinforcement, and deployment on hardware."""

__version__ = "0.2.0.dev0"
