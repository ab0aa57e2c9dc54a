"""Further offline algorithms, and synthetic trajectories by diffusion."""
