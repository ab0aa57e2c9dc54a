"""Further offline learners, and synthetic trajectories by diffusion."""
